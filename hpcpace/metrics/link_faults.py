"""From connections that are held up, or were in a stretch of time, to the links at fault.

Each connection is a test of the links on its way. A slow one accuses those that no faster one passes in the same
direction. The fewest links that explain all slow ones are named. A ring of all ranks is enough for that, where
comparing groups has nothing to compare.

A link that is slow for a third of a job has a mean rate that is neither its rate then nor its rate else, and looks like
one that comes and goes. What is slow within a stretch is compared there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.flow_figures import DOWN, UP, FlowFigures, FlowFindings, LinkCause, LinkFault, Usual
from hpcpace.metrics.flow_job import HEADERS, FlowJob, FlowLimits, FlowThresholds, line_bytes_per_s, p_above
from hpcpace.metrics.flows import Flows
from hpcpace.metrics.links import cleared_links, explanations, suspected_ways
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.special import NORMAL_MAD, UPPER_95, pdtr, pdtrc, stdtrit
from hpcpace.metrics.topology import Topology

_QUARTERS = 4  # statistics: the quartile
_MIN_EXPECTED = 1e-9  # statistics: a Poisson mean of nothing sent


def locate_by_flows(
    figures: FlowFigures,
    topology: Topology,
    *,
    foreign_bytes_per_s: Floats,
    line_rate_bps: Floats | None = None,
    rest: FlowFigures | None = None,
    limits: FlowLimits,
    thresholds: FlowThresholds | None = None,
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
        rest: the connections in the rest of the time, if this is a stretch in which some were slow.
        limits: the thresholds that users adjust most; None for the defaults.
        thresholds: all others, likewise.
    """
    job = FlowJob(
        figures=figures,
        topology=topology,
        foreign_bytes_per_s=np.nan_to_num(foreign_bytes_per_s),
        line_bytes_per_s=line_bytes_per_s(topology, line_rate_bps),
        rest=rest,
        limits=limits,
        thresholds=thresholds or FlowThresholds(),
    )
    line_share, line_s = _line_use(job)
    if len(figures) < 2 or not job.is_compared:
        few = "fewer than two TCP connections between hosts carried enough to be compared"
        reason = few if len(figures) < 2 else "no two TCP connections of a kind pass different links"
        found = _below_line(job, np.ones(len(figures), np.bool_)) or _passing(job)
        return FlowFindings(faults=tuple(found), is_compared=False, reason=reason, line_share=line_share, line_s=line_s)
    faults: list[LinkFault] = []
    by_rate = (_slow, _passing_uplinks, _slow_uplinks)
    for search in (_beside_others, _latent, _below_line, _lossy, *by_rate, _stalled, _small):
        explained = {flow for fault in faults for flow in fault.flows}
        if search in by_rate:
            explained |= {flow for fault in faults for flow in fault.returning}
        is_left = np.array([pair not in explained for pair in job.pairs], np.bool_)
        faults += search(job, is_left)
    is_hidden = job.is_hidden(np.ones(len(figures), np.bool_))
    return FlowFindings(
        faults=tuple(sorted(faults, key=lambda fault: -fault.effect.value)),
        is_compared=not is_hidden,
        reason="messages are so short that delayed acknowledgements may be most of their time" if is_hidden else "",
        crossing_factor=job.crossing_factor,
        line_share=line_share,
        line_s=line_s,
    )


