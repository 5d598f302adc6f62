"""What transfers show: slow links, groups that cross switches, bursts, or simply much communication."""

from __future__ import annotations

import numpy as np

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import confidence_of
from hpcpace.diagnosis.modes.evidence import BurstEvidence, LocalityEvidence, SlowLinkEvidence, TransferEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Panels
from hpcpace.metrics.network.links import LinkCulprit, LinkFindings, Locality


def communication_findings(
    panels: Panels, links: LinkFindings | None, crossing: Locality | None, settings: DiagnosisConfig
) -> list[DiagnosisFinding]:
    """Return what transfers show: a slow link, bursts of contention, or that the job is bound by communication.

    Contention is what transfers beyond one and a half of their lower quartile take. Without bursts and slow links, a
    large share of transfer is the work that there is.
    """
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
    if burst_share >= settings.contention_share and num_bursts >= 3 and len(np.unique(panels.node)) > 1:
        bursts = BurstEvidence(share=burst_share, bursts=num_bursts / len(transfer))
        found.append(DiagnosisFinding(evidence=bursts, loss_share=burst_share, confidence=0.95))
    moved = float(transfer.mean()) - float(burst_ns.mean())
    of_work = moved / max(moved + float(panels.work_ns.mean()), 1.0)
    if of_work >= settings.communication_share:
        transfers = TransferEvidence(
            share=share - burst_share,
            of_work=of_work,
            are_links_compared=links is not None and links.is_identifiable,
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
