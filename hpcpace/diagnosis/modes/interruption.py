"""Checkpoints and evaluations that only some ranks make, while the others wait for them in the next collective."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import mean_share_interval
from hpcpace.diagnosis.modes.evidence import InterruptionEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Floats, Panels, rank_culprit
from hpcpace.metrics.phases import Part
from hpcpace.metrics.recurrence import run_begins, steps_between

_LEAST_OF_LONGEST = 0.25


def interruption_findings(panels: Panels, settings: DiagnosisConfig) -> list[DiagnosisFinding]:
    """Return the checkpoints and evaluations for which ranks wait that make none; none where all make them alike.

    The loss is what the longest rank takes beyond the mean of those that make none.

    Args:
        panels: the steps.
        settings: the thresholds.
    """
    if panels.parts_ns is None:
        return []
    found = [_interruption(panels, panels.parts_ns[:, :, part], part) for part in (Part.CHECKPOINT, Part.EVAL)]
    return [finding for finding in found if finding is not None and finding.loss_share >= settings.runtime_share]


def _interruption(panels: Panels, spent_ns: Floats, part: Part) -> DiagnosisFinding | None:
    mean_ns = spent_ns.mean(axis=1)
    makes: NDArray[np.bool_] = mean_ns >= _LEAST_OF_LONGEST * mean_ns.max()
    if not mean_ns.any() or makes.all():
        return None
    lost_ns = np.maximum(spent_ns[makes].max(axis=0) - spent_ns[~makes].mean(axis=0), 0.0)
    is_event: NDArray[np.bool_] = np.any(spent_ns[makes] > 0, axis=0)
    share = float(lost_ns.mean()) / panels.mean_time_ns
    evidence = InterruptionEvidence(
        phase=part.name.lower(),
        ranks=tuple(panels.rank[makes].tolist()),
        events=int(is_event.sum()),
        mean_ns=float(spent_ns[makes].max(axis=0)[is_event].mean()),
        share=share,
        period_steps=steps_between(run_begins(is_event)),
    )
    phase = part.name.lower()
    interval = mean_share_interval(panels, lost_ns[None, :])
    culprit = Culprit(kind="phase", id=phase, aliases=(f"phase {phase}",), effect=share, interval=interval)
    hosts = dict(zip(panels.rank.tolist(), panels.host, strict=True))
    ranks = (rank_culprit(rank, hosts, share, interval, panels) for rank in evidence.ranks)
    return DiagnosisFinding(evidence=evidence, loss_share=share, confidence=0.95, culprits=(*ranks, culprit))
