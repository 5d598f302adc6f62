"""Which ranks a run is judged by: not those whose trace contradicts itself, or all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.diagnosis.measure import Measured
from hpcpace.metrics.contradictions import Contradiction, contradictions
from hpcpace.trace.reader import RankTrace, Table
from hpcpace.trace.stream import StoredTable
from hpcpace.units import NS_PER_S, format_duration

_MOST_NAMED = 8
# Clocks that are wrong by less are found by what they contradict; a rank that is so far off is not of this job.
_MOST_STEPS_APART, _LEAST_APART_NS = 10, NS_PER_S
_LEAST_OPERATIONS_SHARE = 0.5


def credible_traces(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], list[str]]:
    """Return the traces that do not contradict themselves, and a sentence for each contradiction."""
    kept, said = [], []
    for trace in traces:
        found = contradictions({**trace.tables, "collectives": _in_memory(trace.tables["collectives"])})
        is_grave = any(one.is_grave for one in found)
        kept += [] if is_grave else [trace]
        end = f"; nothing of rank {trace.header.rank} is believed" if is_grave else ""
        said += [f"{trace.path}: {', '.join(map(str, found))}{end}"] if found else []
    return kept, _shortened(said)


def _in_memory(collectives: Table) -> Table:
    """Return the rows that are in memory; the others are looked at when they are read."""
    if isinstance(collectives, StoredTable):
        return collectives.stream.trace.tables["collectives"]
    return collectives


def incredible_ranks(measured: Measured) -> tuple[set[int], list[str]]:
    """Return the ranks that all others contradict, and a sentence for each."""
    found = {**_contradictory_on_disk(measured), **_apart_in_time(measured), **_silent(measured)}
    return set(found), _shortened(list(found.values()))


def _contradictory_on_disk(measured: Measured) -> dict[int, str]:
    """Return the ranks whose collectives were found to contradict themselves while they were read."""
    if measured.streamed is None:
        return {}
    found = {}
    counts = zip(measured.evidence.traces, measured.streamed.num_contradictory, measured.streamed.num_read, strict=True)
    for trace, num_bad, num_rows in counts:
        one = Contradiction("collectives", "cannot be", int(num_bad), int(num_rows))
        if one.is_grave:
            found[trace.header.rank] = f"{trace.path}: {one}; nothing of rank {trace.header.rank} is believed"
    return found


def _apart_in_time(measured: Measured) -> dict[int, str]:
    """Return the ranks whose steps lie at another time than the same steps of the others.

    Ranks of one job step together. The file of an earlier start with the same names, or a clock that is wrong by hours,
    must not pass for a rank of it.
    """
    evidence = measured.evidence
    rows = [row for row, rank in enumerate(evidence.ranks) if rank not in evidence.unknown_clocks]
    if len(rows) < 2:
        return {}
    begin_ns = measured.begin_all_ns[rows].astype(np.float64)
    apart_ns = np.median(begin_ns - np.median(begin_ns, axis=0), axis=1)
    least_ns = max(_MOST_STEPS_APART * float(np.median(measured.times_ns)), _LEAST_APART_NS)
    return {
        evidence.ranks[row]: (
            f"{evidence.traces[row].path}: the steps of rank {evidence.ranks[row]} are {format_duration(abs(ns))} "
            f"{'behind' if ns > 0 else 'before'} those of the others: it belongs to another start, "
            "or its clock is wrong; nothing of it is believed"
        )
        for row, ns in zip(rows, apart_ns.tolist(), strict=True)
        if abs(ns) > least_ns
    }


def _silent(measured: Measured) -> dict[int, str]:
    """Return the ranks that recorded far fewer operations than others of their role.

    What they lack would pass for work of their own.
    """
    num_operations = measured.totals.num_operations
    found = {}
    for role in np.unique(measured.role):
        members = np.flatnonzero(measured.role == role)
        usual = float(np.median(num_operations[members]))
        # If it is not known who does the same work, ranks may do different things, but not nothing.
        is_role_known = measured.evidence.traces[members[0]].header.pp >= 0
        least = _LEAST_OPERATIONS_SHARE * usual if is_role_known else min(usual, 1.0)
        for row in members[num_operations[members] < least].tolist():
            trace = measured.evidence.traces[row]
            found[trace.header.rank] = (
                f"{trace.path}: rank {trace.header.rank} has {num_operations[row]} operations in the steps in which "
                f"others of its role have {usual:.0f}; nothing of it is believed"
            )
    return found


def absent_ranks(traces: Sequence[RankTrace], world_size: int) -> tuple[int, ...]:
    """Return the ranks that are not among some traces, and with which these communicate.

    All that are not there, where no trace says with whom it communicates.
    """
    is_member = np.zeros(world_size, np.bool_)
    for trace in traces:
        members = trace.tables["groups"]["rank"]
        is_member[members[(members >= 0) & (members < world_size)]] = True
    is_absent = is_member if is_member.any() else ~is_member
    is_absent[[trace.header.rank for trace in traces]] = False
    return tuple(np.flatnonzero(is_absent).tolist())


def _shortened(said: Sequence[str]) -> list[str]:
    more = len(said) - _MOST_NAMED
    return [*said[:_MOST_NAMED], f"{more} more traces contradict themselves or the others"] if more > 0 else list(said)
