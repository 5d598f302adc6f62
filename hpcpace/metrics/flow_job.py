"""The connections of a job and what they are held against: limits, the rates of others, and line rates."""

from __future__ import annotations

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.flow_figures import FlowFigures
from hpcpace.metrics.special import ndtri, stdtr
from hpcpace.metrics.topology import Topology

_BITS = 8  # format: bits of a byte
HEADERS = 66 / 1448  # format: share of payload that Ethernet, IPv4 and TCP with timestamps add
_QUARTERS = 4  # statistics: the quartile
_OF_ERRORS = 4  # statistics: power of errors in the degrees of freedom (Welch 1947)
_ALIKE = 2.0  # statistics: standard errors by which two rates that are equal may differ
_MIN_ERROR = 1e-9  # statistics: divides where a rate does not vary at all


@dataclass(frozen=True, kw_only=True)
class FlowLimits:
    """The thresholds of connections that users adjust most.

    Attributes:
        rate_share: by which share connections must take longer for their bytes than others.
        uplink_factor: how many times as long connections between leaves may take as those within one, by design.
        foreign_share: least rate of foreign traffic that counts, relative to that of a connection that is not slow.
        repeat_share: least share of segments that are sent again.
        level: largest probability of a false culprit.
    """

    rate_share: float
    uplink_factor: float
    foreign_share: float
    repeat_share: float
    level: float


@dataclass(frozen=True, kw_only=True)
class FlowThresholds(Thresholds, topic="links"):
    """When a connection accuses the links on its way, and when it clears them."""

    min_busy_share: float = number(0.5, "share")
    """Part of the busiest connection's busy time; one that is busy for less is not held up by its way."""
    min_queue_share: float = number(0.5, "share")
    """Part of the queue of the slowest connection; one that waits for data hardly queues."""
    free_queue_share: float = number(0.3, "share")
    """Part of the queue of a slow connection; acknowledgements that queue less have found the way free."""
    min_repeats: int = number(10, "events")
    """Segments sent again; fewer may be chance, whatever their share."""
    repeat_ratio: float = number(4.0, "times")
    """Share of repeated segments over the usual one; a healthy way may lose two or three times as much."""
    duplicate_share: float = number(0.5, "share")
    """Part of the segments sent again that had arrived, from which on packets overtake each other."""
    full_queue_ratio: float = number(2.0, "times")
    """Queue over that of connections that lose nothing; losses behind a longer one are its overflow."""
    min_queue_s: float = number(1e-4, "s")
    """A shorter queue is none, by the resolution of round trips."""
    cleared_stall_share: float = number(0.25, "share")
    """Part of the stalls of the worst connection; one with fewer may clear its links."""
    min_stalls: int = number(3, "events")
    """With fewer stalls no link is said to flap."""
    clearing_chance: float = number(0.05, "probability")
    """A connection clears its links if it had as few stalls by chance less often than this."""
    small_segment_share: float = number(0.9, "share")
    """Part of the job's largest segment; smaller ones are those of another MTU, not of other headers."""
    explained_share: float = number(0.7, "share")
    """Part of the usual rate that a connection and foreign traffic must reach for these to explain it."""
    min_latency_s: float = number(5e-4, "s")
    """Excess of the least round trip over the usual one; less may be cables, switches, or the load of hosts."""
    latency_ratio: float = number(3.0, "times")
    """Least round trip over the usual one, likewise."""
    min_interval_repeats: float = number(2.0, "events")
    """Repetitions per sample, from which on chance losses show in most samples, and the overflow of a queue in some."""
    max_hidden_ratio: float = number(2.0, "times")
    """Beyond it delayed acknowledgements may hide so much that connections say little of their links."""
    alike_share: float = number(0.5, "share")
    """Part of the bytes of another connection, from which on the rates of two are compared."""
    full_line_share: float = number(0.85, "share")
    """Part of the line rate at which a way is full: frames and pauses leave no more to use."""


