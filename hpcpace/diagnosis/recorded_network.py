"""The evidence of the network of a run: what its traces recorded, with what its snapshots know of interfaces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.audit.facts import Snapshot
from hpcpace.diagnosis.credible_run import CredibleRun
from hpcpace.diagnosis.figures.interface_facts import interface_facts, known_interfaces
from hpcpace.diagnosis.figures.network import NetworkEvidence, StepWindow, network_evidence
from hpcpace.diagnosis.measure import Measured


def recorded_network(run: CredibleRun, snapshots: Sequence[Snapshot]) -> NetworkEvidence:
    """Return what was recorded of the network in the time of the used steps.

    Args:
        run: the run.
        snapshots: those of its hosts; none where the audit saved none.
    """
    measured = run.measured
    known = None
    if measured.interfaces is not None:
        known = known_interfaces(measured.interfaces, interface_facts(snapshots))
    return network_evidence(known, measured.flows, step_window(measured), measured.places, _are_recorded(run))


def step_window(measured: Measured) -> StepWindow:
    """Return the time of the used steps, by the ranks whose clock is known, or by the first one."""
    unknown = measured.timed.unknown_clocks
    rows = [row for row, rank in enumerate(measured.timed.ranks) if rank not in unknown] or [0]
    begin_ns = int(measured.common.begin_ns[rows, 0].min())
    return StepWindow(
        begin_ns=begin_ns,
        end_ns=max(int(measured.common.end_ns[rows, -1].max()), begin_ns + 1),
        num_steps=int(measured.common.step[-1] - measured.common.step[0]) + 1,
    )


def _are_recorded(run: CredibleRun) -> NDArray[np.bool_]:
    """Return of which nodes all ranks have connections in their traces, (num_nodes,).

    Where the host of a rank without a trace is not known, it may be any.
    """
    places = run.measured.places
    unknown_clocks = run.measured.timed.unknown_clocks
    is_recorded = np.ones(places.num_nodes, np.bool_)
    for trace, node in zip(run.measured.timed.traces, places.node.tolist(), strict=True):
        is_recorded[node] &= len(trace.tables["flows"]) > 0 and trace.header.rank not in unknown_clocks
    for rank in run.missing:
        host = run.hosts.get(rank, "")
        is_recorded &= np.array([bool(host) and name.partition("#")[0] != host for name in places.node_names])
    return is_recorded
