"""Compare ranks with others that do the same work: how much a rank exceeds them, in which phase, and with which data.

A role is one pipeline stage and tensor slot. A rank's excess is the sum of those of its phases, so a stage that holds
most of the excess beyond chance explains the lateness; otherwise the data cannot tell the stage.

Stages of a pipeline work on the same microbatch at different times and on different devices. What they have in common
within a step, beyond the place in the schedule, comes from the microbatch itself, such as the lengths of its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.phases import OWN_WORK, Part
from hpcpace.metrics.resampling import MAX_BLOCKS, Estimate, block_means, half_width, trimmed_mean
from hpcpace.metrics.special import TINY, stdtrit

_LEVEL = 0.05  # statistics: of 95 % intervals of all phases together
_TRIMMED = 0.1  # statistics: of the ranks at each end, which may be slow or fast for once


@dataclass(frozen=True, kw_only=True)
class StageThresholds(Thresholds, topic="straggler"):
    """Which stages of its step explain that a rank is late."""

    min_stage_part: float = number(0.2, "share")
    """Part of the excess from which a stage is worth a word."""
    explained_part: float = number(0.5, "share")
    """Part of the excess that the named stages must hold beyond chance; else the data cannot name the stage."""


def same_work(stage: Ints, slot: Ints) -> Ints:
    """Return which ranks do the same work, numbered from 0, int64, (num_ranks,).

    Those of one stage and tensor slot. Without replicas nobody would have a counterpart, so the slots of a stage are
    compared: tensor parallelism divides the work of a stage evenly.

    Args:
        stage, slot: coordinates of each rank in the pipeline and in tensor parallelism, int64, (num_ranks,).
    """
    _, role, counts = np.unique(np.stack([stage, slot]), axis=1, return_inverse=True, return_counts=True)
    if counts.max(initial=0) == 1:
        _, role = np.unique(stage, return_inverse=True)
    return np.asarray(role, np.int64).reshape(-1)


class Stage(StrEnum):
    """What a rank does by itself during its step."""

    DATA = "data loading"
    COMPUTE = "computation"
    COLLECTION = "garbage collection"
    NO_PHASE = "no phase"
    HOST = "waiting for the host"


STAGE_OF = {
    Part.DATA: Stage.DATA,
    Part.FORWARD: Stage.COMPUTE,
    Part.BACKWARD: Stage.COMPUTE,
    Part.OPTIMIZER: Stage.COMPUTE,
    Part.GC: Stage.COLLECTION,
    Part.OTHER: Stage.NO_PHASE,
    Part.HOST: Stage.HOST,
}
"""The stage that each part of own work belongs to."""


@dataclass(frozen=True, kw_only=True)
class PhaseExcess:
    """One phase of late ranks against the same phase of others.

    Attributes:
        phase: name of the phase, `other` for time that no phase covers.
        own_ns: mean of the late ranks in the steps concerned.
        usual_ns: mean of those that they are compared with.
        interval_ns: 95 % interval of the difference, over all phases together (Bonferroni).
    """

    phase: str
    own_ns: float
    usual_ns: float
    interval_ns: tuple[float, float]

    @property
    def stage(self) -> Stage:
        """The stage that the phase belongs to."""
        return STAGE_OF[Part[self.phase.upper()]]

    @property
    def is_longer(self) -> bool:
        """Whether the late ranks take longer than the others beyond chance."""
        return self.interval_ns[0] > 0


@dataclass(frozen=True, kw_only=True)
class StageComparison:
    """Which stages explain the lateness of ranks.

    Attributes:
        stages: those that hold most of the excess beyond chance, largest first; empty where the data cannot tell.
        phases: all phases of own work, largest difference first.
        num_steps: steps that were compared.
        is_of_device: always False, of an earlier version that also compared host times of ranks with a device.
        is_with_itself: whether late steps were compared with other steps of the same ranks.
        has_forward: whether any rank has a forward phase; without one its time is in `other`.
        is_without_gradients: whether calls of modules without gradients, as of a rollout, take most of the late ranks'
            time in `other`.
    """

    stages: tuple[Stage, ...]
    phases: tuple[PhaseExcess, ...]
    num_steps: int
    is_of_device: bool = False
    is_with_itself: bool = False
    has_forward: bool = True
    is_without_gradients: bool = False


def compare_with_others(
    parts_ns: Floats, late: Ints, others: Ints, steps: slice, limits: StageThresholds
) -> StageComparison | None:
    """Return the stages in which ranks exceed others in some consecutive steps, by means over blocks of these.

    Args:
        parts_ns: the parts of each step, (num_ranks, num_steps, num_parts).
        late: rows of the late ranks, int64.
        others: rows of those they are compared with, int64.
        steps: at least two.
        limits: which stages explain the excess.

    Returns:
        None without steps or others to compare with.
    """
    rows = np.concatenate([late, others])
    num_steps = len(range(*steps.indices(parts_ns.shape[1])))
    num_blocks = min(MAX_BLOCKS, num_steps // 2)
    if not len(others) or num_blocks < 2:
        return None
    length = num_steps // num_blocks
    blocks = np.empty((len(rows), num_blocks, len(OWN_WORK)))
    for index, row in enumerate(rows.tolist()):
        own = parts_ns[row, steps][: num_blocks * length]
        blocks[index] = own.reshape(num_blocks, length, -1).mean(axis=1)[:, list(OWN_WORK)]
    usual = trimmed_mean(blocks[len(late) :], _TRIMMED)
    return _compared(blocks[: len(late)].mean(axis=0), usual, num_steps, limits)


def compare_events(
    parts_ns: Floats, work_ns: Floats, rows: Ints, is_event: Bools, limits: StageThresholds
) -> StageComparison | None:
    """Return the stages in which single late steps exceed the usual ones of the same rank.

    Of each step it is the rank that exceeds its own median work by most.

    Args:
        parts_ns: the parts of each step, (num_ranks, num_steps, num_parts).
        work_ns: own work, (num_ranks, num_steps).
        rows: of the ranks concerned, int64.
        is_event: the late steps, bool, (num_steps,).
        limits: which stages explain the excess.

    Returns:
        None with fewer than two late steps, or without others.
    """
    columns = np.flatnonzero(is_event)
    if len(columns) < 2 or is_event.all():
        return None
    above_ns = work_ns[rows][:, columns] - np.median(work_ns[rows], axis=1, keepdims=True)
    latest = rows[above_ns.argmax(axis=0)]
    usual_ns = np.zeros((len(parts_ns), len(OWN_WORK)))
    for row in np.unique(latest).tolist():
        usual_ns[row] = parts_ns[row][~is_event][:, list(OWN_WORK)].mean(axis=0)
    own_ns = parts_ns[latest, columns][:, list(OWN_WORK)]
    num_blocks = min(MAX_BLOCKS, len(columns))
    block = np.arange(len(columns)) * num_blocks // len(columns)
    first = np.flatnonzero(np.diff(block, prepend=-1))
    size = np.diff(np.append(first, len(columns)))[:, None]
    own, usual = (np.add.reduceat(values, first, axis=0) / size for values in (own_ns, usual_ns[latest]))
    return replace(_compared(own, usual, len(columns), limits), is_with_itself=True)


def _compared(own: Floats, usual: Floats, num_steps: int, limits: StageThresholds) -> StageComparison:
    """Return the comparison of means over blocks, each (num_blocks, len(OWN_WORK))."""
    difference = own - usual
    # Where no device waited for its host there is nothing to compare of that, and no chance to correct for.
    parts = [part for part, column in zip(OWN_WORK, difference.T, strict=True) if part is not Part.HOST or column.any()]
    difference = difference[:, : len(parts)]
    mean, half = _intervals(difference, len(parts))
    phases = [
        PhaseExcess(
            phase=part.name.lower(),
            own_ns=float(own[:, index].mean()),
            usual_ns=float(usual[:, index].mean()),
            interval_ns=(float(mean[index] - half[index]), float(mean[index] + half[index])),
        )
        for index, part in enumerate(parts)
    ]
    phases.sort(key=lambda each: each.usual_ns - each.own_ns)
    return StageComparison(stages=_stages(difference, limits), phases=tuple(phases), num_steps=num_steps)


def _stages(difference: Floats, limits: StageThresholds) -> tuple[Stage, ...]:
    """Return the stages that hold most of the excess beyond chance, largest first; none if chance may hold it.

    Args:
        difference: of the first parts of own work, (num_blocks, num_parts).
        limits: which stages explain the excess.
    """
    parts = OWN_WORK[: difference.shape[1]]
    stages = list(dict.fromkeys(STAGE_OF[part] for part in parts))
    of_stage = np.array([difference[:, [STAGE_OF[part] is stage for part in parts]].sum(axis=1) for stage in stages]).T
    excess = of_stage.sum(axis=1)
    mean, half = _intervals(of_stage, len(stages))
    named = np.flatnonzero((mean > half) & (mean >= limits.min_stage_part * excess.mean()))
    # What the named stages hold beyond that part of the excess must itself be beyond chance.
    above = of_stage[:, named].sum(axis=1) - limits.explained_part * excess
    beyond, beyond_half = _intervals(above[:, None], 1)
    if not len(named) or beyond[0] <= beyond_half[0]:
        return ()
    return tuple(stages[index] for index in named[mean[named].argsort()[::-1]].tolist())


def _intervals(values: Floats, num_compared: int) -> tuple[Floats, Floats]:
    """Return means over blocks and half of their intervals, by Student's t, each (num_columns,)."""
    num_blocks = len(values)
    factor = float(stdtrit(num_blocks - 1, 1 - _LEVEL / 2 / num_compared))
    mean: Floats = values.mean(axis=0)
    half: Floats = factor * values.std(axis=0, ddof=1) / np.sqrt(num_blocks)
    return mean, half


