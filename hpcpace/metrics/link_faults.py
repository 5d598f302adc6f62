"""From connections that are held up, or were in a stretch of time, to the links at fault.

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
from hpcpace.metrics.flow_figures import DOWN, UP, FlowFigures, LinkCause, LinkFault
from hpcpace.metrics.flow_job import FlowJob, p_above
from hpcpace.metrics.flows import Flows
from hpcpace.metrics.link_explanations import explanations
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.special import NORMAL_MAD, UPPER_95, stdtrit
from hpcpace.metrics.topology import Topology

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
