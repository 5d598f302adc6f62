"""What the traces of an attempt say of the network interfaces of its hosts: counters become differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpcpace.metrics.clocks.common_clock import CommonClock
from hpcpace.metrics.clocks.rank_clocks import reference_times
from hpcpace.metrics.network.counter_steps import counter_steps
from hpcpace.metrics.network.flow_tables import BoolArray, IntArray, InterfaceUse
from hpcpace.metrics.topology import Topology
from hpcpace.trace.tables import RankTrace, Table

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
