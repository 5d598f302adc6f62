"""From panels of steps to findings, topic by topic, and to the verdict in words; or why the data decide nothing.

A rule finds nothing where its evidence stays below its threshold or within chance. Own work needs no common clock, so
who is late is judged by it; transfers need one, and are not judged where a clock is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple, assert_never

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import listed, percent, place_name, plural, rank_list
from hpcpace.core.thresholds import Thresholds, ThresholdValues, number
from hpcpace.diagnosis.finding import MAX_NAMED, Case, DiagnosisFinding, Evidence, Panels, Said, first_ranks
from hpcpace.diagnosis.incomplete import MARK_STEPS
from hpcpace.diagnosis.summary import AuditFigures, Causes, EndKind, Finding, Mode, RunEnd, Verdict
from hpcpace.diagnosis.topics import (
    communication,
    cores,
    events,
    idle,
    jitter,
    links,
    pipeline,
    run_end,
    stops,
    straggler,
)
from hpcpace.diagnosis.topics.cores import CoreEvidence
from hpcpace.diagnosis.topics.idle import InputThresholds
from hpcpace.diagnosis.topics.pipeline import PipelineThresholds, bubble_remarks
from hpcpace.diagnosis.topics.run_end import last_words, run_end_line
from hpcpace.diagnosis.topics.stages import StagedEvidence
from hpcpace.metrics.hotspots import Hotspot
from hpcpace.metrics.phases import Part
from hpcpace.metrics.stragglers import MIN_STEPS, SearchObstacle

_MAX_REMARKS = 2  # display: audit findings in the verdict
_HEALTHY_CONFIDENCE = 0.95  # statistics: of a healthy verdict, as the score measures it


def verdict_of(diagnosis: Diagnosis, *, hosts: Mapping[int, str], remarks: Sequence[str] = ()) -> Verdict:
    """Return a diagnosis in words.

    Args:
        diagnosis: what was found.
        hosts: host names by rank.
        remarks: sentences that belong to the verdict whatever it is, such as on a pipeline's bubble.
    """
    remarks = [*_shared_cores(diagnosis, hosts), *remarks]
    if diagnosis.obstacle is not None:
        return _undecided(diagnosis, diagnosis.obstacle, remarks)
    if not diagnosis.findings:
        return _healthy(diagnosis, hosts, remarks)
    first = diagnosis.findings[0]
    words, *others = (
        finding.evidence.words(Said(finding=finding, hosts=hosts, is_upper_bound=bool(diagnosis.absent)))
        for finding in diagnosis.findings
    )
    return Verdict(
        mode=str(first.mode),
        variety=first.variety,
        culprits=tuple(
            {
                (each.kind, each.id): each for finding in diagnosis.findings[::-1] for each in finding.culprits[::-1]
            }.values()
        )[::-1],
        confidence=first.confidence,
        loss_share=first.loss_share,
        headline="; ".join([words.headline, *_absent(diagnosis)]),
        why=(words.why, *words.more),
        next=(words.next, *_find_traces(diagnosis)),
        also=(*(other.headline for other in others), *remarks),
        findings=tuple(_summarized(finding) for finding in diagnosis.findings),
    )


def with_end(verdict: Verdict, end: RunEnd | None, hosts: Mapping[int, str]) -> Verdict:
    """Return a verdict that names the end of the run before its time, where none of its findings does.

    Args:
        verdict: on the steps until then.
        end: what ended the run; None where nothing did.
        hosts: host names by rank.
    """
    if end is None or end.kind is EndKind.FAILURE or any(each.mode == Mode.ENDED for each in verdict.findings):
        return verdict
    headline = f"{verdict.headline}; {run_end_line(end, hosts)}"
    return replace(verdict, headline=headline, why=(*verdict.why, *last_words(end, hosts)))


def main_verdict(verdict: Verdict) -> Verdict:
    """Return a verdict with the culprits of its main mode alone, as a page shows them under its headline."""
    return replace(verdict, culprits=verdict.findings[0].culprits if verdict.findings else ())


def near_misses(
    diagnosis: Diagnosis, panels: Panels, hotspots: Sequence[Hotspot], first_excess: float, thresholds: ThresholdValues
) -> tuple[str, ...]:
    """Return what stands out but stays below its threshold; nothing if something is above one.

    Args:
        diagnosis: what was found.
        panels: the steps.
        hotspots: places that are slower than others.
        first_excess: mean excess of the ranks of the first of them over their roles.
        thresholds: above which something is worth a remark.
    """
    if diagnosis.findings or diagnosis.obstacle is not None:
        return ()
    found = []
    if hotspots:
        first = hotspots[0]
        name = place_name(first.kind, first.id)
        reason = ", which may be waiting for a core" if diagnosis.cores is not None else ""
        found.append(f"{name} has {percent(first_excess)} more own work than others of its role{reason}")
    data = float(panels.data_ns.mean()) / panels.mean_time_ns
    if data >= thresholds.of(InputThresholds).notable_share:
        found.append(f"waiting for data takes {percent(data)}")
    return (f"below the thresholds: {'; '.join(found)}",) if found else ()


def remarks_of(causes: Causes | None, hosts: Mapping[int, str], thresholds: ThresholdValues) -> tuple[str, ...]:
    """Return what belongs to every verdict: a pipeline's bubble, and ranks whose clocks may be wrong."""
    remarks = bubble_remarks(causes, thresholds.of(PipelineThresholds))
    if causes is not None and causes.suspected_ranks:
        who = first_ranks(causes.suspected_ranks, hosts)
        remarks.append(
            f"the clock of {who} may be wrong: arrival times contradict durations, so they are blamed on nobody"
        )
    return tuple(remarks)


