"""The common clock: the clock of each rank from its trace, and all times on one clock.

Recorded times are never changed. This module maps them to the clock of the reference rank by piecewise-linear
interpolation between synchronisations, and gives each a half-width that bounds its error. Differences are taken in
int64, because float64 cannot hold hours in nanoseconds to a fraction of a microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import library
from hpcpace.trace.reader import RankTrace
from hpcpace.trace.schema import DRIFT_PPM

WANDER_PPM = 1.0
"""Statistics: the least that a clock's rate may change between two synchronisations: the temperature of its crystal."""
_MAX_NS = 1 << 60  # format: 36 years; differences of what damaged samples may give must fit into int64
_PPM = 1e-6  # format: units


class ReferenceTimes(NamedTuple):
    """Times on the clock of the reference rank.

    Attributes:
        time_ns: int64, (num_times,).
        halfwidth_ns: bound on the error, inf if the clock is unknown, float64, (num_times,).
        extrapolated: outside the range of synchronisations, or without any, bool, (num_times,).
    """

    time_ns: Ints
    halfwidth_ns: Floats
    extrapolated: Bools


@dataclass(frozen=True, kw_only=True)
class CommonClock:
    """The clock of one rank against the reference, in order of time.

    Attributes:
        local_ns: int64, (num_samples,), strictly increasing.
        offset_ns: int64, (num_samples,), local minus reference.
        halfwidth_ns: int64, (num_samples,).
    """

    local_ns: Ints
    offset_ns: Ints
    halfwidth_ns: Ints

    def ahead_by(self, ahead_ns: int) -> CommonClock:
        """Return the clock if its samples have missed that it is ahead by some nanoseconds more."""
        return replace(self, offset_ns=self.offset_ns + ahead_ns) if ahead_ns else self

    @classmethod
    def from_table(cls, table: NDArray[Any] | Mapping[str, ArrayLike]) -> CommonClock:
        """Return the clock that a trace's `clock` table describes, in any order; of equal times the first row counts.

        Raises:
            TraceError: the rows refer to different reference ranks.
        """
        references = np.unique(np.asarray(table["ref_rank"]))
        if len(references) > 1:
            raise TraceError(
                f"the clock table names several reference ranks, {references.tolist()}: the file mixes two runs; "
                "report the attempts one by one"
            )
        local_ns, first = np.unique(np.asarray(table["local_ns"], dtype=np.int64), return_index=True)
        return cls(
            local_ns=local_ns,
            offset_ns=np.asarray(table["offset_ns"], dtype=np.int64)[first],
            halfwidth_ns=np.asarray(table["halfwidth_ns"], dtype=np.int64)[first],
        )

    @property
    def num_samples(self) -> int:
        """Number of synchronisations."""
        return len(self.local_ns)

    @property
    def is_reference(self) -> bool:
        """Whether this is the reference clock itself: no measurement of another clock has width 0."""
        return self.num_samples > 0 and not (self.offset_ns.any() or self.halfwidth_ns.any())

    def to_reference(self, local_ns: ArrayLike) -> ReferenceTimes:
        """Map times of this rank to the reference clock.

        Between two samples the error is the interpolated half-width, plus the change of rate times the distance to the
        nearer sample. Outside of them, the uncertainty of the last rate grows with the distance.

        Args:
            local_ns: int64, (num_times,).
        """
        times = np.asarray(local_ns, dtype=np.int64)
        if self.is_reference:
            return ReferenceTimes(times, np.zeros(times.shape), self._outside(times))
        if self.num_samples == 0:
            return ReferenceTimes(times, np.full(times.shape, np.inf), np.ones(times.shape, dtype=bool))
        if self.num_samples == 1:
            distance_ns = np.abs(times - self.local_ns[0]).astype(np.float64)
            halfwidth_ns = self.halfwidth_ns[0] + distance_ns * DRIFT_PPM * _PPM
            return ReferenceTimes(times - self.offset_ns[0], halfwidth_ns, self._outside(times))
        return self._interpolate(times)

    def residuals_ns(self) -> Ints:
        """Return by how much each inner sample differs from the line between its neighbours: the measured error.

        Returns:
            int64, (max(num_samples - 2, 0),). It spans two intervals, so it is larger than the error between samples.
        """
        if self.num_samples <= 2:
            return np.zeros(0, dtype=np.int64)
        span_ns = self.local_ns[2:] - self.local_ns[:-2]
        part: Floats = (self.local_ns[1:-1] - self.local_ns[:-2]) / span_ns
        change_ns = (self.offset_ns[2:] - self.offset_ns[:-2]) * part
        line_ns = self.offset_ns[:-2] + whole_ns(change_ns)
        return np.asarray(self.offset_ns[1:-1] - line_ns)

    def jumps(self, max_rate: float) -> Ints:
        """Return the samples after which the clock jumped: half-widths and a rate explain less than it changed by.

        Args:
            max_rate: the largest difference of the rates of two clocks.

        Returns:
            int64, (num_jumps,): the clock jumped between each of these samples and the next one.
        """
        change_ns = np.abs(np.diff(self.offset_ns)).astype(np.float64)
        explained_ns = self.halfwidth_ns[:-1] + self.halfwidth_ns[1:] + max_rate * np.diff(self.local_ns)
        return np.flatnonzero(change_ns > explained_ns)

    def residual_bounds_ns(self) -> Floats:
        """Return the largest residuals that the half-widths of three samples allow, where a clock's rate is constant.

        Returns:
            float64, (max(num_samples - 2, 0),).
        """
        if self.num_samples <= 2:
            return np.zeros(0)
        part: Floats = (self.local_ns[1:-1] - self.local_ns[:-2]) / (self.local_ns[2:] - self.local_ns[:-2])
        before, own, after = (self.halfwidth_ns[at] for at in (slice(-2), slice(1, -1), slice(2, None)))
        return np.asarray(own + (1 - part) * before + part * after)

    def _outside(self, times: Ints) -> Bools:
        return np.asarray((times < self.local_ns[0]) | (times > self.local_ns[-1]))

    def _interpolate(self, times: Ints) -> ReferenceTimes:
        length_ns = np.diff(self.local_ns)
        rates = np.diff(self.offset_ns) / length_ns
        wander = _wander(rates)
        segment = np.clip(np.searchsorted(self.local_ns, times, side="right") - 1, 0, self.num_samples - 2)
        since_ns = times - self.local_ns[segment]
        until_ns = self.local_ns[segment + 1] - times
        offset_ns = self.offset_ns[segment] + whole_ns(since_ns * rates[segment])

        before, after = self.halfwidth_ns[segment], self.halfwidth_ns[segment + 1]
        part = np.clip(since_ns / length_ns[segment], 0.0, 1.0)
        nearer_ns = np.abs(np.minimum(since_ns, until_ns))
        outside = self._outside(times)
        rate_error = np.where(outside, (before + after) / length_ns[segment], 0.0) + wander[segment]
        halfwidth_ns = before + (after - before) * part + nearer_ns * rate_error
        return ReferenceTimes(times - offset_ns, halfwidth_ns, outside)


