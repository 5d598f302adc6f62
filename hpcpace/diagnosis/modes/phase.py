"""Phases that take too much of the step: waiting for data, and garbage collection."""

from __future__ import annotations

import numpy as np

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import mean_share_interval
from hpcpace.diagnosis.modes.evidence import CollectionEvidence, InputEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Floats, Panels, slowest_ns


def input_finding(panels: Panels, work_ns: Floats, settings: DiagnosisConfig) -> list[DiagnosisFinding]:
    """Return whether the job waits for its data: mean share of the phase `data` in the step.

    The loss is what the slowest rank of a role takes with this phase, less without: all wait for whose data come last.

    Args:
        panels: the steps.
        work_ns: own work with stragglers put back, float64, (num_ranks, num_steps).
        settings: the thresholds.
    """
    share = float(panels.data_ns.mean()) / panels.mean_time_ns
    if share < settings.input_share:
        return []
    culprit = Culprit(
        kind="phase",
        id="data",
        aliases=("phase data",),
        effect=share,
        interval=mean_share_interval(panels, panels.data_ns),
    )
    gain_ns = slowest_ns(work_ns, panels.role) - slowest_ns(np.maximum(work_ns - panels.data_ns, 0.0), panels.role)
    loss_share = max(gain_ns / panels.mean_time_ns, share)
    evidence = InputEvidence(share=share)
    return [DiagnosisFinding(evidence=evidence, loss_share=loss_share, confidence=0.97, culprits=(culprit,))]


def collection_finding(panels: Panels, settings: DiagnosisConfig) -> list[DiagnosisFinding]:
    """Return whether garbage collection costs: per step the largest of all ranks, because the others wait for it."""
    share = float(panels.gc_ns.max(axis=0).mean()) / panels.mean_time_ns
    if share < settings.runtime_share:
        return []
    culprit = Culprit(
        kind="phase", id="gc", aliases=("phase gc",), effect=share, interval=mean_share_interval(panels, panels.gc_ns)
    )
    return [
        DiagnosisFinding(
            evidence=CollectionEvidence(share=share), loss_share=share, confidence=0.95, culprits=(culprit,)
        )
    ]