def audit_remarks(audit: AuditFigures | None) -> tuple[str, ...]:
    """Return the first audit findings that set the culprits apart from the others, for the verdict."""
    matches = audit.matches if audit is not None else ()
    return tuple(match.told for match in matches if not match.is_common)[:_MAX_REMARKS]


def _summarized(finding: DiagnosisFinding) -> Finding:
    return Finding(
        mode=str(finding.mode),
        variety=finding.variety,
        loss_share=finding.loss_share,
        confidence=finding.confidence,
        culprits=finding.culprits,
        numbers=finding.evidence.numbers(),
        stages=finding.evidence.stages if isinstance(finding.evidence, StagedEvidence) else (),
        loss_interval=finding.loss_interval,
    )


def _undecided(diagnosis: Diagnosis, obstacle: Obstacle, remarks: Sequence[str]) -> Verdict:
    return Verdict(
        mode=str(Mode.CANNOT_TELL),
        confidence=0.0,
        headline=f"cannot tell: {'; '.join([*_absent(diagnosis), obstacle.words])}",
        why=(*_certain(diagnosis), *obstacle.why),
        next=tuple(_find_traces(diagnosis)) or (obstacle.advice,),
        also=tuple(remarks),
    )


def _healthy(diagnosis: Diagnosis, hosts: Mapping[int, str], remarks: Sequence[str]) -> Verdict:
    smallest = diagnosis.smallest_effect
    why = "no two ranks do the same work, so stages were compared with each other, and ranks were not"
    if diagnosis.num_present == 1:
        why = "a single rank waits for no other, and is compared with none: only its own steps were judged"
    if smallest is not None:
        why = f"a rank {percent(smallest)} slower than its role would have been detected"
    small = [f"{each.words} {percent(each.share)} of the step" for each in diagnosis.small]
    nothing = "healthy: no straggler, contention, imbalance or amplified jitter above the thresholds"
    return Verdict(
        mode=str(Mode.HEALTHY),
        confidence=_HEALTHY_CONFIDENCE,
        headline="; no fault, but not nothing: ".join([nothing, *([listed(small)] if small else [])]),
        why=(why,),
        next=(_next_of_healthy(diagnosis, hosts),),
        also=tuple(remarks),
    )


def _next_of_healthy(diagnosis: Diagnosis, hosts: Mapping[int, str]) -> str:
    if diagnosis.cores is None:
        return "nothing: to go faster, change the job, not the cluster"
    return f"to go faster: {diagnosis.cores.evidence.words(Said(finding=diagnosis.cores, hosts=hosts)).next}"


