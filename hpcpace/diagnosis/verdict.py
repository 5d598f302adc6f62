"""The verdict in words: what is wrong, the figures behind it, and what to do; or why the data decide nothing.

`hpcpace.diagnosis.diagnose` computes; here and in `finding_words` its results only become sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from hpcpace.core.text import named_ranks, percent, place_name, plural, rank_list
from hpcpace.diagnosis.diagnose import Diagnosis, DiagnosisFinding, Mode, Panels
from hpcpace.diagnosis.finding_words import words_of
from hpcpace.diagnosis.modes.evidence import CoreEvidence, numbers_of, stages_of
from hpcpace.diagnosis.modes.obstacle import (
    AbsentRanks,
    HostTimes,
    NoPhases,
    NothingCompared,
    NothingMeasured,
    Obstacle,
    TooFewSteps,
    TooMuchNoise,
    UnmatchedOperations,
    WrongClock,
)
from hpcpace.diagnosis.modes.run_end import EndKind, RunEnd
from hpcpace.diagnosis.sentences import run_end_line
from hpcpace.diagnosis.summary import AuditFigures, Causes, Finding, Verdict
from hpcpace.metrics.hotspots import Hotspot

_MOST_NAMED = 4
_LONGEST_LIST = 30
_LARGE_BUBBLE, _NOTABLE_DATA = 0.15, 0.05
_MOST_RANKS = 8
_MOST_REMARKS = 2
_UNSEEN = (
    "the host runs ahead of the device, so own work, waits and transfers in a step are not known; arrivals at "
    "collectives on the device name no rank as late"
)
_MORE_STEPS = "use more steps of the run (--steps, --include-warmup), or record more"


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
    is_most = bool(diagnosis.absent)
    first = diagnosis.findings[0]
    words, *others = (words_of(finding, hosts, is_most=is_most) for finding in diagnosis.findings)
    return Verdict(
        mode=str(first.mode),
        variety=first.variety,
        culprits=tuple(culprit for finding in diagnosis.findings for culprit in finding.culprits),
        confidence=first.confidence,
        loss_share=first.loss_share,
        headline="; ".join([words.headline, *_absent(diagnosis)]),
        why=(words.why, *words.more),
        next=(words.next, *_find_traces(diagnosis)),
        also=(*(other.headline for other in others), *remarks),
        findings=tuple(_summarized(finding) for finding in diagnosis.findings),
    )


def with_end(verdict: Verdict, end: RunEnd | None, hosts: Mapping[int, str]) -> Verdict:
    """Return a verdict that says what ended the run before its time, where none of its findings does.

    Args:
        verdict: on the steps until then.
        end: what ended the run; None where nothing did.
        hosts: host names by rank.
    """
    if end is None or end.kind is EndKind.FAILURE or any(each.mode == Mode.ENDED for each in verdict.findings):
        return verdict
    return replace(verdict, headline=f"{verdict.headline}; {run_end_line(end, hosts)}")


def main_verdict(verdict: Verdict) -> Verdict:
    """Return a verdict with the culprits of its main mode alone, as a page shows them under its headline."""
    return replace(verdict, culprits=verdict.findings[0].culprits if verdict.findings else ())


def near_misses(
    diagnosis: Diagnosis, panels: Panels, hotspots: Sequence[Hotspot], first_excess: float
) -> tuple[str, ...]:
    """Return what stands out but stays below its threshold; nothing if something is above one.

    Args:
        diagnosis: what was found.
        panels: the steps.
        hotspots: places that are slower than others.
        first_excess: mean excess of the ranks of the first of them over their roles.
    """
    if diagnosis.findings or diagnosis.obstacle is not None:
        return ()
    found = []
    if hotspots:
        first = hotspots[0]
        name = place_name(first.kind, first.id)
        found.append(f"{name} has {percent(first_excess)} more own work than others of its role")
    if (data := float(panels.data_ns.mean()) / panels.mean_time_ns) >= _NOTABLE_DATA:
        found.append(f"waiting for data takes {percent(data)}")
    return (f"below the thresholds: {'; '.join(found)}",) if found else ()


def remarks_of(causes: Causes | None, hosts: Mapping[int, str]) -> tuple[str, ...]:
    """Return what belongs to every verdict: a pipeline's bubble, and ranks whose clocks may be wrong."""
    remarks = []
    bubble = causes.bubble if causes is not None else None
    if bubble is not None and bubble.share >= max(_LARGE_BUBBLE, bubble.ideal_share or 0.0):
        ideal = f" (the schedule alone costs {percent(bubble.ideal_share)})" if bubble.ideal_share else ""
        remarks.append(f"pipeline bubble {percent(bubble.share)} of the step{ideal}: more microbatches make it smaller")
    if causes is not None and causes.suspected_ranks:
        who = named_ranks(causes.suspected_ranks[:_MOST_RANKS], hosts)
        more = f" and {len(causes.suspected_ranks) - _MOST_RANKS} more" if causes.suspected_ranks[_MOST_RANKS:] else ""
        remarks.append(
            f"the clock of {who}{more} may be wrong: arrival times contradict durations, so they are blamed on nobody"
        )
    return tuple(remarks)


def audit_remarks(audit: AuditFigures | None) -> tuple[str, ...]:
    """Return the first audit findings that set the culprits apart from the others, for the verdict."""
    matches = audit.matches if audit is not None else ()
    return tuple(match.told for match in matches if not match.is_common)[:_MOST_REMARKS]


