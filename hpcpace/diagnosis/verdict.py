"""The verdict in words: the findings, the figures behind them, and what to do; or why the data decide nothing.

`hpcpace.diagnosis.diagnose` computes; here its results become sentences, with those of each topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcpace.core.text import percent, place_name
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.diagnose import Diagnosis, Obstacle, shortened_ranks
from hpcpace.diagnosis.finding import DiagnosisFinding, Panels, Said, first_ranks
from hpcpace.diagnosis.incomplete import MARK_STEPS
from hpcpace.diagnosis.summary import AuditFigures, Causes, EndKind, Finding, Mode, RunEnd, Verdict
from hpcpace.diagnosis.topics.cores import CoreEvidence
from hpcpace.diagnosis.topics.idle import InputThresholds
from hpcpace.diagnosis.topics.pipeline import PipelineThresholds, bubble_remarks
from hpcpace.diagnosis.topics.run_end import last_words, run_end_line
from hpcpace.diagnosis.topics.stages import StagedEvidence
from hpcpace.metrics.hotspots import Hotspot

_MAX_REMARKS = 2  # display: audit findings in the verdict


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
    return Verdict(
        mode=str(Mode.HEALTHY),
        confidence=0.95,
        headline="healthy: no straggler, contention, imbalance or amplified jitter above the thresholds",
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