_BY_PLACE, _BY_STEP = 2, 3  # format: axes of microbatches over which steps and places are averaged


@dataclass(frozen=True, kw_only=True)
class VariationThresholds(Thresholds, topic="jitter"):
    """When it is known how work varies with the data."""

    min_passes: int = number(100, "operations", at_least=1)
    """Passes of a rank, fewer of which do not show how stages vary together."""


@dataclass(frozen=True, kw_only=True)
class DataVariation:
    """How work varies from microbatch to microbatch.

    Attributes:
        shared: correlation between neighbouring stages of a replica, median over these pairs: 1 if all of the variation
            comes with the microbatch, 0 if none does.
        spread: standard deviation of the work of a pass within a step, relative to it, median over ranks.
    """

    shared: float
    spread: float


def data_variation(
    own_ns: Floats, stage: Ints, replica: Ints, min_passes: int = VariationThresholds.min_passes
) -> DataVariation | None:
    """Return how work varies; None without two stages, two microbatches a step, or enough passes.

    Args:
        own_ns: work in each pass, above 0, float64, (num_ranks, num_kinds, num_steps, num_microbatches).
        stage: pipeline stage of each rank, int64, (num_ranks,).
        replica: of each rank, ranks of a replica share their data, int64, (num_ranks,).
        min_passes: of a rank.
    """
    num_kinds, _, num_microbatches = own_ns.shape[1:]
    pairs = [
        (first, second)
        for first in range(len(stage))
        for second in np.flatnonzero((replica == replica[first]) & (stage == stage[first] + 1))[:1].tolist()
    ]
    if not pairs or num_microbatches < 2 or own_ns[0].size < min_passes or not (own_ns > 0).all():
        return None
    logs = np.log(own_ns)
    logs = logs - logs.mean(axis=_BY_PLACE, keepdims=True)
    logs = logs - logs.mean(axis=_BY_STEP, keepdims=True)
    varying = logs.reshape(len(logs), num_kinds, -1)
    spread = varying.std(axis=2)
    standard = varying / np.maximum(spread[:, :, None], TINY)
    first, second = (np.array(side) for side in zip(*pairs, strict=True))
    shared = (standard[first] * standard[second]).mean(axis=(1, 2))
    return DataVariation(shared=float(np.median(shared)), spread=float(np.median(spread.mean(axis=1))))


