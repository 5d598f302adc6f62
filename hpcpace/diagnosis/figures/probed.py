"""What a probe of the hosts says about the transfers of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpcpace.core.hostlist import short_list
from hpcpace.diagnosis.devices import has_device
from hpcpace.diagnosis.judged import JudgedRun
from hpcpace.diagnosis.measure import Measured
from hpcpace.diagnosis.network_summary import ProbedFigures, ProbedRow
from hpcpace.metrics.extrapolation import TransferTerm
from hpcpace.metrics.links import GroupTransfers

if TYPE_CHECKING:
    from hpcpace.probe.record import LatencyLaw, ProbeRecord

_MAX_ROWS = 32  # display: of transfers next to a probe
_OF_PROBE = {"send": "send_recv", "recv": "send_recv"}


class _Compared(NamedTuple):
    """What groups must have in common to be compared with one law."""

    op: str
    num_nodes: int
    num_ranks: int
    size_bytes: int


def probed_figures(run: JudgedRun) -> ProbedFigures | None:
    """Return the transfers next to the probe; None without one."""
    measured, probe = run.measured, run.probe
    if probe is None:
        return None
    refused = _refusal(measured, probe.record)
    laws = {(law.op, law.num_nodes, law.num_ranks): law for law in probe.record.laws}
    rows, num_unprobed = ([], 0) if refused else _rows(_kinds(measured), laws)
    total_ns = sum(row.transfer_ns * row.num_groups for row in rows)
    achieved = sum(row.probed_ns * row.num_groups for row in rows) / total_ns if total_ns else None
    return ProbedFigures(
        source=probe.source,
        probed_unix_ns=probe.record.started_unix_ns,
        refused=refused,
        achieved=achieved,
        rows=tuple(rows[:_MAX_ROWS]),
        num_unprobed=num_unprobed,
    )


def probed_term(run: JudgedRun) -> TransferTerm | None:
    """Return how the exposed transfer of a step grows with nodes by the laws of the probe; None where it cannot."""
    measured, probe, transfer_ns = run.measured, run.probe, float(run.panels.transfer_ns.mean())
    if probe is None or _refusal(measured, probe.record):
        return None
    from hpcpace.probe.laws import transfer_term

    num_nodes = measured.places.num_nodes
    calls = [(kind.op, float(kind.size_bytes), 1.0) for kind in _kinds(measured) if kind.num_nodes == num_nodes]
    return transfer_term(probe.record.laws, calls, num_nodes=num_nodes, transfer_ns=transfer_ns)


def _refusal(measured: Measured, probe: ProbeRecord) -> str:
    """Return why a probe says nothing about a run; empty if it does."""
    probed = {host.name for host in probe.hosts}
    others = [name for name in measured.places.node_names if name not in probed]
    if others:
        return f"it has no {short_list(others)}, where this run was: probe the hosts of the run"
    if not probe.laws:
        return "it has no laws: probe for longer (--time)"
    if any(has_device(trace) for trace in measured.timed.traces) and probe.device != "cuda":
        return "it was taken on CPUs and the run used GPUs: probe with --device cuda"
    return ""


def _kinds(measured: Measured) -> dict[_Compared, list[GroupTransfers]]:
    """Return the groups of each kind that communicate between nodes."""
    places = measured.places
    node_of = dict(zip(places.ranks, places.node.tolist(), strict=True))
    found: dict[_Compared, list[GroupTransfers]] = {}
    for group in measured.operations.transfers:
        if not all(member in node_of for member in group.members) or not np.isfinite(group.transfer_ns).any():
            continue
        num_nodes = len({node_of[member] for member in group.members})
        if num_nodes > 1:
            op = _OF_PROBE.get(group.op, group.op)
            kind = _Compared(op=op, num_nodes=num_nodes, num_ranks=len(group.members), size_bytes=group.size_bytes)
            found.setdefault(kind, []).append(group)
    return found


def _rows(
    kinds: dict[_Compared, list[GroupTransfers]], laws: dict[tuple[str, int, int], LatencyLaw]
) -> tuple[list[ProbedRow], int]:
    """Return rows, those with the most transfer first, and the number of kinds without a law."""
    rows = []
    for kind, groups in kinds.items():
        if (law := laws.get((kind.op, kind.num_nodes, kind.num_ranks))) is not None:
            transfer_ns = max(float(np.mean([np.nanmedian(group.transfer_ns) for group in groups])), 1.0)
            probed_ns = law.time_ns(kind.size_bytes)
            rows.append(
                ProbedRow(
                    **kind._asdict(),
                    num_groups=len(groups),
                    transfer_ns=transfer_ns,
                    probed_ns=probed_ns,
                    achieved=probed_ns / transfer_ns,
                    is_beyond=kind.size_bytes > law.most_bytes,
                )
            )
    return sorted(rows, key=lambda row: -row.transfer_ns * row.num_groups), len(kinds) - len(rows)
