"""Phases that take too much of the step: waiting for data, and garbage collection."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import mean_share_interval
from hpcpace.diagnosis.modes.evidence import CollectionEvidence, InputEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Floats, Panels, rank_culprit, slowest_ns


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
    waiting = _waiting(panels, settings)
    culprit = Culprit(
        kind="phase",
        id="data",
        aliases=("phase data",),
        effect=share,
        interval=mean_share_interval(panels, panels.data_ns),
    )
    gain_ns = slowest_ns(work_ns, panels.role) - slowest_ns(np.maximum(work_ns - panels.data_ns, 0.0), panels.role)
    loss_share = max(gain_ns / panels.mean_time_ns, share)
    evidence, culprits = InputEvidence(share=share), [culprit]
    if not waiting.all():
        hosts = dict(zip(panels.rank.tolist(), panels.host, strict=True))
        for row in np.flatnonzero(waiting).tolist():
            spent_ns = panels.data_ns[row : row + 1]
            effect, interval = float(spent_ns.mean()) / panels.mean_time_ns, mean_share_interval(panels, spent_ns)
            culprits.append(rank_culprit(int(panels.rank[row]), hosts, effect, interval, panels))
        evidence = InputEvidence(
            share=share,
            ranks=tuple(panels.rank[waiting].tolist()),
            waiting_ns=float(panels.data_ns[waiting].mean()),
            others_ns=float(panels.data_ns[~waiting].mean()),
        )
    return [DiagnosisFinding(evidence=evidence, loss_share=loss_share, confidence=0.97, culprits=tuple(culprits))]


def _waiting(panels: Panels, settings: DiagnosisConfig) -> NDArray[np.bool_]:
    """Return which ranks wait for data, bool, (num_ranks,).

    Those whose wait takes half of the threshold of all, and a quarter of that of the rank that waits longest.
    """
    share = panels.data_ns.mean(axis=1) / panels.mean_time_ns
    waiting: NDArray[np.bool_] = share >= max(settings.input_share, float(share.max()) / 2) / 2
    return waiting


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