def _beside_others(job: FlowJob, is_left: Bools) -> list[LinkFault]:
    """Return the links on which foreign traffic holds connections up.

    These are busy, and slower than those without foreign traffic on their way, or with it fill the line. In a ring they
    may be little slower: the others wait for their data, and send it in pieces too small to show the rate of their way.
    """
    figures, limits = job.figures, job.limits
    rate = np.exp(figures.log_rate)
    is_foreign = job.foreign_bytes_per_s[None] >= limits.foreign_share * rate[:, None, None]
    shared = figures.paths & is_foreign
    own = np.where(shared, job.foreign_bytes_per_s, 0.0) + rate[:, None, None] * (1 + HEADERS)
    is_full = np.asarray(shared & (own >= job.thresholds.full_line_share * job.line_bytes_per_s[None, :, None]))
    is_beside = np.asarray(shared.any(axis=(1, 2)))
    is_busy = (figures.busy_s >= job.thresholds.min_busy_share * figures.busy_s.max()) & ~figures.is_limited
    p_values = np.where(is_full.any(axis=(1, 2)), 0.0, 1.0)
    if not is_beside.all():
        usual, error = usual_rate(job, np.flatnonzero(is_beside), int(np.argmax(is_beside)))
        behind = usual - figures.most_log_rate
        slower = p_above(figures, behind, error, 0.0)
        p_values = np.where(behind >= np.log1p(limits.foreign_share), np.minimum(p_values, slower), p_values)
    rows = np.flatnonzero(is_left & is_beside & is_busy & (p_values <= limits.level))
    # Of a way that is full by its line rate nothing else needs to be.
    has_full = np.asarray(is_full[rows].any(axis=(1, 2)))
    suspects = np.where(has_full[:, None, None], is_full[rows], shared[rows])
    foreign = np.where(suspects, job.foreign_bytes_per_s, 0.0).max(axis=(1, 2), initial=0.0)
    alone = np.full(len(figures), -np.inf)
    alone[rows] = np.log(rate[rows] + foreign)
    is_well = np.ones(len(figures), np.bool_)
    return faults_of(job, rows, np.asarray(suspects), p_values, LinkCause.FOREIGN, alone, is_well)


