"""The report of a run, all of its sections in their order, and the card of at most 12 lines at the end of a run.

The terminal and RUN/report.html show the same document.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from hpcpace import __version__
from hpcpace.core.files import write_file
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import json_text
from hpcpace.core.text import listed, milliseconds, named_ranks, percent, place_name, plural, rank_list, shell_word
from hpcpace.diagnosis import summary as diagnosed
from hpcpace.diagnosis.incomplete import incomplete_rank_line, jump_line, open_line, suspect_line
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.summary import Culprit, Finding, IncompleteRank, Mode, Summary
from hpcpace.diagnosis.verdict import main_verdict
from hpcpace.report.document import PAGE, Block, Document, Notes, Row, Section, Stack, Table, Verdict
from hpcpace.report.html import html_page
from hpcpace.report.sections.causes import causes_section, jitter_section, named_ranks_of, pacing_section
from hpcpace.report.sections.communication import communication_section, probed_section
from hpcpace.report.sections.hosts import (
    audit_section,
    clocks_section,
    cores_section,
    could_also_be,
    devices_section,
    places_section,
)
from hpcpace.report.sections.network import network_section
from hpcpace.report.sections.phases import (
    PARTS,
    attempts_section,
    drawn_parts,
    phases_section,
    rows_shown,
    run_section,
    time_section,
)
from hpcpace.report.sections.steps import own_delay_section, slowest_section, times_section
from hpcpace.report.terminal import num_lines, print_document

MAY_CHANGE = "verdict and figures may change until it ends"
"""Said of a run that still runs."""
_MAX_TAG = 40
_MAX_CULPRITS = 12
_OF_RANKS = ("Own delay by rank and step", "Phases by rank")
_EVIDENCE = {
    "stopped": ("Step times", "Slowest step"),
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
    for jump in summary.clocks.jumps:
        yield "warning", jump_line(jump)
    if line := suspect_line(summary.clocks):
        yield "warning", line
    for sentence in (*summary.steps.warnings, *summary.switches.problems):
        yield "warning", sentence
    if summary.world.emulation:
        yield "lab", summary.world.emulation
    if summary.world.imported:
        yield "imported", summary.world.imported


_REASONS = {
    "step_ms": ("step-times", "no plot of step times", "they are not known"),
    "own_delay_ms": (
        "own-delay",
        "no plot of own delay",
        "no two ranks do the same work, or their work is not known",
    ),
    "parts_ms": ("phases-over-steps", "no plot of phases over steps", "they are not known, or there is a single step"),
    "phases": ("phase-shares", "no plot of phases", "they are not known"),
    "communication_share": (
        "regime",
        "no plot of transfer over steps",
        "the share of transfer in each step is not known",
    ),
    "core_times": ("core-phases", "no plot of times on and off a core", "the hosts do not count them, or nobody did"),
    "bandwidths": (
        "bandwidths",
        "no plot of bandwidths",
        "there are no transfers of a known size, or they are shorter than the error of the clocks",
    ),
    "origins": (
        "origins",
        "no plot of where waiting began",
        "no rank waited, or the steps have too many operations to be rebuilt",
    ),
    "growth": (
        "growth",
        "no plot of growth with scale",
        "that needs three or more that wait for each other, in enough steps",
    ),
    "hotspots": ("hotspots", "no places", "no place is slower than the others, or there are too few to compare"),
    "leaf_matrix": ("matrix-switch", "no matrix of switches", "Slurm reported no switches, or only one"),
    "node_matrix": ("matrix-node", "no matrix of nodes", "no operation among some of the nodes was recorded"),
    "clocks": (
        "clock-error",
        "no plot of clock errors",
        "no synchronisation of clocks was recorded, as with a single host",
    ),
}
"""By field of the data of plots: the plot, how its absence is said, and the usual reason."""


def run_document(
    summary: Summary,
    verdict: diagnosed.Verdict,
    plots: PlotData,
    *,
    ranks: Sequence[int] | None = None,
    progress: str = "",
    timeline: str = "",
) -> Document:
    """Return all that there is to say of a run; the same arguments give the same document.

    Args:
        summary: figures of the run.
        verdict: what is said first.
        plots: what the plots show.
        ranks: the ranks that a terminal shows; with more than 16 of them, and none asked for, roles and extreme ranks.
        progress: how far a run is that still runs; empty of one that has ended.
        timeline: name of a file for Perfetto beside the page; empty without one.
    """
    named, shown = named_ranks_of(summary), rows_shown(summary, ranks)
    sections = [
        time_section(summary),
        run_section(summary, (*plots.versions, ("report by hpcpace", __version__)) if plots.versions else ()),
        attempts_section(summary),
        causes_section(summary),
        audit_section(summary),
        probed_section(summary),
        pacing_section(summary),
        times_section(summary, plots),
        slowest_section(plots, summary.run, timeline, named),
        own_delay_section(summary, plots, named),
        phases_section(summary, shown, named),
        devices_section(summary),
        cores_section(summary, plots.core_times, named),
        communication_section(summary, plots, shown),
        network_section(summary, plots.network),
        places_section(summary, plots),
        clocks_section(summary, plots),
        jitter_section(summary, plots),
    ]
    which = f"attempt {summary.attempt}" + (f" ({len(summary.attempts)} in all)" if len(summary.attempts) > 1 else "")
    document = Document(
        heading="hpcpace report",
        subject=summary.run,
        remark=which,
        title=f"{verdict.mode}: {Path(summary.run).name}",
        verdict=verdict_of(summary, verdict),
        warnings=list(warnings_of(summary, progress)),
        sections=sections,
        data=json_text(summary.to_json()),
        has_choice=len(summary.ranks) > 1,
    )
    sections.append(left_out_section(summary, {plot.name for plot in document.plots()}, plots.reasons))
    return document


def left_out_section(summary: Summary, drawn: Collection[str], reasons: Mapping[str, str]) -> Section:
    """Return what is missing or cut off.

    Args:
        summary: the figures.
        drawn: names of the plots that a page has.
        reasons: why others have no data, by field of the data of plots.
    """
    cut = summary.cut_off
    hosts = {row.rank: row.host for row in summary.ranks} | {rank.rank: rank.host for rank in cut.ranks}
    lines = list(_lines(summary, hosts))
    opened = [open_line(operation, hosts) for operation in cut.open]
    lost = [incomplete_rank_line(rank, hosts) for rank in cut.ranks if _is_listed(rank)]
    missing = [f"{what}: {reasons.get(key, why)}" for key, (name, what, why) in _REASONS.items() if name not in drawn]
    is_whole = not (lines or opened or lost or cut.problems)
    return Section(
        "Missing or cut off",
        (
            Notes(lines),
            Notes(opened, is_folded=True, is_ranked=True),
            Notes(lost, is_folded=True, is_ranked=True),
            Notes(cut.problems, is_folded=True),
            Notes(["nothing: every rank and record is in the figures"] * is_whole, on=PAGE),
            Notes(missing, on=PAGE),
        ),
        is_reference=True,
    )


def _lines(summary: Summary, hosts: Mapping[int, str]) -> Iterator[str]:
    cut = summary.cut_off
    if summary.world.missing:
        yield f"no trace of {rank_list(summary.world.missing)}: waits for them count as transfer"
    if cut.not_closed:
        yield f"not closed: the trace of {named_ranks(cut.not_closed, hosts)} (killed, crashed, or still running)"
    if summary.tracing.num_dropped:
        yield f"{plural(summary.tracing.num_dropped, 'record')} dropped by the recorder"
    for kind in summary.kinds:
        if kind.num_unmatched:
            yield (
                f"{kind.num_unmatched} {kind.op} of {rank_list(kind.ranks_unmatched)} have no comparable counterpart "
                "on every member (trace missing or cut off, or clock, group or peer unknown): their blocked time "
                "counts as transfer"
            )


def _is_listed(rank: IncompleteRank) -> bool:
    # Ranks without a trace are listed among the problems, those that were not closed in one line.
    return bool(rank.num_lost_operations or rank.num_dropped or (rank.host and not rank.has_trace))


def page(
    summary: Summary, verdict: diagnosed.Verdict, plots: PlotData, *, progress: str = "", timeline: str = ""
) -> str:
    """Return the report of a run as a page; the arguments are those of `run_document`."""
    return html_page(run_document(summary, verdict, plots, progress=progress, timeline=timeline))


def write_html(path: Path, summary: Summary, verdict: diagnosed.Verdict, plots: PlotData) -> None:
    """Write the page in one piece, so that a reader never sees half of it; see `hpcpace.core.files.Folder.write`.

    Raises:
        OSError: it cannot be written.
    """
    write_file(path, page(summary, verdict, plots))


_MAX_LINES = 12
_MAX_LETTERS = 3 * 62
"""display: of the verdict, and of what to do; three lines beside their labels."""
_MIN_SHARE = 0.005
"""display: smaller parts of a step are left out, unless they hold the cause."""
_GROUPS = (
    ("busy", ("forward", "backward", "optimizer")),
    ("exposed wait", ("sync_wait", "wait")),
    ("transfer", ("sync_transfer", "transfer")),
    ("wait or transfer", ("sync_either", "either")),
    ("other", ("data", "host", "gc", "pace", "checkpoint", "eval", "other")),
)
"""The groups of `Shares.whole`, with the parts of a step in each as `drawn_parts` names them."""
_NAMES = {part: name for name, parts, _, _ in PARTS for part in parts}
_SYNC, _REST, _NO_PHASE = "gradient sync", "elsewhere", "no phase"
_CAUSES = {
    Mode.STRAGGLER: "exposed wait",
    Mode.IMBALANCE: "exposed wait",
    Mode.AMPLIFICATION: "exposed wait",
    Mode.DATA: "exposed wait",
    Mode.RUNTIME: "exposed wait",
    Mode.CONTENTION: "transfer",
    Mode.LOCALITY: "transfer",
    Mode.COMMUNICATION: "transfer",
    Mode.INPUT: "data",
    Mode.HOST: "host",
}
"""Where the loss of a mode shows in the step, unless its phase is known: a group, or one part. Others show anywhere."""


@dataclass(frozen=True)
class _Leaf:
    """A part of the mean step.

    Attributes:
        name: as it is shown.
        parts: of `drawn_parts`.
        time_ns: mean over ranks.
        inside: parts of it.
    """

    name: str
    parts: tuple[str, ...]
    time_ns: float
    inside: tuple[_Leaf, ...] = ()


def card_text(summary: Summary, run: str, *, width: int, encoding: str, has_colors: bool) -> str:
    """Return the card of a run as text.

    Args:
        summary: the figures of its report.
        run: the run as a user names it.
        width: letters in a line; only a command to paste may be longer.
        encoding: of where it is printed.
        has_colors: whether that shows colours.
    """
    page = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace", newline="")
    console = Console(
        file=page,
        width=width,
        force_terminal=has_colors,
        color_system="standard" if has_colors else None,
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    document = card_document(summary, run, width=width)
    print_document(console, document)
    page.seek(0)
    return "".join(f"{line.rstrip()}\n" for line in page)


def card_document(summary: Summary, run: str, *, width: int) -> Document:
    """Return the card of a run, with as many parts of the step as fit."""
    most = sum(len(parts) for _, parts in _GROUPS)
    for number in range(most, 0, -1):
        document = _document(summary, run, most_parts=number)
        if num_lines(document, width) <= _MAX_LINES:
            return document
    return _document(summary, run, most_parts=0)


def _document(summary: Summary, run: str, *, most_parts: int) -> Document:
    said = main_verdict(summary.verdict)
    verdict = verdict_of(summary, said)
    finding = said.findings[0] if said.findings else None
    low, high = map(percent, (finding and finding.loss_interval) or (0.0, 0.0))
    cost = f"cost {low} to {high}" if low != high else ""
    sure = ", ".join(word for word in (cost, verdict.sure) if word)
    warnings = [(label, _cut(sentence, _MAX_LETTERS // 3)) for label, sentence in warnings_of(summary, "")]
    return Document(
        heading="hpcpace report",
        # Behind a #, so that the line can still be pasted.
        subject=shell_word(run) + (f"  # attempt {summary.attempt}" if summary.attempt else ""),
        title=verdict.headline,
        verdict=replace(
            verdict,
            headline=_cut(verdict.headline, _MAX_LETTERS - len(sure)),
            sure=sure,
            lines=(("Next", [_cut(sentence, _MAX_LETTERS) for sentence in said.next[:1]]),),
            content=(),
        ),
        warnings=warnings[:1],
        sections=(Section("Where the time went", (_tree(summary, finding, most_parts),)),),
        is_brief=True,
    )


def _cut(sentence: str, most: int) -> str:
    """Return a sentence, cut between two words where it is too long."""
    return sentence if len(sentence) <= most else f"{sentence[: most - 4].rsplit(' ', 1)[0]} ..."


def _tree(summary: Summary, finding: Finding | None, most_parts: int) -> Table | Notes:
    """Return where the mean step went, with the cause marked, or why that is not known."""
    step_ns = float(np.mean([row.step_ns for row in summary.ranks])) if summary.ranks else 0.0
    groups = _groups(summary)
    if not groups or not step_ns or summary.shares.whole is None:
        return Notes([summary.unknown or "where the time of a step went is not known"])
    part, mark = _cause(finding)
    shown = _shown(groups, part, step_ns, most_parts)
    num_used = summary.steps.num_used
    root = f"step, mean of {num_used}" if num_used > 1 else "one step"
    rows = [Row((root, f"{milliseconds(step_ns)} ms", "100 %", ""))]
    for place, group in enumerate(shown):
        is_last = place == len(shown) - 1
        rows.append(_row("└─ " if is_last else "├─ ", group, step_ns, part, mark))
        for inner in group.inside:
            stem = ("   " if is_last else "│  ") + ("└─ " if inner is group.inside[-1] else "├─ ")
            rows.append(_row(stem, inner, step_ns, part, mark))
    return Table(("",) * 4, rows, text=(0, 3))


def _groups(summary: Summary) -> list[_Leaf]:
    """Return the groups of parts that the step has; nothing where they are not known on all ranks."""
    known = [drawn_parts(row.parts_ns) for row in summary.ranks if row.parts_ns is not None]
    if not known or len(known) < len(summary.ranks):
        return []
    names = {name for parts in known for name in parts}
    times = {name: float(np.mean([parts.get(name, 0.0) for parts in known])) for name in names}
    groups = []
    for name, parts in _GROUPS:
        inside = tuple(_Leaf(_name_in(part), (part,), times[part]) for part in parts if times.get(part))
        if inside:
            is_one = len(inside) == 1 and (name != "other" or inside[0].name == _NO_PHASE)
            time_ns = sum(leaf.time_ns for leaf in inside)
            groups.append(_Leaf(name, sum((leaf.parts for leaf in inside), ()), time_ns, () if is_one else inside))
    return groups


def _name_in(part: str) -> str:
    """Return the name of a part below its group."""
    if part.startswith("sync_"):
        return _SYNC
    return {"wait": _REST, "transfer": _REST, "either": _REST, "other": _NO_PHASE}.get(part, _NAMES[part])


def _shown(groups: Sequence[_Leaf], cause: str, step_ns: float, most_parts: int) -> list[_Leaf]:
    """Return groups with the largest parts inside them, and with the one that is the cause."""
    inner = [leaf for group in groups for leaf in group.inside]
    inner.sort(key=lambda leaf: (cause not in leaf.parts, -leaf.time_ns))
    kept = [leaf for leaf in inner if leaf.time_ns >= _MIN_SHARE * step_ns or cause in leaf.parts][:most_parts]
    shown = [replace(group, inside=tuple(leaf for leaf in group.inside if leaf in kept)) for group in groups]
    return [group for group in shown if group.inside or group.time_ns >= _MIN_SHARE * step_ns or cause == group.name]


def _row(stem: str, leaf: _Leaf, step_ns: float, cause: str, mark: str) -> Row:
    is_cause = bool(cause) and (cause == leaf.name or (leaf.parts == (cause,) and not leaf.inside))
    share = f"{100 * leaf.time_ns / step_ns:.1f} %"
    cells = (stem + leaf.name, f"{milliseconds(leaf.time_ns)} ms", share, mark if is_cause else "")
    return Row(cells, style="strong" if is_cause else "")


def _cause(finding: Finding | None) -> tuple[str, str]:
    """Return the part or group of the step that holds what the verdict names, and what is said of it; may be empty."""
    if finding is None:
        return "", ""
    names = [place_name(culprit.kind, culprit.id) for culprit in finding.culprits]
    who = listed(names[:2]) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"
    for name, stage in zip(names, finding.stages, strict=False):
        longer = [phase for phase in stage.phases if phase.is_longer] if stage is not None and stage.stages else []
        if longer:
            phase = longer[0]
            own, usual = milliseconds(phase.own_ns), milliseconds(phase.usual_ns)
            return phase.phase, f"<- {name}: {own} ms, usual {usual} ms"
    part = _CAUSES.get(Mode(finding.mode), "") if finding.mode in list(Mode) else ""
    return part, f"<- {who}" if who else "<- the cause"
