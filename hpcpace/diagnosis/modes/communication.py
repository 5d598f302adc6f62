"""What transfers show: slow links, groups that cross switches, bursts, or simply much communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import confidence_of
from hpcpace.diagnosis.modes.evidence import (
    BurstEvidence,
    FlowEvidence,
    LocalityEvidence,
    SlowLinkEvidence,
    TransferEvidence,
)
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Panels
from hpcpace.diagnosis.modes.flows import flow_link_findings
from hpcpace.metrics.flow_figures import LinkCause
from hpcpace.metrics.links import LinkCulprit, LinkFindings, Locality


def network_findings(
    panels: Panels,
    links: LinkFindings | None,
    crossing: Locality | None,
    settings: DiagnosisConfig,
    *,
    is_clock_wrong: bool,
) -> list[DiagnosisFinding]:
    """Return what connections and transfers show; transfers that connections explain are not told again.

    Args:
        panels: the steps.
        links: what comparing the transfers of groups found; None where they were not compared.
        crossing: groups that cross switches against those inside; None unless there are both.
        settings: the thresholds.
        is_clock_wrong: whether a clock is proven wrong: transfers are not judged then, rates of connections are.
    """
    held_up = flow_link_findings(panels, links, settings)
    transfers = [] if is_clock_wrong else _transfer_findings(panels, links, crossing, held_up, settings)
    return [*held_up, *transfers]


def _transfer_findings(
    panels: Panels,
    links: LinkFindings | None,
    crossing: Locality | None,
    held_up: Sequence[DiagnosisFinding],
    settings: DiagnosisConfig,
) -> list[DiagnosisFinding]:
    """Return what transfers show: a slow link, bursts of contention, or that the job is bound by communication.

    Contention is what transfers beyond one and a half of their lower quartile take. Without bursts and slow links, a
    large share of transfer is the work that there is.
    """
    causes = {finding.evidence.cause for finding in held_up if isinstance(finding.evidence, FlowEvidence)}
    if causes - {LinkCause.FLAPPING, LinkCause.SMALL_MTU} and any(
        finding.loss_share >= settings.contention_share for finding in held_up
    ):
        return []
    transfer = panels.transfer_ns.mean(axis=0)
    share = float(transfer.mean()) / panels.mean_length_ns
    is_one_link = links is not None and any(len(culprit.ids) == 1 for culprit in links.culprits)
    if crossing is not None and not is_one_link and _is_far_slower(crossing, settings):
        evidence = LocalityEvidence(factor=crossing.factor, share=share)
        return [DiagnosisFinding(evidence=evidence, loss_share=share * (1 - 1 / crossing.factor), confidence=0.95)]
    if links is not None and links.culprits:
        first = links.culprits[0]
        culprits = tuple(_link_culprit(culprit) for culprit in links.culprits)
        loss_share = share * first.effect_share / (1 + first.effect_share)
        return [
            DiagnosisFinding(
                evidence=SlowLinkEvidence(effect=first.effect_share, share=share),
                loss_share=loss_share,
                confidence=confidence_of(first.p_value),
                culprits=culprits,
            )
        ]
    found: list[DiagnosisFinding] = []
    usual = float(np.quantile(transfer, 0.25))
    burst_ns = np.where(transfer > 1.5 * usual, transfer - usual, 0.0)
    burst_share = float(burst_ns.mean()) / panels.mean_length_ns
    num_bursts = int((burst_ns > 0).sum())
    # One node has no fabric: what varies there is its own load.
    is_contended = burst_share >= settings.contention_share and num_bursts >= 3 and len(np.unique(panels.node)) > 1
    if is_contended and LinkCause.FLAPPING not in causes:
        bursts = BurstEvidence(share=burst_share, bursts=num_bursts / len(transfer))
        found.append(DiagnosisFinding(evidence=bursts, loss_share=burst_share, confidence=0.95))
    moved = float(transfer.mean()) - float(burst_ns.mean())
    of_work = moved / max(moved + float(panels.work_ns.mean()), 1.0)
    if of_work >= settings.communication_share:
        transfers = TransferEvidence(
            share=share - burst_share,
            of_work=of_work,
            are_links_compared=(links is not None and links.is_identifiable)
            or (panels.flows is not None and panels.flows.is_compared),
            line_share=panels.flows.line_share if panels.flows is not None else None,
            transfer=panels.transfer_share,
            bursts=burst_share,
            least=settings.communication_share,
        )
        found.append(DiagnosisFinding(evidence=transfers, loss_share=share - burst_share, confidence=0.95))
    return found


def _is_far_slower(crossing: Locality, settings: DiagnosisConfig) -> bool:
    return crossing.p_value < settings.level and crossing.interval[0] > 1 + settings.link_share


def _link_culprit(culprit: LinkCulprit) -> Culprit:
    return Culprit(
        kind="link",
        id=culprit.ids[0],
        aliases=culprit.aliases,
        effect=culprit.effect_share,
        interval=culprit.interval,
    )
