"""The verdict: what is wrong in one sentence, why, what to do, what else shares the loss, and who is at fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcpace.core.text import percent, place_name
from hpcpace.diagnosis import summary as diagnosed
from hpcpace.diagnosis.incomplete import suspect_line
from hpcpace.diagnosis.summary import Culprit, Summary
from hpcpace.report.document import PAGE, Block, Row, Stack, Table, Verdict
from hpcpace.report.sections.places import could_also_be

MAY_CHANGE = "verdict and figures may change until it ends"
"""Said of a run that still runs."""
_MAX_TAG = 40
_MAX_CULPRITS = 12
_OF_RANKS = ("Own delay by rank and step", "Phases by rank")
_EVIDENCE = {
    "persistent straggler": _OF_RANKS,
    "transient straggler": (*_OF_RANKS, "Slowest step"),
    "pipeline imbalance": ("Phases by rank", "Causes"),
    "runtime and control plane": ("Own delay by rank and step", "Step times"),
    "fabric contention": ("Places", "Communication by kind"),
    "locality": ("Places", "Communication by kind"),
    "synchronisation amplification": ("Jitter and scale",),
    "input-bound": ("Phases by rank",),
    "host-bound": ("Phases by rank",),
    "ranks share cores": ("Cores",),
    "communication-bound": ("Communication by kind",),
}
"""The sections that show what each mode rests on."""
_STOPPED = ("hang", "ended early")
"""Modes whose culprits did not take more of the time than others: the sentences name them."""
_KINDS = {"healthy": "healthy", "cannot tell": "unsure"}


def verdict_of(summary: Summary, verdict: diagnosed.Verdict) -> Verdict:
    """Return the verdict of a run, with the sections that its sentences rest on.

    Args:
        summary: the figures.
        verdict: what is said first; its culprits are named below it.
    """
    tag, _, rest = verdict.headline.partition(": ")
    is_tagged = bool(rest) and len(tag) <= _MAX_TAG
    evidence = {line: _EVIDENCE.get(verdict.mode, ()) for line in verdict.why}
    evidence |= {line: _EVIDENCE.get(line.partition(":")[0], ()) for line in verdict.also}
    stacks = () if summary.hang is None else summary.hang.stacks
    content: list[Block | None] = [None if verdict.mode in _STOPPED else _culprits_table(verdict.culprits)]
    content += [Stack(f"Stack of rank {stack.rank}", stack.frames[::-1]) for stack in stacks]
    return Verdict(
        headline=verdict.headline,
        tag=tag if is_tagged else verdict.mode,
        sure=f"confidence {100 * verdict.confidence:.0f} %" if verdict.confidence > 0 else "",
        kind=_KINDS.get(verdict.mode, ""),
        lines=(("Why", verdict.why), ("Next", verdict.next), ("Also", verdict.also)),
        evidence=evidence,
        content=content,
    )


def _culprits_table(culprits: Sequence[Culprit]) -> Table:
    rows = [
        Row(
            (
                place_name(culprit.kind, culprit.id),
                percent(culprit.effect),
                f"{percent(culprit.interval[0])} to {percent(culprit.interval[1])}",
                could_also_be(culprit.kind, culprit.id, culprit.aliases),
            ),
            ranks=culprit.id if culprit.kind == "rank" else "",
            hosts=culprit.id if culprit.kind == "node" else "",
        )
        for culprit in culprits
    ]
    head = ("who", "more than others", "95 % interval", "could also be")
    return Table(head, rows, "Who is at fault", text=(0, 3), limits=(0, _MAX_CULPRITS), on=PAGE)


def warnings_of(summary: Summary, progress: str) -> Iterator[tuple[str, str]]:
    """Yield what must not be missed, with a word for each; `progress` is how far a run is that still runs."""
    if progress:
        yield "state", f"{progress}: {MAY_CHANGE}"
    if line := suspect_line(summary.clocks):
        yield "warning", line
    for sentence in (*summary.steps.warnings, *summary.switches.problems):
        yield "warning", sentence
    if summary.world.emulation:
        yield "lab", summary.world.emulation
    if summary.world.imported:
        yield "imported", summary.world.imported
