"""Missing or cut off: ranks, operations and records that the figures do not contain, and plots without data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hpcpace.core.text import named_ranks, plural, rank_list
from hpcpace.diagnosis.sentences import incomplete_rank_line, open_line
from hpcpace.diagnosis.summary import IncompleteRank, Summary
from hpcpace.report.document import PAGE, Notes, Section

_REASONS = {
    "step_ms": ("step-times", "no plot of step times", "they are not known"),
    "own_delay_ms": (
        "own-delay",
        "no plot of own delay",
        "no two ranks do the same work, or their work is not known",
    ),
    "phases": ("phase-shares", "no plot of phases", "they are not known"),
    "communication_share": (
        "regime",
        "no plot of transfer over steps",
        "the share of transfer in each step is not known",
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
