"""Devices that wait for their hosts to issue work: many small kernels, slow Python, or a synchronisation."""

from __future__ import annotations

import numpy as np

from hpcpace.core.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import mean_share_interval
from hpcpace.diagnosis.modes.evidence import HostEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Floats, Panels, slowest_ns

_LEAST_SHARE = 0.2  # of all idle time, below which a phase is not worth a word
_SURE, _BOUNDED = 0.95, 0.8


def host_finding(panels: Panels, work_ns: Floats, settings: DiagnosisConfig) -> list[DiagnosisFinding]:
    """Return whether devices wait for their hosts: mean share of the step in which they are idle for them.

    The loss is what the slowest rank of a role takes with this idle time, less without, and must exceed the threshold
    as well. Time in which devices wait for data is not in it: that is the phase `data`, and another mode.

    Args:
        panels: the steps.
        work_ns: own work with stragglers put back, float64, (num_ranks, num_steps).
        settings: the thresholds.
    """
    share = float(panels.host_ns.mean()) / panels.mean_time_ns
    gain_ns = slowest_ns(work_ns, panels.role) - slowest_ns(np.maximum(work_ns - panels.host_ns, 0.0), panels.role)
    if min(share, gain_ns / panels.mean_time_ns) < settings.host_share:
        return []
    idle = [each for each in panels.idle if each.idle_ns >= _LEAST_SHARE * sum(one.idle_ns for one in panels.idle)]
    is_bound = sum(each.bounded_ns for each in idle) > sum(each.idle_ns for each in idle) / 2
    interval = mean_share_interval(panels, panels.host_ns)
    culprits = tuple(
        Culprit(kind="phase", id=each.phase, aliases=(f"phase {each.phase}",), effect=share, interval=interval)
        for each in idle[:1]
    )
    evidence = HostEvidence(
        share=share, phases=tuple((each.phase, each.idle_ns / panels.mean_time_ns) for each in idle), is_most=is_bound
    )
    return [
        DiagnosisFinding(
            evidence=evidence,
            loss_share=gain_ns / panels.mean_time_ns,
            confidence=_BOUNDED if is_bound else _SURE,
            culprits=culprits,
        )
    ]