def _wander(rates: Floats) -> Floats:
    """Return how much the rate of each segment may vary: its difference from the neighbours, or the least bound."""
    seen = np.abs(np.diff(rates))
    around = np.maximum(np.append(seen, 0.0), np.append(0.0, seen))
    return np.asarray(np.maximum(around, WANDER_PPM * _PPM))


def whole_ns(values_ns: NDArray[Any]) -> Ints:
    """Round to nanoseconds, clipped to 36 years: differences of what damaged samples may give would overflow."""
    return np.asarray(np.rint(np.clip(values_ns, -_MAX_NS, _MAX_NS)), np.int64)


_MAX_COMPARED = 16  # speed: bounds that it is faster to compare with than to search among
_BLOCK_ROWS = 1 << 13  # speed: rows that fit into the cache of a core


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


def reference_times(clock: CommonClock, local_ns: Ints) -> Ints:
    """Return `clock.to_reference(local_ns).time_ns`, without the half-widths that cost several times as much.

    Args:
        clock: the clock of a rank.
        local_ns: times of that clock, (num_times,).
    """
    if clock.num_samples < 2 or clock.is_reference:
        return clock.to_reference(local_ns).time_ns
    rates = np.diff(clock.offset_ns) / np.diff(clock.local_ns)
    times_ns = np.empty(len(local_ns), np.int64)
    kernels = library()
    if kernels is not None:
        kernels.reference_times(
            *(clock.num_samples, clock.local_ns, clock.offset_ns, rates, _MAX_NS, len(local_ns), local_ns, times_ns)
        )
        return times_ns
    # Times are nearly in order: most blocks lie between two samples, and are mapped without a lookup for each row.
    for first in range(0, len(local_ns), _BLOCK_ROWS):
        own_ns = local_ns[first : first + _BLOCK_ROWS]
        segment = _segments(clock.local_ns[1:-1], own_ns)
        offset_ns = whole_ns((own_ns - clock.local_ns[segment]) * rates[segment])
        offset_ns += clock.offset_ns[segment]
        np.subtract(own_ns, offset_ns, out=times_ns[first : first + _BLOCK_ROWS])
    return times_ns


def _segments(bounds_ns: Ints, times_ns: Ints) -> Ints | int:
    """Return how many bounds, ascending, are no later than each time, (num_times,); one number where all have one."""
    if not len(times_ns):
        return np.zeros(0, np.int64)
    first, last = np.searchsorted(bounds_ns, (times_ns.min(), times_ns.max()), side="right").tolist()
    if first == last:
        return int(first)
    if last - first > _MAX_COMPARED:
        return np.searchsorted(bounds_ns, times_ns, side="right").astype(np.int64)
    segment = np.full(len(times_ns), first)
    for bound_ns in bounds_ns[first:last]:
        segment += times_ns >= bound_ns
    return segment
