"""What connections and interfaces carried between two samples: differences of counters, on the common clock.

Traces hold cumulative counters once a second. Everything that judges the network starts from these differences, so that
it need not know how a counter was read, nor which rank of a host read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


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
