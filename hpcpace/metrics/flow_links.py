"""Find the links that hold connections up, by the job's own connections: each is a test of the links on its way.

A slow connection accuses the links on its way that no faster one passes in the same direction. The fewest links that
explain all slow ones are named. A ring of all ranks is enough for that, where comparing groups has nothing to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.flow_figures import DOWN, UP, FlowFigures, FlowFindings, LinkCause, LinkFault
from hpcpace.metrics.links import cleared_links, explanations
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.special import pdtr, pdtrc, stdtr, stdtrit
from hpcpace.metrics.topology import Topology

BETWEEN_SWITCHES = "between switches"
"""Id of whatever connects the hosts where switches are not known."""

_BITS = 8
_USUAL_SEGMENT, _HEADER_BYTES = 1448, 66  # Ethernet, IPv4, TCP with timestamps


@dataclass(frozen=True, kw_only=True)
class FlowLimits:
    """Thresholds.

    Attributes:
        rate_share: by which share connections must take longer for their bytes than others.
        uplink_factor: how many times as long connections between leaves may take as those within one, by design.
        foreign_share: least rate of foreign traffic that counts, relative to that of a connection that is not slow.
        repeat_share: least share of segments that are sent again.
        level: largest probability of a false culprit.
    """

    rate_share: float = 0.3
    uplink_factor: float = 3.0
    foreign_share: float = 0.1
    repeat_share: float = 0.002
    level: float = 0.005


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
    max_hidden_ratio: float = number(2.0, "times")
    """Beyond it delayed acknowledgements may hide so much that connections say little of their links."""
    alike_share: float = number(0.5, "share")
    """Part of the bytes of another connection, from which on the rates of two are compared."""
    full_line_share: float = number(0.85, "share")
    """Part of the line rate at which a way is full: frames and pauses leave no more to use."""


def locate_by_flows(
    figures: FlowFigures,
    topology: Topology,
    *,
    foreign_bytes_per_s: Floats,
    line_rate_bps: Floats | None = None,
    limits: FlowLimits = FlowLimits(),
    thresholds: FlowThresholds = FlowThresholds(),
) -> FlowFindings:
    """Return the links that hold connections up, and why.

    Connections are compared with others of their kind: those between leaves, and those within one, which must not be
    slower than the former. Where all connections between leaves are slow, uplinks are named only if they are so beyond
    `uplink_factor`: uplinks that are shared by design are no fault.

    Args:
        figures: the connections.
        topology: where the nodes are.
        foreign_bytes_per_s: on each link in each direction, as of `foreign_on_links`, (num_links, 2); NaN unknown.
        line_rate_bps: of the interface of each node that carries the job, (num_nodes,), 0 unknown.
        limits: the thresholds that users adjust most.
        thresholds: all others.
    """
    job = _Job(
        figures=figures,
        topology=topology,
        foreign_bytes_per_s=np.nan_to_num(foreign_bytes_per_s),
        line_bytes_per_s=_line_bytes_per_s(topology, line_rate_bps),
        limits=limits,
        thresholds=thresholds,
    )
    if len(figures) < 2 or not job.is_compared:
        few = "fewer than two TCP connections between hosts carried enough to be compared"
        reason = few if len(figures) < 2 else "no two TCP connections of a kind pass different links"
        return FlowFindings(faults=(), is_compared=False, reason=reason)
    faults: list[LinkFault] = []
    for search in (_beside_others, _slow, _slow_uplinks, _lossy, _stalled, _small):
        explained = {flow for fault in faults for flow in fault.flows}
        if search in (_slow, _slow_uplinks):
            explained |= {flow for fault in faults for flow in fault.returning}
        is_left = np.array([pair not in explained for pair in job.pairs], np.bool_)
        faults += search(job, is_left)
    is_hidden = job.is_hidden(np.ones(len(figures), np.bool_))
    return FlowFindings(
        faults=tuple(sorted(faults, key=lambda fault: -fault.effect.value)),
        is_compared=not is_hidden,
        reason="messages are so short that delayed acknowledgements may be most of their time" if is_hidden else "",
        crossing_factor=job.crossing_factor,
        line_share=_line_share(job),
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The connections of a job, and what they are held against.

    Attributes:
        foreign_bytes_per_s: on each link in each direction, 0 where none is known, (num_links, 2).
        line_bytes_per_s: line rate of each link, infinite where it is not known, (num_links,).
    """

    figures: FlowFigures
    topology: Topology
    foreign_bytes_per_s: Floats
    line_bytes_per_s: Floats
    limits: FlowLimits
    thresholds: FlowThresholds

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
        """Return the upper quartile of the rates of connections, as logarithm, and its error: most may be slow."""
        log_rate = self.figures.log_rate if log_rate is None else log_rate
        rows = np.flatnonzero(is_meant)
        order = rows[np.argsort(-log_rate[rows])]
        at = order[(len(order) - 1) // 4]
        return float(log_rate[at]), float(self.figures.error[at])

    def fast_of_kind(self) -> tuple[Floats, Floats]:
        """Return what fast connections of the kind of each one reach, as logarithm, and its error, (num_flows,)."""
        crossing = self.is_crossing
        fast, error = np.zeros(len(self.figures)), np.zeros(len(self.figures))
        for kind in (crossing, ~crossing):
            if kind.any():
                fast[kind], error[kind] = self.fast(kind)
        if crossing.any() and not crossing.all():
            across, within = self.fast(crossing), self.fast(~crossing)
            if within[0] < across[0]:
                fast[~crossing], error[~crossing] = across
        return fast, error


def _beside_others(job: _Job, is_left: Bools) -> list[LinkFault]:
    """Return the links on which foreign traffic holds connections up.

    These are busy, and slower than those without foreign traffic on their way, or with it fill the line. In a ring they
    may be little slower: the others wait for their data, and send it in pieces too small to show the rate of their way.
    """
    figures, limits = job.figures, job.limits
    rate = np.exp(figures.log_rate)
    is_foreign = job.foreign_bytes_per_s[None] >= limits.foreign_share * rate[:, None, None]
    shared = figures.paths & is_foreign
    own = np.where(shared, job.foreign_bytes_per_s, 0.0) + rate[:, None, None] * (1 + _HEADER_BYTES / _USUAL_SEGMENT)
    is_full = np.asarray(shared & (own >= job.thresholds.full_line_share * job.line_bytes_per_s[None, :, None]))
    is_beside = np.asarray(shared.any(axis=(1, 2)))
    is_busy = (figures.busy_s >= job.thresholds.min_busy_share * figures.busy_s.max()) & ~figures.is_limited
    p_values = np.where(is_full.any(axis=(1, 2)), 0.0, 1.0)
    if not is_beside.all():
        usual, error = _usual(job, np.flatnonzero(is_beside), int(np.argmax(is_beside)))
        behind = usual - figures.most_log_rate
        slower = _p_above(figures, behind, error, 0.0)
        p_values = np.where(behind >= np.log1p(limits.foreign_share), np.minimum(p_values, slower), p_values)
    rows = np.flatnonzero(is_left & is_beside & is_busy & (p_values <= limits.level))
    # Of a way that is full by its line rate nothing else needs to be.
    has_full = np.asarray(is_full[rows].any(axis=(1, 2)))
    suspects = np.where(has_full[:, None, None], is_full[rows], shared[rows])
    foreign = np.where(suspects, job.foreign_bytes_per_s, 0.0).max(axis=(1, 2), initial=0.0)
    alone = np.full(len(figures), -np.inf)
    alone[rows] = np.log(rate[rows] + foreign)
    return _faults(job, rows, np.asarray(suspects), p_values, LinkCause.FOREIGN, alone)


def _slow(job: _Job, is_left: Bools) -> list[LinkFault]:
    """Return the links whose connections are slower than others of their kind."""
    figures, limits = job.figures, job.limits
    fast, fast_error = job.fast_of_kind()
    behind = fast - figures.most_log_rate
    p_values = _p_above(figures, behind, fast_error, np.log1p(limits.rate_share / 2))
    is_slow = is_left & (behind >= np.log1p(limits.rate_share)) & (p_values <= limits.level) & ~figures.is_limited
    # Others of a ring wait for data: they have little outstanding, and find no queue.
    is_slow &= figures.busy_s >= job.thresholds.min_busy_share * figures.busy_s.max()
    if is_slow.any():
        slowest = np.flatnonzero(is_slow)[np.argmin(figures.most_log_rate[is_slow])]
        is_slow &= figures.queue_s >= job.thresholds.min_queue_share * figures.queue_s[slowest]
    is_slow &= _exceeds_core_wait(figures, behind)
    rows = np.flatnonzero(is_slow)
    is_faster = figures.log_rate[None, :] - figures.most_log_rate[rows, None] >= np.log1p(limits.rate_share)
    is_alike = figures.num_bytes[None, :] >= job.thresholds.alike_share * figures.num_bytes[rows, None]
    suspects = np.asarray(figures.paths[rows] & ~cleared_links(figures.paths, is_faster))
    # Short messages may pass a slow link at once. Where they clear all, only connections that carry as much do.
    is_cleared = ~np.asarray(suspects.any(axis=(1, 2)))
    by_alike = cleared_links(figures.paths, is_faster & is_alike)
    suspects[is_cleared] = (figures.paths[rows] & ~by_alike)[is_cleared]
    suspects = _with_queues(job, rows, suspects)
    return _faults(job, rows, suspects, p_values)


def _exceeds_core_wait(figures: FlowFigures, behind: Floats) -> Bools:
    """Return which connections are held up for longer than a want of cores explains, (num_flows,).

    Whoever waits for a core gives and takes its data late.

    Args:
        figures: the connections.
        behind: logarithm of the ratio of the usual rate to that of each, (num_flows,).
    """
    held_share = figures.busy_s / figures.window_s * (1 - np.exp(-np.maximum(behind, 0.0)))
    return np.asarray(held_share > figures.core_wait)


def _with_queues(job: _Job, rows: Ints, suspects: Bools) -> Bools:
    """Return suspects without the ways in front of which acknowledgements of other connections find no queue.

    Acknowledgements go the way back, and wait behind the data that a slow link holds up there.

    Args:
        job: the connections.
        rows: the slow ones.
        suspects: the ways that each may be slow for, (num_rows, num_links, 2).
    """
    figures = job.figures
    has_no_queue = figures.queue_s[None, :] < job.thresholds.free_queue_share * figures.queue_s[rows, None]
    left = suspects & ~cleared_links(figures.paths[:, :, ::-1], has_no_queue)
    # What clears everything has seen another queue: the slow connections then keep what they were suspected of.
    return np.where(np.asarray(left.any(axis=(1, 2)))[:, None, None], left, suspects)


def _slow_uplinks(job: _Job, is_left: Bools) -> list[LinkFault]:
    """Return the uplinks as one set where all connections between leaves are far slower than those within one."""
    figures, crossing, factor = job.figures, job.is_crossing, job.crossing_factor
    if factor is None or factor <= job.limits.uplink_factor or job.is_hidden(crossing) or not is_left[crossing].all():
        return []
    within, error = job.fast(~crossing)
    behind = within - job.middle_log_rate
    p_values = _p_above(figures, behind, error, np.log(job.limits.uplink_factor))
    rows = np.flatnonzero(crossing)
    is_explained = ~_exceeds_core_wait(figures, behind)
    if p_values[rows].min() > job.limits.level or is_explained[rows].all():
        return []
    # What is above the leaves may be at fault as well, so no uplink is named alone: all explain all.
    suspects = np.repeat((figures.paths[rows].any(axis=0) & job.topology.is_uplink[:, None])[None], len(rows), axis=0)
    return _faults(job, rows, suspects, p_values)


def _lossy(job: _Job, is_left: Bools) -> list[LinkFault]:
    """Return the links whose connections send far more again than others, and not only after stalls."""
    figures, least, least_share = job.figures, job.thresholds, job.limits.repeat_share
    shares = figures.repeats / np.maximum(figures.packets, 1.0)
    usual = float(np.sort(shares)[(len(shares) - 1) // 4])  # most may pass the same host, as in a short pipeline
    expected = max(usual, least_share / least.repeat_ratio) * figures.packets
    fewer = figures.repeats / least.repeat_ratio - 1
    chance = np.where(fewer < 0, 1.0, pdtrc(np.maximum(fewer, 0.0), np.maximum(expected, 1e-9)))
    p_values = chance * len(figures)
    is_lossy = (
        is_left & (shares >= max(least_share, least.repeat_ratio * usual)) & (figures.repeats >= least.min_repeats)
    )
    is_lossy &= (figures.steady_repeat_share >= least_share / 2) & (p_values <= job.limits.level)
    is_clean = shares < least_share / 2
    if is_clean.any():
        # What overflows a queue, as in front of a slow link, fills it first; chance losses keep queues short.
        usual_queue_s = max(float(np.median(figures.queue_s[is_clean])), least.min_queue_s)
        is_lossy &= figures.queue_s <= least.full_queue_ratio * usual_queue_s
    rows, suspects = _accused(job, is_lossy, is_clean)
    return _faults(job, rows, suspects, p_values, LinkCause.LOSSY)


def _stalled(job: _Job, is_left: Bools) -> list[LinkFault]:
    """Return the links whose connections stand still now and then, while others go on.

    A connection clears its links if it would have stood still more often on the way of the worst one: one that sends
    little is seldom under way when a link is down.
    """
    figures = job.figures
    stalls = np.where(is_left, figures.num_stalls, 0)
    least = max(job.thresholds.cleared_stall_share * stalls.max(), 1)
    sending_s = figures.num_bytes / np.exp(figures.usual_log_rate)
    worst = int(np.argmax(stalls))
    expected = stalls[worst] * np.minimum(sending_s / sending_s[worst], 1.0)
    is_well = np.asarray((stalls < least) & (pdtr(stalls, expected) <= job.thresholds.clearing_chance))
    rows, suspects = _accused(job, stalls >= least, is_well)
    all_stalls, all_intervals = int(figures.num_stalls.sum()), int(figures.num_intervals.sum())

    def chance(held_up: Ints) -> float:
        count, intervals = int(figures.num_stalls[held_up].sum()), int(figures.num_intervals[held_up].sum())
        if count < job.thresholds.min_stalls:
            return 1.0
        return _stall_chance(count, intervals, all_stalls, all_intervals) * len(job.topology.links)

    faults = _faults(job, rows, suspects, chance, LinkCause.FLAPPING)
    return [fault for fault in faults if fault.p_value <= job.limits.level]


def _stall_chance(count: int, intervals: int, all_stalls: int, all_intervals: int) -> float:
    """Return the probability that at least `count` of all stalls fall into these intervals by chance, hypergeometric.

    As `scipy.stats.hypergeom.sf`, whose package takes longer to load than a report of a small run.
    """
    spare = all_intervals - intervals - all_stalls  # of the other intervals, if all stalls were in them
    inside = np.arange(max(-spare, 0), min(intervals, all_stalls) + 1)
    last = inside[:-1].astype(np.float64)
    # From one number of stalls to the next the probability changes by a factor, which loses no digits.
    factors = (intervals - last) * (all_stalls - last) / ((last + 1) * (spare + last + 1))
    log_weights = np.concatenate([[0.0], np.log(factors).cumsum()])
    weights = np.exp(log_weights - log_weights.max())
    return float(weights[inside >= count].sum() / weights.sum())


def _small(job: _Job, is_left: Bools) -> list[LinkFault]:
    """Return the links whose connections send smaller segments than others."""
    sizes = job.figures.segment_bytes
    is_small = sizes < job.thresholds.small_segment_share * sizes.max()
    rows, suspects = _accused(job, is_left & is_small & (sizes > 0), ~is_small)
    return _faults(job, rows, suspects, np.zeros(len(sizes)), LinkCause.SMALL_MTU)


def _p_above(figures: FlowFigures, behind: Floats, error: Floats | float, near: float) -> Floats:
    """Return the probability that connections are this far behind others if truly they are by `near`."""
    spread = np.maximum(np.hypot(figures.error, error), 1e-9)
    p_values = stdtr(np.maximum(figures.num_intervals - 1, 1), -(behind - near) / spread) * len(figures)
    return np.asarray(np.minimum(p_values, 1.0))


def _accused(job: _Job, is_accused: Bools, is_well: Bools) -> tuple[Ints, Bools]:
    """Return the accused connections, and the ways that each passes and that no connection that is well clears."""
    paths, rows = job.figures.paths, np.flatnonzero(is_accused)
    return rows, np.asarray(paths[rows] & ~cleared_links(paths, is_well))


def _faults(
    job: _Job,
    rows: Ints,
    suspects: Bools,
    p_values: Floats | Callable[[Ints], float],
    cause: LinkCause | None = None,
    usual: Floats | None = None,
) -> list[LinkFault]:
    """Return the links that explain what is wrong with some connections.

    Args:
        job: the connections.
        rows: those that something is wrong with.
        suspects: the ways that each of them passes and that no well one clears, bool, (num_rows, num_links, 2).
        p_values: of each connection, of which the smallest counts, (num_flows,); or that of some connections together.
        cause: the fault; None where that follows from what else the connections show.
        usual: logarithm of the rate that each would have, (num_flows,); None for that of other connections.
    """
    faults = []
    for links, own in explanations(np.asarray(suspects.any(axis=2))):
        held_up, ways = rows[own], np.asarray(suspects[own].any(axis=0) & links[:, None])
        p_value = p_values(held_up) if callable(p_values) else float(p_values[held_up].min())
        least_usual = -np.inf if usual is None else float(usual[held_up].max())
        faults.append(_fault(job, held_up, links, ways, cause, p_value, least_usual))
    return faults


def _fault(
    job: _Job, rows: Ints, links: Bools, ways: Bools, cause: LinkCause | None, p_value: float, least_usual: float
) -> LinkFault:
    """Return what is wrong at some links; without a cause they are slow, and why follows from what else is seen."""
    figures = job.figures
    log_rate = figures.most_log_rate if cause is None else figures.log_rate
    worst = int(rows[np.argmin(log_rate[rows])])
    usual, usual_error = _usual(job, rows, worst, ways)
    usual = max(usual, least_usual)
    slow_rate, usual_rate = float(np.exp(log_rate[worst])), float(np.exp(usual))
    foreign = float(job.foreign_bytes_per_s[ways].max())
    half_width = float(stdtrit(max(figures.num_intervals[worst] - 1, 1), 0.975))
    half_width *= float(np.hypot(figures.error[worst], usual_error))
    returning = np.flatnonzero((figures.paths[:, :, ::-1] & ways).any(axis=(1, 2)))
    others = np.setdiff1d(np.arange(len(figures)), rows)
    return LinkFault(
        cause=cause or _cause_of_slowness(job, rows, links),
        is_certain=cause is not LinkCause.FOREIGN or slow_rate + foreign >= job.thresholds.explained_share * usual_rate,
        ids=_names(job.topology, links),
        direction=_direction(figures, ways),
        flows=tuple(job.pairs[row] for row in rows),
        returning=tuple(job.pairs[row] for row in returning),
        effect=Estimate.around(usual - float(log_rate[worst]), half_width).through(np.expm1),
        p_value=p_value,
        slow_bytes_per_s=slow_rate,
        usual_bytes_per_s=usual_rate,
        foreign_bytes_per_s=foreign,
        repeat_share=_repeat_share(figures, rows),
        others_repeat_share=_repeat_share(figures, others),
        stall_share=float(figures.stall_s[rows].max()) / figures.window_s,
        busy_share=float(figures.busy_s[worst]) / figures.window_s,
        segment_bytes=int(figures.segment_bytes[rows].min()),
        usual_segment_bytes=int(figures.segment_bytes.max()),
    )


def _usual(job: _Job, rows: Ints, worst: int, ways: Bools | None = None) -> tuple[float, float]:
    """Return the rate of connections that are not accused, as logarithm, and its error.

    Those on other ways that carry about as much as the worst accused one, if there are any, and of these those of its
    kind.
    """
    figures, crossing = job.figures, job.is_crossing
    is_other = np.ones(len(figures), np.bool_)
    is_other[rows] = False
    is_elsewhere = ~(figures.paths & ways).any(axis=(1, 2)) if ways is not None else is_other
    is_alike = figures.num_bytes >= job.thresholds.alike_share * figures.num_bytes[worst]
    for wanted in (is_elsewhere, is_alike, crossing == crossing[worst]):
        is_other = is_other & wanted if (is_other & wanted).any() else is_other
    chosen = np.flatnonzero(is_other)
    if not len(chosen):
        return job.fast(np.ones(len(figures), np.bool_))
    middle = chosen[np.argsort(figures.log_rate[chosen])][len(chosen) // 2]
    return float(figures.log_rate[middle]), float(figures.error[middle])


def _cause_of_slowness(job: _Job, rows: Ints, links: Bools) -> LinkCause:
    """Return why connections are slow, from what else they show."""
    figures, (fast, _) = job.figures, job.fast_of_kind()
    is_usually_fast = fast[rows] - figures.usual_log_rate[rows] < np.log1p(job.limits.rate_share)
    if is_usually_fast.all() and (figures.num_stalls[rows] > 0).all():
        return LinkCause.FLAPPING
    return LinkCause.SLOW if (links & ~job.topology.is_uplink).any() else LinkCause.UPLINK


def _repeat_share(figures: FlowFigures, rows: Ints) -> float:
    return float(figures.repeats[rows].sum()) / max(float(figures.packets[rows].sum()), 1.0)


def _names(topology: Topology, links: Bools) -> tuple[str, ...]:
    """Return names of links; where switches are not known, what is between them is suspected as well."""
    names = tuple(topology.links[index] for index in np.flatnonzero(links).tolist())
    return names if topology.num_leaves or len(names) == 1 else (*names, BETWEEN_SWITCHES)


def _direction(figures: FlowFigures, ways: Bools) -> str:
    """Return the only direction that is suspected, if connections pass the other one and are well."""
    if ways[:, UP].any() == ways[:, DOWN].any():
        return ""
    way = UP if ways[:, UP].any() else DOWN
    is_passed = figures.paths[:, np.flatnonzero(ways[:, way]), 1 - way].any(axis=0)
    return ("up", "down")[way] if is_passed.all() else ""


def _line_bytes_per_s(topology: Topology, line_rate_bps: Floats | None) -> Floats:
    """Return the line rate of each link, infinite where it is not known, (num_links,)."""
    found = np.full(len(topology.links), np.inf)
    if line_rate_bps is not None and topology.num_nodes > 1:
        found[: topology.num_nodes] = np.where(line_rate_bps > 0, line_rate_bps / _BITS, np.inf)
    return found


def _line_share(job: _Job) -> float | None:
    """Return the largest part of its interface's line rate that a connection reached while it was busy."""
    line = job.line_bytes_per_s[job.figures.source]
    if not np.isfinite(line).any():
        return None
    on_wire = np.exp(job.figures.log_rate) * (1 + _HEADER_BYTES / _USUAL_SEGMENT)
    return float(min((on_wire / line).max(), 1.0))
