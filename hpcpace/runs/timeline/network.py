"""What interfaces and connections carried, as counters: a process for each host, and the flows of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_US
from hpcpace.metrics.flows import Flows, InterfaceUse, flows_of, interface_use
from hpcpace.metrics.topology import Topology, topology_of
from hpcpace.runs.timeline.steps import ShownSteps
from hpcpace.runs.timeline.tracks import Counter, Process, shown_name

_MOST_CONNECTIONS = 8  # of a rank, those that carried most
_BITS = 8
_EVENTS = ("errors", "drops", "pauses", "marks")
_RATES = {"sent": "sent_bytes", "received": "received_bytes"}
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Network:
    """The network counters of the steps, read once a second, so that each may cover several steps."""

    shown: ShownSteps

    @cached_property
    def _topology(self) -> Topology:
        headers = [trace.header for trace in self.shown.recorded]
        return topology_of(
            ranks=[header.rank for header in headers],
            nodes=[header.node for header in headers],
            hosts=[header.host for header in headers],
            addresses=[header.topology_addr for header in headers],
        )

    @cached_property
    def _use(self) -> InterfaceUse:
        return interface_use(self.shown.recorded, self.shown.timed.clocks, self._topology)

    @cached_property
    def _flows(self) -> Flows:
        return flows_of(self.shown.recorded, self.shown.timed.clocks, self._topology)

    def _near(self, begin_ns: Int64Array, end_ns: Int64Array) -> NDArray[np.bool_]:
        first_ns, last_ns = self.shown.span_ns
        return np.asarray((end_ns > first_ns) & (begin_ns < last_ns))

    def hosts(self, first_number: int) -> Iterator[Process]:
        """Yield a process for each host with interfaces, numbered from `first_number` on."""
        use = self._use
        near = self._near(use.begin_ns, use.end_ns)
        by_host: dict[str, list[Counter]] = {}
        for number, (host, name) in enumerate(use.names):
            rows = np.flatnonzero(near & (use.interface == number))
            if len(rows):
                by_host.setdefault(host, []).extend(_of_interface(use, rows, shown_name(name)))
        for number, (host, counters) in enumerate(by_host.items(), start=first_number):
            yield Process(name=f"network of {shown_name(host)}", number=number, counters=counters)

    def flows(self, rank: int) -> Iterator[Counter]:
        """Yield the counters of the connections of a rank to other hosts that carried most."""
        flows, ends = self._flows, self._flows.connections
        mine = np.flatnonzero(ends.rank == rank)
        if not len(mine):
            return
        near = self._near(flows.begin_ns, flows.end_ns) & np.isin(flows.connection, mine)
        carried = np.bincount(
            flows.connection[near],
            weights=(flows.acked_bytes + flows.received_bytes)[near],
            minlength=len(ends.rank),
        )
        for connection in sorted(mine.tolist(), key=lambda row: -carried[row])[:_MOST_CONNECTIONS]:
            rows = np.flatnonzero(near & (flows.connection == connection))
            if len(rows):
                peer = int(ends.peer_rank[connection])
                to = f"rank {peer}" if peer >= 0 else shown_name(ends.remote[connection])
                yield from _of_flow(flows, rows, f"to {to}")


def _of_interface(use: InterfaceUse, rows: Int64Array, name: str) -> Iterator[Counter]:
    times = use.begin_ns[rows], use.end_ns[rows]
    for what, column in _RATES.items():
        yield _counter(f"{name} {what}", "Gbit/s", *times, _gbps(getattr(use, column)[rows], *times))
    for event in _EVENTS:
        counts = getattr(use, event)[rows]
        if counts.any():
            yield _counter(f"{name} {event}", "count", *times, counts.astype(np.float64))


def _of_flow(flows: Flows, rows: Int64Array, name: str) -> Iterator[Counter]:
    times = flows.begin_ns[rows], flows.end_ns[rows]
    columns: Mapping[tuple[str, str], NDArray[np.float64]] = {
        ("acknowledged", "Gbit/s"): _gbps(flows.acked_bytes[rows], *times),
        ("round trip", "us"): flows.rtt_ns[rows] / NS_PER_US,
        ("sent again", "Gbit/s"): _gbps(flows.retransmitted_bytes[rows], *times),
        ("not yet sent", "bytes"): flows.unsent_bytes[rows].astype(np.float64),
    }
    for (what, unit), values in columns.items():
        if values.any():
            yield _counter(f"{name} {what}", unit, *times, values)


def _gbps(size_bytes: Int64Array, begin_ns: Int64Array, end_ns: Int64Array) -> NDArray[np.float64]:
    return np.asarray(_BITS * size_bytes / np.maximum(end_ns - begin_ns, 1))


def _counter(name: str, unit: str, begin_ns: Int64Array, end_ns: Int64Array, values: NDArray[np.float64]) -> Counter:
    """Return a counter that has each value over its interval, and 0 where there is none."""
    is_last = np.append(begin_ns[1:] > end_ns[:-1], True)
    times_ns = np.concatenate([begin_ns, end_ns[is_last]])
    order = np.argsort(times_ns, kind="stable")
    return Counter(
        name=name, unit=unit, time_ns=times_ns[order], values=np.append(values, np.zeros(int(is_last.sum())))[order]
    )
