"""How busy each network interface was, and which part of its traffic was this job's.

Interfaces count the frames of everybody on a host, connections only what this job sends. The difference is foreign:
other jobs, but also what this job moves past the connections of its ranks, such as files and checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.flows import Flows, InterfaceUse

SENT, RECEIVED = 0, 1
"""Rows of the first dimension of loads."""

_MAX_CELLS = 4_000_000  # memory: of all interfaces
_USUAL_MTU = 1500  # format: of Ethernet
_ETHERNET_BYTES, _IP_BYTES, _TCP_BYTES = 14, 20, 32  # format: headers, TCP with timestamps: docs/measuring.md
_HEADER_BYTES = _ETHERNET_BYTES + _IP_BYTES + _TCP_BYTES
_MORE_OF_IPV6 = 20  # format: bytes by which its header is longer
_ACKNOWLEDGED_BYTES = 65536  # format: by one acknowledgement, where Linux joins segments before TCP sees them
_MIN_ACKNOWLEDGED = 2  # format: segments, by RFC 5681, section 4.2


@dataclass(frozen=True, kw_only=True)
class LoadThresholds(Thresholds, topic="network"):
    """When it is known what interfaces carried, and for whom."""

    min_covered_share: float = number(0.5, "share")
    """Share of a cell of time that must be sampled for its bytes to be known."""
    carried_part: float = number(0.9, "share")
    """Part of the job's bytes of a host that an interface must have counted to be the one that carries them."""


@dataclass(frozen=True, kw_only=True)
class InterfaceLoads:
    """Bytes of each interface over time, in cells of equal length.

    Attributes:
        names: (host, interface), (num_interfaces,).
        node: index of the host in the names of the topology's nodes, (num_interfaces,).
        line_rate_bps: line rate in bit/s, 0 unknown, (num_interfaces,).
        edges_ns: ends of the cells on the common clock, int64, (num_cells + 1,).
        total_bytes: bytes sent and received, with headers, (2, num_interfaces, num_cells); NaN where not known.
        job_bytes: those of this job's connections, with headers by formula, likewise; NaN where not known.
        slack_bytes: by how much headers and acknowledgements may make `job_bytes` wrong, likewise.
        carries_job: whether the interface carries the job's connections of its host, (num_interfaces,); False also
            where that is unknown.
    """

    names: tuple[tuple[str, str], ...]
    node: Ints
    line_rate_bps: Ints
    edges_ns: Ints
    total_bytes: Floats
    job_bytes: Floats
    slack_bytes: Floats
    carries_job: Bools

    @property
    def cell_s(self) -> float:
        """Length of a cell in seconds, 1 but for long runs of many interfaces."""
        return float(self.edges_ns[1] - self.edges_ns[0]) / NS_PER_S

    @property
    def foreign_bytes(self) -> Floats:
        """Bytes that were not this job's, (2, num_interfaces, num_cells); NaN where not known.

        What samples at different times put into the wrong cell cancels out in sums over cells, so single cells may be
        below 0.
        """
        return self.total_bytes - self.job_bytes


@dataclass(frozen=True, kw_only=True)
class InterfaceTotals:
    """What each interface carried on the whole; each (2, num_interfaces): sent, received. NaN where not known.

    Attributes:
        bytes_per_s: mean over the cells that are known.
        peak_bytes_per_s: of the busiest cell.
        foreign_bytes_per_s: mean of what was not this job's, at least 0.
        slack_bytes_per_s: by how much headers may make that wrong.
    """

    bytes_per_s: Floats
    peak_bytes_per_s: Floats
    foreign_bytes_per_s: Floats
    slack_bytes_per_s: Floats

    @property
    def is_foreign(self) -> Bools:
        """Whether more was foreign than headers can explain."""
        return np.asarray(self.foreign_bytes_per_s > self.slack_bytes_per_s)


