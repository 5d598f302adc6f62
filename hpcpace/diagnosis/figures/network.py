"""Traffic of interfaces and connections during the used steps: section and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.credible import CredibleRun
from hpcpace.diagnosis.network_summary import (
    DirectionUse,
    HostRetransmissions,
    InterfaceRow,
    NetworkFigures,
    PairRow,
    RateSource,
)
from hpcpace.diagnosis.plot_data import InterfaceLine, NetworkPlots
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.flows import (
    KINDS,
    Flows,
    InterfaceUse,
    PairTraffic,
    RaisedThresholds,
    interface_events,
    is_raised,
    node_pairs,
    rank_pairs,
    retransmitted,
    usual_rate,
)
from hpcpace.metrics.interface_use import (
    RECEIVED,
    SENT,
    InterfaceLoads,
    InterfaceTotals,
    LoadThresholds,
    interface_loads,
    interface_totals,
    is_rdma,
    select_interfaces,
    summed_up_share,
)
from hpcpace.metrics.topology import Topology

if TYPE_CHECKING:
    from hpcpace.audit.facts import Snapshot

_PER_GIGA, _PER_MEGA = 10**9, 10**6  # format: units
_LOOPBACK = "lo"
_BITS = 8  # format: bits of a byte
_USUAL_SEGMENT_BYTES = 1448  # format: payload of a packet, in which bytes that were sent are counted
_MAX_PAIRS, _MAX_LINES, _MAX_HOSTS = 2000, 1024, 1024  # display: rows of the summary and lines and hosts of the plots


@dataclass(frozen=True, kw_only=True)
class NetworkThresholds(Thresholds, topic="network"):
    """When figures of the network are worth reporting."""

    least_foreign_share: float = number(0.05, "share")
    """Share of the line rate, or else of the bytes, from which foreign traffic is reported."""
    compared_part: float = number(0.1, "share")
    """Part of the bytes of the pair with most from which the rate of a pair counts for the median."""
    listed_part: float = number(0.01, "share")
    """Part of the bytes of the pair with most from which a pair is listed before others and has a rate on the map: the
    rate of small messages is that of round trips."""
    max_summed_up_share: float = number(0.02, "share")
    """Share of bytes in connections recorded as sums up to which foreign traffic is known nevertheless."""


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """The time of the used steps.

    Attributes:
        begin_ns, end_ns: on the common clock.
        num_steps: steps from the first to the last of them, those without detail included.
        step: numbers of the used steps, ascending, (num_used,).
        step_begin_ns: when the first rank began each of them, on the common clock, (num_used,).
    """

    begin_ns: int
    end_ns: int
    num_steps: int
    step: Ints
    step_begin_ns: Ints

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.begin_ns) / NS_PER_S

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.duration_s / self.num_steps

    def steps_in(self, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the first and the last step that begin between two times, or that in which these are."""
        first, stop = np.searchsorted(self.step_begin_ns, [begin_ns, end_ns]).tolist()
        first = min(first, len(self.step) - 1)
        return int(self.step[first]), int(self.step[max(stop - 1, first)])


@dataclass(frozen=True, kw_only=True)
class InterfaceFacts:
    """One interface.

    Attributes:
        speed_bps: line rate that the device reports, 0 unknown.
        shaped_bps: rate to which a token bucket shapes what it sends, 0 without one.
        mtu: 0 unknown.
        master: bond or bridge that it is part of, which counts its bytes again; empty without one.
    """

    speed_bps: int = 0
    shaped_bps: int = 0
    mtu: int = 0
    master: str = ""


@dataclass(frozen=True, kw_only=True)
class KnownInterfaces:
    """Interfaces whose bytes count once, with what is known of them.

    Attributes:
        use: their counters, with line rates from the trace, or else the snapshot, or the rate of a token bucket below.
        rate_source: who says the line rate, (num_interfaces,).
        mtu: 0 unknown, (num_interfaces,).
    """

    use: InterfaceUse
    rate_source: tuple[RateSource, ...]
    mtu: Ints


