"""What interfaces and connections carried during the used steps: the report's section on the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.figures.interface_facts import KnownInterfaces
from hpcpace.diagnosis.network_summary import (
    DirectionUse,
    HostRetransmissions,
    InterfaceRow,
    NetworkFigures,
    PairRow,
)
from hpcpace.metrics.network.event_rates import KINDS, interface_events, is_raised, retransmitted, usual_rate
from hpcpace.metrics.network.flow_tables import Flows
from hpcpace.metrics.network.interface_use import (
    RECEIVED,
    SENT,
    InterfaceLoads,
    InterfaceTotals,
    interface_loads,
    interface_totals,
    is_rdma,
    summed_up_share,
)
from hpcpace.metrics.network.pair_traffic import PairTraffic, node_pairs, rank_pairs
from hpcpace.metrics.topology import Topology
from hpcpace.units import NS_PER_S

FloatArray = NDArray[np.float64]

_BITS = 8
_MOST_PAIRS = 2000
_LEAST_FOREIGN = 0.05  # of the line rate, or else of the bytes, to be worth telling
_PART_OF_MOST = 0.1  # of the bytes of the pair with most, for a pair's rate to be compared
PART_TO_COUNT = 0.01
"""Of the bytes of the pair with most, for a pair to be listed before others and to have a rate on the map."""

_MOST_SUMMED_UP = 0.02  # of all bytes, in connections of which only sums are recorded
_USUAL_SEGMENT = 1448  # bytes of payload, to count what was sent in packets


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """The time of the used steps.

    Attributes:
        begin_ns, end_ns: on the common clock.
        num_steps: steps from the first to the last of them, those without detail included.
    """

    begin_ns: int
    end_ns: int
    num_steps: int

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.begin_ns) / NS_PER_S

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.duration_s / self.num_steps


@dataclass(frozen=True, kw_only=True)
class NetworkEvidence:
    """What the figures and plots of the network rest on.

    Attributes:
        window: the time of the used steps.
        places: where the ranks are.
        known: the interfaces; None without a sample of any.
        loads, totals: what they carried; None likewise.
        flows: the connections; None in traces without them.
        is_recorded: of which nodes all ranks recorded their connections, (num_nodes,).
    """

    window: StepWindow
    places: Topology
    known: KnownInterfaces | None
    loads: InterfaceLoads | None
    totals: InterfaceTotals | None
    flows: Flows | None
    is_recorded: NDArray[np.bool_]


def network_evidence(
    known: KnownInterfaces | None,
    flows: Flows | None,
    window: StepWindow,
    places: Topology,
    is_recorded: NDArray[np.bool_],
) -> NetworkEvidence:
    """Return what interfaces carried in the time of the used steps; arguments as of `NetworkEvidence`."""
    loads = None
    if known is not None and len(known.use.names):
        loads = interface_loads(
            known.use,
            flows if flows is None or summed_up_share(flows) <= _MOST_SUMMED_UP else None,
            begin_ns=window.begin_ns,
            end_ns=window.end_ns,
            is_recorded=is_recorded,
            mtu=known.mtu,
        )
    return NetworkEvidence(
        window=window,
        places=places,
        known=known if loads is not None else None,
        loads=loads,
        totals=interface_totals(loads) if loads is not None else None,
        flows=flows,
        is_recorded=is_recorded,
    )


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
        pairs=_longest(pairs),
        num_pairs=len(pairs),
        median_rate_bps=float(np.median(rates)) if len(rates) else None,
    )


def _longest(pairs: Sequence[PairRow]) -> tuple[PairRow, ...]:
    """Return the pairs that send longest, those that carry next to nothing last."""
    least = PART_TO_COUNT * max((row.bytes_per_step for row in pairs), default=0.0)
    return tuple(sorted(pairs, key=lambda row: (row.bytes_per_step < least, -(row.busy_share or 0.0)))[:_MOST_PAIRS])


def host_traffic(evidence: NetworkEvidence) -> PairTraffic | None:
    """Return what hosts sent to each other; None without connections."""
    if evidence.flows is None:
        return None
    return node_pairs(evidence.flows, begin_ns=evidence.window.begin_ns, end_ns=evidence.window.end_ns)


def _interface_rows(evidence: NetworkEvidence) -> list[InterfaceRow]:
    loads, totals, known = evidence.loads, evidence.totals, evidence.known
    if loads is None or totals is None or known is None:
        return []
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
                sent=_direction(evidence.window, loads, totals, row, SENT),
                received=_direction(evidence.window, loads, totals, row, RECEIVED),
                errors=errors,
                drops=drops,
                pauses=pauses,
                marks=marks,
                raised=tuple(kind for kind, is_one in zip(KINDS, raised[:, row].tolist(), strict=True) if is_one),
            )
        )
    return rows


def _direction(
    window: StepWindow, loads: InterfaceLoads, totals: InterfaceTotals, row: int, direction: int
) -> DirectionUse:
    mean, peak, foreign = (
        float(values[direction, row])
        for values in (totals.bytes_per_s, totals.peak_bytes_per_s, totals.foreign_bytes_per_s)
    )
    line = float(loads.line_rate_bps[row]) / _BITS
    of_line = _share(foreign, line)
    of_bytes = _share(foreign, mean)
    is_worth = ((of_line if of_line is not None else of_bytes) or 0.0) >= _LEAST_FOREIGN
    return DirectionUse(
        bytes_per_step=_finite(mean) * window.step_s,
        mean_bps=_finite(mean) * _BITS,
        peak_bps=_finite(peak) * _BITS,
        utilisation=_share(mean, line),
        peak_utilisation=_share(peak, line),
        foreign_bps=foreign * _BITS if np.isfinite(foreign) else None,
        foreign_share=of_bytes,
        foreign_utilisation=of_line,
        # Where the job sends nothing, it does not matter what others send.
        is_foreign=bool(totals.is_foreign[direction, row] and loads.carries_job[row] and is_worth),
    )


def _finite(value: float) -> float:
    return value if np.isfinite(value) else 0.0


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
    if summed_up_share(evidence.flows) > _MOST_SUMMED_UP:
        return "ranks have more connections than are recorded one by one"
    if not evidence.is_recorded[loads.node[row]]:
        return "not all ranks of the host recorded their connections"
    return "it is not known which interfaces of the host carry this job's connections"


def _raised(evidence: NetworkEvidence, counts: NDArray[np.int64], loads: InterfaceLoads) -> NDArray[np.bool_]:
    """Return which counters of which interfaces have most of what a host has more of, (4, num_interfaces)."""
    num_nodes = evidence.places.num_nodes
    exposure = np.zeros(num_nodes)
    exposure[np.unique(loads.node)] = evidence.window.duration_s
    found = np.zeros(counts.shape, np.bool_)
    for kind, of_kind in enumerate(counts):
        of_node = np.bincount(loads.node, of_kind, minlength=num_nodes)
        is_meant = is_raised(of_node, exposure)[loads.node]
        found[kind] = is_meant & (2 * of_kind >= of_node[loads.node])
    return found


def _retransmissions(evidence: NetworkEvidence) -> tuple[HostRetransmissions, ...]:
    if evidence.flows is None:
        return ()
    places, window = evidence.places, evidence.window
    sent, again = retransmitted(evidence.flows, places.num_nodes, begin_ns=window.begin_ns, end_ns=window.end_ns)
    packets = (sent / _USUAL_SEGMENT, again / _USUAL_SEGMENT)
    raised, usual = is_raised(packets[1], packets[0]), usual_rate(packets[1], packets[0])
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


def _pair_rows(evidence: NetworkEvidence) -> tuple[list[PairRow], FloatArray]:
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
    much = found.acked_bytes >= _PART_OF_MOST * found.acked_bytes.max(initial=1)
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
