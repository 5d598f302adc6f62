"""Decides which ranks are believed: not those whose trace contradicts itself or all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.sound_stream import contradictions_of, sound_stream
from hpcpace.metrics.contradictions import Contradiction, contradictions
from hpcpace.trace.tables import RankTrace
from hpcpace.units import NS_PER_S, format_duration

# Clocks that are wrong by less are found by what they contradict; a rank that is so far off is not of this job.
_MOST_STEPS_APART, _LEAST_APART_NS = 10, NS_PER_S
_LEAST_OPERATIONS_SHARE = 0.5


def credible_traces(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], list[str]]:
    """Return the traces whose steps and phases do not contradict themselves, and a sentence for each contradiction."""
    kept, said = [], []
    for trace in traces:
        found = contradictions({**trace.tables, "collectives": sound_stream(trace).nothing})
        kept += [] if any(one.is_grave for one in found) else [trace]
        said += [_sentence(trace, found)] if found else []
    return kept, said


def _sentence(trace: RankTrace, found: Sequence[Contradiction]) -> str:
    end = f"; nothing of rank {trace.header.rank} is believed" if any(one.is_grave for one in found) else ""
    return f"{trace.path}: {', '.join(map(str, found))}{end}"


def sentences_on_operations(measured: Measured) -> list[str]:
    """Return a sentence for each trace whose operations contradict themselves, though not too many of them."""
    said = []
    for stream in measured.operations.streams:
        found = contradictions_of(stream)
        said += [_sentence(stream.original, found)] if found else []
    return said


def incredible_ranks(measured: Measured) -> tuple[set[int], list[str]]:
    """Return the ranks that all others contradict, and a sentence for each."""
    found = {**_silent(measured), **_apart_in_time(measured), **_contradictory(measured)}
    return set(found), list(found.values())


def _contradictory(measured: Measured) -> dict[int, str]:
    """Return the ranks whose operations contradict themselves."""
    found = {stream.original.header.rank: (stream, contradictions_of(stream)) for stream in measured.operations.streams}
    return {
        rank: _sentence(stream.original, said)
        for rank, (stream, said) in found.items()
        if any(one.is_grave for one in said)
    }


def _apart_in_time(measured: Measured) -> dict[int, str]:
    """Return the ranks whose steps are at another time than the same steps of the others.

    Ranks of one job step together. The file of an earlier start with the same names, or a clock that is wrong by hours,
    must not be taken for a rank of it.
    """
    timed = measured.timed
    rows = [row for row, rank in enumerate(timed.ranks) if rank not in timed.unknown_clocks]
    if len(rows) < 2:
        return {}
    apart_ns = steps_apart_ns(measured.common.begin_ns[rows], float(np.median(measured.times_ns)))
    return {
        timed.ranks[row]: (
            f"{timed.traces[row].path}: the steps of rank {timed.ranks[row]} are {format_duration(abs(ns))} "
            f"{'behind' if ns > 0 else 'before'} those of the others: it belongs to another start, "
            "or its clock is wrong; nothing of it is believed"
        )
        for row, ns in zip(rows, apart_ns.tolist(), strict=True)
        if ns
    }


def steps_apart_ns(begin_ns: NDArray[np.int64], step_ns: float) -> NDArray[np.float64]:
    """Return by how much the steps of each rank are behind those of the others, float64, (num_ranks,).

    It is 0 where they are at the same time, give or take some steps and a second.

    Args:
        begin_ns: of the same steps of each rank on the common clock, int64, (num_ranks, num_steps).
        step_ns: how long a step takes.
    """
    apart_ns = np.median(begin_ns - np.median(begin_ns, axis=0), axis=1)
    return np.where(np.abs(apart_ns) > max(_MOST_STEPS_APART * step_ns, _LEAST_APART_NS), apart_ns, 0.0)


def _silent(measured: Measured) -> dict[int, str]:
    """Return the ranks that recorded far fewer operations than others of their role.

    The time of the operations that they lack would be taken for their own work.
    """
    num_operations = measured.operations.totals.num_operations
    found = {}
    for role in np.unique(measured.role):
        members = np.flatnonzero(measured.role == role)
        usual = float(np.median(num_operations[members]))
        # If it is not known who does the same work, ranks may do different things, but not nothing.
        is_role_known = measured.timed.traces[members[0]].header.pp >= 0
        least = _LEAST_OPERATIONS_SHARE * usual if is_role_known else min(usual, 1.0)
        for row in members[num_operations[members] < least].tolist():
            trace = measured.timed.traces[row]
            found[trace.header.rank] = (
                f"{trace.path}: rank {trace.header.rank} has {num_operations[row]} operations in the steps in which "
                f"others of its role have {usual:.0f}; nothing of it is believed"
            )
    return found


def absent_ranks(traces: Sequence[RankTrace], world_size: int) -> tuple[int, ...]:
    """Return the ranks without a trace with which those with a trace communicate.

    If no trace says with whom its rank communicates, these are all ranks without a trace.
    """
    is_member = np.zeros(world_size, np.bool_)
    for trace in traces:
        members = trace.tables["groups"]["rank"]
        is_member[members[(members >= 0) & (members < world_size)]] = True
    is_absent = is_member if is_member.any() else ~is_member
    is_absent[[trace.header.rank for trace in traces]] = False
    return tuple(np.flatnonzero(is_absent).tolist())
