"""Times in which ranks did not run: stopped by a signal, frozen with their cgroup or host, or swapped out.

A rank samples its counters at equal intervals, in a thread. Where the next sample comes late, either nothing of the
process ran, or the thread alone did not. In the second case another thread used its processor time, waited for a core,
or left a row in the trace; or this thread woke up again and again because another one kept Python's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.common_clock import CommonClock, reference_times

_MIN_ROWS = 3  # statistics: fewer have no usual interval
_USUAL = 0.95  # statistics: of the other intervals, the quantile of what a counter grows by
_BUSY = ("cpu_time_ns", "run_wait_ns", "cpu_throttled_ns")


@dataclass(frozen=True, kw_only=True)
class StopThresholds(Thresholds, topic="stops"):
    """When a rank did not run."""

    least_ns: int = number(400_000_000, "ns")
    """Delay of a sample from which the rank may not have run: busy hosts delay a thread by less."""
    busy_share: float = number(0.1, "share")
    """Share of the delay in which the rank ran, or waited for a core, from which it was not stopped."""
    quiet_share: float = number(0.75, "share")
    """Share of the delay for which the trace must have no other row of the rank: after a stop, a few may come before
    the sample."""
    lock_wakeups_per_s: float = number(20.0, "events")
    """Wake-ups of the sampling thread per second of delay from which it waited for Python's lock: Python then wakes it
    up 200 times a second."""
    overlap_share: float = number(0.5, "share")
    """Part of the shorter of two stops that must be common for them to be one stop of a host or a job."""
    swap_faults_per_s: float = number(100.0, "events")
    """Major page faults per second of a stop from which the host swapped: a process that is stopped has none."""
    least_loss_share: float = number(0.005, "share")
    """Share of the time that stops must cost to be a finding."""
    most_steps_share: float = number(0.5, "share")
    """Share of the steps up to which those with a stop are left out where other causes are judged; if there are more,
    the others would not represent the run."""


@dataclass(frozen=True, kw_only=True)
class RankStops:
    """The times in which a rank did not run, each (num_stops,).

    Attributes:
        begin_ns, end_ns: on the clock of the rank; the begin may be later by up to one interval between samples.
        major_faults: page faults with disk access meanwhile.
        is_blocked: whether another thread kept Python's lock all the time and used no core: the rank was not stopped,
            but waited in one call.
    """

    begin_ns: Ints
    end_ns: Ints
    major_faults: Ints
    is_blocked: Bools


def rank_stops(host: Mapping[str, NDArray[Any]], rows_ns: Sequence[Ints], limits: StopThresholds) -> RankStops:
    """Return when a rank did not run; nothing where its counters are not known.

    Args:
        host: its `host` table.
        rows_ns: times of other rows of the rank, on the same clock, of threads other than the one that samples.
        limits: when a rank did not run.
    """
    time_ns = np.asarray(host["time_ns"], np.int64)
    found = np.zeros(0, np.int64)
    if len(time_ns) >= _MIN_ROWS and np.any(host["cpu_time_ns"]) and (np.diff(time_ns) > 0).all():
        found = _late_samples(host, time_ns, limits)
    begin_ns, end_ns = time_ns[found], time_ns[np.minimum(found + 1, len(time_ns) - 1)]
    if not len(found):
        none = np.zeros(0, np.int64)
        return RankStops(begin_ns=none, end_ns=none, major_faults=none, is_blocked=none.astype(np.bool_))
    interval_ns = int(np.median(np.diff(time_ns)))
    # The thread sleeps until the sample is due, so from then on nothing ran.
    due_ns, events_ns = begin_ns + interval_ns, np.unique(np.concatenate([time_ns[:1], *rows_ns]))
    at = np.searchsorted(events_ns, due_ns, side="right")
    before_ns, after_ns = events_ns[np.maximum(at - 1, 0)], np.append(events_ns, end_ns.max())[at]
    first_ns, last_ns = np.maximum(begin_ns, before_ns), np.minimum(end_ns, after_ns)
    # Rows that end long before the sample show that the rank ran on; no row at all says nothing about the interval.
    is_quiet = last_ns - due_ns >= limits.quiet_share * (end_ns - due_ns)
    unknown = before_ns <= begin_ns
    first_ns = np.where(unknown, begin_ns + interval_ns // 2, first_ns)
    faults = np.diff(np.asarray(host["major_faults"], np.int64))[found]
    return RankStops(
        begin_ns=first_ns[is_quiet],
        end_ns=last_ns[is_quiet],
        major_faults=np.maximum(faults, 0)[is_quiet],
        is_blocked=_is_locked(host, found, time_ns, interval_ns, limits)[is_quiet],
    )


def _late_samples(host: Mapping[str, NDArray[Any]], time_ns: Ints, limits: StopThresholds) -> Ints:
    """Return the samples after which the next one came late although the rank neither ran nor waited for a core.

    Threads of a rank that is stopped wait for no core. Where they waited for as long as the sample is late, a busy host
    delayed it, even if they wait as long in other intervals.
    """
    passed_ns = np.diff(time_ns)
    late_ns = passed_ns - int(np.median(passed_ns))
    is_late = late_ns >= limits.least_ns
    for name in _BUSY:
        grown = np.diff(np.asarray(host[name], np.float64))
        usual = float(np.quantile(grown[~is_late], _USUAL)) if (~is_late).any() else 0.0
        is_late &= (grown >= 0) & (grown <= max(usual, 0.0) + limits.busy_share * late_ns)
    is_late &= np.diff(np.asarray(host["run_wait_ns"], np.float64)) < late_ns
    return np.flatnonzero(is_late)


def _is_locked(
    host: Mapping[str, NDArray[Any]], found: Ints, time_ns: Ints, interval_ns: int, limits: StopThresholds
) -> Bools:
    """Return whether the thread waited for Python's lock; False also where its wake-ups are not known."""
    grown = np.diff(np.asarray(host["sampler_wakeups"], np.float64))
    is_other = ~np.isin(np.arange(len(grown)), found)
    usual = float(np.quantile(grown[is_other], _USUAL)) if is_other.any() else 0.0
    late_s = (np.diff(time_ns)[found] - interval_ns) / NS_PER_S
    return np.asarray(grown[found] > usual + limits.lock_wakeups_per_s * late_s)