def _shared_cores(diagnosis: Diagnosis, hosts: Mapping[int, str]) -> list[str]:
    """Return that ranks share cores, where that is notable and below its threshold."""
    cores = diagnosis.cores
    is_found = any(finding.mode == Mode.CORES for finding in diagnosis.findings)
    if cores is None or not isinstance(cores.evidence, CoreEvidence) or is_found:
        return []
    if cores.evidence.is_of_lab:
        return [cores.evidence.words(Said(finding=cores, hosts=hosts)).headline]
    why_none = "on purpose" if cores.evidence.is_on_purpose else f"threshold {percent(cores.evidence.least)}"
    words = cores.evidence.words(Said(finding=cores, hosts=hosts))
    return [f"{words.headline} ({why_none})"]


def _absent(diagnosis: Diagnosis) -> list[str]:
    """Return what every headline says while ranks are missing."""
    num_ranks = diagnosis.num_present + len(diagnosis.absent)
    lost = [rank for rank in diagnosis.absent if rank not in diagnosis.stepless]
    sentences = []
    if lost:
        has = "has" if len(lost) == 1 else "have"
        sentences.append(f"{shortened_ranks(lost)} of {num_ranks} {has} no usable trace")
    if diagnosis.stepless:
        sentences.append(f"no step was seen on {shortened_ranks(diagnosis.stepless)} of {num_ranks}")
    return sentences


def _find_traces(diagnosis: Diagnosis) -> list[str]:
    """Return what to do about missing ranks."""
    lost = [rank for rank in diagnosis.absent if rank not in diagnosis.stepless]
    sentences = []
    if lost:
        traces = "traces" if lost[1:] else "trace"
        whose = shortened_ranks(lost)
        sentences.append(f"find the {traces} of {whose}: the list of what is missing, below, says why")
    if diagnosis.stepless:
        trains = "train" if diagnosis.stepless[1:] else "trains"
        sentences.append(f"if {shortened_ranks(diagnosis.stepless)} {trains}, {MARK_STEPS}")
    return sentences


def _certain(diagnosis: Diagnosis) -> list[str]:
    """Return what is true whatever the missing ranks did."""
    if not diagnosis.absent:
        return []
    sentences = ["the others may have waited for a missing rank, so waits and transfers prove nothing here"]
    if diagnosis.smallest_effect is not None:
        sentences.append(
            f"certain: none of the {diagnosis.num_present} ranks with a trace is {percent(diagnosis.smallest_effect)} "
            "slower than its role; that would have been detected"
        )
    return sentences


_MORE_STEPS = "record at least 20 steps, such as schedule(active=20) of torch.profiler, and report them"
_MAX_LIST_CHARS = 30  # display: a longer list of ranks is cut
_MIN_COST = 0.001  # display: nobody is named for less than a thousandth of the step


class Needs(Enum):
    """The data without which a topic does not run."""

    NOTHING = auto()
    STEPS = auto()
    OWN_WORK = auto()


class Topic(NamedTuple):
    """A topic: its rule, and the data that it needs."""

    find: Callable[[Case], Sequence[DiagnosisFinding]]
    needs: Needs


