"""What hosts did to their ranks: stops of ranks, hosts and the whole job, and memory that grows until none is left.

A warm-up that ends, a jump, and a cache that is emptied again are not steady growth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.evidence import TimedTraces
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.common_clock import reference_times
from hpcpace.metrics.steps import StepPanel
from hpcpace.metrics.stops import Stop, StopThresholds, common_stops, lost_ns, on_common_clock, rank_stops
from hpcpace.trace.tables import RankTrace

if TYPE_CHECKING:
    from hpcpace.audit.facts import Snapshot


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
        begin_unix_ns=unix_ns(first, stop.begin_ns - int(reference_times(clock, _start_ns(first))[0])),
        length_ns=stop.length_ns,
        step=step,
        lost_ns=cost_ns,
        is_swapping=stop.major_faults >= limits.swap_faults_per_s * stop.length_ns / NS_PER_S,
        is_call_known=bool(all(np.any(trace.tables["host"]["sampler_wakeups"]) for trace in own)),
    )


def _start_ns(trace: RankTrace) -> Ints:
    return np.asarray(trace.tables["account"]["time_ns"][:1], np.int64)


def unix_ns(trace: RankTrace, since_start_ns: int) -> int:
    """Return the wall-clock time of something so long after the trace was made, which is when it is first flushed.

    0 where that is not known.
    """
    return trace.header.created_unix_ns + since_start_ns if trace.header.created_unix_ns and not trace.first_step else 0


_NUM_BLOCKS = 8  # statistics: of the time, whose medians leave out short peaks


@dataclass(frozen=True, kw_only=True)
class GrowthThresholds(Thresholds, topic="memory"):
    """When memory grows steadily."""

    least_samples: int = number(30, "samples")
    """Samples, one a second, below which a warm-up looks alike."""
    least_bytes: int = number(100 * 1024 * 1024, "bytes")
    """Growth below which allocators alone may be the reason: they keep freed memory in pieces."""
    least_share: float = number(0.05, "share")
    """Growth over the memory at the begin, likewise."""
    least_part: float = number(0.5, "share")
    """Part of the mean growth that an eighth of the time must have at least, but for one: growth that ends, or goes on
    in a few jumps, is a warm-up or a change of the work."""
    later_part: float = number(0.7, "share")
    """Growth of the second half of the time over that of the first from which it does not come to rest: what saturates
    within the run has less than half."""
    largest_jump: float = number(0.3, "share")
    """Part of the growth that two neighbouring samples may have: more is one allocation."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Memory that grows steadily.

    Attributes:
        bytes_per_s: its slope.
        first_bytes, last_bytes: medians at the begin and at the end.
    """

    bytes_per_s: float
    first_bytes: float
    last_bytes: float


def steady_growth(time_ns: Ints, size_bytes: Floats, limits: GrowthThresholds) -> Growth | None:
    """Return how memory grows; None where it does not, or not steadily.

    Args:
        time_ns: of the samples, ascending, (num_samples,).
        size_bytes: memory then, (num_samples,).
        limits: when growth is steady.
    """
    if len(time_ns) < max(limits.least_samples, 2 * _NUM_BLOCKS) or (np.diff(time_ns) <= 0).any():
        return None
    edges = np.linspace(time_ns[0], time_ns[-1], _NUM_BLOCKS + 1)
    block = np.clip(np.searchsorted(edges, time_ns, side="right") - 1, 0, _NUM_BLOCKS - 1)
    if len(np.unique(block)) < _NUM_BLOCKS:
        return None
    medians = np.array([float(np.median(size_bytes[block == number])) for number in range(_NUM_BLOCKS)])
    grown = np.diff(medians)
    total, half = float(medians[-1] - medians[0]), len(grown) // 2
    if total < max(limits.least_bytes, limits.least_share * float(medians[0])):
        return None
    num_small = int((grown < limits.least_part * total / len(grown)).sum())
    later, earlier = float(grown[-half:].sum()), float(grown[:half].sum())
    is_jump = float(np.diff(size_bytes).max()) > limits.largest_jump * total
    if num_small > 1 or later < limits.later_part * earlier or is_jump:
        return None
    slope = np.polyfit((time_ns - time_ns[0]) / NS_PER_S, size_bytes, 1)[0]
    return Growth(bytes_per_s=float(slope), first_bytes=float(medians[0]), last_bytes=float(medians[-1]))


@dataclass(frozen=True, kw_only=True)
class GrowingMemory:
    """The memory of a rank that grows steadily.

    Attributes:
        rank: its number.
        is_of_device: whether it is that of its device; else that of its process.
        may_be_files: whether pages of mapped files are in it, because the trace does not have them apart.
        bytes_per_step: by how much it grows.
        first_bytes, last_bytes: at the begin and at the end of the used steps.
        limit_bytes: what the ranks of the host have together, by the limit of their cgroup or the memory of the host; 0
            where that is not known.
        full_step: the step in which all ranks of the host have used that up, at the latest; -1 where not known.
        full_s: how long after the last used step that is.
    """

    rank: int
    is_of_device: bool
    may_be_files: bool
    bytes_per_step: float
    first_bytes: float
    last_bytes: float
    limit_bytes: int
    full_step: int
    full_s: float


def growing_memory(
    timed: TimedTraces, steps: StepPanel, limits_bytes: Mapping[int, int], limits: GrowthThresholds
) -> tuple[GrowingMemory, ...]:
    """Return the ranks whose memory grows steadily during some steps, the fastest growing first.

    Args:
        timed: the traces.
        steps: the steps, on each rank's own clock; at least one.
        limits_bytes: what the ranks of a host have together, by rank; those of `memory_limits`.
        limits: when growth is steady.
    """
    length_ns = float(steps.end_ns[:, -1].max() - steps.begin_ns[:, 0].min())
    step_s = length_ns / NS_PER_S / max(int(steps.step[-1] - steps.step[0]) + 1, 1)
    samples = {
        trace.header.rank: _samples(trace, int(begin_ns), int(end_ns))
        for trace, begin_ns, end_ns in zip(timed.traces, steps.begin_ns[:, 0], steps.end_ns[:, -1], strict=True)
    }
    grown = {rank: steady_growth(own.time_ns, own.process_bytes, limits) for rank, own in samples.items()}
    full = dict(_filled(timed.traces, samples, grown, limits_bytes))
    found = []
    for rank, growth in grown.items():
        if growth is not None:
            limit_bytes, full_s = full.get(rank, (0, -1.0))
            step = int(steps.step[-1]) + round(full_s / step_s) if full_s >= 0 else -1
            found.append(_growing(rank, growth, step_s, limit_bytes, step, full_s, samples[rank]))
    for rank, own in samples.items():
        if (of_device := steady_growth(own.time_ns, own.device_bytes, limits)) is not None:
            found.append(_growing(rank, of_device, step_s, 0, -1, -1.0, None))
    return tuple(sorted(found, key=lambda each: -each.bytes_per_step))


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """Memory of a rank, each (num_samples,); `has_files` says that pages of mapped files are in that of its process."""

    time_ns: Ints
    process_bytes: Floats
    device_bytes: Floats
    has_files: bool


def _samples(trace: RankTrace, begin_ns: int, end_ns: int) -> _Samples:
    host = trace.tables["host"]
    rows = host.select((host["time_ns"] >= begin_ns) & (host["time_ns"] <= end_ns))
    process_bytes = np.asarray(rows["rss_bytes"], np.float64) - np.asarray(rows["rss_file_bytes"], np.float64)
    return _Samples(
        time_ns=np.asarray(rows["time_ns"], np.int64),
        process_bytes=process_bytes,
        device_bytes=np.asarray(rows["gpu_memory_bytes"], np.float64),
        has_files=not np.any(rows["rss_file_bytes"]),
    )


def _growing(
    rank: int, growth: Growth, step_s: float, limit_bytes: int, full_step: int, full_s: float, own: _Samples | None
) -> GrowingMemory:
    return GrowingMemory(
        rank=rank,
        is_of_device=own is None,
        may_be_files=own is not None and own.has_files,
        bytes_per_step=growth.bytes_per_s * step_s,
        first_bytes=growth.first_bytes,
        last_bytes=growth.last_bytes,
        limit_bytes=limit_bytes,
        full_step=full_step,
        full_s=full_s,
    )


def memory_limits(snapshots: Sequence[Snapshot]) -> dict[int, int]:
    """Return the memory that the ranks of a host have together, by rank: the limit of a cgroup, or all of the host."""
    found = {}
    for snapshot in snapshots:
        for rank in snapshot.ranks:
            known = [size for size in (snapshot.kernel.memory_bytes, rank.memory_max_bytes) if size]
            if known:
                found[rank.rank] = min(known)
    return found


def _filled(
    traces: Sequence[RankTrace],
    samples: Mapping[int, _Samples],
    grown: Mapping[int, Growth | None],
    limits: Mapping[int, int],
) -> Iterator[tuple[int, tuple[int, float]]]:
    """Yield the limit of each rank that has one, and in how many seconds the ranks of its host have reached it."""
    for trace in traces:
        rank, node = trace.header.rank, trace.header.node
        near = [other.header.rank for other in traces if other.header.node == node]
        used = sum(float(samples[one].process_bytes[-1]) for one in near if len(samples[one].time_ns))
        slope = sum(growth.bytes_per_s for one in near if (growth := grown[one]) is not None)
        if rank in limits and slope > 0 and limits[rank] > used:
            yield rank, (limits[rank], (limits[rank] - used) / slope)
