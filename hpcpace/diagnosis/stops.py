"""When ranks of a run did not run, and which steps that concerns: stops of ranks, hosts, and the whole job."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from hpcpace.core.text import NS_PER_S
from hpcpace.diagnosis.evidence import TimedTraces
from hpcpace.metrics import Bools, Ints
from hpcpace.metrics.common_clock import reference_times
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.stops import Stop, StopThresholds, common_stops, lost_ns, on_common_clock, rank_stops
from hpcpace.trace.tables import RankTrace


class StopScope(StrEnum):
    """Who stood still together."""

    RANK = "rank"
    HOST = "host"
    JOB = "job"
    CALL = "call"


@dataclass(frozen=True, kw_only=True)
class SeenStop:
    """One time in which ranks did not run.

    Attributes:
        ranks: their numbers.
        hosts: names of their hosts, each once.
        scope: who stood still together; CALL where a rank waited in a call that keeps Python's lock.
        is_alone: whether the rank is the only one of its host, which may have stood still with it.
        begin_unix_ns: when it began, wall-clock time; 0 where that is not known.
        length_ns: how long it lasted.
        step: the first step that it is in.
        lost_ns: how much longer steps took because of it.
        is_swapping: whether the host swapped meanwhile.
        is_call_known: whether the trace distinguishes a stop from a call that keeps Python's lock.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    scope: StopScope
    is_alone: bool
    begin_unix_ns: int
    length_ns: int
    step: int
    lost_ns: float
    is_swapping: bool
    is_call_known: bool


@dataclass(frozen=True, kw_only=True)
class JudgedStops:
    """The stops of a run.

    Attributes:
        found: the stops in the used steps, the most expensive first.
        share: of the time of all used steps that they cost.
        is_kept: which steps are without one, bool, (num_steps,); all where most have one.
    """

    found: tuple[SeenStop, ...] = ()
    share: float = 0.0
    is_kept: Bools = field(default_factory=lambda: np.ones(0, np.bool_))


def stops_of(timed: TimedTraces, steps: StepPanel, step_times_ns: Ints, limits: StopThresholds) -> JudgedStops:
    """Return when ranks did not run during some steps.

    Args:
        timed: the traces and their clocks.
        steps: the steps, on the common clock.
        step_times_ns: how long each took, (num_steps,).
        limits: when a rank did not run.
    """
    traces, clocks = timed.traces, timed.clocks
    of_ranks = [
        on_common_clock(rank_stops(trace.tables["host"], _other_rows(trace), limits), clock)
        for trace, clock in zip(traces, clocks, strict=True)
    ]
    times_ns = step_times_ns.astype(np.float64)
    has_stop, seen = np.zeros(len(times_ns), np.bool_), list[SeenStop]()
    for stop in common_stops(of_ranks, limits):
        cost_ns, is_in = lost_ns(stop, steps.begin_ns, steps.end_ns, times_ns)
        if is_in.any():
            has_stop |= is_in
            seen.append(_seen(stop, timed, int(steps.step[is_in][0]), cost_ns, limits))
    is_rare = has_stop.mean() <= limits.most_steps_share if len(has_stop) else True
    return JudgedStops(
        found=tuple(sorted(seen, key=lambda stop: -stop.lost_ns)),
        share=sum(stop.lost_ns for stop in seen) / max(float(times_ns.sum()), 1.0),
        is_kept=~has_stop if is_rare else np.ones(len(times_ns), np.bool_),
    )


def _other_rows(trace: RankTrace) -> list[Ints]:
    """Return times at which threads other than the sampling one left a row."""
    columns = (("steps", "begin_ns"), ("steps", "end_ns"), ("phases", "begin_ns"), ("phases", "end_ns"))
    return [np.asarray(trace.tables[table][name], np.int64) for table, name in (*columns, ("account", "time_ns"))]


def _seen(stop: Stop, timed: TimedTraces, step: int, cost_ns: float, limits: StopThresholds) -> SeenStop:
    traces = timed.traces
    own = [traces[row] for row in stop.rows]
    hosts = {trace.header.node: trace.header.host for trace in own}
    num_there = sum(trace.header.node in hosts for trace in traces)
    scope = StopScope.RANK
    if stop.is_blocked:
        scope = StopScope.CALL
    elif len(own) == len(traces) and len(own) > 1:
        scope = StopScope.JOB
    elif len(own) == num_there and len(own) > len(hosts):
        scope = StopScope.HOST
    first, clock = own[0], timed.clocks[stop.rows[0]]
    return SeenStop(
        ranks=tuple(trace.header.rank for trace in own),
        hosts=tuple(hosts.values()),
        scope=scope,
        is_alone=len(own) == num_there,
        begin_unix_ns=_unix_ns(first, stop.begin_ns - int(reference_times(clock, _start_ns(first))[0])),
        length_ns=stop.length_ns,
        step=step,
        lost_ns=cost_ns,
        is_swapping=stop.major_faults >= limits.swap_faults_per_s * stop.length_ns / NS_PER_S,
        is_call_known=bool(all(np.any(trace.tables["host"]["sampler_wakeups"]) for trace in own)),
    )


def _start_ns(trace: RankTrace) -> Ints:
    return np.asarray(trace.tables["account"]["time_ns"][:1], np.int64)


def _unix_ns(trace: RankTrace, since_start_ns: int) -> int:
    """Return the wall-clock time of something so long after the trace was made, which is when it is first flushed."""
    return trace.header.created_unix_ns + since_start_ns if trace.header.created_unix_ns and not trace.first_step else 0
