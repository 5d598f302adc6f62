"""Links that hold the job's own connections up: slow or full of others' traffic, flapping, lossy, with a small MTU."""

from __future__ import annotations

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import confidence_of
from hpcpace.diagnosis.modes.evidence import FlowEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Panels
from hpcpace.metrics.flow_figures import LinkCause, LinkFault
from hpcpace.metrics.links import LinkFindings
from hpcpace.metrics.topology import unit_name

BROKEN = (LinkCause.LOSSY, LinkCause.SMALL_MTU)
"""What is a fault by itself, however little it costs this job."""


def flow_link_findings(panels: Panels, links: LinkFindings | None, settings: DiagnosisConfig) -> list[DiagnosisFinding]:
    """Return a finding for each cause: what the step would take if these links were as fast as the others.

    Rates of connections need no common clock, so these findings hold where a clock is wrong.

    Args:
        panels: the steps.
        links: what comparing the transfers of groups found, which may single out one link of a set.
        settings: the thresholds.
    """
    if panels.flows is None:
        return []
    by_cause: dict[LinkCause, list[tuple[LinkFault, float]]] = {}
    for fault in panels.flows.faults:
        loss_share = _loss_share(fault, panels)
        if loss_share >= settings.contention_share or fault.cause in BROKEN:
            by_cause.setdefault(fault.cause, []).append((fault, loss_share))
    return [_finding(faults, panels, links) for faults in by_cause.values()]


def _finding(faults: list[tuple[LinkFault, float]], panels: Panels, links: LinkFindings | None) -> DiagnosisFinding:
    """Return one finding for links with the same cause; in a ring they hold up the same steps, so losses do not add."""
    faults = sorted(faults, key=lambda pair: -pair[1])
    worst, loss_share = faults[0]
    return DiagnosisFinding(
        evidence=FlowEvidence(
            cause=worst.cause,
            is_certain=worst.is_certain,
            direction=worst.direction if len(faults) == 1 else "",
            effect=worst.effect_share,
            share=_held_share(worst, panels),
            slow_bytes_per_s=worst.slow_bytes_per_s,
            usual_bytes_per_s=worst.usual_bytes_per_s,
            foreign_bytes_per_s=worst.foreign_bytes_per_s,
            repeats=worst.repeat_share,
            others_repeats=worst.others_repeat_share,
            stalls=worst.stall_share,
            segment_bytes=worst.segment_bytes,
            usual_segment_bytes=worst.usual_segment_bytes,
            flows=len(worst.flows),
        ),
        loss_share=loss_share,
        confidence=confidence_of(worst.p_value),
        culprits=tuple(_culprit(fault, links) for fault, _ in faults),
    )


def _held_share(fault: LinkFault, panels: Panels) -> float:
    """Return for which share of the step connections through a link can have held it up: they were busy, and awaited.

    Where transfers are not known, the busy time is the most that it can be.
    """
    busy_share = fault.stall_share if fault.cause is LinkCause.FLAPPING else fault.busy_share
    return min(busy_share, panels.transfer_share) if panels.transfer_share > 0 else busy_share


def _loss_share(fault: LinkFault, panels: Panels) -> float:
    share = _held_share(fault, panels)
    if fault.cause is LinkCause.FLAPPING:
        return share
    return share * max(1 - fault.slow_bytes_per_s / fault.usual_bytes_per_s, 0.0)


def _culprit(fault: LinkFault, links: LinkFindings | None) -> Culprit:
    """Return the link; of several, those that comparing groups holds for slow as well, where there are any."""
    by_groups = {name for culprit in (links.culprits if links is not None else ()) for name in culprit.ids}
    both = tuple(name for name in fault.ids if name in by_groups)
    ids = both if both and len(fault.ids) > 1 else fault.ids
    return Culprit(
        kind="link",
        id=ids[0],
        aliases=tuple(unit_name(("link", name)) for name in ids),
        effect=fault.effect_share,
        interval=fault.interval,
    )