@dataclass(frozen=True, kw_only=True)
class NetworkEvidence:
    """What the figures and plots of the network rest on.

    Attributes:
        window: the time of the used steps.
        places: where the ranks are.
        known: the interfaces; None without a sample of any.
        flows: the connections; None in traces without them.
        is_recorded: of which nodes all ranks recorded their connections, (num_nodes,).
        limits: the thresholds.
    """

    window: StepWindow
    places: Topology
    known: KnownInterfaces | None
    flows: Flows | None
    is_recorded: Bools
    limits: NetworkThresholds = field(default_factory=NetworkThresholds)
    raised: RaisedThresholds = field(default_factory=RaisedThresholds)
    known_loads: LoadThresholds = field(default_factory=LoadThresholds)

    @cached_property
    def is_summed_up(self) -> bool:
        """Whether ranks have more connections than are recorded one by one."""
        return self.flows is not None and summed_up_share(self.flows) > self.limits.max_summed_up_share

    @cached_property
    def loads(self) -> InterfaceLoads | None:
        """What the interfaces carried; None without a sample of any."""
        if self.known is None or not len(self.known.use.names):
            return None
        return interface_loads(
            self.known.use,
            None if self.flows is None or self.is_summed_up else self.flows,
            begin_ns=self.window.begin_ns,
            end_ns=self.window.end_ns,
            is_recorded=self.is_recorded,
            mtu=self.known.mtu,
            limits=self.known_loads,
        )


def recorded_network(run: CredibleRun, snapshots: Sequence[Snapshot], limits: NetworkThresholds) -> NetworkEvidence:
    """Return what was recorded of the network in the time of the used steps.

    Args:
        run: the run.
        snapshots: those of its hosts; none where the audit saved none.
        limits: the thresholds.
    """
    measured, use, rows = run.measured, run.measured.interfaces, run.measured.timed.known
    begin_ns = int(measured.common.begin_ns[rows, 0].min())
    window = StepWindow(
        begin_ns=begin_ns,
        end_ns=max(int(measured.common.end_ns[rows, -1].max()), begin_ns + 1),
        num_steps=int(measured.common.step[-1] - measured.common.step[0]) + 1,
        step=measured.common.step,
        step_begin_ns=np.maximum.accumulate(measured.common.begin_ns[rows].min(axis=0)),
    )
    return NetworkEvidence(
        window=window,
        places=measured.places,
        known=None if use is None else known_interfaces(use, interface_facts(snapshots)),
        flows=measured.flows,
        is_recorded=_are_recorded(run),
        limits=limits,
        raised=measured.thresholds.of(RaisedThresholds),
        known_loads=measured.thresholds.of(LoadThresholds),
    )


def _are_recorded(run: CredibleRun) -> Bools:
    """Return of which nodes all ranks have connections in their traces, (num_nodes,).

    Where the host of a rank without a trace is not known, it may be any.
    """
    places, timed = run.measured.places, run.measured.timed
    is_recorded = np.ones(places.num_nodes, np.bool_)
    for trace, node in zip(timed.traces, places.node.tolist(), strict=True):
        is_recorded[node] &= len(trace.tables["flows"]) > 0 and trace.header.rank not in timed.unknown_clocks
    for rank in run.missing:
        host = run.hosts.get(rank, "")
        is_recorded &= np.array([bool(host) and name.partition("#")[0] != host for name in places.node_names])
    return is_recorded


def interface_facts(snapshots: Sequence[Snapshot]) -> dict[tuple[str, str], InterfaceFacts]:
    """Return the facts of all interfaces by host and name; an RDMA port is called `mlx5_0/1`."""
    found = {}
    for snapshot in snapshots:
        for device in snapshot.net or ():
            found[snapshot.host, device.name] = InterfaceFacts(
                speed_bps=(device.speed_mbps or 0) * _PER_MEGA,
                shaped_bps=round((device.shaped_mbps or 0) * _PER_MEGA),
                mtu=device.mtu or 0,
                master=device.master,
            )
        for adapter in snapshot.rdma or ():
            for port in adapter.ports:
                facts = InterfaceFacts(speed_bps=round((port.rate_gbps or 0) * _PER_GIGA))
                found[snapshot.host, f"{adapter.name}/{port.number}"] = facts
    return found


