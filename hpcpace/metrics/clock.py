"""From a rank's own clock to the common one, after the run, and the proof by causality that it is right.

The recorded times stay as they were taken; here they are mapped to the clock of the reference rank by
piecewise-linear interpolation between synchronisations, with a half-width in which the truth lies. Differences are
taken in int64, because hours in nanoseconds leave float64 no room for fractions of a microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcpace.errors import TraceError

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

DRIFT_PPM = 200.0
"""How far two clocks may run apart where no second synchronisation tells: crystal plus NTP's slewing in practice."""
WANDER_PPM = 1.0
"""How much the rate of a clock may change between two synchronisations, at least: temperature of a crystal."""


class ReferenceTimes(NamedTuple):
    """Times on the clock of the reference rank.

    Attributes:
        time_ns: int64, (num_times,).
        halfwidth_ns: float64, (num_times,); the true time lies within it; inf where the clock is unknown.
        extrapolated: bool, (num_times,); outside of the synchronisations, or without any.
    """

    time_ns: Int64Array
    halfwidth_ns: FloatArray
    extrapolated: BoolArray


@dataclass(frozen=True, kw_only=True)
class CommonClock:
    """The clock of one rank against the reference, in order of time.

    Attributes:
        local_ns: int64, (num_samples,), strictly increasing.
        offset_ns: int64, (num_samples,), local minus reference.
        halfwidth_ns: int64, (num_samples,).
        drift_ppm: bound on the relative rate where only one sample is known.
        wander_ppm: least bound on the change of rate between two samples.
    """

    local_ns: Int64Array
    offset_ns: Int64Array
    halfwidth_ns: Int64Array
    drift_ppm: float = DRIFT_PPM
    wander_ppm: float = WANDER_PPM

    @classmethod
    def from_table(
        cls,
        table: NDArray[Any] | Mapping[str, ArrayLike],
        *,
        drift_ppm: float = DRIFT_PPM,
        wander_ppm: float = WANDER_PPM,
    ) -> CommonClock:
        """Return the clock of the rows of a trace's `clock` table, in any order; of equal times the first row counts.

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
            drift_ppm=drift_ppm,
            wander_ppm=wander_ppm,
        )

    @property
    def num_samples(self) -> int:
        """Number of synchronisations."""
        return len(self.local_ns)

    @property
    def is_reference(self) -> bool:
        """Whether this is the reference clock itself; no measurement of another one has width 0."""
        return self.num_samples > 0 and not (self.offset_ns.any() or self.halfwidth_ns.any())

    def to_reference(self, local_ns: ArrayLike) -> ReferenceTimes:
        """Map times of this rank to the reference clock.

        Between two samples the error is the interpolated half-width plus the change of rate times the distance
        to the nearer sample; outside of them the uncertainty of the last rate adds up with the distance.

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
            halfwidth_ns = self.halfwidth_ns[0] + distance_ns * self.drift_ppm * 1e-6
            return ReferenceTimes(times - self.offset_ns[0], halfwidth_ns, self._outside(times))
        return self._interpolate(times)

    def residuals_ns(self) -> Int64Array:
        """Return what each inner sample differs from the line between its neighbours: the measured error.

        Returns:
            int64, (max(num_samples - 2, 0),). It spans two intervals, so it is larger than the error between samples.
        """
        if self.num_samples < 3:
            return np.zeros(0, dtype=np.int64)
        span_ns = self.local_ns[2:] - self.local_ns[:-2]
        part = (self.local_ns[1:-1] - self.local_ns[:-2]) / span_ns
        line_ns = self.offset_ns[:-2] + np.rint((self.offset_ns[2:] - self.offset_ns[:-2]) * part).astype(np.int64)
        return np.asarray(self.offset_ns[1:-1] - line_ns)

    def _outside(self, times: Int64Array) -> BoolArray:
        return np.asarray((times < self.local_ns[0]) | (times > self.local_ns[-1]))

    def _interpolate(self, times: Int64Array) -> ReferenceTimes:
        length_ns = np.diff(self.local_ns)
        rates = np.diff(self.offset_ns) / length_ns
        wander = self._wander(rates)
        segment = np.clip(np.searchsorted(self.local_ns, times, side="right") - 1, 0, self.num_samples - 2)
        since_ns = times - self.local_ns[segment]
        until_ns = self.local_ns[segment + 1] - times
        offset_ns = self.offset_ns[segment] + np.rint(since_ns * rates[segment]).astype(np.int64)

        before, after = self.halfwidth_ns[segment], self.halfwidth_ns[segment + 1]
        part = np.clip(since_ns / length_ns[segment], 0.0, 1.0)
        nearer_ns = np.abs(np.minimum(since_ns, until_ns))
        outside = self._outside(times)
        rate_error = np.where(outside, (before + after) / length_ns[segment], 0.0) + wander[segment]
        halfwidth_ns = before + (after - before) * part + nearer_ns * rate_error
        return ReferenceTimes(times - offset_ns, halfwidth_ns, outside)

    def _wander(self, rates: FloatArray) -> FloatArray:
        """Return per segment how much its rate may vary: what was seen against its neighbours, or the least bound."""
        seen = np.abs(np.diff(rates))
        around = np.maximum(np.concatenate([seen, [0.0]]), np.concatenate([[0.0], seen]))
        return np.asarray(np.maximum(around, self.wander_ppm * 1e-6))


