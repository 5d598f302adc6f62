"""From panels of steps to what is wrong: each mode is judged by its own rule, and takes a share of the loss.

A rule says nothing where its evidence stays below its threshold or within chance. Own work needs no common clock, so
who is late is judged by it; transfers need one, and are not judged where a clock is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.arrival import arrival_finding
from hpcpace.diagnosis.modes.communication import network_findings
from hpcpace.diagnosis.modes.cores import core_finding, with_cores
from hpcpace.diagnosis.modes.ended import end_finding
from hpcpace.diagnosis.modes.events import event_finding
from hpcpace.diagnosis.modes.evidence import (
    CollectionEvidence,
    CoreEvidence,
    FlowEvidence,
    InputEvidence,
    InterruptionEvidence,
    LatenessEvidence,
    LatePattern,
)
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Panels
from hpcpace.diagnosis.modes.hang import hang_finding
from hpcpace.diagnosis.modes.host import host_finding
from hpcpace.diagnosis.modes.interruption import interruption_findings
from hpcpace.diagnosis.modes.jitter import jitter_finding
from hpcpace.diagnosis.modes.mode import Mode
from hpcpace.diagnosis.modes.obstacle import (
    AbsentRanks,
    HostTimes,
    NoPhases,
    NothingCompared,
    Obstacle,
    TooFewSteps,
    TooMuchNoise,
    UnmatchedOperations,
    WrongClock,
)
from hpcpace.diagnosis.modes.phase import collection_finding, input_finding
from hpcpace.diagnosis.modes.pipeline import imbalance_finding
from hpcpace.diagnosis.modes.run_end import RunEnd
from hpcpace.diagnosis.modes.straggler import search_stragglers, straggler_findings
from hpcpace.hang.views import FoundHang
from hpcpace.metrics.links import LinkFindings, Locality
from hpcpace.metrics.lost_operations import OpenOperation
from hpcpace.metrics.stragglers import LEAST_STEPS, SearchObstacle, StragglerSearch
from hpcpace.metrics.what_if import Rebuilt

__all__ = ["Culprit", "Diagnosis", "DiagnosisFinding", "Mode", "Panels", "diagnose"]

# Told before all others, whatever those cost.
_LEADING = (Mode.ENDED, Mode.HANG)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong, the largest loss first.

    Attributes:
        findings: all modes above their thresholds; empty if nothing is wrong.
        obstacle: why the data decide nothing; None if they do.
        smallest_effect: the smallest excess of one rank that would have been named with a probability of 0.9; None
            where no two ranks are compared.
        absent: ranks with which the judged ones communicate, and of which nothing is known. Then waits and transfers
            prove nothing, and the loss to a straggler is an upper bound.
        num_present: ranks that are judged.
        slow: indices of the ranks that stand out: the usual work of a role is without theirs.
        cores: that ranks share cores, where that is notable; among the findings only above its threshold.
    """

    findings: tuple[DiagnosisFinding, ...]
    obstacle: Obstacle | None
    smallest_effect: float | None
    absent: tuple[int, ...] = ()
    num_present: int = 0
    slow: tuple[int, ...] = ()
    cores: DiagnosisFinding | None = None

    @property
    def late_ranks(self) -> frozenset[int]:
        """The ranks that findings name as late by their own work, those of named nodes and slots included."""
        named = (finding for finding in self.findings if finding.culprits)
        late = (finding.evidence for finding in named if isinstance(finding.evidence, LatenessEvidence))
        return frozenset(rank for evidence in late for rank in evidence.ranks)


def diagnose(
    panels: Panels,
    *,
    hang: FoundHang | None = None,
    opened: Sequence[OpenOperation] = (),
    links: LinkFindings | None = None,
    crossing: Locality | None = None,
    is_clock_wrong: bool = False,
    rebuilt: Rebuilt | None = None,
    absent: Sequence[int] = (),
    end: RunEnd | None = None,
    settings: DiagnosisConfig | None = None,
) -> Diagnosis:
    """Return what is wrong with a run.

    Args:
        panels: the steps that are judged.
        hang: what held the job up; None where nothing did.
        opened: operations that some members entered and that never completed, or that failed.
        links: what comparing the transfers of groups found; None where they were not compared.
        crossing: groups that cross switches against those inside; None unless there are both.
        is_clock_wrong: whether a clock is proven wrong: transfers are not judged then.
        rebuilt: steps of them, which show what stragglers and slow stages cost; None if they were not rebuilt.
        absent: ranks with which those of the panels communicate, and of which nothing is known.
        end: what ended the run before its time; None where nothing did.
        settings: the thresholds.
    """
    settings = settings or DiagnosisConfig()
    num_steps = len(panels.times_ns)
    hangs = hang_finding(hang, panels, opened)
    stopped = (*end_finding(end, hangs, panels), *hangs)
    cores = core_finding(panels, settings)
    known = partial(Diagnosis, absent=tuple(absent), num_present=len(panels.rank), cores=cores)
    if num_steps < settings.least_steps:
        few = TooFewSteps(num_steps=num_steps, least=settings.least_steps)
        return known(findings=stopped, obstacle=None if stopped else few, smallest_effect=None)
    if panels.host_timed:
        seen = (*stopped, *arrival_finding(panels, settings))  # nothing else rests on what devices did
        why = NoPhases() if panels.is_unphased else HostTimes(ranks=panels.host_timed)
        return known(findings=seen, obstacle=None if seen else why, smallest_effect=None)
    search = search_stragglers(panels, settings)
    # Messages of absent ranks would be missing from it, and most steps have to be alike.
    is_usable = rebuilt is not None and not absent and len(rebuilt.graph.step) >= rebuilt.graph.num_left_out
    steps = rebuilt if is_usable else None
    straggler, without, rest = straggler_findings(panels, search, steps, settings)
    findings = [
        *stopped,
        *straggler,
        *imbalance_finding(panels, without, steps, settings),
        *input_finding(rest, without, settings),
        *host_finding(rest, without, settings),
        *collection_finding(rest, settings),
        *interruption_findings(panels, settings),
        *network_findings(panels, links, crossing, settings, is_clock_wrong=is_clock_wrong),
    ]
    is_collection_found = any(isinstance(finding.evidence, CollectionEvidence) for finding in findings)
    findings += event_finding(panels, without, settings, is_collection_found=is_collection_found)
    findings += jitter_finding(panels, without, _explained_share(findings), settings)
    findings = _joined(with_cores(cores, findings, panels, settings))
    findings.sort(key=_place)
    obstacle: Obstacle | None = None
    if absent:
        findings = [finding for finding in findings if _needs_no_others(finding)]
        obstacle = None if findings else AbsentRanks()
    elif not findings:
        obstacle = WrongClock() if is_clock_wrong else _obstacle_of(search, panels, is_noise_known=cores is not None)
        obstacle = obstacle or _unmatched(panels, settings)
    return known(findings=tuple(findings), obstacle=obstacle, smallest_effect=search.smallest_share, slow=search.slow)