def interface_totals(loads: InterfaceLoads) -> InterfaceTotals:
    """Return means and peaks over time."""
    foreign = _mean(loads.foreign_bytes)
    peak = np.fmax.reduce(loads.total_bytes, axis=2)
    return InterfaceTotals(
        bytes_per_s=_mean(loads.total_bytes) / loads.cell_s,
        peak_bytes_per_s=peak / loads.cell_s,
        foreign_bytes_per_s=np.maximum(foreign, 0.0) / loads.cell_s,
        slack_bytes_per_s=_mean(np.where(np.isnan(loads.job_bytes), np.nan, loads.slack_bytes)) / loads.cell_s,
    )


def _mean(values: Floats) -> Floats:
    """Return the mean over the cells that are known, (2, num_interfaces); NaN where none is."""
    is_known = np.isfinite(values)
    count = is_known.sum(axis=2)
    sums = np.where(is_known, values, 0.0).sum(axis=2)
    return np.asarray(np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0))


def interface_loads(
    use: InterfaceUse,
    flows: Flows | None,
    *,
    begin_ns: int,
    end_ns: int,
    is_recorded: Bools,
    mtu: Ints | None = None,
    limits: LoadThresholds = LoadThresholds(),
) -> InterfaceLoads:
    """Return what interfaces carried between two times, and what of it was this job's.

    A connection belongs to the interface that has its local address. Where that is not recorded, and one interface of
    the host alone carried at least the bytes of its connections, they are its. Otherwise, and where an interface
    carried less than its connections, as where samples come late, `job_bytes` is not known. Counters of RDMA do not say
    whose bytes they count.

    Args:
        use: counters of interfaces; without the loopback, and without members of bonds and bridges, whose bytes are
            counted twice.
        flows: the connections of all ranks; None in traces without them.
        begin_ns, end_ns: from when to when, on the common clock, at least a nanosecond.
        is_recorded: of which nodes all ranks recorded all of their connections, (num_nodes,).
        mtu: of each interface of `use`, 0 unknown, which counts as 1500.
        limits: when bytes are known.
    """
    edges_ns = cell_edges(begin_ns, end_ns, len(use.names))
    counters, least = (use.sent_bytes, use.received_bytes), limits.min_covered_share
    total_bytes = np.stack([_interface_cells(use, edges_ns, values, least) for values in counters])
    job_bytes, slack_bytes = np.full(total_bytes.shape, np.nan), np.zeros(total_bytes.shape)
    carries_job = np.zeros(len(use.names), np.bool_)
    if flows is not None:
        is_ethernet = ~np.array([is_rdma(name) for _, name in use.names], np.bool_)
        flow_rows = _rows_by_node(flows, len(is_recorded))
        for node in np.flatnonzero(is_recorded).tolist():
            rows = np.flatnonzero((use.node == node) & is_ethernet)
            names = [use.names[row][1] for row in rows.tolist()]
            payload = _payload_by_interface(
                flows, flow_rows[node], names, total_bytes[:, rows], edges_ns, limits.carried_part
            )
            if payload is None:
                listed = np.array(flows.connections.interface)
                carries_job[rows] = np.isin(names, listed[flows.connections.node == node] if len(listed) else [])
                continue
            for row, of_row in zip(rows.tolist(), payload.transpose(1, 0, 2), strict=True):
                size = int(mtu[row]) if mtu is not None and mtu[row] > 0 else _USUAL_MTU
                framed, slack_bytes[:, row] = wire_bytes(of_row, size, has_ipv6=_has_ipv6(flows, node))
                job_bytes[:, row] = np.where(np.isfinite(total_bytes[:, row]), framed, np.nan)
                carries_job[row] = of_row.any()
    return InterfaceLoads(
        names=use.names,
        node=use.node,
        line_rate_bps=use.line_rate_bps,
        edges_ns=edges_ns,
        total_bytes=total_bytes,
        job_bytes=job_bytes,
        slack_bytes=slack_bytes,
        carries_job=carries_job,
    )


def summed_up_share(flows: Flows) -> float:
    """Return the share of all bytes that connections carried whose rank and interface are not known."""
    carried = flows.sent_bytes + flows.received_bytes
    return float(carried[flows.connection < 0].sum() / max(int(carried.sum()), 1))