@dataclass(frozen=True, kw_only=True)
class FlowJob:
    """The connections of a job, and what they are held against.

    Attributes:
        foreign_bytes_per_s: on each link in each direction, 0 where none is known, (num_links, 2).
        line_bytes_per_s: line rate of each link, infinite where it is not known, (num_links,).
        rest: the connections in the rest of the time; None if this is all of it.
    """

    figures: FlowFigures
    topology: Topology
    foreign_bytes_per_s: Floats
    line_bytes_per_s: Floats
    limits: FlowLimits
    thresholds: FlowThresholds
    rest: FlowFigures | None = None

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Both nodes of each connection."""
        return list(zip(self.figures.source.tolist(), self.figures.destination.tolist(), strict=True))

    @property
    def is_crossing(self) -> Bools:
        """Which connections pass uplinks, (num_flows,)."""
        return self.figures.is_crossing(self.topology)

    @property
    def is_compared(self) -> bool:
        """Whether connections of a kind pass different links."""
        paths = np.asarray(self.figures.paths.any(axis=2))
        kinds = [paths[kind] for kind in (self.is_crossing, ~self.is_crossing) if kind.sum() > 1]
        return any(bool((kind.any(axis=0) & ~kind.all(axis=0)).any()) for kind in kinds)

    @property
    def middle_log_rate(self) -> Floats:
        """The rate of each connection if its acknowledgements are delayed by half of the most, as logarithm."""
        figures = self.figures
        return np.asarray(np.log(2) - np.logaddexp(-figures.log_rate, -figures.most_log_rate))

    def is_hidden(self, is_meant: Bools) -> bool:
        """Return whether delayed acknowledgements may be most of the time of most of some connections."""
        hidden = (self.figures.most_log_rate - self.figures.log_rate)[is_meant]
        return bool(np.median(hidden) > np.log(self.thresholds.max_hidden_ratio))

    @property
    def crossing_factor(self) -> float | None:
        """How many times as long the fast connections between leaves take as the fast ones within one."""
        crossing = self.is_crossing
        if not crossing.any() or crossing.all():
            return None
        return float(np.exp(self.fast(~crossing)[0] - self.fast(crossing, self.middle_log_rate)[0]))

    def fast(self, is_meant: Bools, log_rate: Floats | None = None) -> tuple[float, float]:
        """Return the upper quartile of the rates of connections, as logarithm, and its error: most may be slow.

        A connection that carries little may seem faster than the line, and its rate has a large error. What is known
        then is that the line is reached, as surely as all that are equally fast within their errors exceed it together.
        """
        log_rate = self.figures.log_rate if log_rate is None else log_rate
        rows = np.flatnonzero(is_meant)
        order = rows[np.argsort(-log_rate[rows])]
        at = order[(len(order) - 1) // _QUARTERS]
        capped, error = self.capped(float(log_rate[at])), float(self.figures.error[at])
        if capped == log_rate[at]:
            return capped, error
        alike = rows[np.abs(log_rate[rows] - log_rate[at]) <= _ALIKE * np.hypot(self.figures.error[rows], error)]
        weights = 1 / np.maximum(self.figures.error[alike], _MIN_ERROR) ** 2
        beyond = float(np.average(log_rate[alike], weights=weights)) - capped
        # The chance that the rate is lower than this error allows is `level` with and without the cap.
        error = float(1 / np.sqrt(weights.sum())) + beyond / float(ndtri(self.limits.level))
        return capped, max(error, 0.0)

    @property
    def usual_line_bytes_per_s(self) -> float:
        """The upper quartile of the line rates of hosts, infinite if none is known."""
        known = np.sort(self.line_bytes_per_s[np.isfinite(self.line_bytes_per_s)])
        return float(known[-1 - (len(known) - 1) // _QUARTERS]) if len(known) else float("inf")

    def capped(self, log_rate: float) -> float:
        """Return a rate, as logarithm, or that of the line: what is faster was in a buffer when it was sent."""
        return min(log_rate, float(np.log(self.usual_line_bytes_per_s / (1 + HEADERS))))

    def fast_of_kind(self) -> tuple[Floats, Floats]:
        """Return what fast connections of the kind of each one reach, as logarithm, and its error, (num_flows,).

        At least what those within a leaf reach, over the factor that uplinks may have by design.
        """
        crossing = self.is_crossing
        fast, error = np.zeros(len(self.figures)), np.zeros(len(self.figures))
        for kind in (crossing, ~crossing):
            if kind.any():
                fast[kind], error[kind] = self.fast(kind)
        if crossing.any() and not crossing.all():
            across, within = self.fast(crossing), self.fast(~crossing)
            if within[0] < across[0]:
                fast[~crossing], error[~crossing] = across
            design = within[0] - float(np.log(self.limits.uplink_factor))
            if across[0] < design:
                fast[crossing], error[crossing] = design, within[1]
        return fast, error

    def p_below_rest(self, near: float) -> Floats:
        """Return the probability that connections are this far below their rates in the rest if truly it is by `near`.

        Welch's test; 1 where a connection has no figures in the rest.
        """
        figures, at = self.figures, self._in_rest
        if self.rest is None:
            return np.ones(len(figures))
        errors = np.maximum(np.array([figures.error, self.rest.error[at]]), _MIN_ERROR)
        freedoms = np.maximum(np.array([figures.num_intervals, self.rest.num_intervals[at]]) - 1, 1)
        variance = (errors**2).sum(axis=0)
        freedom = variance**2 / (errors**_OF_ERRORS / freedoms).sum(axis=0)
        below = self.rest_log_rate - figures.most_log_rate - near
        p_values = stdtr(freedom, -below / np.sqrt(variance)) * len(figures)
        return np.where(np.isfinite(p_values), np.minimum(p_values, 1.0), 1.0)

    @property
    def rest_log_rate(self) -> Floats:
        """Logarithm of the rate of each connection in the rest of the time, NaN unknown, (num_flows,)."""
        if self.rest is None:
            return np.full(len(self.figures), np.nan)
        at = self._in_rest
        return np.where(self.rest.connection[at] == self.figures.connection, self.rest.log_rate[at], np.nan)

    @property
    def _in_rest(self) -> Ints:
        """The row of each connection in the figures of the rest, any row where it has none there."""
        if self.rest is None:
            return np.zeros(len(self.figures), np.int64)
        order = np.argsort(self.rest.connection)
        found = np.searchsorted(self.rest.connection[order], self.figures.connection)
        return np.asarray(order[np.minimum(found, len(order) - 1)])


def p_above(figures: FlowFigures, behind: Floats, error: Floats | float, near: float) -> Floats:
    """Return the probability that connections are this far behind others if truly they are by `near`."""
    spread = np.maximum(np.hypot(figures.error, error), _MIN_ERROR)
    p_values = stdtr(np.maximum(figures.num_intervals - 1, 1), -(behind - near) / spread) * len(figures)
    return np.asarray(np.minimum(p_values, 1.0))


def line_bytes_per_s(topology: Topology, line_rate_bps: Floats | None) -> Floats:
    """Return the line rate of each link, infinite where it is not known, (num_links,)."""
    found = np.full(len(topology.links), np.inf)
    if line_rate_bps is not None and topology.num_nodes > 1:
        found[: topology.num_nodes] = np.where(line_rate_bps > 0, line_rate_bps / _BITS, np.inf)
    return found
