"""Pipeline imbalance: a stage with more work than the others."""

from __future__ import annotations

import numpy as np

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import block_error, confidence_of, p_value_of
from hpcpace.diagnosis.modes.evidence import ImbalanceEvidence
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Floats, Int64s, Panels
from hpcpace.metrics.kernels import others_median
from hpcpace.metrics.recurrence import mean_interval
from hpcpace.metrics.resampling import block_means
from hpcpace.metrics.roles import StageComparison, compare_with_others
from hpcpace.metrics.what_if import Rebuilt, stage_change

_ONE_ERROR = 0.16  # one-sided level of one standard error


def imbalance_finding(
    panels: Panels, work_ns: Floats, steps: Rebuilt | None, settings: DiagnosisConfig
) -> list[DiagnosisFinding]:
    """Return the pipeline imbalance: a stage whose work exceeds that of the other stages.

    In each block of steps, a stage's work is the lower median over its ranks' means, so that one slow rank is not taken
    for a slow stage; its excess is over the median of the other stages. With one rank a stage, stage and rank cannot be
    told apart. The loss is what the rebuilt steps gain where the stage has no more work than the others; where steps
    are not rebuilt, the slowest stage less the mean one.

    Args:
        panels: the steps.
        work_ns: own work with stragglers put back, float64, (num_ranks, num_steps).
        steps: the steps rebuilt; None where they are not.
        settings: the thresholds.
    """
    stages = np.unique(panels.stage[panels.stage >= 0])
    if len(stages) < 2:
        return []
    blocks = block_means(panels.work_ns)
    work = np.array([_lower_median(blocks[panels.stage == stage]) for stage in stages])
    reference = others_median(work)
    base = reference.mean(axis=1)
    share = (work - reference) / np.maximum(base, 1.0)[:, None]
    mean, error, factor = block_error(share, settings.level / len(stages))
    slowest = int(mean.argmax())
    if mean[slowest] <= max(settings.imbalance_share, factor * error[slowest]):
        return []
    stage = int(stages[slowest])
    effect, interval = stage_excess(work_ns, panels.stage, stage)
    members = np.flatnonzero(panels.stage == stage)
    aliases = [f"slot pp{stage}"]
    if len(members) == 1:
        aliases.append(f"rank {panels.rank[members[0]]}")
    if len(set(panels.node[members].tolist())) == 1 and (panels.node == panels.node[members[0]]).sum() == len(members):
        aliases.append(f"node {panels.host[members[0]]}")
    loss_ns = float((work.max(axis=0) - work.mean(axis=0)).mean())
    if steps is not None:
        gain = steps.gain(stage_change(stage, members, panels.work_ns, effect))
        loss_ns = gain.gain_share * steps.measured_ns
    culprit = Culprit(
        kind="slot",
        id=f"pp{stage}",
        aliases=tuple(aliases),
        effect=effect,
        interval=interval,
    )
    return [
        DiagnosisFinding(
            evidence=ImbalanceEvidence(effect=effect, stages=_stages(panels, members)),
            loss_share=loss_ns / panels.mean_time_ns,
            confidence=confidence_of(p_value_of(mean[slowest], error[slowest], share.shape[1]) * len(stages)),
            culprits=(culprit,),
        )
    ]


def _stages(panels: Panels, members: Int64s) -> tuple[StageComparison | None, ...]:
    """Return what the ranks of a pipeline stage take longer for than those of the others."""
    if panels.parts_ns is None:
        return ()
    others = np.flatnonzero((panels.stage >= 0) & (panels.stage != panels.stage[members[0]]))
    every_step = slice(0, panels.work_ns.shape[1])
    return (panels.qualified(compare_with_others(panels.parts_ns, members, others, every_step)),)


def stage_excess(work_ns: Floats, stage: Int64s, slow: int) -> tuple[float, tuple[float, float]]:
    """Return by what share a stage's mean work exceeds the median of the others', with its 95 % interval.

    Stages within one standard error of the median one are averaged with it: the median of a few noisy stages, taken
    block by block, leans to whichever side has stages that differ for good.

    Args:
        work_ns: own work with stragglers put back, float64, (num_ranks, num_steps).
        stage: of each rank, -1 where there is none, int64, (num_ranks,).
        slow: number of the stage; there are others.
    """
    blocks = block_means(work_ns)
    work = np.array([blocks[stage == of].mean(axis=0) for of in np.unique(stage[stage >= 0])])
    is_slow = np.unique(stage[stage >= 0]) == slow
    others = work[~is_slow]
    apart = others - others.mean(axis=0)
    mean, error, factor = block_error(apart, _ONE_ERROR)
    middle = np.sort(mean)[[(len(mean) - 1) // 2, len(mean) // 2]]
    is_like = (mean >= middle[0] - factor * error) & (mean <= middle[1] + factor * error)
    share = work[is_slow][0] / np.maximum(others[is_like].mean(axis=0), 1.0) - 1
    effect, low, high = mean_interval(share)
    return effect, (low, high)


def _lower_median(values: Floats) -> Floats:
    middle: Floats = np.sort(values, axis=0)[(len(values) - 1) // 2]
    return middle
