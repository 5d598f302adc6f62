"""In which stage a late rank loses its time: each phase of its own work against that of the others, with an interval.

A rank's excess is the sum of those of its phases, so a stage that holds most of the
excess beyond chance explains the lateness; otherwise the data cannot tell the stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from hpcpace.metrics.phases import OWN_WORK, Part
from hpcpace.metrics.resampling import trimmed_mean

_MOST_BLOCKS = 20
_LEVEL = 0.05
_LEAST_SHARE = 0.2  # of the excess, below which a stage is not worth a word
_MOST = 0.5
_TRIMMED = 0.1

Floats = NDArray[np.float64]


class Stage(StrEnum):
    """What a rank does by itself during its step."""

    DATA = "data loading"
    COMPUTE = "computation"
    COLLECTION = "garbage collection"
    NO_PHASE = "no phase"
    HOST = "waiting for the host"


_STAGE_OF = {
    Part.DATA: Stage.DATA,
    Part.FORWARD: Stage.COMPUTE,
    Part.BACKWARD: Stage.COMPUTE,
    Part.OPTIMIZER: Stage.COMPUTE,
    Part.GC: Stage.COLLECTION,
    Part.OTHER: Stage.NO_PHASE,
    Part.HOST: Stage.HOST,
}


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
        return _STAGE_OF[Part[self.phase.upper()]]

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
    """

    stages: tuple[Stage, ...]
    phases: tuple[PhaseExcess, ...]
    num_steps: int
    is_of_device: bool = False
    is_with_itself: bool = False
    has_forward: bool = True


def compare_with_others(
    parts_ns: Floats, late: NDArray[np.int64], others: NDArray[np.int64], steps: slice
) -> StageComparison | None:
    """Return the stages in which ranks exceed others in some consecutive steps, by means over blocks of these.

    Args:
        parts_ns: the parts of each step, (num_ranks, num_steps, num_parts).
        late: rows of the late ranks, int64.
        others: rows of those they are compared with, int64.
        steps: at least two.

    Returns:
        None without steps or others to compare with.
    """
    rows = np.concatenate([late, others])
    num_steps = len(range(*steps.indices(parts_ns.shape[1])))
    num_blocks = min(_MOST_BLOCKS, num_steps // 2)
    if not len(others) or num_blocks < 2:
        return None
    length = num_steps // num_blocks
    blocks = np.empty((len(rows), num_blocks, len(OWN_WORK)))
    for index, row in enumerate(rows.tolist()):
        own = parts_ns[row, steps][: num_blocks * length]
        blocks[index] = own.reshape(num_blocks, length, -1).mean(axis=1)[:, list(OWN_WORK)]
    usual = trimmed_mean(blocks[len(late) :], _TRIMMED)
    return _compared(blocks[: len(late)].mean(axis=0), usual, num_steps)


def compare_events(
    parts_ns: Floats, work_ns: Floats, rows: NDArray[np.int64], is_event: NDArray[np.bool_]
) -> StageComparison | None:
    """Return the stages in which single late steps exceed the usual ones of the same rank.

    Of each step it is the rank that exceeds its own median work by most.

    Args:
        parts_ns: the parts of each step, (num_ranks, num_steps, num_parts).
        work_ns: own work, (num_ranks, num_steps).
        rows: of the ranks concerned, int64.
        is_event: the late steps, bool, (num_steps,).

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
    num_blocks = min(_MOST_BLOCKS, len(columns))
    block = np.arange(len(columns)) * num_blocks // len(columns)
    first = np.flatnonzero(np.diff(block, prepend=-1))
    size = np.diff(np.append(first, len(columns)))[:, None]
    own, usual = (np.add.reduceat(values, first, axis=0) / size for values in (own_ns, usual_ns[latest]))
    return replace(_compared(own, usual, len(columns)), is_with_itself=True)


def _compared(own: Floats, usual: Floats, num_steps: int) -> StageComparison:
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
    return StageComparison(stages=_stages(difference), phases=tuple(phases), num_steps=num_steps)


def _stages(difference: Floats) -> tuple[Stage, ...]:
    """Return the stages that hold most of the excess beyond chance, largest first; none if chance may hold it.

    Args:
        difference: of the first parts of own work, (num_blocks, num_parts).
    """
    parts = OWN_WORK[: difference.shape[1]]
    stages = list(dict.fromkeys(_STAGE_OF[part] for part in parts))
    of_stage = np.array([difference[:, [_STAGE_OF[part] is stage for part in parts]].sum(axis=1) for stage in stages]).T
    excess = of_stage.sum(axis=1)
    mean, half = _intervals(of_stage, len(stages))
    named = np.flatnonzero((mean > half) & (mean >= _LEAST_SHARE * excess.mean()))
    # What the named stages hold beyond half of the excess must itself be beyond chance.
    beyond, beyond_half = _intervals((of_stage[:, named].sum(axis=1) - _MOST * excess)[:, None], 1)
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