def _latent(job: FlowJob, is_left: Bools) -> list[LinkFault]:
    """Return the links that add to round trips: even the least one of connections through them is far longer.

    A queue does not, because it is empty now and then. A round trip passes each link in both directions, so the
    direction is not known.
    """
    figures, least = job.figures, job.thresholds
    known_s = np.sort(figures.least_rtt_s[np.isfinite(figures.least_rtt_s)])
    if not len(known_s):
        return []
    usual_s = float(known_s[(len(known_s) - 1) // _QUARTERS])
    more_s = figures.least_rtt_s - usual_s
    is_longer = (more_s >= least.min_latency_s) & (figures.least_rtt_s >= least.latency_ratio * usual_s)
    rows = np.flatnonzero(is_left & is_longer)
    cleared = cleared_links(np.asarray(figures.paths.any(axis=2)), np.isfinite(figures.least_rtt_s) & ~is_longer)
    suspects = np.asarray(figures.paths[rows].any(axis=2) & ~cleared)[..., None] & np.ones(2, np.bool_)
    faults = faults_of(job, rows, suspects, np.zeros(len(figures)), LinkCause.LATENCY, is_well=~is_longer)
    by_pair = dict(zip(job.pairs, more_s.tolist(), strict=True))
    return [replace(fault, latency_s=min(by_pair[pair] for pair in fault.flows)) for fault in faults]


def _slow(job: FlowJob, is_left: Bools) -> list[LinkFault]:
    """Return the links whose connections are slower than others of their kind."""
    figures, limits = job.figures, job.limits
    fast, fast_error = job.fast_of_kind()
    behind = fast - figures.most_log_rate
    p_values = p_above(figures, behind, fast_error, np.log1p(limits.rate_share / 2))
    p_values = np.minimum(p_values, job.p_below_rest(np.log1p(limits.rate_share / 2)))
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
    suspects = suspected_ways(figures.paths, rows, is_faster)
    # Short messages may pass a slow link at once. Where they clear all, only connections that carry as much do.
    is_cleared = ~np.asarray(suspects.any(axis=(1, 2)))
    suspects[is_cleared] = suspected_ways(figures.paths, rows, is_faster & is_alike)[is_cleared]
    suspects = _with_queues(job, rows, suspects)
    return faults_of(job, rows, suspects, p_values)


def _exceeds_core_wait(figures: FlowFigures, behind: Floats, also_of_others: float = 0.0) -> Bools:
    """Return which connections are held up for longer than a want of cores explains, (num_flows,).

    Whoever waits for a core gives and takes its data late.

    Args:
        figures: the connections.
        behind: logarithm of the ratio of the usual rate to that of each, (num_flows,).
        also_of_others: share of the time for which the connections with that rate may be held up as well.
    """
    held_share = figures.busy_s / figures.window_s * (1 - np.exp(-np.maximum(behind, 0.0)))
    return np.asarray(held_share > figures.core_wait - also_of_others)


def _with_queues(job: FlowJob, rows: Ints, suspects: Bools) -> Bools:
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


def _below_line(job: FlowJob, is_left: Bools) -> list[LinkFault]:
    """Return the hosts' links with a lower line rate than others that connections fill; nothing faster need be seen."""
    figures, line = job.figures, job.line_bytes_per_s
    usual = job.usual_line_bytes_per_s
    if np.isinf(usual) or not len(figures):
        return []
    is_lower = line * (1 + job.limits.rate_share) <= usual
    rate = np.exp(figures.log_rate)
    of_line = rate * (1 + HEADERS) / line[:, None]
    is_full = (of_line >= job.thresholds.full_line_share) & (of_line <= 2 - job.thresholds.full_line_share)
    suspects = figures.paths & (is_lower[:, None] & is_full).T[:, :, None]
    is_busy = figures.busy_s >= job.thresholds.min_busy_share * figures.busy_s.max()
    rows = np.flatnonzero(is_left & is_busy & ~figures.is_limited & suspects.any(axis=(1, 2)))
    most = np.full(len(figures), np.log(usual / (1 + HEADERS)))
    faults = faults_of(job, rows, suspects[rows], np.zeros(len(figures)), usual=most)
    return [replace(fault, usual=Usual.LINE) for fault in faults]


def _passing_uplinks(job: FlowJob, is_left: Bools) -> list[LinkFault]:
    """Return the uplinks as one set where all connections between leaves are slower than in the rest of the time.

    Those within a leaf must not be, and those between leaves must still queue.
    """
    figures, rest, crossing = job.figures, job.rest, job.is_crossing
    if rest is None or not crossing.any() or not is_left[crossing].all():
        return []
    is_slower, behind, p_values = _below_rest(job)
    near = np.log1p(job.limits.rate_share / 2)
    usual_queue_s = float(np.median(rest.queue_s))
    if not is_slower[crossing].all() or (behind[~crossing] > near).any():
        return []
    if float(np.median(figures.queue_s[crossing])) < job.thresholds.min_queue_share * usual_queue_s:
        return []
    rows = np.flatnonzero(crossing)
    suspects = np.repeat((figures.paths[rows].any(axis=0) & job.topology.is_uplink[:, None])[None], len(rows), axis=0)
    found = faults_of(job, rows, suspects, p_values, usual=job.rest_log_rate)
    return [replace(fault, usual=Usual.REST) for fault in found]


def _passing(job: FlowJob) -> list[LinkFault]:
    """Return the links of connections that are slower than in the rest of the time, where no others clear any of them.

    Between two hosts, for instance, all connections pass both links, and either may be slow.
    """
    if job.rest is None or not len(job.figures) or job.is_hidden(np.ones(len(job.figures), np.bool_)):
        return []
    beside = _beside_others(job, np.ones(len(job.figures), np.bool_))
    if beside:
        return beside
    is_slower, _, p_values = _below_rest(job)
    rows = np.flatnonzero(is_slower)
    found = faults_of(job, rows, job.figures.paths[rows], p_values, usual=job.rest_log_rate)
    return [replace(fault, usual=Usual.REST) for fault in found]


def _below_rest(job: FlowJob) -> tuple[Bools, Floats, Floats]:
    """Return which connections are slower than in the rest of the time, by which logarithm, and the chance of that."""
    p_values = job.p_below_rest(np.log1p(job.limits.rate_share / 2))
    behind = job.rest_log_rate - job.figures.most_log_rate
    is_slower = (p_values <= job.limits.level) & (behind >= np.log1p(job.limits.rate_share))
    is_slower &= _exceeds_core_wait(job.figures, behind) & ~job.figures.is_limited
    return is_slower, behind, p_values


def _slow_uplinks(job: FlowJob, is_left: Bools) -> list[LinkFault]:
    """Return the uplinks as one set where all connections between leaves are far slower than those within one."""
    figures, crossing, factor = job.figures, job.is_crossing, job.crossing_factor
    if factor is None or factor <= job.limits.uplink_factor or job.is_hidden(crossing) or not is_left[crossing].all():
        return []
    within, error = job.fast(~crossing)
    behind = within - job.middle_log_rate
    p_values = p_above(figures, behind, error, np.log(job.limits.uplink_factor))
    rows = np.flatnonzero(crossing)
    # The same hosts wait for cores when they send within a leaf.
    is_explained = ~_exceeds_core_wait(figures, behind, float(figures.core_wait[~crossing].min()))
    if p_values[rows].min() > job.limits.level or is_explained[rows].all():
        return []
    # What is above the leaves may be at fault as well, so no uplink is named alone: all explain all.
    suspects = np.repeat((figures.paths[rows].any(axis=0) & job.topology.is_uplink[:, None])[None], len(rows), axis=0)
    return faults_of(job, rows, suspects, p_values)


def _lossy(job: FlowJob, is_left: Bools) -> list[LinkFault]:
    """Return the links whose connections send far more again than others, and not only after stalls.

    What had arrived before it was sent again was overtaken on its way; the peer reports that.
    """
    figures, least, least_share = job.figures, job.thresholds, job.limits.repeat_share
    shares = figures.repeats / np.maximum(figures.packets, 1.0)
    # A quartile: most may pass the same host, as in a short pipeline.
    usual = float(np.sort(shares)[(len(shares) - 1) // _QUARTERS])
    expected = max(usual, least_share / least.repeat_ratio) * figures.packets
    fewer = figures.repeats / least.repeat_ratio - 1
    chance = np.where(fewer < 0, 1.0, pdtrc(np.maximum(fewer, 0.0), np.maximum(expected, _MIN_EXPECTED)))
    p_values = chance * len(figures)
    is_lossy = (
        is_left & (shares >= max(least_share, least.repeat_ratio * usual)) & (figures.repeats >= least.min_repeats)
    )
    is_lossy &= (figures.steady_repeat_share >= least_share / 2) & (p_values <= job.limits.level)
    # Where there are enough to tell: what overflows a queue is lost in bursts.
    is_counted = figures.repeats >= least.min_interval_repeats * figures.num_intervals
    is_lossy &= ~is_counted | (figures.usual_repeat_share >= least_share / 2)
    is_clean = shares < least_share / 2
    if is_clean.any():
        # What overflows a queue, as in front of a slow link, fills it first; chance losses keep queues short.
        usual_queue_s = max(float(np.median(figures.queue_s[is_clean])), least.min_queue_s)
        has_arrived = figures.duplicates >= least.duplicate_share * figures.repeats
        is_lossy &= has_arrived | (figures.queue_s <= least.full_queue_ratio * usual_queue_s)
    rows, suspects = _accused(job, is_lossy, is_clean)
    faults = faults_of(job, rows, suspects, p_values, LinkCause.LOSSY, is_well=is_clean)
    return [
        replace(fault, cause=LinkCause.REORDERING) if fault.duplicate_share >= least.duplicate_share else fault
        for fault in faults
    ]


def _stalled(job: FlowJob, is_left: Bools) -> list[LinkFault]:
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

    faults = faults_of(job, rows, suspects, chance, LinkCause.FLAPPING, is_well=is_well)
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


def _small(job: FlowJob, is_left: Bools) -> list[LinkFault]:
    """Return the links whose connections send smaller segments than others."""
    sizes = job.figures.segment_bytes
    is_small = sizes < job.thresholds.small_segment_share * sizes.max()
    rows, suspects = _accused(job, is_left & is_small & (sizes > 0), ~is_small)
    return faults_of(job, rows, suspects, np.zeros(len(sizes)), LinkCause.SMALL_MTU, is_well=~is_small)


def _accused(job: FlowJob, is_accused: Bools, is_well: Bools) -> tuple[Ints, Bools]:
    """Return the accused connections, and the ways that each passes and that no connection that is well clears."""
    rows = np.flatnonzero(is_accused)
    return rows, suspected_ways(job.figures.paths, rows, is_well)


def _line_use(job: FlowJob) -> tuple[float | None, float | None]:
    """Return which part of its interface's line rate the connection reached while busy that needs the line longest.

    One that carries little may be fast while those that the job waits for are slow. The second value is for how many
    seconds it would have been busy at all of that rate.
    """
    line = job.line_bytes_per_s[job.figures.source]
    if not np.isfinite(line).any():  # also without connections
        return None, None
    of_line = np.minimum(np.exp(job.figures.log_rate) * (1 + HEADERS) / line, 1.0)
    on_line_s = np.nan_to_num(of_line * job.figures.busy_s)
    first = int(on_line_s.argmax())
    return float(of_line[first]), float(on_line_s[first])


_MAX_BLOCKS = 256  # memory: a search looks at all pairs of blocks
_MAX_STRETCHES = 8  # display: more are rates that vary


@dataclass(frozen=True, kw_only=True)
class StretchThresholds(Thresholds, topic="links"):
    """When a connection is slow for a while."""

    min_stretch_samples: int = number(3, "samples")
    """Length of a stretch, and of the rest; shorter ones are stalls or noise."""
    min_stretch_deviations: float = number(6.0, "standard errors")
    """By which the rate in a stretch is below that of the rest; the best of all stretches is 4 to 5 below by chance."""
    slow_samples_share: float = number(0.75, "share")
    """Part of a stretch's samples that are slow; fewer are a link that comes and goes."""
    max_slow_rest: float = number(0.5, "share")
    """Part of the other samples that may be slow, in stretches of their own."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of time in which a connection was slow.

    Attributes:
        begin_ns, end_ns: on the common clock.
        connection: its row in the connections.
        flow: both of its nodes.
        deviations: by how many standard errors its rate was lower.
    """

    begin_ns: int
    end_ns: int
    connection: int
    flow: tuple[int, int]
    deviations: float


def slow_stretches(
    flows: Flows,
    topology: Topology,
    *,
    begin_ns: int,
    end_ns: int,
    rate_share: float,
    thresholds: StretchThresholds | None = None,
) -> list[Stretch]:
    """Return stretches in which some connection between nodes was slow, the most certain first; they do not overlap.

    Args:
        flows: the connections.
        topology: where the nodes are.
        begin_ns, end_ns: the window, on the common clock.
        rate_share: by which share its bytes take longer there than in the rest.
        thresholds: when it is a stretch.
    """
    limits, of = thresholds or StretchThresholds(), flows.connections
    is_between = (of.node >= 0) & (of.peer_node >= 0) & (of.node != of.peer_node)
    is_meant = (flows.begin_ns >= begin_ns) & (flows.end_ns <= end_ns) & (flows.busy_ns > 0) & (flows.acked_bytes > 0)
    rows = np.flatnonzero(is_meant & np.append(is_between, False)[flows.connection])
    rows = rows[np.lexsort((flows.begin_ns[rows], flows.connection[rows]))]
    found: list[Stretch] = []
    for of_one in np.split(rows, np.flatnonzero(np.diff(flows.connection[rows])) + 1):
        blocks = np.array_split(of_one, min(len(of_one), _MAX_BLOCKS)) if len(of_one) else []
        rates = [np.log(flows.acked_bytes[block].sum() / flows.busy_ns[block].sum()) for block in blocks]
        if not blocks:
            continue
        row = int(flows.connection[of_one[0]])
        for first, stop, deviations in _searched(np.array(rates), np.log1p(rate_share), limits):
            found.append(
                Stretch(
                    begin_ns=int(flows.begin_ns[blocks[first][0]]),
                    end_ns=int(flows.end_ns[blocks[stop - 1][-1]]),
                    connection=row,
                    flow=(int(of.node[row]), int(of.peer_node[row])),
                    deviations=deviations,
                )
            )
    chosen: list[Stretch] = []
    for one in sorted(found, key=lambda each: -each.deviations):
        if all(one.begin_ns >= other.end_ns or one.end_ns <= other.begin_ns for other in chosen):
            chosen.append(one)
    return chosen[:_MAX_STRETCHES]


def _searched(log_rate: Floats, least: float, limits: StretchThresholds) -> list[tuple[int, int, float]]:
    """Return the slow stretches of a series: first sample, the one behind the last, and the deviations."""
    todo, found = [(0, len(log_rate))], list[tuple[int, int, float]]()
    while todo and len(found) < _MAX_STRETCHES:
        begin, end = todo.pop()
        best = _slowest(log_rate[begin:end], least, limits)
        if best is not None:
            first, stop, deviations = best
            found.append((begin + first, begin + stop, deviations))
            todo += [(begin, begin + first), (begin + stop, end)]
    return found


def _slowest(log_rate: Floats, least: float, limits: StretchThresholds) -> tuple[int, int, float] | None:
    """Return the stretch whose mean is farthest below that of the rest; None if it is no slow one.

    Circular binary segmentation (Olshen et al. 2004, Biostatistics 5, equation 2), with noise from neighbours.
    """
    num_samples, shortest = len(log_rate), limits.min_stretch_samples
    if num_samples < 2 * shortest or np.ptp(log_rate) < least:
        return None
    sums = np.concatenate([[0.0], np.cumsum(log_rate - np.median(log_rate))])
    first, stop = np.triu_indices(num_samples + 1, k=shortest)
    is_meant = stop - first <= num_samples - shortest
    first, stop = first[is_meant], stop[is_meant]
    length = stop - first
    inside = sums[stop] - sums[first]
    below = (sums[-1] - inside) / (num_samples - length) - inside / length
    score = below * np.sqrt(length * (num_samples - length) / num_samples)
    best = int(np.argmax(score))
    is_in = np.zeros(num_samples, np.bool_)
    is_in[first[best] : stop[best]] = True
    steps = np.abs(np.diff(log_rate))
    noise = max(NORMAL_MAD * float(np.median(steps)) / np.sqrt(2), least / limits.min_stretch_deviations)
    usual = float(np.median(log_rate[~is_in]))
    is_slow = log_rate <= usual - least
    is_stretch = (
        score[best] >= limits.min_stretch_deviations * noise
        and is_slow[is_in].mean() >= limits.slow_samples_share
        and is_slow[~is_in].mean() <= limits.max_slow_rest
    )
    if not is_stretch:
        return None
    # Samples at its ends are partly of the time before and after.
    begin, end = int(first[best]), int(stop[best])
    most = float(np.median(log_rate[begin:end])) + least / 2
    while end - begin > shortest and log_rate[begin] > most:
        begin += 1
    while end - begin > shortest and log_rate[end - 1] > most:
        end -= 1
    return begin, end, float(score[best] / noise)


def within(flows: Flows, stretches: Sequence[Stretch]) -> Bools:
    """Return the rows of flows whose middle is in one of the stretches, (num_rows,)."""
    middle_ns = flows.begin_ns + (flows.end_ns - flows.begin_ns) // 2
    return in_stretches(middle_ns, stretches)


def in_stretches(times_ns: Ints, stretches: Sequence[Stretch]) -> Bools:
    """Return which times are in one of the stretches, bool, of their shape."""
    found = np.zeros(times_ns.shape, np.bool_)
    for one in stretches:
        found |= (times_ns >= one.begin_ns) & (times_ns < one.end_ns)
    return found


def select_flows(flows: Flows, is_meant: Bools) -> Flows:
    """Return some rows of flows; `is_meant` is of each, (num_rows,)."""
    columns = {each.name: getattr(flows, each.name) for each in fields(flows) if each.name != "connections"}
    return replace(flows, **{name: values[is_meant] for name, values in columns.items() if values is not None})


BETWEEN_SWITCHES = "between switches"
"""Id of whatever connects the hosts where switches are not known."""
_WAYS = ("up", "down")


def faults_of(
    job: FlowJob,
    rows: Ints,
    suspects: Bools,
    p_values: Floats | Callable[[Ints], float],
    cause: LinkCause | None = None,
    usual: Floats | None = None,
    is_well: Bools | None = None,
) -> list[LinkFault]:
    """Return the links that explain what is wrong with some connections.

    Args:
        job: the connections.
        rows: those that something is wrong with.
        suspects: the ways that each of them passes and that no well one clears, bool, (num_rows, num_links, 2).
        p_values: of each connection, of which the smallest counts, (num_flows,); or that of some connections together.
        cause: the fault; None where that follows from what else the connections show.
        usual: logarithm of the rate that each would have, (num_flows,); None for that of other connections.
        is_well: connections that lack this fault for certain, (num_flows,); None where rates say so.
    """
    suspected = np.asarray(suspects.any(axis=2))
    found = explanations(suspected)
    is_held = np.array([suspected[:, links].any(axis=1) for links, _ in found], np.bool_)
    faults = []
    for (links, own), held in zip(found, is_held, strict=True):
        held_up, alone = rows[held], rows[held & (is_held.sum(axis=0) == 1)]
        ways = np.asarray(suspects[held].any(axis=0) & links[:, None])
        p_value = p_values(held_up) if callable(p_values) else float(p_values[held_up].min())
        least_usual = -np.inf if usual is None else float(usual[held_up].max())
        fault = _fault(job, held_up, links, ways, cause, p_value, least_usual)
        fault = replace(fault, is_one_enough=bool(suspected[np.ix_(own, links)].all(axis=0).any()))
        if is_well is None:
            faults.append(_with_slow_way(job, fault, alone, ways))
        else:
            faults.append(replace(fault, direction=_only_way(job.figures.paths[is_well], ways)))
    return faults


def _fault(
    job: FlowJob, rows: Ints, links: Bools, ways: Bools, cause: LinkCause | None, p_value: float, least_usual: float
) -> LinkFault:
    """Return what is wrong at some links; without a cause they are slow, and why follows from what else is seen."""
    figures = job.figures
    log_rate = figures.most_log_rate if cause is None else figures.log_rate
    worst = int(rows[np.argmin(log_rate[rows])])
    usual, usual_error = usual_rate(job, rows, worst, ways)
    usual = max(usual, least_usual)
    slow_bytes_per_s, usual_bytes_per_s = float(np.exp(log_rate[worst])), float(np.exp(usual))
    foreign = float(job.foreign_bytes_per_s[ways].max())
    half_width = float(stdtrit(max(figures.num_intervals[worst] - 1, 1), UPPER_95))
    half_width *= float(np.hypot(figures.error[worst], usual_error))
    returning = np.flatnonzero((figures.paths[:, :, ::-1] & ways).any(axis=(1, 2)))
    others = np.setdiff1d(np.arange(len(figures)), rows)
    explained = job.thresholds.explained_share * usual_bytes_per_s
    return LinkFault(
        cause=cause or _cause_of_slowness(job, rows, links),
        is_certain=cause is not LinkCause.FOREIGN or slow_bytes_per_s + foreign >= explained,
        ids=_names(job.topology, links),
        flows=tuple(job.pairs[row] for row in rows),
        returning=tuple(job.pairs[row] for row in returning),
        effect=Estimate.around(usual - float(log_rate[worst]), half_width).through(np.expm1),
        p_value=p_value,
        slow_bytes_per_s=slow_bytes_per_s,
        usual_bytes_per_s=usual_bytes_per_s,
        foreign_bytes_per_s=foreign,
        repeat_share=_repeat_share(figures, rows),
        others_repeat_share=_repeat_share(figures, others),
        duplicate_share=min(float(figures.duplicates[rows].sum()) / max(float(figures.repeats[rows].sum()), 1.0), 1.0),
        stall_share=float(figures.stall_s[rows].max()) / figures.window_s,
        busy_share=float(figures.busy_s[worst]) / figures.window_s,
        segment_bytes=int(figures.segment_bytes[rows].min()),
        usual_segment_bytes=int(figures.segment_bytes.max()),
    )


def usual_rate(job: FlowJob, rows: Ints, worst: int, ways: Bools | None = None) -> tuple[float, float]:
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
    return job.capped(float(figures.log_rate[middle])), float(figures.error[middle])


def _cause_of_slowness(job: FlowJob, rows: Ints, links: Bools) -> LinkCause:
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


def _only_way(well_paths: Bools, ways: Bools) -> str:
    """Return the only direction that is suspected, if connections pass the other one and are well."""
    suspected = ways.any(axis=0)
    if suspected.all():
        return ""
    way = int(np.argmax(suspected))
    return _WAYS[way] if well_paths[:, ways[:, way], 1 - way].any(axis=0).all() else ""


def _with_slow_way(job: FlowJob, fault: LinkFault, rows: Ints, ways: Bools) -> LinkFault:
    """Return the fault of a link that is slow with its direction: the one whose connections are slower, beyond chance.

    Those of the other one may be held up as well, because their acknowledgements wait in the queue of the slow one.
    Connections that carry far less are left out: the rate of short messages is that of their acknowledgements.

    Args:
        job: the connections.
        fault: of the link.
        rows: connections that nothing else holds up.
        ways: which are suspected, (num_links, 2).
    """
    figures, (link, *more) = job.figures, np.flatnonzero(ways.any(axis=1))
    if more:
        return fault
    rate, is_accused = figures.most_log_rate, np.isin(np.arange(len(figures)), rows)
    is_alike = figures.num_bytes >= job.thresholds.alike_share * figures.num_bytes[rows].max(initial=0.0)
    passing = [np.flatnonzero(figures.paths[:, link, way] & is_alike) for way in (UP, DOWN)]
    slowest = [of[np.argmin(rate[of])] if len(of) else None for of in passing]
    if slowest[UP] is None or slowest[DOWN] is None:
        return fault
    way = UP if rate[slowest[UP]] < rate[slowest[DOWN]] else DOWN
    slow, fast = slowest[way], slowest[1 - way]
    # What acknowledgements of messages may have been delayed counts for neither direction.
    ahead = np.full(len(figures), figures.log_rate[fast] - rate[slow])
    p_value = p_above(figures, ahead, figures.error[fast], 0.0)[slow]
    if not is_accused[slow] or ahead[slow] < np.log1p(job.limits.rate_share / 2) or p_value > job.limits.level:
        return fault
    return replace(fault, direction=_WAYS[way], other_way_bytes_per_s=float(np.exp(figures.log_rate[fast])))