def is_rdma(interface: str) -> bool:
    """Return whether an interface is a port of an RDMA adapter or of Slingshot, whose counters are not of TCP."""
    return "/" in interface or interface.startswith("cxi")


def select_interfaces(use: InterfaceUse, is_meant: Bools) -> InterfaceUse:
    """Return the counters of some interfaces, numbered anew; `is_meant` is of each, (num_interfaces,)."""
    number = np.where(is_meant, np.cumsum(is_meant) - 1, -1)
    rows = is_meant[use.interface]
    columns = ("begin_ns", "end_ns", "sent_bytes", "received_bytes", "errors", "drops", "pauses", "marks")
    return replace(
        use,
        names=tuple(name for name, is_one in zip(use.names, is_meant.tolist(), strict=True) if is_one),
        node=use.node[is_meant],
        line_rate_bps=use.line_rate_bps[is_meant],
        interface=number[use.interface[rows]],
        **{name: getattr(use, name)[rows] for name in columns},
    )


def cell_edges(begin_ns: int, end_ns: int, num_interfaces: int) -> Ints:
    """Return the ends of cells of whole seconds that cover a time: as short as memory for all interfaces allows."""
    num_seconds = max(-(-(end_ns - begin_ns) // NS_PER_S), 1)
    cell_ns = -(-num_seconds * max(num_interfaces, 1) // _MAX_CELLS) * NS_PER_S
    num_cells = max((end_ns - begin_ns) // cell_ns, 1)
    return begin_ns + cell_ns * np.arange(num_cells + 1, dtype=np.int64)


def wire_bytes(payload: Floats, mtu: int, *, has_ipv6: bool = False) -> tuple[Floats, Floats]:
    """Return what payload takes in frames in both directions, and how much of it is uncertain.

    Counters of adapters have the headers of each segment, those of virtual links one header for up to 64 KiB. What is
    received is acknowledged once for 64 KiB to once for two segments (docs/measuring.md).

    Args:
        payload: bytes sent and received, (2, ...).
        mtu: largest IP packet, in bytes.
        has_ipv6: whether headers are those of IPv6.
    """
    header_bytes = _HEADER_BYTES + _MORE_OF_IPV6 * has_ipv6
    segment_bytes = max(mtu - header_bytes + _ETHERNET_BYTES, 1)
    back = payload[::-1]
    headers = payload * (header_bytes / segment_bytes)
    few_acks = back * (header_bytes / _ACKNOWLEDGED_BYTES)
    most_acks = back * (header_bytes / (_MIN_ACKNOWLEDGED * segment_bytes))
    return payload + headers + few_acks, np.maximum(headers, most_acks)


def spread(begin_ns: Ints, end_ns: Ints, values: NDArray[np.number], edges_ns: Ints) -> Floats:
    """Return how much of values that accrued evenly over intervals fell into each cell, (num_cells,).

    Args:
        begin_ns, end_ns: the intervals, (num_rows,); empty ones count for nothing.
        values: what accrued, (num_rows,).
        edges_ns: ascending, (num_cells + 1,).
    """
    is_whole = end_ns > begin_ns
    begin_ns, end_ns = begin_ns[is_whole], end_ns[is_whole]
    origin_ns = int(edges_ns[0])  # doubles hold times since the first edge to the nanosecond
    rate = values[is_whole].astype(np.float64) / (end_ns - begin_ns)
    times = np.concatenate([begin_ns, end_ns]) - origin_ns
    if not len(times):
        return np.zeros(len(edges_ns) - 1)
    order = np.argsort(times, kind="stable")
    times, rates = times[order], np.cumsum(np.concatenate([rate, -rate])[order])
    so_far = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(times))])
    return np.diff(np.interp(edges_ns - origin_ns, times, so_far))


def _interface_cells(use: InterfaceUse, edges_ns: Ints, values: Ints, least_share: float) -> Floats:
    """Return the bytes of each interface in each cell; NaN where less of a cell was sampled."""
    cells = np.full((len(use.names), len(edges_ns) - 1), np.nan)
    length_ns = float(edges_ns[1] - edges_ns[0])
    order = np.argsort(use.interface, kind="stable")
    ends = np.searchsorted(use.interface[order], np.arange(len(use.names) + 1))
    for index in range(len(use.names)):
        rows = order[ends[index] : ends[index + 1]]
        begin_ns, end_ns = use.begin_ns[rows], use.end_ns[rows]
        covered = spread(begin_ns, end_ns, end_ns - begin_ns, edges_ns) / length_ns
        found = spread(begin_ns, end_ns, values[rows], edges_ns)
        is_known = covered >= least_share
        cells[index, is_known] = found[is_known] / covered[is_known]
    return cells


def _rows_by_node(flows: Flows, num_nodes: int) -> list[Ints]:
    """Return the rows of the connections of each node."""
    node = np.append(flows.connections.node, -1)[flows.connection]
    order = np.argsort(node, kind="stable")
    return np.split(order, np.searchsorted(node[order], np.arange(num_nodes + 1)))[1:-1]


def _payload_by_interface(
    flows: Flows, rows: Ints, names: Sequence[str], total_bytes: Floats, edges_ns: Ints, carried_part: float
) -> Floats | None:
    """Return the payload of a node's connections by interface, (2, num_interfaces, num_cells); None if not known.

    Args:
        flows: of all nodes.
        rows: those of the node.
        names: its interfaces.
        total_bytes: what they carried, (2, num_interfaces, num_cells).
        edges_ns: ends of the cells.
        carried_part: as of `LoadThresholds`.
    """
    listed = flows.connections.interface
    connections, of = np.unique(flows.connection[rows], return_inverse=True)
    places = [names.index(listed[row]) if listed and listed[row] in names else -1 for row in connections.tolist()]
    place = np.array(places, np.int64)[of]
    payload = np.zeros((2, len(names), len(edges_ns) - 1))
    for own in np.unique(place[place >= 0]).tolist():
        payload[:, own] = _payload(flows, rows[place == own], edges_ns)
    unplaced = _payload(flows, rows[place < 0], edges_ns)
    if unplaced.any():
        carrier = _carrier(total_bytes, payload, unplaced, carried_part)
        if carrier < 0:
            return None
        payload[:, carrier] += unplaced
    return payload if _could_carry(total_bytes, payload, carried_part).all() else None


def _payload(flows: Flows, rows: Ints, edges_ns: Ints) -> Floats:
    """Return the payload of some rows in each cell, (2, num_cells)."""
    begin_ns, end_ns = flows.begin_ns[rows], flows.end_ns[rows]
    return np.stack(
        [spread(begin_ns, end_ns, values[rows], edges_ns) for values in (flows.sent_bytes, flows.received_bytes)]
    )


def _has_ipv6(flows: Flows, node: int) -> bool:
    return any(flows.connections.local[row].startswith("[") for row in np.flatnonzero(flows.connections.node == node))


def _carrier(total_bytes: Floats, payload: Floats, more: Floats, carried_part: float) -> int:
    """Return the one interface that carried `more` on top of its payload, -1 where none or several may have.

    Args:
        total_bytes, payload: of the interfaces of a node, (2, num_interfaces, num_cells).
        more: (2, num_cells).
        carried_part: as of `LoadThresholds`.
    """
    could = np.flatnonzero(_could_carry(total_bytes, payload + more[:, None, :], carried_part))
    return int(could[0]) if len(could) == 1 else -1


def _could_carry(total_bytes: Floats, payload: Floats, carried_part: float) -> Bools:
    """Return which interfaces carried at least a payload in both directions, (num_interfaces,)."""
    is_known: Bools = np.isfinite(total_bytes[SENT]) & np.isfinite(total_bytes[RECEIVED])
    carried = np.where(is_known, total_bytes, 0.0).sum(axis=2)
    asked = np.where(is_known, payload, 0.0).sum(axis=2)
    is_any = is_known.any(axis=1) | ~payload.any(axis=(0, 2))
    return np.asarray((carried >= carried_part * asked).all(axis=0) & is_any)