@dataclass(frozen=True, kw_only=True)
class PairViolations:
    """Ranks of one node that left a collective before a rank of another node had entered it.

    Attributes:
        exit_node: node of the ranks that left too early.
        enter_node: node of the rank that entered last.
        num_violations: exits before the last entry.
        median_ns: median size.
        max_ns: largest size.
        num_unexplained: those larger than both half-widths together: the clock is wrong there.
    """

    exit_node: int
    enter_node: int
    num_violations: int
    median_ns: int
    max_ns: int
    num_unexplained: int


@dataclass(frozen=True, kw_only=True)
class CausalityCheck:
    """How often the common clock contradicts causality.

    Attributes:
        num_ops: collectives that could be checked: present on two ranks or more.
        num_ops_violated: those with at least one violation.
        pairs: by node pair, those with most unexplained violations first.
    """

    num_ops: int
    num_ops_violated: int
    pairs: tuple[PairViolations, ...]

    @property
    def num_violations(self) -> int:
        """Exits before the last entry."""
        return sum(pair.num_violations for pair in self.pairs)

    @property
    def num_unexplained(self) -> int:
        """Violations that the half-widths do not explain."""
        return sum(pair.num_unexplained for pair in self.pairs)

    @property
    def max_ns(self) -> int:
        """Size of the largest violation, 0 if there is none."""
        return max((pair.max_ns for pair in self.pairs), default=0)


def check_causality(
    enter_ns: Int64Array,
    exit_ns: Int64Array,
    halfwidth_ns: ArrayLike,
    nodes: ArrayLike,
    present: BoolArray | None = None,
) -> CausalityCheck:
    """Check that of a synchronising collective no rank exits before the last one enters.

    Args:
        enter_ns: int64, (num_ops, num_ranks), reference time.
        exit_ns: int64, (num_ops, num_ranks), reference time.
        halfwidth_ns: broadcasts to (num_ops, num_ranks); ranks of one node share a clock, so among them it is 0.
        nodes: int, (num_ranks,), node index of each rank.
        present: bool, (num_ops, num_ranks), which ranks took part; all when not given.
    """
    if present is None:
        present = np.ones(enter_ns.shape, dtype=bool)
    widths_ns = np.broadcast_to(np.asarray(halfwidth_ns, dtype=np.float64), enter_ns.shape)
    checked = present.sum(axis=1) >= 2
    enter_ns, exit_ns, widths_ns, present = (array[checked] for array in (enter_ns, exit_ns, widths_ns, present))
    if not len(enter_ns):
        return CausalityCheck(num_ops=0, num_ops_violated=0, pairs=())

    last = np.where(present, enter_ns, np.iinfo(np.int64).min).argmax(axis=1)
    rows = np.arange(len(last))
    size_ns = enter_ns[rows, last][:, None] - exit_ns
    violated = present & (size_ns > 0)
    op, rank = np.nonzero(violated)
    node = np.asarray(nodes)
    exit_node, enter_node = node[rank], node[last[op]]
    allowed_ns = np.where(exit_node == enter_node, 0.0, widths_ns[op, rank] + widths_ns[op, last[op]])
    pairs = [
        _pair(int(a), int(b), size_ns[op, rank][chosen], allowed_ns[chosen])
        for a, b in np.unique(np.stack([exit_node, enter_node], axis=1), axis=0)
        for chosen in [(exit_node == a) & (enter_node == b)]
    ]
    pairs.sort(key=lambda pair: (-pair.num_unexplained, -pair.num_violations, pair.exit_node, pair.enter_node))
    return CausalityCheck(num_ops=len(rows), num_ops_violated=int(violated.any(axis=1).sum()), pairs=tuple(pairs))


def _pair(exit_node: int, enter_node: int, sizes_ns: Int64Array, allowed_ns: FloatArray) -> PairViolations:
    return PairViolations(
        exit_node=exit_node,
        enter_node=enter_node,
        num_violations=len(sizes_ns),
        median_ns=int(np.median(sizes_ns)),
        max_ns=int(sizes_ns.max()),
        num_unexplained=int((sizes_ns > allowed_ns).sum()),
    )
