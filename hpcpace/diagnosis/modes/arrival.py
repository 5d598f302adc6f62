"""Stragglers by their arrival at collectives on devices, for ranks whose own work is not known."""

from __future__ import annotations

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import confidence_of
from hpcpace.diagnosis.modes.evidence import ArrivalEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Panels, rank_culprit
from hpcpace.metrics.arrivals import LateArrival


def arrival_finding(panels: Panels, settings: DiagnosisConfig) -> list[DiagnosisFinding]:
    """Return the ranks that are late at collectives by more than the threshold, as one finding.

    Others work no longer than the step without their wait for the late rank, so lateness relative to that is the least
    that its work exceeds theirs by. What it costs is at most its lateness, if nobody can use that time otherwise.

    Args:
        panels: the steps, and who is late.
        settings: the thresholds.
    """
    late = [each for each in panels.arrivals if _excess(each.duration_ns, panels) >= settings.straggler_share]
    if not late:
        return []
    first = late[0]
    evidence = ArrivalEvidence(
        effect=_excess(first.duration_ns, panels),
        p_value=first.p_value,
        late_share=first.late_share,
        share=first.duration_ns / panels.mean_time_ns,
        arrival_ns=first.arrival_ns,
        duration_ns=first.duration_ns,
        ranks=tuple(sorted(each.rank for each in late)),
    )
    return [
        DiagnosisFinding(
            evidence=evidence,
            loss_share=evidence.share,
            confidence=confidence_of(first.p_value),
            culprits=tuple(_culprit(each, panels) for each in late),
        )
    ]


def _excess(late_ns: float, panels: Panels) -> float:
    return late_ns / max(panels.mean_time_ns - late_ns, 1.0)


def _culprit(late: LateArrival, panels: Panels) -> Culprit:
    hosts = dict(zip(panels.rank.tolist(), panels.host, strict=True))
    low, high = (_excess(bound_ns, panels) for bound_ns in late.interval_ns)
    return rank_culprit(late.rank, hosts, _excess(late.duration_ns, panels), (low, high), panels)