def known_interfaces(use: InterfaceUse, facts: Mapping[tuple[str, str], InterfaceFacts]) -> KnownInterfaces:
    """Return the interfaces without loopbacks and parts of bonds and bridges, with their line rates.

    Args:
        use: counters of all interfaces.
        facts: what snapshots say; empty without any.
    """
    facts = {name: facts.get(name, InterfaceFacts()) for name in use.names}
    is_counted = [name != _LOOPBACK and (host, facts[host, name].master) not in facts for host, name in use.names]
    use = select_interfaces(use, np.array(is_counted, np.bool_))
    rates = [
        _line_rate(rate_bps, facts[name]) for name, rate_bps in zip(use.names, use.line_rate_bps.tolist(), strict=True)
    ]
    return KnownInterfaces(
        use=replace(use, line_rate_bps=np.array([rate_bps for rate_bps, _ in rates], np.int64)),
        rate_source=tuple(source for _, source in rates),
        mtu=np.array([facts[name].mtu for name in use.names], np.int64),
    )


def _line_rate(recorded_bps: int, facts: InterfaceFacts) -> tuple[int, RateSource]:
    rate_bps = recorded_bps or facts.speed_bps
    if facts.shaped_bps and not 0 < rate_bps <= facts.shaped_bps:
        return facts.shaped_bps, "tc"
    return rate_bps, "device" if rate_bps else ""


def network_figures(evidence: NetworkEvidence) -> NetworkFigures | None:
    """Return what is reported of the network; None where nothing of it was recorded, or all ranks share a host."""
    if evidence.places.num_nodes < 2 or (evidence.loads is None and evidence.flows is None):
        return None
    interfaces = _interface_rows(evidence)
    pairs, rates = _pair_rows(evidence)
    return NetworkFigures(
        duration_s=evidence.window.duration_s,
        peak_s=evidence.loads.cell_s if evidence.loads is not None else 1.0,
        has_flows=evidence.flows is not None,
        interfaces=tuple(sorted(interfaces, key=lambda row: -row.load)),
        num_idle=(len(evidence.loads.names) if evidence.loads is not None else 0) - len(interfaces),
        retransmissions=_retransmissions(evidence),
        pairs=_longest(pairs, evidence.limits.listed_part),
        num_pairs=len(pairs),
        median_rate_bps=float(np.median(rates)) if len(rates) else None,
    )


def _longest(pairs: Sequence[PairRow], listed_part: float) -> tuple[PairRow, ...]:
    """Return the pairs that send longest, those that carry next to nothing last."""
    least = listed_part * max((row.bytes_per_step for row in pairs), default=0.0)
    return tuple(sorted(pairs, key=lambda row: (row.bytes_per_step < least, -(row.busy_share or 0.0)))[:_MAX_PAIRS])


def host_traffic(evidence: NetworkEvidence) -> PairTraffic | None:
    """Return what hosts sent to each other; None without connections."""
    if evidence.flows is None:
        return None
    return node_pairs(evidence.flows, begin_ns=evidence.window.begin_ns, end_ns=evidence.window.end_ns)


def _interface_rows(evidence: NetworkEvidence) -> list[InterfaceRow]:
    loads, known = evidence.loads, evidence.known
    if loads is None or known is None:
        return []
    totals = interface_totals(loads)
    counts = interface_events(known.use, begin_ns=evidence.window.begin_ns, end_ns=evidence.window.end_ns)
    raised = _raised(evidence, counts, loads)
    carried = np.nan_to_num(totals.bytes_per_s).sum(axis=0)
    rows = []
    for row in np.flatnonzero((carried > 0) | counts.any(axis=0)).tolist():
        errors, drops, pauses, marks = counts[:, row].tolist()
        host, name = loads.names[row]
        rows.append(
            InterfaceRow(
                host=host,
                interface=name,
                line_rate_bps=int(loads.line_rate_bps[row]) or None,
                rate_source=known.rate_source[row],
                carries_job=bool(loads.carries_job[row]),
                why_unknown=_why_unknown(evidence, row),
                sent=_direction(evidence, loads, totals, row, SENT),
                received=_direction(evidence, loads, totals, row, RECEIVED),
                errors=errors,
                drops=drops,
                pauses=pauses,
                marks=marks,
                raised=tuple(kind for kind, is_one in zip(KINDS, raised[:, row].tolist(), strict=True) if is_one),
            )
        )
    return rows


