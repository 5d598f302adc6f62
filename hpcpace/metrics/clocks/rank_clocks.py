"""The clock of each rank from its trace, and its times on the common clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import TraceError
from hpcpace.metrics.clocks.common_clock import CommonClock, whole_ns
from hpcpace.trace.reader import RankTrace

# To compare with so many bounds is faster than to search among them.
_MOST_COMPARED = 16
_BLOCK_ROWS = 1 << 13


def rank_clocks(traces: Sequence[RankTrace]) -> tuple[list[CommonClock], tuple[int, ...]]:
    """Return each rank's clock, and the ranks whose clock cannot be compared with that of the others.

    A rank without samples has the clock of a rank on its own host, where one has some. Without any sample at all, the
    ranks on the host of the first one are compared with each other.
    """
    own = [_own_clock(trace) for trace in traces]
    of_host = {t.header.host_key: clock for t, clock in zip(traces, own, strict=True) if clock.num_samples}
    if not of_host:
        zero = np.zeros(1, np.int64)
        of_host = {traces[0].header.host_key: CommonClock(local_ns=zero, offset_ns=zero, halfwidth_ns=zero)}
    clocks, unknown = [], []
    for index, (trace, clock) in enumerate(zip(traces, own, strict=True)):
        if not clock.num_samples and (trace.header.host_key or index == 0):
            clock = of_host.get(trace.header.host_key, clock)
        if not clock.num_samples:
            unknown.append(trace.header.rank)
        clocks.append(clock)
    return clocks, tuple(unknown)


def _own_clock(trace: RankTrace) -> CommonClock:
    try:
        return CommonClock.from_table(trace.tables["clock"])
    except TraceError:  # a contradictory table is as good as none, and the report says that it has none
        none = np.zeros(0, np.int64)
        return CommonClock(local_ns=none, offset_ns=none, halfwidth_ns=none)


def reference_times(clock: CommonClock, local_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `clock.to_reference(local_ns).time_ns`, without the half-widths that cost several times as much.

    Args:
        clock: the clock of a rank.
        local_ns: times of that clock, (num_times,).
    """
    if clock.num_samples < 2 or clock.is_reference:
        return clock.to_reference(local_ns).time_ns
    rates = np.diff(clock.offset_ns) / np.diff(clock.local_ns)
    times_ns = np.empty(len(local_ns), np.int64)
    # Times are nearly in order: most blocks lie between two samples, and are mapped without a lookup for each row.
    for first in range(0, len(local_ns), _BLOCK_ROWS):
        own_ns = local_ns[first : first + _BLOCK_ROWS]
        segment = _segments(clock.local_ns[1:-1], own_ns)
        offset_ns = whole_ns((own_ns - clock.local_ns[segment]) * rates[segment])
        offset_ns += clock.offset_ns[segment]
        np.subtract(own_ns, offset_ns, out=times_ns[first : first + _BLOCK_ROWS])
    return times_ns


def _segments(bounds_ns: NDArray[np.int64], times_ns: NDArray[np.int64]) -> NDArray[np.int64] | int:
    """Return how many bounds, ascending, are no later than each time, (num_times,); one number where all have one."""
    if not len(times_ns):
        return np.zeros(0, np.int64)
    first, last = np.searchsorted(bounds_ns, (times_ns.min(), times_ns.max()), side="right").tolist()
    if first == last:
        return int(first)
    if last - first > _MOST_COMPARED:
        return np.searchsorted(bounds_ns, times_ns, side="right").astype(np.int64)
    segment = np.full(len(times_ns), first)
    for bound_ns in bounds_ns[first:last]:
        segment += times_ns >= bound_ns
    return segment
