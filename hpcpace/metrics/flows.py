"""Traffic of connections and interfaces: counters of traces as differences over time, and tables of them.

Traces hold cumulative counters once a second. Everything that judges the network starts from these differences, so that
it need not know how a counter was read, nor which rank of a host read it. Nobody tells a rank who is at the other end
of a connection; the two ends of a connection list the same addresses the other way round, so the traces of all ranks
show it without a message in the job.

No counter of events is evidence by itself: a healthy fabric pauses and marks, and drops a little. A host that has far
more of them than all others is. The sender's side of a connection knows its bytes and rates; where only the receiver
was recorded, rates are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.common_clock import CommonClock, reference_times
from hpcpace.metrics.kernels import others_median
from hpcpace.metrics.topology import Topology
from hpcpace.trace.schema import OTHER_CONNECTIONS
from hpcpace.trace.tables import RankTrace, Table


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

    rank: Ints
    peer_rank: Ints
    node: Ints
    peer_node: Ints
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
        unsent_bytes: waiting in the send buffer at the end of the interval.
        duplicate_segments: segments that the peer reports to have got twice (D-SACK, RFC 2883), 0 also where the kernel
            does not count them; None where they were not recorded.
        segment_bytes: the largest payload of a packet that the connection sends, at the end of the interval (TCP_INFO's
            tcpi_snd_mss), 0 unknown; None where it was not recorded.
    """

    connections: Connections
    connection: Ints
    begin_ns: Ints
    end_ns: Ints
    sent_bytes: Ints
    acked_bytes: Ints
    received_bytes: Ints
    retransmitted_bytes: Ints
    busy_ns: Ints
    receiver_limited_ns: Ints
    sender_limited_ns: Ints
    rtt_ns: Ints
    least_rtt_ns: Ints
    unsent_bytes: Ints
    duplicate_segments: Ints | None = None
    segment_bytes: Ints | None = None


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
    """

    names: tuple[tuple[str, str], ...]
    node: Ints
    line_rate_bps: Ints
    interface: Ints
    begin_ns: Ints
    end_ns: Ints
    sent_bytes: Ints
    received_bytes: Ints
    errors: Ints
    drops: Ints
    pauses: Ints
    marks: Ints


KINDS = ("errors", "drops", "pauses", "marks")
"""The counters of interfaces, in the order of `interface_events`."""


@dataclass(frozen=True, kw_only=True)
class RaisedThresholds(Thresholds, topic="network"):
    """When a host has far more errors, drops or repetitions than the others."""

    min_raised: int = number(10, "events")
    """Events of a host, fewer of which are usual."""
    raised_ratio: float = number(3.0, "times")
    """Events of a host over those of the others in as much time or as many packets: healthy hosts differ by less."""
    raised_deviations: float = number(5.0, "standard errors")
    """Excess over those of the others, by the square root of their number: chance adds less."""


def interface_events(use: InterfaceUse, *, begin_ns: int, end_ns: int) -> Ints:
    """Return the events of each interface in intervals whose middle is between two times, (4, num_interfaces)."""
    rows = np.flatnonzero(in_window(use, begin_ns, end_ns))
    counters = (getattr(use, kind)[rows] for kind in KINDS)
    return np.array([_summed(use.interface[rows], values, len(use.names)) for values in counters])


def retransmitted(flows: Flows, num_nodes: int, *, begin_ns: int, end_ns: int) -> tuple[Ints, Ints]:
    """Return the bytes that each node sent and those that it sent again, in such intervals, (num_nodes,) each."""
    node = np.append(flows.connections.node, -1)[flows.connection]
    rows = np.flatnonzero(in_window(flows, begin_ns, end_ns) & (node >= 0))
    sent, again = flows.sent_bytes[rows], flows.retransmitted_bytes[rows]
    return _summed(node[rows], sent, num_nodes), _summed(node[rows], again, num_nodes)


def in_window(rows: Flows | InterfaceUse, begin_ns: int, end_ns: int) -> Bools:
    """Return the intervals whose middle is between two times, bool, (num_rows,)."""
    middle_ns = rows.begin_ns + (rows.end_ns - rows.begin_ns) // 2
    return np.asarray((middle_ns >= begin_ns) & (middle_ns < end_ns))


def _summed(number: Ints, values: NDArray[np.number], num_numbers: int) -> Ints:
    """Return the sum of the values of each number from 0, int64, (num_numbers,)."""
    return np.rint(np.bincount(number, values, minlength=num_numbers)).astype(np.int64)


def usual_rate(counts: NDArray[np.number], exposures: NDArray[np.number]) -> Floats:
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


def is_raised(
    counts: NDArray[np.number], exposures: NDArray[np.number], limits: RaisedThresholds = RaisedThresholds()
) -> Bools:
    """Return which hosts have far more events than the others: 10, 3 times as many, and beyond what chance adds.

    Args:
        counts, exposures: as of `usual_rate`, (num_hosts,).
        limits: the thresholds.
    """
    expected = usual_rate(counts, exposures) * exposures
    beyond = expected + limits.raised_deviations * np.sqrt(np.maximum(expected, 0.0))
    least = np.maximum(np.maximum(beyond, limits.raised_ratio * expected), limits.min_raised)
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

    source: Ints
    destination: Ints
    acked_bytes: Ints
    sent_bytes: Ints
    retransmitted_bytes: Ints
    busy_ns: Ints

    @property
    def bytes_per_s(self) -> Floats:
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
    return _pairs(flows, of.rank, of.peer_rank, in_window(flows, begin_ns, end_ns))


def node_pairs(flows: Flows, *, begin_ns: int, end_ns: int) -> PairTraffic:
    """Return the traffic between nodes, likewise."""
    of = flows.connections
    return _pairs(flows, of.node, of.peer_node, in_window(flows, begin_ns, end_ns))


def _pairs(flows: Flows, end: Ints, far_end: Ints, is_meant: Bools) -> PairTraffic:
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

    def summed(values: Ints, of_back: Ints) -> Ints:
        return _summed(pair, np.concatenate([values[rows], of_back]), len(pairs))

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


def _busy_ns(flows: Flows, rows: Ints, pair: Ints, num_pairs: int) -> Ints:
    """Return how long each pair was busy: in each second as long as the busiest of its connections, (num_pairs,)."""
    second = (flows.end_ns[rows] - flows.end_ns[rows].min(initial=0)) // NS_PER_S
    num_seconds = int(second.max(initial=0)) + 1
    keys, first, key = np.unique(flows.connection[rows] * num_seconds + second, return_index=True, return_inverse=True)
    of_connection = np.bincount(key, flows.busy_ns[rows], minlength=len(keys))
    cells, cell = np.unique(pair[first] * num_seconds + second[first], return_inverse=True)
    busiest = np.zeros(len(cells))
    np.maximum.at(busiest, cell, of_connection)
    return _summed(cells // num_seconds, busiest, num_pairs)


_MAX_COUNTED = 1 << 60  # format: beyond what counters and clocks have; sums of two fit into int64


@dataclass(frozen=True, kw_only=True)
class CounterSteps:
    """What counters grew by from one sample to the next, by key and time.

    Attributes:
        key: whose counters, (num_steps,).
        begin_ns, end_ns: times of both samples, as recorded, (num_steps,).
        last_row: row of the later sample, (num_steps,).
        grown: by column what was added, (num_steps,) each.
    """

    key: Ints
    begin_ns: Ints
    end_ns: Ints
    last_row: Ints
    grown: dict[str, Ints]


def counter_steps(
    keys: Ints, table: Mapping[str, NDArray[Any]], columns: Sequence[str], resettable: Sequence[str] = ()
) -> CounterSteps:
    """Return the steps of counters; those over which one of `columns` fell are left out.

    Args:
        keys: whose counters a row has, (num_rows,).
        table: `time_ns` and the columns; of rows with one key and time the first counts, and rows with values that no
            counter has do not.
        columns: counters that only ever grow.
        resettable: counters of which nothing is known where they fell, so that they count as unchanged.
    """
    times_ns = table["time_ns"].astype(np.int64)
    is_sound = np.abs(times_ns) < _MAX_COUNTED
    for name in (*columns, *resettable):
        is_sound &= (table[name] >= 0) & (table[name] < _MAX_COUNTED)
    rows = np.flatnonzero(is_sound)
    rows = rows[np.lexsort((times_ns[rows], keys[rows]))]
    is_repeated = (np.diff(keys[rows]) == 0) & (np.diff(times_ns[rows]) == 0)
    rows = np.delete(rows, np.flatnonzero(is_repeated) + 1)
    first, last = rows[:-1], rows[1:]
    grown = {name: table[name][last].astype(np.int64) - table[name][first] for name in (*columns, *resettable)}
    is_step = keys[first] == keys[last]
    for name in columns:
        is_step &= grown[name] >= 0
    return CounterSteps(
        key=keys[last][is_step],
        begin_ns=times_ns[first][is_step],
        end_ns=times_ns[last][is_step],
        last_row=last[is_step],
        grown={name: np.maximum(values[is_step], 0) for name, values in grown.items()},
    )


_BYTES = ("tx_bytes", "rx_bytes")
_LOOPBACK = "lo"


def interface_use(
    traces: Sequence[RankTrace],
    clocks: Sequence[CommonClock],
    topology: Topology,
) -> InterfaceUse:
    """Return what each interface carried between two samples, interface after interface by time.

    The loopback interface is left out, and so are hosts whose clock is unknown. Of several ranks of a host that have
    counters, the one with most rows counts.

    Args:
        traces: of the ranks; `network` was read.
        clocks: of these ranks.
        topology: places of these ranks, and maybe of more.
    """
    names: list[tuple[str, str]] = []
    nodes: list[int] = []
    rates: list[int] = []
    parts: list[dict[str, Ints]] = []
    for node, trace, clock in _sources(traces, clocks, topology):
        table = trace.tables["network"]
        first = len(names)
        known = [name for name in trace.header.interfaces if name != _LOOPBACK]
        number = {name: first + place for place, name in enumerate(known)}
        of_row = np.array([number.get(name, -1) for name in trace.header.interfaces] or [-1], np.int64)
        keys = np.where(table["interface"] < len(of_row), of_row[np.minimum(table["interface"], len(of_row) - 1)], -1)
        host = topology.node_names[node]
        names += [(host, name) for name in known]
        nodes += [node] * len(known)
        rates += [_line_rate_bps(table, keys == number[name]) for name in known]
        parts.append(_use(table, keys, clock))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else _no_use()
    return InterfaceUse(
        names=tuple(names),
        node=np.array(nodes, np.int64),
        line_rate_bps=np.array(rates, np.int64),
        sent_bytes=columns.pop("tx_bytes"),
        received_bytes=columns.pop("rx_bytes"),
        **columns,
    )


def _sources(
    traces: Sequence[RankTrace], clocks: Sequence[CommonClock], topology: Topology
) -> list[tuple[int, RankTrace, CommonClock]]:
    """Return of each node the trace with its counters, ascending by node."""
    row_of = {rank: row for row, rank in enumerate(topology.ranks)}
    found: dict[int, tuple[RankTrace, CommonClock]] = {}
    for trace, clock in zip(traces, clocks, strict=True):
        node, num_rows = int(topology.node[row_of[trace.header.rank]]), len(trace.tables["network"])
        if num_rows and clock.num_samples and (node not in found or num_rows > len(found[node][0].tables["network"])):
            found[node] = trace, clock
    return [(node, *found[node]) for node in sorted(found)]


def _use(table: Table, keys: Ints, clock: CommonClock) -> dict[str, Ints]:
    steps = counter_steps(keys, table, _BYTES, KINDS)
    begin_ns, end_ns = (reference_times(clock, times_ns) for times_ns in (steps.begin_ns, steps.end_ns))
    is_sound = (steps.key >= 0) & (end_ns > begin_ns)
    found = {"interface": steps.key, "begin_ns": begin_ns, "end_ns": end_ns, **steps.grown}
    return {name: values[is_sound] for name, values in found.items()}


def _no_use() -> dict[str, Ints]:
    return {name: np.zeros(0, np.int64) for name in ("interface", "begin_ns", "end_ns", *_BYTES, *KINDS)}


def _line_rate_bps(table: Table, is_own: Bools) -> int:
    """Return the usual line rate of an interface in bit/s, 0 if it is not known."""
    seen_bps = table["rate_bps"][is_own & (table["rate_bps"] > 0)]
    return int(np.median(seen_bps)) if len(seen_bps) else 0


_FLOW_BYTES = ("sent_bytes", "acked_bytes", "received_bytes")
_CUMULATIVE = (*_FLOW_BYTES, "retransmitted_bytes", "busy_ns", "receiver_limited_ns", "sender_limited_ns",
               "duplicate_segments")  # fmt: skip
_AT_THE_END = ("rtt_ns", "least_rtt_ns", "unsent_bytes", "segment_bytes")
_MAX_BYTES_PER_NS = 1250
"""Format: 10 Tb/s, more than any host sends: larger differences are damage."""
_BUSY_SLACK_NS = NS_PER_S
"""The kernel counts busy time in jiffies and up to the moment of reading, which is a little later than `time_ns`."""


def flows_of(traces: Sequence[RankTrace], clocks: Sequence[CommonClock], topology: Topology) -> Flows:
    """Return what each connection carried between two samples, connection after connection by time.

    Ranks whose clock is unknown have no flows. Intervals in which a counter fell or jumped further than is possible are
    left out: a connection number that stands for another connection, a damaged row, a counter that started again.

    Args:
        traces: of the ranks; `connections` and `flows` were read.
        clocks: of these ranks.
        topology: places of these ranks, and maybe of more.
    """
    row_of = {rank: row for row, rank in enumerate(topology.ranks)}
    ends = [end for trace in traces for end in _ends(trace, int(topology.node[row_of[trace.header.rank]]))]
    place = {(end.rank, end.number): row for row, end in enumerate(ends)}
    parts = [
        _flows_of_rank(trace.header.rank, trace.tables["flows"], clock, place)
        for trace, clock in zip(traces, clocks, strict=True)
        if clock.num_samples
    ]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else _flow_columns()
    return Flows(connections=_connections(ends, row_of, topology), **columns)


@dataclass(frozen=True, kw_only=True)
class _End:
    """One end of a connection, as a rank lists it.

    Attributes:
        rank, node: who lists it, and the index of its node.
        number: of the connection in the rank's trace.
        first_ns, last_ns: first and last row of its flow on the rank's own clock, 0 without any.
    """

    rank: int
    node: int
    number: int
    peer_rank: int
    peer_host: str
    local: str
    remote: str
    interface: str
    first_ns: int
    last_ns: int


_TEXTS = ("peer_host", "local", "remote", "interface")


def _ends(trace: RankTrace, node: int) -> list[_End]:
    """Return the connections of a rank; of rows with one number the first counts."""
    table, flows = trace.tables["connections"], trace.tables["flows"]
    numbers, first = np.unique(table["connection"], return_index=True)
    order = np.lexsort((flows["time_ns"], flows["connection"]))
    times_ns, of = flows["time_ns"][order], flows["connection"][order]
    begins, ends = (np.searchsorted(of, numbers, side=side) for side in ("left", "right"))
    return [
        _End(
            rank=trace.header.rank,
            node=node,
            number=int(number),
            peer_rank=int(table["peer_rank"][row]),
            **{name: table[name][row].decode("utf-8", "replace") for name in _TEXTS},
            first_ns=int(times_ns[begin]) if begin < end else 0,
            last_ns=int(times_ns[end - 1]) if begin < end else 0,
        )
        for number, row, begin, end in zip(numbers, first, begins, ends, strict=True)
        if number >= 0
    ]


def _flows_of_rank(
    rank: int, table: Table, clock: CommonClock, place: Mapping[tuple[int, int], int]
) -> dict[str, Ints]:
    """Return the columns of `Flows` for one rank, with the flags in place of what they mean."""
    numbers = table["connection"].astype(np.int64)
    listed = np.unique(numbers)
    known = {**place, (rank, OTHER_CONNECTIONS): OTHER_CONNECTIONS}
    rows = np.array([known.get((rank, number), -2) for number in listed.tolist()], np.int64)
    steps = counter_steps(numbers, table, _CUMULATIVE)
    connection = rows[np.searchsorted(listed, steps.key)] if len(listed) else steps.key
    is_sound = (connection > -2) & _is_possible(steps, connection)
    begin_ns, end_ns = (reference_times(clock, times_ns) for times_ns in (steps.begin_ns, steps.end_ns))
    is_sound &= end_ns > begin_ns
    found = {"connection": connection, "begin_ns": begin_ns, "end_ns": end_ns}
    found |= {name: steps.grown[name] for name in _CUMULATIVE}
    for name in ("receiver_limited_ns", "sender_limited_ns"):
        found[name] = np.minimum(found[name], found["busy_ns"])
    found |= {name: np.maximum(table[name][steps.last_row].astype(np.int64), 0) for name in _AT_THE_END}
    return {name: values[is_sound] for name, values in found.items()}


def _flow_columns() -> dict[str, Ints]:
    names = ("connection", "begin_ns", "end_ns", *_CUMULATIVE, *_AT_THE_END)
    return {name: np.zeros(0, np.int64) for name in names}


def _is_possible(steps: CounterSteps, connection: Ints) -> Bools:
    """Return which differences a connection can have made, bool, (num_steps,)."""
    length_ns = steps.end_ns - steps.begin_ns
    most_bytes = np.minimum(length_ns, np.iinfo(np.int64).max // _MAX_BYTES_PER_NS) * _MAX_BYTES_PER_NS
    possible: Bools = np.logical_and.reduce([steps.grown[name] <= most_bytes for name in _FLOW_BYTES])
    # Connections that are summed up are busy at the same time.
    possible &= (steps.grown["busy_ns"] <= length_ns + _BUSY_SLACK_NS) | (connection == OTHER_CONNECTIONS)
    return possible


def _connections(ends: Sequence[_End], row_of: Mapping[int, int], topology: Topology) -> Connections:
    mirror = defaultdict[tuple[str, str], list[_End]](list)
    nodes_at = defaultdict[str, set[int]](set)
    node_of_host = {name: node for node, name in enumerate(topology.node_names)}
    for end in ends:
        mirror[end.local, end.remote].append(end)
        nodes_at[_address(end.local)].add(end.node)
    peers = []
    for end in ends:
        peer = _meeting(end, [other for other in mirror[end.remote, end.local] if other.rank != end.rank])
        rank = end.peer_rank if peer is None else peer.rank
        at_address = nodes_at.get(_address(end.remote), set())
        if rank in row_of:
            node = int(topology.node[row_of[rank]])
        else:
            node = min(at_address) if len(at_address) == 1 else node_of_host.get(end.peer_host, -1)
        peers.append((rank, node))
    own = np.array([(end.rank, end.node) for end in ends], np.int64).reshape(-1, 2)
    others = np.array(peers, np.int64).reshape(-1, 2)
    return Connections(
        rank=own[:, 0],
        peer_rank=others[:, 0],
        node=own[:, 1],
        peer_node=others[:, 1],
        local=tuple(end.local for end in ends),
        remote=tuple(end.remote for end in ends),
        interface=tuple(end.interface for end in ends),
    )


def _meeting(end: _End, peers: Sequence[_End]) -> _End | None:
    """Return the other end: of several ranks that had these addresses, the one that had them at the same time.

    Clocks of hosts count from boot, but ports are reused after minutes only: where several ranks fit, none is named.
    """
    if len({peer.rank for peer in peers}) > 1:
        peers = [peer for peer in peers if peer.first_ns <= end.last_ns and end.first_ns <= peer.last_ns]
    return peers[0] if len({peer.rank for peer in peers}) == 1 else None


def _address(text: str) -> str:
    """Return an address without its port."""
    return text.rpartition(":")[0]