def _direction(
    evidence: NetworkEvidence, loads: InterfaceLoads, totals: InterfaceTotals, row: int, direction: int
) -> DirectionUse:
    rates = (totals.bytes_per_s, totals.peak_bytes_per_s, totals.foreign_bytes_per_s)
    mean, peak, foreign = (float(rate[direction, row]) for rate in rates)
    line = float(loads.line_rate_bps[row]) / _BITS
    of_line, of_bytes = _share(foreign, line), _share(foreign, mean)
    foreign_share = (of_line if of_line is not None else of_bytes) or 0.0
    is_worth = foreign_share >= evidence.limits.least_foreign_share
    return DirectionUse(
        bytes_per_step=float(np.nan_to_num(mean)) * evidence.window.step_s,
        mean_bps=float(np.nan_to_num(mean)) * _BITS,
        peak_bps=float(np.nan_to_num(peak)) * _BITS,
        utilisation=_share(mean, line),
        peak_utilisation=_share(peak, line),
        foreign_bps=foreign * _BITS if np.isfinite(foreign) else None,
        foreign_share=of_bytes,
        foreign_utilisation=of_line,
        # Where the job sends nothing, it does not matter what others send.
        is_foreign=bool(totals.is_foreign[direction, row] and loads.carries_job[row] and is_worth),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if np.isfinite(part) and whole > 0 else None


def _why_unknown(evidence: NetworkEvidence, row: int) -> str:
    """Return why foreign traffic of an interface is not known; empty where it is."""
    loads = evidence.loads
    assert loads is not None
    if np.isfinite(loads.job_bytes[:, row]).any():
        return ""
    if is_rdma(loads.names[row][1]):
        return "counters of RDMA do not say whose bytes they count"
    if evidence.flows is None:
        return "the traces have no connections"
    if evidence.is_summed_up:
        return "ranks have more connections than are recorded one by one"
    if not evidence.is_recorded[loads.node[row]]:
        return "not all ranks of the host recorded their connections"
    return "it is not known which interfaces of the host carry this job's connections"


def _raised(evidence: NetworkEvidence, counts: Ints, loads: InterfaceLoads) -> Bools:
    """Return which counters of which interfaces have most of what a host has more of, (4, num_interfaces)."""
    num_nodes = evidence.places.num_nodes
    exposure = np.zeros(num_nodes)
    exposure[np.unique(loads.node)] = evidence.window.duration_s
    found = np.zeros(counts.shape, np.bool_)
    for kind, of_kind in enumerate(counts):
        of_node = np.bincount(loads.node, of_kind, minlength=num_nodes)
        is_meant = is_raised(of_node, exposure, evidence.raised)[loads.node]
        found[kind] = is_meant & (2 * of_kind >= of_node[loads.node])
    return found


def _retransmissions(evidence: NetworkEvidence) -> tuple[HostRetransmissions, ...]:
    if evidence.flows is None:
        return ()
    places, window = evidence.places, evidence.window
    sent, again = retransmitted(evidence.flows, places.num_nodes, begin_ns=window.begin_ns, end_ns=window.end_ns)
    packets = (again / _USUAL_SEGMENT_BYTES, sent / _USUAL_SEGMENT_BYTES)
    raised, usual = is_raised(*packets, evidence.raised), usual_rate(*packets)
    rows = [
        HostRetransmissions(
            host=places.node_names[node],
            sent_bytes=int(sent[node]),
            share=float(again[node] / sent[node]),
            usual_share=float(usual[node]) if np.isfinite(usual[node]) else None,
            is_raised=bool(raised[node]),
        )
        for node in np.flatnonzero(sent > 0).tolist()
    ]
    return tuple(sorted(rows, key=lambda row: -row.share))


def _pair_rows(evidence: NetworkEvidence) -> tuple[list[PairRow], Floats]:
    """Return the rank pairs, and the rates in bit/s of those that carry much."""
    if evidence.flows is None:
        return [], np.zeros(0)
    window = evidence.window
    found = rank_pairs(evidence.flows, begin_ns=window.begin_ns, end_ns=window.end_ns)
    hosts = _hosts(evidence)
    rate_bps = found.bytes_per_s * _BITS
    rows = [
        PairRow(
            source=int(found.source[row]),
            destination=int(found.destination[row]),
            source_host=hosts.get(int(found.source[row]), ""),
            destination_host=hosts.get(int(found.destination[row]), ""),
            bytes_per_step=float(found.acked_bytes[row]) / window.num_steps,
            rate_bps=float(rate_bps[row]) if np.isfinite(rate_bps[row]) else None,
            busy_share=float(found.busy_ns[row]) / NS_PER_S / window.duration_s if found.busy_ns[row] else None,
            retransmitted_share=_share(float(found.retransmitted_bytes[row]), float(found.sent_bytes[row])),
        )
        for row in np.flatnonzero(found.acked_bytes > 0).tolist()
    ]
    much = found.acked_bytes >= evidence.limits.compared_part * found.acked_bytes.max(initial=1)
    return rows, rate_bps[much & np.isfinite(rate_bps)]


def _hosts(evidence: NetworkEvidence) -> dict[int, str]:
    """Return the host of each rank, those without a trace by what their peers know."""
    places, flows = evidence.places, evidence.flows
    hosts = {rank: places.node_names[node] for rank, node in zip(places.ranks, places.node.tolist(), strict=True)}
    if flows is not None:
        ends = flows.connections
        pairs = zip(ends.peer_rank.tolist(), ends.peer_node.tolist(), strict=True)
        hosts = {rank: places.node_names[node] for rank, node in pairs if node >= 0} | hosts
    return hosts


def network_plots(evidence: NetworkEvidence, figures: NetworkFigures | None) -> NetworkPlots | None:
    """Return what the plots of the network show, interfaces in the order of the figures; None without figures."""
    if figures is None:
        return None
    loads, window = evidence.loads, evidence.window
    step_mb, rate_mbps, hosts = _matrices(evidence)
    return NetworkPlots(
        time_s=(loads.edges_ns[:-1] - window.begin_ns) / NS_PER_S if loads is not None else np.zeros(0),
        lines=_lines(loads, figures) if loads is not None else (),
        num_interfaces=len(figures.interfaces),
        hosts=hosts,
        step_mb=step_mb,
        rate_mbps=rate_mbps,
    )


def _lines(loads: InterfaceLoads, figures: NetworkFigures) -> tuple[InterfaceLine, ...]:
    row_of = {name: row for row, name in enumerate(loads.names)}
    total_mbps = loads.total_bytes * (per_cell := _BITS / _PER_MEGA / loads.cell_s)
    foreign_mbps = np.maximum(loads.total_bytes - loads.job_bytes, 0.0) * per_cell
    return tuple(
        InterfaceLine(
            host=shown.host,
            interface=shown.interface,
            line_mbps=shown.line_rate_bps / _PER_MEGA if shown.line_rate_bps else None,
            total_mbps=total_mbps[:, row_of[shown.host, shown.interface]],
            foreign_mbps=foreign_mbps[:, row_of[shown.host, shown.interface]],
        )
        for shown in figures.interfaces[:_MAX_LINES]
    )


def _matrices(evidence: NetworkEvidence) -> tuple[Floats, Floats, tuple[str, ...]]:
    """Return payload per step in MB and rate in Mb/s from host to host, and the hosts, those of a leaf side by side."""
    traffic, places = host_traffic(evidence), evidence.places
    if traffic is None or places.num_nodes > _MAX_HOSTS:
        return np.zeros((0, 0)), np.zeros((0, 0)), ()
    order = np.argsort(places.node_leaf, kind="stable")
    place = np.argsort(order)
    step_mb, rate_mbps = np.full((2, places.num_nodes, places.num_nodes), np.nan)
    is_used = traffic.acked_bytes > 0
    cells = place[traffic.source[is_used]], place[traffic.destination[is_used]]
    step_mb[cells] = traffic.acked_bytes[is_used] / evidence.window.num_steps / _PER_MEGA
    # The rate of small messages is that of round trips.
    carried = traffic.acked_bytes[is_used]
    counts = carried >= evidence.limits.listed_part * carried.max(initial=0)
    rate_mbps[cells] = np.where(counts, traffic.bytes_per_s[is_used] * _BITS / _PER_MEGA, np.nan)
    return step_mb, rate_mbps, tuple(places.node_names[node] for node in order.tolist())
