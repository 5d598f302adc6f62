"""Pipeline imbalance: stages with more work than the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import percent, place_name
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    Case,
    CoreWaiting,
    DiagnosisFinding,
    FindingWords,
    Panels,
    Said,
    block_error,
    confidence_of,
)
from hpcpace.diagnosis.summary import Causes, Culprit, Mode
from hpcpace.diagnosis.topics.beside_hosts import most_gain, works_longer
from hpcpace.diagnosis.topics.idle import HostThresholds
from hpcpace.diagnosis.topics.stages import StagedEvidence, advice_of_imbalance, by_stage, stage_sentences
from hpcpace.metrics import Floats, Ints
from hpcpace.metrics.kernels import others_median
from hpcpace.metrics.pass_work import even_stages
from hpcpace.metrics.resampling import Estimate, block_means
from hpcpace.metrics.roles import Stage, StageComparison, StageThresholds, compare_with_others
from hpcpace.metrics.special import stdtr
from hpcpace.trace.schema import Phase

_BESIDE_HOSTS = 0.08  # statistics: error of a cost, as a part of it, where devices of slow stages wait for their hosts


@dataclass(frozen=True, kw_only=True)
class PipelineThresholds(Thresholds, topic="pipeline"):
    """When stages are alike, and a bubble is worth a remark."""

    alike_level: float = number(0.16, "probability")
    """One-sided level at which a stage counts as like the median one, here one standard error: more would average
    stages that differ for good."""
    large_bubble_share: float = number(0.15, "share")
    """Share of the step that a bubble must take to be mentioned; smaller ones are the usual schedule's."""


@dataclass(frozen=True, kw_only=True)
class ImbalanceEvidence(StagedEvidence):
    """Pipeline stages with more work than the others.

    Attributes:
        effect: the excess of the first as a share of their work.
    """

    mode: ClassVar[str] = Mode.IMBALANCE
    effect: float

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        culprits = said.finding.culprits
        has, costs = ("have", "cost") if culprits[1:] else ("has", "costs")
        costs = f"{costs} {said.lost}{by_stage(self.stages)}"
        excess = f"{percent(culprits[0].effect)} above that of the other stages {said.interval}"
        return FindingWords(
            headline=f"pipeline imbalance: {said.who} {has} more work than the other stages and {costs}",
            why=f"own work {excess}; the others wait for it",
            next=advice_of_imbalance(self.stages),
            more=stage_sentences(self.stages, [place_name(culprit.kind, culprit.id) for culprit in culprits]),
        )

    def is_waiting_for_cores(self, finding: DiagnosisFinding, waiting: CoreWaiting, panels: Panels) -> bool:
        """Return whether waiting for cores explains the excess of the stages."""
        stages = [int(culprit.id.removeprefix("pp")) for culprit in finding.culprits]
        return waiting.is_all_of(self.effect, np.isin(panels.stage, stages))