def on_common_clock(stops: RankStops, clock: CommonClock) -> RankStops:
    """Return the stops of a rank on the common clock."""
    begin_ns, end_ns = (reference_times(clock, times_ns) for times_ns in (stops.begin_ns, stops.end_ns))
    return replace(stops, begin_ns=begin_ns, end_ns=end_ns)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One time in which some ranks did not run together.

    Attributes:
        rows: their indices, ascending.
        begin_ns, end_ns: on the common clock.
        major_faults: the most of a rank.
        is_blocked: whether they were not stopped, but waited in a call that keeps Python's lock.
    """

    rows: tuple[int, ...]
    begin_ns: int
    end_ns: int
    major_faults: int
    is_blocked: bool

    @property
    def length_ns(self) -> int:
        """How long it lasted."""
        return self.end_ns - self.begin_ns


def common_stops(of_ranks: Sequence[RankStops], limits: StopThresholds) -> tuple[Stop, ...]:
    """Return the stops of all ranks, those of several ranks at the same time as one, in the order of their begins.

    Args:
        of_ranks: those of each rank, on the common clock.
        limits: how much stops must overlap.
    """
    single = sorted(_single(of_ranks), key=lambda stop: stop.begin_ns)
    merged: list[Stop] = []
    for stop in single:
        last = merged[-1] if merged else None
        if last is not None and _are_one(last, stop, limits):
            merged[-1] = replace(
                last,
                rows=tuple(sorted({*last.rows, *stop.rows})),
                end_ns=max(last.end_ns, stop.end_ns),
                major_faults=max(last.major_faults, stop.major_faults),
            )
        else:
            merged.append(stop)
    return tuple(merged)


def _single(of_ranks: Sequence[RankStops]) -> Iterator[Stop]:
    for row, stops in enumerate(of_ranks):
        columns = (stops.begin_ns, stops.end_ns, stops.major_faults, stops.is_blocked)
        for begin_ns, end_ns, faults, is_blocked in zip(*(column.tolist() for column in columns), strict=True):
            yield Stop(rows=(row,), begin_ns=begin_ns, end_ns=end_ns, major_faults=faults, is_blocked=is_blocked)


def _are_one(first: Stop, second: Stop, limits: StopThresholds) -> bool:
    """Return whether two stops are one of a host or a job; a call that blocks is one of its rank alone."""
    if first.is_blocked or second.is_blocked or set(first.rows) & set(second.rows):
        return False
    common_ns = min(first.end_ns, second.end_ns) - max(first.begin_ns, second.begin_ns)
    return common_ns >= limits.overlap_share * min(first.length_ns, second.length_ns)


def lost_ns(stop: Stop, begin_ns: Ints, end_ns: Ints, times_ns: Floats) -> tuple[float, Bools]:
    """Return how much longer steps took because of a stop, and which steps it is in, bool, (num_steps,).

    A step loses what it exceeds the median step by, and at most the length of the stop.

    Args:
        stop: the stop.
        begin_ns, end_ns: of the steps of each rank, on the common clock, (num_ranks, num_steps).
        times_ns: wall time of each step, (num_steps,).
    """
    rows = list(stop.rows)
    is_in = ((begin_ns[rows] < stop.end_ns) & (end_ns[rows] > stop.begin_ns)).any(axis=0)
    beyond_ns = np.maximum(times_ns - float(np.median(times_ns)), 0.0) if len(times_ns) else times_ns
    return min(float(beyond_ns[is_in].sum()), float(stop.length_ns)), np.asarray(is_in)
