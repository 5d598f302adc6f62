"""Ranks that share cores: they are ready to run and wait, for each other, for other processes, or for a quota.

Whoever waits for a core seems to compute or to communicate for longer. So what the other rules found is held against
this waiting, and dropped where it may be nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.evidence import (
    BurstEvidence,
    CoreCause,
    CoreEvidence,
    EventEvidence,
    ImbalanceEvidence,
    JitterEvidence,
    LatenessEvidence,
    LatePattern,
    TransferEvidence,
)
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Panels
from hpcpace.metrics.host_waits import CoreUse

NOTABLE_WAIT = 0.05
"""Share of the time that ranks wait for a core from which on a report says so, and other findings are held against."""

_CROWDED, _FILLED = 1.5, 0.75
_LEAST_OTHERS = 0.1
_LEAST_CPU_EXCESS = 0.1


def core_finding(panels: Panels, settings: DiagnosisConfig) -> DiagnosisFinding | None:
    """Return that ranks share cores, also where that costs less than its threshold; None where it is not notable.

    The loss is the waiting of the rank that waits longest: the others wait for it in the next collective.
    """
    use = panels.cores
    if use is None or not (waits := is_notable(use)).any():
        return None
    rows = np.flatnonzero(waits)
    first = int(rows[use.waiting[rows].argmax()])
    hosts = tuple(dict.fromkeys(panels.host[row] for row in (first, *rows)))
    share = float(use.waiting[first])
    near = panels.node == panels.node[first]
    evidence = CoreEvidence(
        cause=_cause(use, near),
        share=share,
        ranks=tuple(panels.rank[rows].tolist()),
        hosts=hosts,
        of_host=int(near.sum()),
        cpus=len(_cpus(use, near)),
        running=float(np.nansum(use.running[near])),
        ready=float(np.nansum(use.running[near] + use.queued[near])),
        pressure=float(use.pressure[first]),
        throttled=float(use.throttled[first]),
        switches=float(use.switches[first]),
        least=settings.core_share,
    )
    culprits = () if set(hosts) == set(panels.host) else tuple(_culprit(use, panels, host, waits) for host in hosts)
    return DiagnosisFinding(evidence=evidence, loss_share=share, confidence=0.95, culprits=culprits)


def is_notable(use: CoreUse) -> NDArray[np.bool_]:
    """Return which ranks wait for a core for a notable share of the time, bool, (num_ranks,)."""
    waits: NDArray[np.bool_] = np.nan_to_num(use.waiting) - 2 * np.nan_to_num(use.error) >= NOTABLE_WAIT
    return waits


def _cpus(use: CoreUse, near: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset().union(*(use.cpus[row] for row in np.flatnonzero(near)))


def _cause(use: CoreUse, near: NDArray[np.bool_]) -> CoreCause:
    """Return who has the cores for which ranks of a host wait.

    Ranks share them with each other where there are more ranks than CPUs, or many more ready threads, which keep the
    CPUs busy. While a rank waits, all of its CPUs are busy: what the job did not use of them then, others did.
    """
    waiting = float(np.nanmax(use.waiting[near]))
    if float(np.nanmax(use.throttled[near])) >= waiting / 2:
        return CoreCause.QUOTA
    num_cpus = len(_cpus(use, near))
    if not num_cpus:
        return CoreCause.UNKNOWN
    running, ready = float(np.nansum(use.running[near])), float(np.nansum((use.running + use.queued)[near]))
    is_own = near.sum() > num_cpus or (ready > _CROWDED * num_cpus and running > _FILLED * num_cpus)
    is_others = not is_own or num_cpus * waiting - running >= _LEAST_OTHERS * num_cpus
    if is_own and is_others:
        return CoreCause.BOTH
    return CoreCause.RANKS if is_own else CoreCause.OTHERS


def _culprit(use: CoreUse, panels: Panels, host: str, waits: NDArray[np.bool_]) -> Culprit:
    rows = np.array([row for row, name in enumerate(panels.host) if name == host and waits[row]])
    row = int(rows[use.waiting[rows].argmax()])
    effect, half = float(use.waiting[row]), 1.96 * float(use.error[row])
    own = [panels.rank[index] for index, name in enumerate(panels.host) if name == host]
    aliases = (f"node {host}", *((f"rank {own[0]}",) if len(own) == 1 else ()))
    return Culprit(kind="node", id=host, aliases=aliases, effect=effect, interval=(effect - half, effect + half))


def with_cores(
    cores: DiagnosisFinding | None, findings: Sequence[DiagnosisFinding], panels: Panels, settings: DiagnosisConfig
) -> list[DiagnosisFinding]:
    """Return findings without those that waiting for cores may explain, and with that one above its threshold.

    Args:
        cores: that ranks share cores; None where they do not.
        findings: of the other rules.
        panels: the steps.
        settings: the thresholds.
    """
    use = panels.cores
    if panels.lab_cores is not None:
        uneven = _most_uneven(panels.lab_cores)
        findings = [each for each in findings if not (_are_bursts(each) and each.loss_share <= uneven)]
    if cores is None or use is None:
        return list(findings)
    kept = [finding for finding in findings if not _is_explained(finding, panels, use, settings)]
    if cores.loss_share < settings.core_share:
        return kept
    # Where the ranks that wait for cores are late, too, that is why, and costs what their lateness costs.
    named = {alias for culprit in cores.culprits for alias in culprit.aliases}
    late = [each.loss_share for each in kept if named & {a for culprit in each.culprits for a in culprit.aliases}]
    return [replace(cores, loss_share=max(cores.loss_share, *late, 0.0)), *kept]


def _are_bursts(finding: DiagnosisFinding) -> bool:
    return isinstance(finding.evidence, BurstEvidence)


def _is_explained(finding: DiagnosisFinding, panels: Panels, use: CoreUse, settings: DiagnosisConfig) -> bool:
    evidence = finding.evidence
    match evidence:
        case TransferEvidence():
            # The kernel's and gloo's threads wait as well: at the worst, all waiting is in transfers.
            left = evidence.share - float(np.nanmean(use.waiting))
            work = evidence.share / evidence.of_work - evidence.share
            return left / max(left + work, 1e-9) < settings.communication_share
        case LatenessEvidence(pattern=LatePattern.FIXED):
            return _is_waiting_alone(evidence.effect, np.isin(panels.rank, evidence.ranks), panels, use)
        case ImbalanceEvidence():
            slow = panels.stage == int(finding.culprits[0].id.removeprefix("pp"))
            return _is_waiting_alone(evidence.effect, slow, panels, use)
        case LatenessEvidence() | EventEvidence() | JitterEvidence() | BurstEvidence():
            return finding.loss_share <= _most_uneven(use)
        case _:
            return False


def _most_uneven(use: CoreUse) -> float:
    """Return the share of the time that ranks may lose because each step waits for whoever waits longest for a core.

    Waits that are as uneven as an exponential distribution have a largest of n that is 1 + 1/2 + ... + 1/n times their
    mean, so that a step loses so many times the mean less one; at least the waiting itself.
    """
    largest = float((1 / np.arange(1, len(use.waiting) + 1)).sum())
    return float(np.nan_to_num(use.waiting).max(initial=0.0)) * max(largest - 1, 1.0)


def _is_waiting_alone(effect: float, slow: NDArray[np.bool_], panels: Panels, use: CoreUse) -> bool:
    """Return whether an excess of some ranks over the others may be waiting for cores.

    It is more where their processor time exceeds that of the others by a good part of it, or where their longer waiting
    leaves more of it than ranks wait at all: so much may be due to when the scheduler lets whom run.
    """
    others = np.isin(panels.role, panels.role[slow]) & ~slow
    others = others if others.any() else ~slow
    running, waiting = use.running, use.waiting
    if np.isnan(waiting[slow]).all() or np.isnan(waiting[others]).all():
        return False
    cpu_excess = float(np.nanmean(running[slow]) / max(float(np.nanmedian(running[others])), 1e-9)) - 1
    if cpu_excess >= max(effect / 2, _LEAST_CPU_EXCESS):
        return False
    usual = float(panels.work_ns[others].mean()) / panels.mean_time_ns
    longer = (float(np.nanmean(waiting[slow])) - float(np.nanmedian(waiting[others]))) / max(usual, 1e-9)
    return not effect - longer > float(np.nanmean(waiting))