def find(case: Case) -> list[DiagnosisFinding]:
    """Return the pipeline imbalance: the stages whose work exceeds that of the other stages.

    In each block of steps, a stage's work is the lower median over its ranks' means, so that one slow rank is not taken
    for a slow stage; garbage collection is not a stage's. Its excess is over the median of the other stages. With one
    rank a stage, stage and rank cannot be distinguished. The loss is what rebuilt steps gain where these stages have no
    more work than the others, all at once, because half of the stages may be on slower nodes; where steps are not
    rebuilt, the slowest stage less the mean one.
    """
    panels, limits = case.panels, case.thresholds.of(PipelineThresholds)
    stages = np.unique(panels.stage[panels.stage >= 0])
    if len(stages) < 2:
        return []
    work_ns = np.maximum(case.work_ns - case.rest.gc_ns, 0.0)
    blocks = block_means(work_ns)
    # Of each stage the lower median of its ranks.
    work = np.array([np.sort(of, axis=0)[(len(of) - 1) // 2] for of in (blocks[panels.stage == s] for s in stages)])
    reference = others_median(work)
    share = (work - reference) / np.maximum(reference.mean(axis=1), 1.0)[:, None]
    mean, error, factor = block_error(share, case.settings.level / len(stages))
    slow = np.flatnonzero(mean > np.maximum(case.settings.imbalance_share, factor * error))
    slow = slow[mean[slow].argsort()[::-1]]
    found = {int(stages[at]): stage_excess(work_ns, panels.stage, int(stages[at]), limits.alike_level) for at in slow}
    if panels.host_ns.any() or panels.explained_idle_ns:
        is_sure = _are_sure(case, {of: effect for of, (effect, _) in found.items()})
        slow = slow[[is_sure[int(of)] for of in stages[slow]]]
        found = {int(of): found[int(of)] for of in stages[slow]}
    if not found:
        return []
    first, num_blocks = int(slow[0]), block_means(share).shape[1]
    p_value = float(stdtr(num_blocks - 1, -mean[first] / error[first])) if error[first] > 0 else 0.0
    evidence = ImbalanceEvidence(
        effect=found[int(stages[first])][0], stages=_stages(panels, list(found), case.thresholds.of(StageThresholds))
    )
    loss_share, interval = _cost(case, found, evidence.stages)
    if loss_share is None:
        loss_share = float((work.max(axis=0) - work.mean(axis=0)).mean()) / panels.mean_time_ns
    return [
        DiagnosisFinding(
            evidence=evidence,
            loss_share=loss_share,
            loss_interval=interval,
            confidence=confidence_of(p_value * len(stages)),
            culprits=tuple(
                Culprit(kind="slot", id=f"pp{stage}", aliases=_aliases(panels, stage), effect=effect, interval=interval)
                for stage, (effect, interval) in found.items()
            ),
        )
    ]


def _cost(
    case: Case, found: dict[int, tuple[float, tuple[float, float]]], stages: Sequence[StageComparison | None]
) -> tuple[float | None, tuple[float, float] | None]:
    """Return what stages cost as a share of the step time, with the interval, and take their idle time from the case.

    If all that they take longer for is idle time of their devices, that counts. If the hosts of the other stages let
    the job go no faster than that, the interval is as wide on both sides as what they take back.

    Args:
        case: what is judged.
        found: excess of each stage, with its interval.
        stages: what each takes longer for.

    Returns:
        None where steps are not rebuilt.
    """
    panels, steps, is_slow = case.panels, case.steps, np.isin(case.panels.stage, list(found))
    is_by_host = [each is not None and Stage.HOST in each.stages for each in stages]
    by_host = [of for of, is_one in zip(found, is_by_host, strict=False) if is_one]
    if by_host:
        is_idle = np.isin(panels.stage, by_host)[:, None]
        case.rest = replace(case.rest, host_ns=np.where(is_idle, 0.0, case.rest.host_ns))
    if steps is None:
        return None, None
    is_only_by_host = by_host and all(each is not None and len(each.stages) == 1 for each in stages)
    idle = case.stretches(Phase.IDLE) if is_only_by_host and len(by_host) == len(found) else None
    if idle is not None:
        cost = case.cost(idle.gain(steps, is_slow))
    else:
        effects = {of: effect for of, (effect, _) in found.items()}
        even = even_stages(steps, case.pass_work, panels.work_ns - panels.gc_ns, panels.stage, effects)
        case.mended.append(even[1])
        error = max(_relative_error(*each) for each in found.values())
        # Where in a schedule hosts hold devices up depends on what stages take.
        idle_share = max(panels.host_ns[panels.stage == of].mean() for of in found) / panels.mean_time_ns
        beside = _BESIDE_HOSTS if idle_share >= case.thresholds.of(HostThresholds).everywhere_share else 0.0
        cost = case.cost(steps.gain_of(*even), float(np.hypot(error, beside)))
    most = most_gain(case, np.flatnonzero(is_slow).tolist())
    taken = cost.value - most
    return (most, (max(most - taken, 0.0), cost.value)) if taken > 0 else (cost.value, cost.interval)


def _are_sure(case: Case, found: dict[int, float]) -> dict[int, bool]:
    """Return of stages, by number, whether more work is theirs for sure where devices wait for their hosts.

    Where in a schedule equally slow hosts hold a device up depends on the schedule, and idle time may look like work.

    Args:
        case: what is judged.
        found: the excess of each.
    """
    panels, stage = case.panels, case.panels.stage
    is_other = (stage >= 0) & ~np.isin(stage, list(found))
    least = 1 + case.thresholds.of(HostThresholds).slower_host
    has_slow_host = {of: len(panels.issue_ratio) and panels.issue_ratio[stage == of].mean() > least for of in found}
    return {of: bool(has_slow_host[of]) or works_longer(case, stage == of, is_other, found[of]) for of in found}


def _relative_error(effect: float, interval: tuple[float, float]) -> float:
    """Return how wrong an excess is, as a part of it."""
    return (interval[1] - interval[0]) / 2 / effect


def _aliases(panels: Panels, stage: int) -> tuple[str, ...]:
    """Return the names of a stage: its slot, and its rank and its node where it has one that is not shared."""
    members = np.flatnonzero(panels.stage == stage)
    aliases = [f"slot pp{stage}"]
    if len(members) == 1:
        aliases.append(f"rank {panels.rank[members[0]]}")
    if len(set(panels.node[members].tolist())) == 1 and (panels.node == panels.node[members[0]]).sum() == len(members):
        aliases.append(f"node {panels.host[members[0]]}")
    return tuple(aliases)


def _stages(panels: Panels, slow: Sequence[int], limits: StageThresholds) -> tuple[StageComparison | None, ...]:
    """Return what the ranks of each slow pipeline stage take longer for than those of the stages that are not slow."""
    if panels.parts_ns is None:
        return ()
    others = np.flatnonzero((panels.stage >= 0) & ~np.isin(panels.stage, slow))
    every_step = slice(0, panels.work_ns.shape[1])
    return tuple(
        panels.qualified(compare_with_others(panels.parts_ns, late, others, every_step, limits), late)
        for late in (np.flatnonzero(panels.stage == stage) for stage in slow)
    )


def stage_excess(work_ns: Floats, stage: Ints, slow: int, alike_level: float) -> tuple[float, tuple[float, float]]:
    """Return by what share a stage's mean work exceeds the median of the others', with its 95 % interval.

    Stages within one standard error of the median one are averaged with it: the median of a few noisy stages, taken
    block by block, leans to whichever side has stages that differ for good.

    Args:
        work_ns: own work with stragglers put back, float64, (num_ranks, num_steps).
        stage: of each rank, -1 where there is none, int64, (num_ranks,).
        slow: number of the stage; there are others.
        alike_level: one-sided level at which a stage counts as like the median one.
    """
    blocks = block_means(work_ns)
    work = np.array([blocks[stage == of].mean(axis=0) for of in np.unique(stage[stage >= 0])])
    is_slow = np.unique(stage[stage >= 0]) == slow
    others = work[~is_slow]
    apart = others - others.mean(axis=0)
    mean, error, factor = block_error(apart, alike_level)
    middle = np.sort(mean)[[(len(mean) - 1) // 2, len(mean) // 2]]
    is_like = (mean >= middle[0] - factor * error) & (mean <= middle[1] + factor * error)
    share = work[is_slow][0] / np.maximum(others[is_like].mean(axis=0), 1.0) - 1
    effect = Estimate.of_mean(share)
    return effect.value, effect.interval


def bubble_remarks(causes: Causes | None, limits: PipelineThresholds) -> list[str]:
    """Return a remark on the pipeline's bubble, if it is large and larger than its schedule makes it."""
    bubble = causes.bubble if causes is not None else None
    if bubble is None or bubble.share < max(limits.large_bubble_share, bubble.ideal_share or 0.0):
        return []
    ideal = f" (the schedule alone costs {percent(bubble.ideal_share)})" if bubble.ideal_share else ""
    return [f"pipeline bubble {percent(bubble.share)} of the step{ideal}: more microbatches make it smaller"]
