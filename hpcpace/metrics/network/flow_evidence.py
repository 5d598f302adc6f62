"""Evidence from connections and interfaces: counters of traces as differences over time.

Nobody tells a rank who is at the other end of a connection. The two ends of a connection list the same addresses the
other way round, so the traces of all ranks tell it without a message in the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_S
from hpcpace.metrics.clocks.common_clock import CommonClock, reference_times
from hpcpace.metrics.network.flow_tables import BoolArray, Connections, Flows, IntArray, InterfaceUse
from hpcpace.metrics.topology import Topology
from hpcpace.trace.schema import OTHER_CONNECTIONS, FlowFlag
from hpcpace.trace.tables import RankTrace, Table

_MOST = 1 << 60


@dataclass(frozen=True, kw_only=True)
class CounterSteps:
    """What counters grew by from one sample to the next, by key and time.

    Attributes:
        key: whose counters, (num_steps,).
        begin_ns, end_ns: times of both samples, as recorded, (num_steps,).
        last_row: row of the later sample, (num_steps,).
        grown: by column what was added, (num_steps,) each.
    """

    key: IntArray
    begin_ns: IntArray
    end_ns: IntArray
    last_row: IntArray
    grown: dict[str, IntArray]


def counter_steps(
    keys: IntArray, table: Mapping[str, NDArray[Any]], columns: Sequence[str], resettable: Sequence[str] = ()
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
    is_sound = (times_ns > -_MOST) & (times_ns < _MOST)
    for name in (*columns, *resettable):
        is_sound &= (table[name] >= 0) & (table[name] < _MOST)
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
_EVENTS = ("errors", "drops", "pauses", "marks", "retransmits", "link_downs")
_LOOPBACK = "lo"


def interface_use(
    traces: Sequence[RankTrace],
    clocks: Sequence[CommonClock],
    topology: Topology,
    line_rates_bps: Mapping[tuple[str, str], int] | None = None,
) -> InterfaceUse:
    """Return what each interface carried between two samples, interface after interface by time.

    The loopback interface is left out, and so are hosts whose clock is unknown. Of several ranks of a host that have
    counters, the one with most rows counts.

    Args:
        traces: of the ranks; `network` was read.
        clocks: of these ranks.
        topology: places of these ranks, and maybe of more.
        line_rates_bps: line rate in bit/s by (host, interface), of what was found when the job began. Where the trace
            has another one, the lower one counts: a shaped interface, or one that agreed on less than it can.
    """
    names: list[tuple[str, str]] = []
    nodes: list[int] = []
    rates: list[int] = []
    parts: list[dict[str, IntArray]] = []
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
        rates += [
            _line_rate(table, keys == number[name], (line_rates_bps or {}).get((host, name), 0)) for name in known
        ]
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


def _use(table: Table, keys: IntArray, clock: CommonClock) -> dict[str, IntArray]:
    steps = counter_steps(keys, table, _BYTES, _EVENTS)
    begin_ns, end_ns = (reference_times(clock, times_ns) for times_ns in (steps.begin_ns, steps.end_ns))
    is_sound = (steps.key >= 0) & (end_ns > begin_ns)
    found = {"interface": steps.key, "begin_ns": begin_ns, "end_ns": end_ns, **steps.grown}
    return {name: values[is_sound] for name, values in found.items()}


def _no_use() -> dict[str, IntArray]:
    return {name: np.zeros(0, np.int64) for name in ("interface", "begin_ns", "end_ns", *_BYTES, *_EVENTS)}


def _line_rate(table: Table, is_own: BoolArray, at_start_bps: int) -> int:
    """Return the usual line rate of an interface in bit/s, 0 if it is not known."""
    seen_bps = table["rate_bps"][is_own & (table["rate_bps"] > 0)]
    rates = [rate for rate in (int(np.median(seen_bps)) if len(seen_bps) else 0, at_start_bps) if rate > 0]
    return min(rates, default=0)


_CUMULATIVE = (
    "sent_bytes",
    "acked_bytes",
    "received_bytes",
    "retransmitted_bytes",
    "busy_ns",
    "receiver_limited_ns",
    "sender_limited_ns",
    "marked_packets",
)
_FLOW_BYTES = ("sent_bytes", "acked_bytes", "received_bytes")
_AT_THE_END = ("rtt_ns", "least_rtt_ns", "delivery_bytes_per_s", "unsent_bytes", "segment_bytes")
_MOST_BYTES_PER_NS = 1250
"""10 Tb/s, more than any host sends: larger differences are damage."""
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
    nodes = [int(topology.node[row_of[trace.header.rank]]) for trace in traces]
    ends = [end for index, trace in enumerate(traces) for end in _ends(index, trace)]
    place = {(end.trace, end.number): row for row, end in enumerate(ends)}
    parts = [
        _flows_of_rank(index, trace.tables["flows"], clock, place)
        for index, (trace, clock) in enumerate(zip(traces, clocks, strict=True))
        if clock.num_samples
    ]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else _flow_columns()
    return Flows(
        connections=_connections(ends, traces, nodes, row_of, topology),
        is_application_limited=(columns.pop("flags") & FlowFlag.APPLICATION_LIMITED) > 0,
        delivery_bytes_per_s=columns.pop("delivery_bytes_per_s").astype(np.float64),
        **columns,
    )


@dataclass(frozen=True, kw_only=True)
class _End:
    """One end of a connection, as a rank lists it.

    Attributes:
        trace: index of the rank's trace.
        number: of the connection in this trace.
        first_ns, last_ns: first and last row of its flow on the rank's own clock, 0 without any.
    """

    trace: int
    number: int
    peer_rank: int
    peer_host: str
    local: str
    remote: str
    interface: str
    first_ns: int
    last_ns: int


def _ends(index: int, trace: RankTrace) -> list[_End]:
    """Return the connections of a rank; of rows with one number the first counts."""
    table, flows = trace.tables["connections"], trace.tables["flows"]
    numbers, first = np.unique(table["connection"], return_index=True)
    order = np.lexsort((flows["time_ns"], flows["connection"]))
    times_ns, of = flows["time_ns"][order], flows["connection"][order]
    begins, ends = (np.searchsorted(of, numbers, side=side) for side in ("left", "right"))
    return [
        _End(
            trace=index,
            number=int(number),
            peer_rank=int(table["peer_rank"][row]),
            peer_host=_text(table["peer_host"][row]),
            local=_text(table["local"][row]),
            remote=_text(table["remote"][row]),
            interface=_text(table["interface"][row]),
            first_ns=int(times_ns[begin]) if begin < end else 0,
            last_ns=int(times_ns[end - 1]) if begin < end else 0,
        )
        for number, row, begin, end in zip(numbers, first, begins, ends, strict=True)
        if number >= 0
    ]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _flows_of_rank(
    index: int, table: Table, clock: CommonClock, place: Mapping[tuple[int, int], int]
) -> dict[str, IntArray]:
    """Return the columns of `Flows` for one rank, with the flags in place of what they mean."""
    numbers = table["connection"].astype(np.int64)
    listed = np.unique(numbers)
    rows = np.array(
        [OTHER_CONNECTIONS if number == OTHER_CONNECTIONS else place.get((index, number), -2) for number in listed],
        np.int64,
    )
    steps = counter_steps(numbers, table, _CUMULATIVE)
    found = _flow_columns()
    connection = rows[np.searchsorted(listed, steps.key)] if len(listed) else steps.key
    is_sound = (connection > -2) & _is_possible(steps, connection)
    begin_ns, end_ns = (reference_times(clock, times_ns) for times_ns in (steps.begin_ns, steps.end_ns))
    is_sound &= end_ns > begin_ns
    found |= {"connection": connection, "begin_ns": begin_ns, "end_ns": end_ns}
    found |= {name: steps.grown[name] for name in _CUMULATIVE}
    for name in ("receiver_limited_ns", "sender_limited_ns"):
        found[name] = np.minimum(found[name], found["busy_ns"])
    found |= {name: np.maximum(table[name][steps.last_row].astype(np.int64), 0) for name in _AT_THE_END}
    found["flags"] = table["flags"][steps.last_row].astype(np.int64)
    return {name: values[is_sound] for name, values in found.items()}


def _flow_columns() -> dict[str, IntArray]:
    names = ("connection", "begin_ns", "end_ns", *_CUMULATIVE, *_AT_THE_END, "flags")
    return {name: np.zeros(0, np.int64) for name in names}


def _is_possible(steps: CounterSteps, connection: IntArray) -> BoolArray:
    """Return which differences a connection can have made, bool, (num_steps,)."""
    length_ns = steps.end_ns - steps.begin_ns
    most_bytes = np.minimum(length_ns, np.iinfo(np.int64).max // _MOST_BYTES_PER_NS) * _MOST_BYTES_PER_NS
    possible: BoolArray = np.logical_and.reduce([steps.grown[name] <= most_bytes for name in _FLOW_BYTES])
    # Connections that are summed up are busy at the same time.
    possible &= (steps.grown["busy_ns"] <= length_ns + _BUSY_SLACK_NS) | (connection == OTHER_CONNECTIONS)
    return possible


def _connections(
    ends: Sequence[_End],
    traces: Sequence[RankTrace],
    nodes: Sequence[int],
    row_of: Mapping[int, int],
    topology: Topology,
) -> Connections:
    mirror = defaultdict[tuple[str, str], list[_End]](list)
    nodes_at = defaultdict[str, set[int]](set)
    node_of_host = {name: node for node, name in enumerate(topology.node_names)}
    for end in ends:
        mirror[end.local, end.remote].append(end)
        nodes_at[_address(end.local)].add(nodes[end.trace])
    peer_ranks, peer_nodes = [], []
    for end in ends:
        peer = _meeting(end, [other for other in mirror[end.remote, end.local] if other.trace != end.trace])
        rank = end.peer_rank if peer is None else traces[peer.trace].header.rank
        at_address = nodes_at.get(_address(end.remote), set())
        if rank in row_of:
            node = int(topology.node[row_of[rank]])
        elif len(at_address) == 1:
            node = min(at_address)
        else:
            node = node_of_host.get(end.peer_host, -1)
        peer_ranks.append(rank)
        peer_nodes.append(node)
    return Connections(
        rank=np.array([traces[end.trace].header.rank for end in ends], np.int64),
        peer_rank=np.array(peer_ranks, np.int64),
        node=np.array([nodes[end.trace] for end in ends], np.int64),
        peer_node=np.array(peer_nodes, np.int64),
        local=tuple(end.local for end in ends),
        remote=tuple(end.remote for end in ends),
        interface=tuple(end.interface for end in ends),
    )


def _meeting(end: _End, peers: Sequence[_End]) -> _End | None:
    """Return the other end: of several ranks that had these addresses, the one that had them at the same time.

    Clocks of hosts count from boot, but ports are reused after minutes only: where several ranks fit, none is named.
    """
    if len({peer.trace for peer in peers}) > 1:
        peers = [peer for peer in peers if peer.first_ns <= end.last_ns and end.first_ns <= peer.last_ns]
    return peers[0] if len({peer.trace for peer in peers}) == 1 else None


def _address(text: str) -> str:
    """Return an address without its port."""
    return text.rpartition(":")[0]
