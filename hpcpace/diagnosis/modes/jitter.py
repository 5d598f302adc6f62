"""Jitter that synchronisation amplifies: every step takes as long as whoever happens to be slowest in it."""

from __future__ import annotations

import numpy as np

from hpcpace.core.config import DiagnosisConfig
from hpcpace.diagnosis.modes.evidence import DataEvidence, JitterEvidence
from hpcpace.diagnosis.modes.finding import DiagnosisFinding, Floats, Panels

_LEAST_SPREAD = 0.02  # of passes within a step; less than that explains no loss above its threshold


def jitter_finding(
    panels: Panels, work_ns: Floats, attributed: float, settings: DiagnosisConfig
) -> list[DiagnosisFinding]:
    """Return what steps lose to their slowest rank, where no rank is slow for long, and whether the data make it so.

    The transient part, mean_i(max_r x) - max_r(mean_i x), of the time x that ranks take to reach their collectives, in
    the role where it is largest; a rank that is slow all the time is put back before. In a pipeline, where delays of
    one stage add to those of others, what the rebuilt step loses against one in which all work is as in the mean.

    Args:
        panels: the steps.
        work_ns: own work with stragglers put back, float64, (num_ranks, num_steps).
        attributed: share of the step time that events and passing stragglers take, which is not counted twice.
        settings: the thresholds.
    """
    share = max(_of_roles(panels, work_ns), (panels.transient_share or 0.0)) - attributed
    if share < settings.jitter_share:
        return []
    varies = panels.data_variation
    if varies is not None and varies.shared >= settings.data_share and varies.spread >= _LEAST_SPREAD:
        found = DataEvidence(share=share, shared=varies.shared, spread=varies.spread)
        return [DiagnosisFinding(evidence=found, loss_share=share, confidence=0.95)]
    return [DiagnosisFinding(evidence=JitterEvidence(share=share), loss_share=share, confidence=0.95)]


def _of_roles(panels: Panels, work_ns: Floats) -> float:
    # A delay of any stage holds its whole pipeline up.
    reach = np.maximum(panels.reach_ns - (panels.work_ns - work_ns), 0.0)
    shares = [0.0]
    for value in np.unique(panels.role):
        of_role = reach[panels.role == value]
        if len(of_role) > 1 and panels.is_role_known:
            shares.append(float(of_role.max(axis=0).mean() - of_role.mean(axis=1).max()) / panels.mean_time_ns)
    return max(shares)
