"""Figures of connections and links: traffic, rates, foreign traffic, and the faults that they show.

A connection that waits for data to send has nothing outstanding. So the bytes over the time in which data was
outstanding are the rate of its path, whatever the job around it waits for: in a ring with one slow link, all
connections move the same bytes in the same time, but only those on that link are busy all the while.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.flows import Flows, in_window
from hpcpace.metrics.interface_use import RECEIVED, SENT, InterfaceLoads, interface_totals
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.topology import Topology

UP, DOWN = 0, 1
"""The directions of a link: towards the top of the network, and back."""

_USUAL_SEGMENT = 1448  # format: payload of Ethernet, IPv4, TCP with timestamps
_DELAYED_ACK_S = 0.04  # timing: TCP_DELACK_MIN of Linux, for the last segment of what is sent at once


@dataclass(frozen=True, kw_only=True)
class FigureThresholds(Thresholds, topic="links"):
    """Which connections have figures, and when they stand still."""

    min_intervals: int = number(4, "samples")
    """Seconds in which a connection sent; fewer give its rate no error."""
    min_bytes: int = number(1_000_000, "bytes")
    """A connection that carries less says nothing about the rate of its way."""
    min_bytes_share: float = number(0.05, "share")
    """Part of the bytes of the largest connection; the rate of a smaller one is that of its latency."""
    max_limited_share: float = number(0.2, "share")
    """Part of the busy time for which window or send buffer may hold a connection back instead of its way."""
    min_stall_s: float = number(0.15, "s")
    """Excess of an interval that is a stall: Linux repeats what was not acknowledged after 0.2 s or more."""
    min_stall_share: float = number(0.3, "share")
    """Part of the busy time of an interval that is a stall; less is a rate that varies."""


@dataclass(frozen=True, kw_only=True)
class FlowFigures:
    """What connections did in a window of time; (num_flows,) each.

    Attributes:
        connection: rows in the connections.
        source, destination: indices of nodes.
        paths: which links each passes in which direction, bool, (num_flows, num_links, 2): up, down.
        window_s: length of the window.
        num_bytes: payload acknowledged.
        busy_s: time in which data was outstanding.
        is_limited: whether its receiver or its sender held it back for more than a fifth of that.
        core_wait: for which share of the time it may be held up because an end of it lacks a core.
        log_rate: natural logarithm of the bytes per busy second.
        most_log_rate: the same without what acknowledgements of messages may have been delayed; infinite where that may
            be all. Equal to `log_rate` where data is sent back at once.
        usual_log_rate: as `log_rate`, of its median interval.
        error: standard error of `log_rate`.
        num_intervals: intervals in which it sent anything.
        num_stalls: intervals that were busy far longer than their bytes take at the usual rate.
        stall_s: that time, in all of them.
        queue_s: median over intervals of the smoothed round trip minus the least one.
        least_rtt_s: the least round trip so far, at the end of the window; NaN unknown.
        packets, repeats: segments sent, and sent again.
        duplicates: segments that arrived twice, 0 also where that is not known.
        usual_repeat_share: median over intervals of the share of the payload that was sent again.
        steady_repeat_share: share of the payload that was sent again away from stalls, which end in repetitions.
        segment_bytes: largest payload of a segment, 0 unknown.
    """

    connection: Ints
    source: Ints
    destination: Ints
    paths: Bools
    window_s: float
    num_bytes: Floats
    busy_s: Floats
    is_limited: Bools
    core_wait: Floats
    log_rate: Floats
    most_log_rate: Floats
    usual_log_rate: Floats
    error: Floats
    num_intervals: Ints
    num_stalls: Ints
    stall_s: Floats
    queue_s: Floats
    least_rtt_s: Floats
    packets: Floats
    repeats: Floats
    duplicates: Floats
    usual_repeat_share: Floats
    steady_repeat_share: Floats
    segment_bytes: Ints

    def __len__(self) -> int:
        return len(self.source)

    def is_crossing(self, topology: Topology) -> Bools:
        """Return which of them pass uplinks, bool, (num_flows,)."""
        return np.asarray(self.paths[:, topology.is_uplink].any(axis=(1, 2)))


def flow_paths(topology: Topology, source: Ints, destination: Ints) -> Bools:
    """Return which links flows pass in which direction, bool, (num_flows, num_links, 2).

    Args:
        topology: where the nodes are.
        source, destination: indices of nodes, (num_flows,).
    """
    paths = np.zeros((len(source), len(topology.links), 2), np.bool_)
    rows = np.arange(len(source))
    leaves = topology.node_leaf
    is_between = source != destination
    for nodes, way in ((source, UP), (destination, DOWN)):
        if topology.num_nodes > 1:
            paths[rows[is_between], nodes[is_between], way] = True
        if topology.num_leaves > 1:
            crossing = rows[leaves[source] != leaves[destination]]
            paths[crossing, topology.num_nodes + leaves[nodes[crossing]], way] = True
    return paths


def flow_figures(
    flows: Flows,
    topology: Topology,
    *,
    begin_ns: int,
    end_ns: int,
    message_bytes: float = np.inf,
    core_wait: Floats | None = None,
    thresholds: FigureThresholds = FigureThresholds(),
) -> FlowFigures:
    """Return what connections between nodes did in intervals whose middle is between two times.

    Connections that carry little are left out, and so are those of which one end is unknown: what they pass is not
    known either.

    Args:
        flows: the connections.
        topology: where the nodes are.
        begin_ns, end_ns: the window, on the common clock.
        message_bytes: how much is sent at once before the sender waits; infinite where both sides always send.
        core_wait: for which share of the time connections of each node may be held up for want of a core, (num_nodes,);
            None for never.
        thresholds: which connections count.
    """
    of = flows.connections
    is_meant = in_window(flows, begin_ns, end_ns) & (flows.connection >= 0)
    total = np.bincount(flows.connection[is_meant], flows.acked_bytes[is_meant], minlength=len(of.rank))
    is_between = (of.node >= 0) & (of.peer_node >= 0) & (of.node != of.peer_node)
    least = max(thresholds.min_bytes, thresholds.min_bytes_share * float(total[is_between].max(initial=0.0)))
    chosen = np.flatnonzero(is_between & (total >= least))
    order = np.flatnonzero(is_meant)[np.argsort(flows.connection[is_meant], kind="stable")]
    edges = (np.searchsorted(flows.connection[order], chosen, side=side) for side in ("left", "right"))
    rows = [order[begin:end] for begin, end in zip(*edges, strict=True)]
    sums = [_sums_of(flows, of_one, thresholds) for of_one in rows]
    keep = [index for index, found in enumerate(sums) if found]
    columns: dict[str, NDArray[Any]] = {
        name: np.array([sums[index][name] for index in keep], dtype) for name, dtype in _SUMS.items()
    }
    source, destination = of.node[chosen[keep]], of.peer_node[chosen[keep]]
    waits = np.zeros(topology.num_nodes) if core_wait is None else core_wait
    delayed_s = columns["num_bytes"] / message_bytes * _DELAYED_ACK_S
    with np.errstate(divide="ignore"):
        most_log_rate = np.log(columns["num_bytes"]) - np.log(np.maximum(columns["busy_s"] - delayed_s, 0.0))
    return FlowFigures(
        connection=chosen[keep],
        source=source,
        destination=destination,
        paths=flow_paths(topology, source, destination),
        window_s=(end_ns - begin_ns) / NS_PER_S,
        core_wait=np.maximum(waits[source], waits[destination]),
        most_log_rate=most_log_rate,
        **columns,
    )


_SUMS = {
    "is_limited": np.bool_,
    **dict.fromkeys(("num_intervals", "num_stalls", "segment_bytes"), np.int64),
    **dict.fromkeys(("num_bytes", "busy_s", "log_rate", "usual_log_rate", "error", "stall_s", "queue_s"), np.float64),
    **dict.fromkeys(("least_rtt_s", "packets", "repeats", "duplicates"), np.float64),
    **dict.fromkeys(("usual_repeat_share", "steady_repeat_share"), np.float64),
}
"""The figures of one connection, each with its type."""


def _sums_of(flows: Flows, rows: Ints, least: FigureThresholds) -> dict[str, float]:
    """Return the figures of one connection by name, none of one that sent too seldom; `rows` are its intervals."""
    rows = rows[flows.busy_ns[rows] > 0]
    num_bytes, busy_s = flows.acked_bytes[rows].astype(np.float64), flows.busy_ns[rows] / NS_PER_S
    total_bytes, total_s = float(num_bytes.sum()), float(busy_s.sum())
    if len(rows) < least.min_intervals or not total_bytes:
        return {}
    rate = total_bytes / total_s
    # The error of a ratio of sums, by linearisation (Cochran 1977, Sampling Techniques, section 6.4).
    parts = (num_bytes - rate * busy_s) / total_bytes
    held_s = float((flows.receiver_limited_ns[rows] + flows.sender_limited_ns[rows]).sum()) / NS_PER_S
    usual_rate = _weighted_median(num_bytes / busy_s, num_bytes)
    excess_s = busy_s - num_bytes / usual_rate
    is_stalled = excess_s > np.maximum(least.min_stall_s, least.min_stall_share * busy_s)
    # Stalls end in repetitions, as those in the intervals around them.
    is_near = is_stalled.copy()
    is_near[1:] |= is_stalled[:-1]
    is_near[:-1] |= is_stalled[1:]
    sent, again = flows.sent_bytes[rows], flows.retransmitted_bytes[rows]
    duplicates = flows.duplicate_segments[rows].sum() if flows.duplicate_segments is not None else 0
    sizes = flows.segment_bytes[rows] if flows.segment_bytes is not None else np.zeros(1, np.int64)
    segment = int(np.median(sizes[sizes > 0])) if (sizes > 0).any() else 0
    known_rtt_ns = flows.least_rtt_ns[rows][flows.least_rtt_ns[rows] > 0]
    queue_ns = flows.rtt_ns[rows] - flows.least_rtt_ns[rows]
    return {
        "num_bytes": total_bytes,
        "busy_s": total_s,
        "is_limited": held_s > least.max_limited_share * total_s,
        "log_rate": float(np.log(rate)),
        "usual_log_rate": float(np.log(usual_rate)),
        "error": float(np.sqrt(len(rows) / (len(rows) - 1) * (parts**2).sum())),
        "num_intervals": len(rows),
        "num_stalls": int(is_stalled.sum()),
        "stall_s": float(excess_s[is_stalled].sum()),
        "queue_s": float(np.median(queue_ns)) / NS_PER_S,
        "least_rtt_s": float(known_rtt_ns.min()) / NS_PER_S if len(known_rtt_ns) else np.nan,
        "packets": float(sent.sum()) / (segment or _USUAL_SEGMENT),
        "repeats": float(again.sum()) / (segment or _USUAL_SEGMENT),
        "duplicates": float(duplicates),
        "usual_repeat_share": float(np.median(again / np.maximum(sent, 1))),
        "steady_repeat_share": float(again[~is_near].sum()) / max(float(sent[~is_near].sum()), 1.0),
        "segment_bytes": segment,
    }


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])


def foreign_on_links(loads: InterfaceLoads, topology: Topology) -> Floats:
    """Return the mean foreign traffic on each link in each direction, bytes per second, (num_links, 2): up, down.

    A host's link has what its interface counted; NaN where that is not known. Of an uplink only the least is known:
    what the hosts of its leaf sent beyond what they received from others cannot have stayed below it. What other hosts
    of the leaf send is not seen.

    Args:
        loads: what the interfaces carried.
        topology: where the nodes are.
    """
    foreign = np.full((len(topology.links), 2), np.nan)
    totals = interface_totals(loads)
    seen = np.where(totals.is_foreign | np.isnan(totals.foreign_bytes_per_s), totals.foreign_bytes_per_s, 0.0)
    of_node = np.full((topology.num_nodes, 2), np.nan)
    for index in np.flatnonzero(loads.carries_job).tolist():
        of_node[loads.node[index]] = seen[[SENT, RECEIVED], index]
    if topology.num_nodes > 1:
        foreign[: topology.num_nodes] = of_node
    if topology.num_leaves > 1:
        for leaf in range(topology.num_leaves):
            nodes = of_node[topology.node_leaf == leaf]
            if np.isfinite(nodes).all():
                sent, received = nodes.sum(axis=0)
                foreign[topology.num_nodes + leaf, [UP, DOWN]] = max(sent - received, 0.0), max(received - sent, 0.0)
    return foreign


class Usual(StrEnum):
    """What the rate of slow connections is held against."""

    OTHERS = "others"
    LINE = "line rate"
    REST = "rest of the time"


class LinkCause(StrEnum):
    """What is wrong with a link."""

    FOREIGN = "foreign traffic"
    LATENCY = "latency"
    SLOW = "slow link"
    UPLINK = "slow or oversubscribed uplink"
    FLAPPING = "flapping link"
    LOSSY = "lossy link"
    REORDERING = "reordering link"
    SMALL_MTU = "small MTU"


@dataclass(frozen=True, kw_only=True)
class LinkFault:
    """A link that holds connections up, or several of which at least one does.

    Attributes:
        cause: what is wrong with it.
        is_certain: whether the cause is distinguished from others; else the link may be slow as well.
        ids: names of links, as of `Topology.links`; several if the data cannot separate them.
        is_one_enough: whether one of these explains all of the connections; else at least two have the fault.
        flows: which connections it holds up, as (source node, destination node).
        returning: connections whose acknowledgements pass it, and may be slow for that.
        effect: by which share they take longer for their bytes than others.
        p_value: probability that chance alone gives as much, over all connections.
        slow_bytes_per_s, usual_bytes_per_s: rate of the slowest of them while it was busy, and of others of its kind.
        usual: of what the latter is the rate, if not of others.
        foreign_bytes_per_s: foreign traffic on it, in the direction of these connections; 0 where none is known.
        repeat_share: share of segments that they sent again.
        others_repeat_share: the same of the other connections.
        duplicate_share: part of the segments that they sent again which had arrived before; 0 also where not known.
        stall_share: share of the time for which they stood still.
        busy_share: share of the time for which the slowest of them was busy.
        direction: `up` or `down` where the fault is in that direction alone, as far as connections show; else empty.
        other_way_bytes_per_s: where the direction follows from rates, what the other one gives at least; else 0.
        latency_s: what it adds to each round trip; 0 where that is not the fault.
        steps: the first and the last step of each stretch in which it was so; empty for all steps.
        segment_bytes, usual_segment_bytes: largest payload of their segments, and of those of others; 0 unknown.
    """

    cause: LinkCause
    is_certain: bool
    ids: tuple[str, ...]
    flows: tuple[tuple[int, int], ...]
    returning: tuple[tuple[int, int], ...]
    effect: Estimate
    p_value: float
    slow_bytes_per_s: float
    usual_bytes_per_s: float
    foreign_bytes_per_s: float
    repeat_share: float
    others_repeat_share: float
    stall_share: float
    busy_share: float
    duplicate_share: float = 0.0
    is_one_enough: bool = True
    direction: str = ""
    other_way_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    usual: Usual = Usual.OTHERS
    steps: tuple[tuple[int, int], ...] = ()
    segment_bytes: int = 0
    usual_segment_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class FlowFindings:
    """What connections show about links.

    Attributes:
        faults: links that hold connections up, largest effect first.
        is_compared: whether a slow link would have shown: at least two connections of a kind, which differ in links.
        reason: why nothing is compared; empty otherwise.
        crossing_factor: how many times as long connections between leaves take as those within one; None without both.
        line_share: part of its interface's line rate that the connection which needs it longest reached while busy,
            headers included; None if not known.
        line_s: seconds that all bytes of that connection take at the line rate; None if not known.
    """

    faults: tuple[LinkFault, ...]
    is_compared: bool
    reason: str
    crossing_factor: float | None = None
    line_share: float | None = None
    line_s: float | None = None
