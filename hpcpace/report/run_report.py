"""The report of a run: its verdict, all of its sections in their order, and what is missing of the run.

The terminal and RUN/report.html show the same document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from hpcpace import __version__
from hpcpace.core.files import write_file
from hpcpace.core.rundir import json_text
from hpcpace.core.text import named_ranks, percent, place_name, plural, rank_list
from hpcpace.diagnosis import summary as diagnosed
from hpcpace.diagnosis.incomplete import incomplete_rank_line, jump_line, open_line, suspect_line
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.summary import Culprit, IncompleteRank, Summary
from hpcpace.report.document import PAGE, Block, Document, Notes, Row, Section, Stack, Table, Verdict
from hpcpace.report.html import html_page
from hpcpace.report.sections.causes import causes_section, jitter_section, named_ranks_of, pacing_section
from hpcpace.report.sections.communication import communication_section, probed_section
from hpcpace.report.sections.cores import cores_section
from hpcpace.report.sections.hosts import audit_section, clocks_section, could_also_be, devices_section, places_section
from hpcpace.report.sections.network import network_section
from hpcpace.report.sections.overview import attempts_section, run_section, time_section
from hpcpace.report.sections.phases import phases_section, rows_shown
from hpcpace.report.sections.steps import own_delay_section, slowest_section, times_section

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