TOPICS = (
    Topic(run_end.find_hanging, Needs.NOTHING),
    Topic(run_end.find, Needs.NOTHING),
    Topic(stops.find, Needs.NOTHING),
    Topic(stops.find_growth, Needs.NOTHING),
    Topic(straggler.find_by_arrival, Needs.STEPS),
    Topic(idle.find_host_everywhere, Needs.OWN_WORK),
    Topic(straggler.find, Needs.OWN_WORK),
    Topic(pipeline.find, Needs.OWN_WORK),
    Topic(idle.find_input, Needs.OWN_WORK),
    Topic(idle.find_host_somewhere, Needs.OWN_WORK),
    Topic(events.find_collection, Needs.OWN_WORK),
    Topic(events.find_interruptions, Needs.OWN_WORK),
    Topic(links.find, Needs.OWN_WORK),
    Topic(links.find_by_transfers, Needs.OWN_WORK),
    Topic(communication.find, Needs.OWN_WORK),
    Topic(events.find, Needs.OWN_WORK),
    Topic(jitter.find, Needs.OWN_WORK),
    Topic(cores.find, Needs.OWN_WORK),
)
"""All topics, in the order in which they run: each sees the findings of those before it in the case.

Hosts that are too slow everywhere come before all that compares ranks by their work, stragglers before topics that
judge the work without theirs, links before communication, all that makes steps differ before jitter, and cores last,
because they may explain any other finding.
"""


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why the data of a run decide nothing.

    Attributes:
        words: the reason, as the headline has it.
        advice: what to do.
        why: further sentences.
    """

    words: str
    advice: str = "use more steps of the run (--steps, --include-warmup), or record more"
    why: tuple[str, ...] = ()


WRONG_CLOCK = Obstacle(
    words="a clock is wrong, so transfers cannot be judged; the ranks' own work shows no fault",
    advice="see the clock error below",
)
EARLY_EXITS = Obstacle(
    words="ranks leave operations before others enter them: a clock is wrong, or they exchange nothing there, so "
    "transfers cannot be judged; the ranks' own work shows no fault",
    advice="see the clock error below",
)
ABSENT_RANKS = Obstacle(words="nothing that is certain explains the step time")
"""Ranks without a trace may cause the waits of the others."""
_IN_FULL = "record some hundred steps in full: hpcpace switch RUN on, or trace.detail"
NO_PHASES = Obstacle(
    words="phases were not recorded, so who works and who waits inside a step is not known", advice=_IN_FULL
)
NOTHING_COMPARED = Obstacle(
    words="ranks send to each other, and which of them do the same work is not known",
    advice="say how ranks are laid out: hpcpace.session(mesh={'dp': 2, 'pp': 2})",
)


def too_few_steps(num_steps: int, least: int, *, num_plain: int = 0) -> Obstacle:
    """Return that a run has fewer steps than a diagnosis needs, beside those that were recorded without detail."""
    are = "is" if num_steps == 1 else "are"
    words = f"{plural(num_steps, 'step')} {are} too few: at least {least} are needed"
    if not num_plain:
        return Obstacle(words=words)
    others = "1 other was" if num_plain == 1 else f"{num_plain} others were"
    return Obstacle(words=f"{words}, and {others} recorded without detail", advice=_IN_FULL)


def too_much_noise(smallest_share: float) -> Obstacle:
    """Return that only a rank slower than its role by more than a share would stand out from the noise."""
    return Obstacle(words=f"noise hides any rank that is less than {smallest_share:.0%} slower than its role")


def unsampled_step(words: str) -> Obstacle:
    """Return that a single step took a rank far longer than usual, in words, and that nothing shows why."""
    return Obstacle(words=words, advice="record samples of the hosts (trace.counters = true)")


def host_times(ranks: Sequence[int]) -> Obstacle:
    """Return that phases of ranks with a device are times of their hosts, so that their work is not known."""
    return Obstacle(
        words=f"phases of {shortened_ranks(ranks)} are host times, and what their devices do is not known",
        advice="trace a few hundred steps with device times of phases (hpcpace help ranks with a device)",
        why=(
            "the host runs ahead of the device, so own work, waits and transfers in a step are not known; arrivals at "
            "collectives on the device name no rank as late",
        ),
    )


def unmatched_operations(share: float) -> Obstacle:
    """Return that a share of the step is in operations that match no other rank's."""
    return Obstacle(
        words=f"{percent(share)} of the step time is in operations that match no other rank's: whether ranks wait or "
        "transfer there is not known",
        advice="record groups, numbers and peers of operations: hpcpace trace does",
    )


@dataclass(frozen=True, kw_only=True)
class HealthyThresholds(Thresholds, topic="healthy"):
    """What a healthy verdict says of losses below the thresholds."""

    small_share: float = number(0.05, "share")
    """Share of the step that a part without own work must take for a healthy verdict to name it: a fault that costs as
    much may be behind it."""