def _place(finding: DiagnosisFinding) -> tuple[bool | float, ...]:
    """Return the sort key of a finding: what stopped the run, then the largest loss.

    That ranks share cores everywhere costs between nothing and the share for which they wait, and steady transfers cost
    between nothing and what they take, for no job is without them. So half of that counts: a slow rank that costs as
    much for certain comes first.
    """
    is_everywhere = finding.mode is Mode.CORES and not finding.culprits
    is_most = is_everywhere or finding.mode is Mode.COMMUNICATION
    loss_share = finding.loss_share / 2 if is_most else finding.loss_share
    return (*(finding.mode is not mode for mode in _LEADING), -loss_share)


def _explained_share(findings: Sequence[DiagnosisFinding]) -> float:
    """Return what findings cost that make steps differ, as a share of the step time."""
    passing = sum(finding.loss_share for finding in findings if _is_passing(finding))
    return passing + sum(
        each.loss_share - each.evidence.share for each in findings if isinstance(each.evidence, InputEvidence)
    )


def _is_passing(finding: DiagnosisFinding) -> bool:
    """Return whether a finding explains why steps differ; what it costs must not be counted as jitter again."""
    evidence = finding.evidence
    is_transient = isinstance(evidence, LatenessEvidence) and evidence.pattern is LatePattern.TRANSIENT
    return is_transient or finding.mode in (Mode.RUNTIME, Mode.AMPLIFICATION, Mode.DATA)


def _unmatched(panels: Panels, settings: DiagnosisConfig) -> UnmatchedOperations | None:
    """Return that operations without a counterpart take as much as would make the job bound by communication."""
    unmatched_ns, work_ns = float(panels.unmatched_ns.mean()), float(panels.work_ns.mean())
    if unmatched_ns < settings.communication_share * max(unmatched_ns + work_ns, 1.0):
        return None
    return UnmatchedOperations(share=unmatched_ns / panels.mean_length_ns)


def _obstacle_of(search: StragglerSearch, panels: Panels, *, is_noise_known: bool) -> Obstacle | None:
    """Return why ranks could not be compared; noise of a known reason is told with the rank that it would not hide."""
    match search.obstacle:
        case SearchObstacle.TOO_FEW_STEPS:
            return TooFewSteps(num_steps=len(panels.times_ns), least=LEAST_STEPS)
        case SearchObstacle.TOO_MUCH_NOISE:
            return None if is_noise_known else TooMuchNoise(smallest_share=search.smallest_share or 0.0)
        case SearchObstacle.NOBODY_COMPARED | None:  # stages and transfers are judged without comparing ranks
            return NothingCompared() if not panels.is_role_known and panels.stage.max() < 1 else None
        case _:
            assert_never(search.obstacle)


def _needs_no_others(finding: DiagnosisFinding) -> bool:
    """Return whether a finding rests on what ranks measured of themselves, or on an operation that never ended.

    Who waits for whom, and how long a transfer takes, is not known while members of a group are; nor is what an event
    or jitter costs, for the steps may be as long without it.
    """
    is_own = isinstance(finding.evidence, (CollectionEvidence, InterruptionEvidence, CoreEvidence))
    return is_own or finding.mode in (*_LEADING, Mode.STRAGGLER, Mode.INPUT, Mode.HOST)


def _joined(findings: Sequence[DiagnosisFinding]) -> list[DiagnosisFinding]:
    """Return one finding a mode: the first one of it, with the loss and the culprits of all.

    What shows to be a cause of its own, such as an evaluation or a lossy link, keeps its own finding.
    """
    joined: dict[tuple[Mode, str], DiagnosisFinding] = {}
    for finding in findings:
        key = (finding.mode, _own_cause(finding))
        first = joined.get(key)
        if first is None:
            joined[key] = finding
            continue
        known = {culprit.aliases for culprit in first.culprits}
        more = tuple(culprit for culprit in finding.culprits if culprit.aliases not in known)
        share = first.loss_share + finding.loss_share
        joined[key] = replace(first, loss_share=share, culprits=first.culprits + more)
    return list(joined.values())


def _own_cause(finding: DiagnosisFinding) -> str:
    is_own = isinstance(finding.evidence, (CollectionEvidence, InterruptionEvidence, FlowEvidence))
    return finding.variety if is_own else ""