@dataclass(frozen=True, kw_only=True)
class ExcessThresholds(Thresholds, topic="straggler"):
    """When a report mentions that a rank exceeds the others of its role."""

    excess_floor: float = number(0.05, "share")
    """Excess over the usual work below which a rank is not mentioned, however certain it is."""
    noise_level: float = number(0.001, "probability", at_least=1e-9)
    """Chance over all ranks of the run up to which an excess is beyond noise."""
    min_excess_steps: int = number(10, "steps", at_least=2)
    """Steps, fewer of which have too few blocks for that."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """By how much one rank exceeds the others of its role.

    Attributes:
        share: mean excess over the usual work of its role, relative to that; 0.3 is 30 percent more.
        interval: its 95 % interval.
        noise: the largest share that chance explains, over all ranks of the run.
        is_marked: whether the share exceeds both noise and the floor.
    """

    share: float
    interval: tuple[float, float]
    noise: float
    is_marked: bool


@dataclass(frozen=True, kw_only=True)
class WorkExcess:
    """The excess of all ranks over their roles, block of steps by block of steps.

    The usual work of a role is the trimmed mean over its other ranks, those left out that are known to be slow. The
    standard error is that of means of blocks of consecutive steps, because neighbouring steps share their noise.

    Attributes:
        of_block: relative to the usual work of the role, NaN for ranks that are compared with nobody, float64,
            (num_ranks, num_blocks).
        num_compared: ranks that are compared.
        limits: when an excess is mentioned.
    """

    of_block: Floats
    num_compared: int
    limits: ExcessThresholds

    def of(self, ranks: Sequence[int]) -> Estimate | None:
        """Return the mean excess of some ranks, by index; None if none of them is compared."""
        found = self.of_block[list(ranks)]
        found = found[np.isfinite(found).all(axis=1)]
        if not len(found):
            return None
        blocks = found.mean(axis=0)
        return Estimate.around(float(blocks.mean()), half_width(_error(blocks), len(blocks)))

    def of_rank(self, rank: int) -> Excess | None:
        """Return the excess of one rank, by index; None if it is not compared."""
        found = self.of([rank])
        if found is None:
            return None
        blocks = self.of_block[rank]
        noise = float(stdtrit(len(blocks) - 1, 1 - self.limits.noise_level / max(self.num_compared, 1))) * _error(
            blocks
        )
        is_marked = found.value > max(self.limits.excess_floor, noise)
        return Excess(share=found.value, interval=found.interval, noise=noise, is_marked=is_marked)


def excess_over_role(
    work_ns: Floats, role: Ints, is_slow: Bools | None = None, limits: ExcessThresholds = ExcessThresholds()
) -> WorkExcess:
    """Return the excess of each rank; nobody is compared without another rank of the role, or with too few steps.

    Args:
        work_ns: (num_ranks, num_steps).
        role: of each rank, (num_ranks,).
        is_slow: ranks that are not usual, (num_ranks,); none if not given. Where all others of a role are slow, they
            are usual.
        limits: when an excess is mentioned.
    """
    num_ranks, num_steps = work_ns.shape
    if num_steps < limits.min_excess_steps:
        return WorkExcess(of_block=np.full((num_ranks, 1), np.nan), num_compared=0, limits=limits)
    is_slow = np.zeros(num_ranks, np.bool_) if is_slow is None else is_slow
    blocks = block_means(work_ns)
    of_block = np.full(blocks.shape, np.nan)
    for value in np.unique(role):
        members = np.flatnonzero(role == value)
        if len(members) < 2:
            continue
        usual_ns = _usual_ns(blocks[members], is_slow[members])
        is_known = usual_ns.mean(axis=1) > 0
        of_block[members[is_known]] = blocks[members[is_known]] / np.maximum(usual_ns[is_known], 1.0) - 1
    return WorkExcess(of_block=of_block, num_compared=int(np.isfinite(of_block).all(axis=1).sum()), limits=limits)


def _usual_ns(blocks: Floats, is_slow: Bools) -> Floats:
    """Return the usual work of the others for each rank of one role, (num_ranks, num_blocks)."""
    is_usual = ~is_slow if (~is_slow).any() else np.ones(len(blocks), np.bool_)
    usual, alone = blocks[is_usual], is_usual & (is_usual.sum() == 1)
    usual_ns = np.empty(blocks.shape)
    usual_ns[~is_usual] = trimmed_mean(usual, _TRIMMED)
    if len(usual) > 1:
        usual_ns[is_usual] = _trimmed_mean_of_others(usual, _TRIMMED)
    elif alone.any():  # the only one that is not slow can be compared with slow ones alone
        usual_ns[alone] = trimmed_mean(blocks[~alone], _TRIMMED)
    return usual_ns


def _trimmed_mean_of_others(values: Floats, share: float) -> Floats:
    """Return for each row the trimmed mean of the other rows, (num_rows, num_columns); at least two rows."""
    num_others = len(values) - 1
    first, place = int(share * num_others), values.argsort(axis=0).argsort(axis=0)
    stop = num_others - first
    sums = np.cumsum(np.pad(np.sort(values, axis=0), ((1, 0), (0, 0))), axis=0)
    # The row itself is missing among those that are kept, so that one more of the larger ones is.
    kept = np.where(place >= stop, sums[stop] - sums[first], sums[stop + 1] - sums[first] - values)
    kept = np.where(place < first, sums[stop + 1] - sums[first + 1], kept)
    return np.asarray(kept / (stop - first))


def _error(blocks: Floats) -> float:
    return float(blocks.std(ddof=1)) / float(np.sqrt(len(blocks)))
