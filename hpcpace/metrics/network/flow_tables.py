"""Tables of the network: traffic of pairs, and errors, drops, pauses and marks by host.

Traces hold cumulative counters once a second. Everything that judges the network starts from these differences, so that
it need not know how a counter was read, nor which rank of a host read it.

No counter of events is evidence by itself: a healthy fabric pauses and marks, and drops a little. A host that has far
more of them than all others is. The sender's side of a connection knows its bytes and rates; where only the receiver
was recorded, rates are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_S
from hpcpace.metrics.roles import others_median


@dataclass(frozen=True, kw_only=True)
class Connections:
    """The TCP connections of the ranks to other hosts; both ends may be listed, each with what its own host saw.

    Attributes:
        rank: the rank whose connection it is, (num_connections,).
        peer_rank: the rank at the other end, -1 where only its host, or not even that, is known.
        node: index of the rank's node in the names of the topology's nodes.
        peer_node: likewise of the peer, -1 unknown.
        local, remote: addresses with ports, as `10.0.0.1:4711` or `[fe80::1]:4711`.
        interface: name of the interface that has the local address, empty unknown; without entries none is known.
    """

    rank: IntArray
    peer_rank: IntArray
    node: IntArray
    peer_node: IntArray
    local: tuple[str, ...]
    remote: tuple[str, ...]
    interface: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Flows:
    """What each connection did between two samples; one row a connection and interval, (num_rows,) each.

    Attributes:
        connection: row in `connections`; -1 for all further connections of a rank that are summed up.
        begin_ns, end_ns: the interval on the common clock.
        sent_bytes: payload sent, repetitions included.
        acked_bytes: payload that the peer has acknowledged.
        received_bytes: payload received.
        retransmitted_bytes: payload sent again.
        busy_ns: time in which data was outstanding.
        receiver_limited_ns, sender_limited_ns: parts of busy_ns limited by the receiver's window, by the send buffer.
        rtt_ns, least_rtt_ns: smoothed round trip at the end of the interval, and the least of the connection so far.
        delivery_bytes_per_s: the kernel's latest estimate of the rate at which data was delivered.
        is_application_limited: whether that estimate was limited by the application.
        unsent_bytes: waiting in the send buffer at the end of the interval.
        marked_packets: delivered with a congestion mark (ECN).
        segment_bytes: the largest payload of a packet that the connection sends, at the end of the interval (TCP_INFO's
            tcpi_snd_mss), 0 unknown; None where it was not recorded.
    """

    connections: Connections
    connection: IntArray
    begin_ns: IntArray
    end_ns: IntArray
    sent_bytes: IntArray
    acked_bytes: IntArray
    received_bytes: IntArray
    retransmitted_bytes: IntArray
    busy_ns: IntArray
    receiver_limited_ns: IntArray
    sender_limited_ns: IntArray
    rtt_ns: IntArray
    least_rtt_ns: IntArray
    delivery_bytes_per_s: FloatArray
    is_application_limited: BoolArray
    unsent_bytes: IntArray
    marked_packets: IntArray
    segment_bytes: IntArray | None = None


@dataclass(frozen=True, kw_only=True)
class InterfaceUse:
    """What each network interface carried between two samples; one row an interface and interval, (num_rows,) each.

    Attributes:
        names: (host, interface) by number, `("n3", "eth0")` or `("n3", "mlx5_0/1")`.
        node: index of the host in the names of the topology's nodes, by number.
        line_rate_bps: line rate in bit/s by number, 0 unknown.
        interface: number, row in `names`.
        begin_ns, end_ns: the interval on the common clock.
        sent_bytes, received_bytes: with headers, as the interface counts them.
        errors, drops, pauses, marks: events by counter: frames with errors, dropped frames, pause frames (or, for RDMA,
            ticks in which a port could not send), congestion marks (RDMA: CNPs handled).
        retransmits: of RDMA, packets sent or asked for again; None if not known.
        link_downs: how often the link went down; None if not known.
    """

    names: tuple[tuple[str, str], ...]
    node: IntArray
    line_rate_bps: IntArray
    interface: IntArray
    begin_ns: IntArray
    end_ns: IntArray
    sent_bytes: IntArray
    received_bytes: IntArray
    errors: IntArray
    drops: IntArray
    pauses: IntArray
    marks: IntArray
    retransmits: IntArray | None = None
    link_downs: IntArray | None = None


IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

KINDS = ("errors", "drops", "pauses", "marks")
"""The counters of interfaces, in the order of `interface_events`."""

_LEAST_EVENTS, _LEAST_RATIO, _DEVIATIONS = 10, 3.0, 5.0


def interface_events(use: InterfaceUse, *, begin_ns: int, end_ns: int) -> IntArray:
    """Return the events of each interface in intervals whose middle is between two times, (4, num_interfaces)."""
    middle_ns = use.begin_ns + (use.end_ns - use.begin_ns) // 2
    rows = np.flatnonzero((middle_ns >= begin_ns) & (middle_ns < end_ns))
    counters = (use.errors, use.drops, use.pauses, use.marks)
    counts = [np.bincount(use.interface[rows], values[rows], minlength=len(use.names)) for values in counters]
    return np.rint(np.array(counts)).astype(np.int64)


def retransmitted(flows: Flows, num_nodes: int, *, begin_ns: int, end_ns: int) -> tuple[IntArray, IntArray]:
    """Return the bytes that each node sent and those that it sent again, in such intervals, (num_nodes,) each."""
    middle_ns = flows.begin_ns + (flows.end_ns - flows.begin_ns) // 2
    node = np.append(flows.connections.node, -1)[flows.connection]
    rows = np.flatnonzero((middle_ns >= begin_ns) & (middle_ns < end_ns) & (node >= 0))
    sent, again = (
        np.rint(np.bincount(node[rows], values[rows], minlength=num_nodes)).astype(np.int64)
        for values in (flows.sent_bytes, flows.retransmitted_bytes)
    )
    return sent, again


def usual_rate(counts: NDArray[np.number], exposures: NDArray[np.number]) -> FloatArray:
    """Return the median rate of the other hosts for each host, NaN where there is no other, (num_hosts,).

    Args:
        counts: events of each host.
        exposures: what they are counted over, such as seconds or packets; hosts with 0 are left out.
    """
    found = np.full(len(counts), np.nan)
    rows = np.flatnonzero(exposures > 0)
    if len(rows) > 1:
        found[rows] = others_median(np.asarray(counts[rows] / exposures[rows], np.float64)[:, None])[:, 0]
    return found


def is_raised(counts: NDArray[np.number], exposures: NDArray[np.number]) -> BoolArray:
    """Return which hosts have far more events than the others: 10, 3 times as many, and beyond what chance adds.

    Args:
        counts, exposures: as of `usual_rate`, (num_hosts,).
    """
    expected = usual_rate(counts, exposures) * exposures
    beyond = expected + _DEVIATIONS * np.sqrt(np.maximum(expected, 0.0))
    least = np.maximum(np.maximum(beyond, _LEAST_RATIO * expected), _LEAST_EVENTS)
    return np.asarray(np.isfinite(expected) & (counts >= least))


@dataclass(frozen=True, kw_only=True)
class PairTraffic:
    """Traffic from one rank or node to another, those with most bytes first; (num_pairs,) each.

    Attributes:
        source, destination: rank numbers, or indices of nodes.
        acked_bytes: payload that arrived.
        sent_bytes, retransmitted_bytes: payload sent, repetitions included, and repetitions; 0 where only the receiver
            was recorded.
        busy_ns: time in which data was outstanding; of several connections at a time that of the busiest. 0 where only
            the receiver was recorded.
    """

    source: IntArray
    destination: IntArray
    acked_bytes: IntArray
    sent_bytes: IntArray
    retransmitted_bytes: IntArray
    busy_ns: IntArray

    @property
    def bytes_per_s(self) -> FloatArray:
        """Achieved rate: payload for each second in which data was outstanding; NaN where that is not known."""
        return np.asarray(
            np.divide(
                self.acked_bytes * float(NS_PER_S),
                self.busy_ns,
                out=np.full(len(self.busy_ns), np.nan),
                where=self.busy_ns > 0,
            )
        )


def rank_pairs(flows: Flows, *, begin_ns: int, end_ns: int) -> PairTraffic:
    """Return the traffic between ranks in intervals whose middle is between two times."""
    of = flows.connections
    return _pairs(flows, of.rank, of.peer_rank, _in_window(flows, begin_ns, end_ns))


def node_pairs(flows: Flows, *, begin_ns: int, end_ns: int) -> PairTraffic:
    """Return the traffic between nodes, likewise."""
    of = flows.connections
    return _pairs(flows, of.node, of.peer_node, _in_window(flows, begin_ns, end_ns))


def _in_window(flows: Flows, begin_ns: int, end_ns: int) -> BoolArray:
    middle_ns = flows.begin_ns + (flows.end_ns - flows.begin_ns) // 2
    return np.asarray((middle_ns >= begin_ns) & (middle_ns < end_ns))


def _pairs(flows: Flows, end: IntArray, far_end: IntArray, is_meant: BoolArray) -> PairTraffic:
    """Return sums over the connections of each pair; `end` and `far_end` are those of each connection."""
    source, destination = (np.append(ids, -1)[flows.connection] for ids in (end, far_end))
    rows = np.flatnonzero(is_meant & (source >= 0) & (destination >= 0))
    # What only its receiver has recorded.
    back = rows[~np.isin(destination[rows], end)]
    zero = np.zeros(len(back), np.int64)
    sources = np.concatenate([source[rows], destination[back]])
    destinations = np.concatenate([destination[rows], source[back]])
    base = int(max(sources.max(initial=0), destinations.max(initial=0))) + 1
    pairs, pair = np.unique(sources * base + destinations, return_inverse=True)

    def summed(values: IntArray, of_back: IntArray) -> IntArray:
        total = np.bincount(pair, np.concatenate([values[rows], of_back]), minlength=len(pairs))
        return np.rint(total).astype(np.int64)

    acked_bytes = summed(flows.acked_bytes, flows.received_bytes[back])
    order = np.argsort(-acked_bytes, kind="stable")
    return PairTraffic(
        source=pairs[order] // base,
        destination=pairs[order] % base,
        acked_bytes=acked_bytes[order],
        sent_bytes=summed(flows.sent_bytes, zero)[order],
        retransmitted_bytes=summed(flows.retransmitted_bytes, zero)[order],
        busy_ns=_busy_ns(flows, rows, pair[: len(rows)], len(pairs))[order],
    )


def _busy_ns(flows: Flows, rows: IntArray, pair: IntArray, num_pairs: int) -> IntArray:
    """Return how long each pair was busy: in each second as long as the busiest of its connections, (num_pairs,)."""
    second = (flows.end_ns[rows] - flows.end_ns[rows].min(initial=0)) // NS_PER_S
    num_seconds = int(second.max(initial=0)) + 1
    keys, first, key = np.unique(flows.connection[rows] * num_seconds + second, return_index=True, return_inverse=True)
    of_connection = np.bincount(key, flows.busy_ns[rows], minlength=len(keys))
    cells, cell = np.unique(pair[first] * num_seconds + second[first], return_inverse=True)
    busiest = np.zeros(len(cells))
    np.maximum.at(busiest, cell, of_connection)
    return np.rint(np.bincount(cells // num_seconds, busiest, minlength=num_pairs)).astype(np.int64)