def _summarized(finding: DiagnosisFinding) -> Finding:
    return Finding(
        mode=str(finding.mode),
        variety=finding.variety,
        loss_share=finding.loss_share,
        confidence=finding.confidence,
        culprits=finding.culprits,
        numbers=numbers_of(finding.evidence),
        stages=stages_of(finding.evidence),
    )


def _undecided(diagnosis: Diagnosis, obstacle: Obstacle, remarks: Sequence[str]) -> Verdict:
    advice = _MORE_STEPS
    if isinstance(obstacle, WrongClock):
        advice = "see the clock error below"
    elif isinstance(obstacle, NothingCompared):
        advice = "say how ranks are laid out: hpcpace.session(mesh={'dp': 2, 'pp': 2})"
    elif isinstance(obstacle, HostTimes):
        advice = "trace a few hundred steps with device times of phases (docs/diagnosis.md, ranks with a device)"
    elif isinstance(obstacle, UnmatchedOperations):
        advice = "record groups, numbers and peers of operations: hpcpace trace does"
    elif isinstance(obstacle, NoPhases):
        advice = "record some hundred steps in full: hpcpace switch RUN on, or trace.detail"
    return Verdict(
        mode=str(Mode.CANNOT_TELL),
        variety="",
        culprits=(),
        confidence=0.0,
        loss_share=0.0,
        headline=f"cannot tell: {'; '.join([*_absent(diagnosis), _obstacle_words(obstacle)])}",
        why=tuple(_certain(diagnosis)) + ((_UNSEEN,) if isinstance(obstacle, HostTimes) else ()),
        next=tuple(_find_traces(diagnosis)) or (advice,),
        also=tuple(remarks),
        findings=(),
    )


def _obstacle_words(obstacle: Obstacle) -> str:
    match obstacle:
        case TooFewSteps():
            are = "is" if obstacle.num_steps == 1 else "are"
            return f"{plural(obstacle.num_steps, 'step')} {are} too few: at least {obstacle.least} are needed"
        case WrongClock():
            return "a clock is wrong, so transfers cannot be judged; the ranks' own work shows no fault"
        case AbsentRanks():
            return "nothing that is certain explains the step time"
        case HostTimes():
            return (
                f"phases of {_shortened_ranks(obstacle.ranks)} are host times, and what their devices do is not known"
            )
        case NoPhases():
            return "phases were not recorded, so who works and who waits inside a step is not known"
        case TooMuchNoise():
            return f"noise hides any rank that is less than {obstacle.smallest_share:.0%} slower than its role"
        case NothingCompared():
            return "ranks send to each other, and which of them do the same work is not known"
        case UnmatchedOperations():
            return (
                f"{percent(obstacle.share)} of the step time is in operations that match no other rank's: whether ranks"
                " wait or transfer there is not known"
            )
        case NothingMeasured():
            return obstacle.error
        case _:
            assert_never(obstacle)


def _healthy(diagnosis: Diagnosis, hosts: Mapping[int, str], remarks: Sequence[str]) -> Verdict:
    smallest = diagnosis.smallest_effect
    why = "no two ranks do the same work, so stages were compared with each other, and ranks were not"
    if diagnosis.num_present == 1:
        why = "a single rank waits for no other, and is compared with none: only its own steps were judged"
    if smallest is not None:
        why = f"a rank {percent(smallest)} slower than its role would have been detected"
    return Verdict(
        mode=str(Mode.HEALTHY),
        variety="",
        culprits=(),
        confidence=0.95,
        loss_share=0.0,
        headline="healthy: no straggler, contention, imbalance or amplified jitter above the thresholds",
        why=(why,),
        next=(_next_of_healthy(diagnosis, hosts),),
        also=tuple(remarks),
        findings=(),
    )


def _next_of_healthy(diagnosis: Diagnosis, hosts: Mapping[int, str]) -> str:
    if diagnosis.cores is None:
        return "nothing: to go faster, change the job, not the cluster"
    return f"to go faster: {words_of(diagnosis.cores, hosts).next}"


def _shared_cores(diagnosis: Diagnosis, hosts: Mapping[int, str]) -> list[str]:
    """Return that ranks share cores, where that is notable and below its threshold."""
    cores = diagnosis.cores
    if cores is None or not isinstance(cores.evidence, CoreEvidence) or cores in diagnosis.findings:
        return []
    why_none = "on purpose" if cores.evidence.least >= 1 else f"threshold {percent(cores.evidence.least)}"
    return [f"{words_of(cores, hosts).headline} ({why_none})"]


def _absent(diagnosis: Diagnosis) -> list[str]:
    """Return what every headline says while traces are missing."""
    if not diagnosis.absent:
        return []
    num_ranks = diagnosis.num_present + len(diagnosis.absent)
    has = "has" if len(diagnosis.absent) == 1 else "have"
    return [f"{_absent_ranks(diagnosis)} of {num_ranks} {has} no usable trace"]


def _absent_ranks(diagnosis: Diagnosis) -> str:
    return _shortened_ranks(diagnosis.absent)


def _shortened_ranks(ranks: Sequence[int]) -> str:
    text = rank_list(ranks)
    if len(text) <= _LONGEST_LIST:
        return text
    return f"{len(ranks)} ranks ({rank_list(ranks[:_MOST_NAMED])}, ...)"


def _find_traces(diagnosis: Diagnosis) -> list[str]:
    """Return what to do about missing traces."""
    if not diagnosis.absent:
        return []
    traces = "trace" if len(diagnosis.absent) == 1 else "traces"
    return [f"find the {traces} of {_absent_ranks(diagnosis)}: the list of what is missing, below, says why"]


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