@dataclass(frozen=True, kw_only=True)
class SmallLoss:
    """A part of the step that no finding explains: what it is, in words, and its share of the step time."""

    words: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings on a run, the largest loss first.

    Attributes:
        findings: all modes above their thresholds; empty if nothing is wrong.
        obstacle: why the data decide nothing; None if they do.
        smallest_effect: the smallest excess of one rank that would have been named with a probability of 0.9; None
            where no two ranks are compared.
        absent: ranks with which the judged ones communicate, and of which nothing is known. Then waits and transfers
            prove nothing, and the loss to a straggler is an upper bound.
        stepless: those of them whose traces are complete and show no step.
        num_present: ranks that are judged.
        slow: indices of the ranks that stand out: the usual work of a role is without theirs.
        cores: that ranks share cores, where that is notable; among the findings only above its threshold.
        small: what takes much of the step although nothing is above its threshold, the largest first.
    """

    findings: tuple[DiagnosisFinding, ...]
    obstacle: Obstacle | None
    smallest_effect: float | None
    absent: tuple[int, ...] = ()
    stepless: tuple[int, ...] = ()
    num_present: int = 0
    slow: tuple[int, ...] = ()
    cores: DiagnosisFinding | None = None
    small: tuple[SmallLoss, ...] = ()

    @property
    def late_ranks(self) -> frozenset[int]:
        """The ranks that findings name as late by their own work, those of named nodes and slots included."""
        named = (finding for finding in self.findings if finding.culprits)
        late = (each.evidence for each in named if isinstance(each.evidence, straggler.LatenessEvidence))
        return frozenset(rank for evidence in late for rank in evidence.ranks)


def diagnose(case: Case) -> Diagnosis:
    """Return what is wrong with a run."""
    panels, cores_found = case.panels, cores.find_shared(case)
    known = _known(case)
    for topic in TOPICS:
        if topic.needs.value <= known.value:
            found = topic.find(case)  # may drop earlier findings
            case.findings = [*case.findings, *found]
    findings = sorted((each for each in _joined(straggler.behind_others(case)) if _costs(each)), key=_place)
    if case.absent:
        findings = [finding for finding in findings if finding.evidence.needs_no_others]
    search = case.search
    return Diagnosis(
        findings=tuple(findings),
        obstacle=None if findings else _obstacle(case, known, is_noise_explained=cores_found is not None),
        smallest_effect=search.smallest_share if search is not None else None,
        absent=tuple(case.absent),
        stepless=tuple(case.stepless),
        num_present=len(panels.rank),
        slow=search.slow if search is not None else (),
        cores=cores_found,
        small=() if findings else _small_losses(case),
    )


_APART = {"checkpoints take": Part.CHECKPOINT, "evaluation takes": Part.EVAL}
"""Parts of the step that are no training."""


def _small_losses(case: Case) -> tuple[SmallLoss, ...]:
    """Return the parts of the step besides own work that are no fault, and large all the same."""
    panels, least = case.panels, case.thresholds.of(HealthyThresholds).small_share
    can_single_out = case.links is None or case.links.is_identifiable or len(np.unique(panels.node)) == 1
    transfers = "exposed transfers take" if can_single_out else "exposed transfers (no slow link could show) take"
    parts = {
        transfers: panels.transfer_ns,
        "garbage collection takes": panels.gc_ns,
        "idle devices that wait for their hosts take": panels.host_ns,
    }
    if panels.parts_ns is not None:
        parts |= {words: panels.parts_ns[:, :, part] for words, part in _APART.items()}
    if len(np.unique(panels.stage)) == 1:  # the bubble of a pipeline is its own remark
        parts["waits for other ranks take"] = panels.wait_ns
    found = [SmallLoss(words=words, share=float(of.mean()) / panels.mean_length_ns) for words, of in parts.items()]
    return tuple(sorted((each for each in found if each.share >= least), key=lambda each: -each.share))


def _known(case: Case) -> Needs:
    """Return what the data of a case suffice for."""
    if len(case.panels.times_ns) < case.settings.least_steps:
        return Needs.NOTHING
    return Needs.STEPS if case.panels.host_timed else Needs.OWN_WORK


def _costs(finding: DiagnosisFinding) -> bool:
    """Return whether a finding costs anything, or is a fault by itself: an end, a hang, a broken link."""
    evidence = finding.evidence
    is_fault = evidence.precedence < Evidence.precedence or evidence.has_own_cause
    return max(finding.loss_share, evidence.later_share or 0.0) >= _MIN_COST or is_fault


def _place(finding: DiagnosisFinding) -> tuple[float, float, bool]:
    """Return the sort key of a finding: what stopped the run, then the largest loss as far as it is certain."""
    evidence = finding.evidence
    return evidence.precedence, -finding.loss_share * finding.counted_part, not evidence.wins_ties


def _obstacle(case: Case, known: Needs, *, is_noise_explained: bool) -> Obstacle | None:
    """Return why the data decide nothing, if nothing was found; None if the run is healthy."""
    panels = case.panels
    if known is Needs.NOTHING:
        few = too_few_steps(len(panels.times_ns), case.settings.least_steps, num_plain=panels.num_plain)
        first = "" if case.absent else straggler.preliminary(case)
        advice = few.advice if panels.num_plain else _MORE_STEPS
        return replace(few, words=f"{few.words}; {first}", advice=advice) if first else few
    if known is Needs.STEPS:  # nothing but arrivals rests on what devices did
        return NO_PHASES if panels.is_unphased else host_times(panels.host_timed)
    if case.absent:
        return ABSENT_RANKS
    if case.is_clock_wrong:
        return WRONG_CLOCK
    if case.are_exits_early:
        return EARLY_EXITS
    if words := stops.long_step(case):
        return unsampled_step(words)
    found = _obstacle_of_search(case, is_noise_explained=is_noise_explained) or _unmatched(case)
    # Whoever waits for a core comes and goes.
    return found if found or is_noise_explained else _doubtful(case)


def _obstacle_of_search(case: Case, *, is_noise_explained: bool) -> Obstacle | None:
    """Return why ranks could not be compared; explained noise is reported with the rank that it would not hide."""
    search, panels = case.search, case.panels
    if search is None:
        return None
    match search.obstacle:
        case SearchObstacle.TOO_FEW_STEPS:
            return too_few_steps(len(panels.times_ns), MIN_STEPS, num_plain=panels.num_plain)
        case SearchObstacle.TOO_MUCH_NOISE:
            return None if is_noise_explained else too_much_noise(search.smallest_share or 0.0)
        case SearchObstacle.NOBODY_COMPARED | None:  # stages and transfers are judged without comparing ranks
            return NOTHING_COMPARED if not panels.is_role_known and panels.stage.max() < 1 else None
        case _:
            assert_never(search.obstacle)


def _doubtful(case: Case) -> Obstacle | None:
    words = straggler.doubtful(case)
    return Obstacle(words=words) if words else None


def _unmatched(case: Case) -> Obstacle | None:
    """Return that operations without a counterpart take as much as would make the job bound by communication."""
    panels = case.panels
    unmatched_ns, work_ns = float(panels.unmatched_ns.mean()), float(panels.work_ns.mean())
    if unmatched_ns < case.settings.communication_share * max(unmatched_ns + work_ns, 1.0):
        return None
    return unmatched_operations(unmatched_ns / panels.mean_length_ns)


def _joined(findings: Sequence[DiagnosisFinding]) -> list[DiagnosisFinding]:
    """Return one finding a mode: the first one of it, with the loss and the culprits of all.

    Findings with an independent cause, such as an evaluation or a lossy link, are not merged.
    """
    joined: dict[tuple[str, str], DiagnosisFinding] = {}
    for finding in findings:
        key = (finding.mode, finding.variety if finding.evidence.has_own_cause else "")
        first = joined.get(key)
        if first is None:
            joined[key] = finding
            continue
        known = {culprit.aliases for culprit in first.culprits}
        more = tuple(culprit for culprit in finding.culprits if culprit.aliases not in known)
        share = first.loss_share + finding.loss_share
        own, more_of = first.loss_interval, finding.loss_interval
        interval = (own[0] + more_of[0], own[1] + more_of[1]) if own is not None and more_of is not None else None
        joined[key] = replace(first, loss_share=share, culprits=first.culprits + more, loss_interval=interval)
    return list(joined.values())


def shortened_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks, or the first of many and how many there are."""
    text = rank_list(ranks)
    return text if len(text) <= _MAX_LIST_CHARS else f"{len(ranks)} ranks ({rank_list(ranks[:MAX_NAMED])}, ...)"
