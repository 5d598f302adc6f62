"""The trial that a policy must pass in the running job: a pure state machine.

First come pairs of blocks that are both unpaced (aa) and must show no effect, then pairs of a paced and an unpaced
block, in an order drawn from a seed that all ranks share. Each pair gives y = ln(T_off / T_on) from the mean durations
of its blocks' steps. All ranks feed in the same numbers, so they decide alike without a message.

The effect is checked after each pair, with one error probability for all checks together. With n values the t statistic
is brought to the scale of a normal one (Wallace 1959, "Bounds on normal approximations to Student's and the chi-square
distributions") and compared with one constant for all looks (Pocock 1977, "Group sequential methods in the design and
analysis of clinical trials"), which follows from simulated sequences.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, field
from enum import StrEnum
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.pace.settings import MIN_PAIRS, PaceSettings
from hpcpace.trace.schema import PaceArm

_NUM_SEQUENCES = 20_000
_SEED = 20260101
# Power with which the smallest detectable effect is detected.
POWER = 0.8


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with an interval that holds at all looks simultaneously.

    Attributes:
        mean: of the values so far.
        low, high: the interval.
        detectable: the smallest true mean that such an interval distinguishes from 0 with a power of 80 %.
        num_values: number of values.
    """

    mean: float
    low: float
    high: float
    detectable: float
    num_values: int

    @property
    def halfwidth(self) -> float:
        """Half of the interval's length."""
        return (self.high - self.low) / 2


def interval(values: Sequence[float], *, first: int, last: int, level: float) -> Interval:
    """Return the mean of some values with the interval of this look.

    Args:
        values: float, (num_values,), at least 2 of them.
        first: number of values at the first look.
        last: number of values at the last one; looks come after each value.
        level: probability that any of the intervals misses the true mean.
    """
    num_values = len(values)
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(num_values)
    # The t of so many degrees of freedom that corresponds to the normal deviate.
    freedom = num_values - 1
    scaled = looks_constant(first, last, level) * (8 * freedom + 3) / (8 * freedom + 1)
    bound = math.sqrt(freedom * math.expm1(scaled**2 / freedom))
    seen = (bound + NormalDist().inv_cdf(POWER)) * error
    return Interval(
        mean=mean, low=mean - bound * error, high=mean + bound * error, detectable=seen, num_values=num_values
    )


@cache
def looks_constant(first: int, last: int, level: float) -> float:
    """Return the normal deviate that the largest look exceeds with this probability if there is no effect.

    Args:
        first, last: number of values at the first and last look.
        level: that probability, two-sided.
    """
    values = np.random.default_rng(_SEED).standard_normal((_NUM_SEQUENCES, last))
    counts = np.arange(1, last + 1)
    means = np.cumsum(values, axis=1) / counts
    squares = np.cumsum(values**2, axis=1) - counts * means**2
    seen = slice(first - 1, last)
    freedom = counts[seen] - 1
    t_squared = means[:, seen] ** 2 * counts[seen] * freedom / squares[:, seen]
    deviates = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom * np.log1p(t_squared / freedom))
    return float(np.quantile(deviates.max(axis=1), 1 - level))


_AA_LEVEL = 0.01
_HARM_SHARE = 0.05
# Three would do for one block, but a trial checks twenty or more: without any effect 1 in 11 trials stopped. With four,
# 1 in 36 of those stopped that also see rare long steps.
_HARM_STANDARD_DEVIATIONS = 4.5
_MIN_BLOCKS_OF_HARM = 3


class TrialOutcome(StrEnum):
    """The outcome of a trial."""

    RUNNING = "running"
    """The job ended before the trial did."""
    GAIN = "gain"
    """Steps are faster with the policy, so it stays on."""
    NO_EFFECT = "no effect"
    """A worthwhile gain is ruled out, or did not show in any pair up to the last."""
    HARM = "harm"
    """Steps are slower with the policy."""
    HARM_AT_ONCE = "harm at once"
    """A single block was so much slower that the trial stopped."""
    NO_CLAIM = "no claim"
    """Blocks that were both unpaced differed, so a trial would mislead."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The results of a trial so far; effects are ln(T_off / T_on), about the share of the step that is gained.

    Attributes:
        outcome: how it ended.
        effect: over the pairs; None with fewer than two.
        aa_effect: over the pairs of unpaced blocks.
        step_off_ns, step_on_ns: mean duration of the steps that counted; NaN without any.
        variation_off, variation_on: coefficient of variation of these steps. A lower one alone is not a gain.
        num_pairs: pairs of a paced and an unpaced block.
        num_blocks_on: blocks that were paced and measured.
        worst_block: how much longer than usual the steps of the slowest paced block took, as a share.
    """

    outcome: TrialOutcome
    effect: Interval | None
    aa_effect: Interval | None
    step_off_ns: float
    step_on_ns: float
    variation_off: float
    variation_on: float
    num_pairs: int
    num_blocks_on: int
    worst_block: float

    @property
    def is_on(self) -> bool:
        """Whether the policy stays on."""
        return self.outcome == TrialOutcome.GAIN

    def to_json(self) -> dict[str, Any]:
        """Return plain values; NaN becomes null."""
        facts = asdict(self) | {"outcome": str(self.outcome)}
        return {key: None if isinstance(value, float) and value != value else value for key, value in facts.items()}


@dataclass(kw_only=True)
class _Block:
    """Consecutive windows of one arm; in a pair of unpaced blocks, one takes the role of the paced block."""

    arm: PaceArm
    is_treated: bool
    pair: int
    num_windows: int
    steps_ns: list[float] = field(default_factory=list)


class Trial:
    """Assigns an arm to each window of steps, and takes the durations of its steps once they are known.

    Durations may arrive some windows after their arms were assigned, but in the same order.

    Args:
        settings: numbers of pairs and steps, and the level.
        seed: draws the order within pairs; the same on all ranks.

    Attributes:
        windows_per_block: windows of a block; may be changed while `phase` is aa, for the blocks after that.
    """

    def __init__(self, settings: PaceSettings, *, seed: int) -> None:
        self._settings = settings
        self._random = random.Random(seed)
        self.windows_per_block = settings.block_steps // settings.window_steps
        self._outcome = TrialOutcome.RUNNING
        self._planned: deque[tuple[PaceArm, bool]] = deque()
        self._asked: deque[_Block | None] = deque()
        self._current: _Block | None = None
        self._pairs_planned = 0
        self._done: dict[int, list[_Block]] = {}
        self._effects: dict[PaceArm, list[float]] = {PaceArm.AA: [], PaceArm.ON: []}
        self._blocks_ns: dict[PaceArm, list[float]] = {arm: [] for arm in PaceArm}
        self._medians_ns: list[float] = []
        self._steps_ns: dict[PaceArm, list[float]] = {arm: [] for arm in PaceArm}
        self._worst = float("nan")

    @property
    def is_over(self) -> bool:
        """Whether the trial has an outcome."""
        return self._outcome != TrialOutcome.RUNNING

    @property
    def phase(self) -> PaceArm:
        """AA while pairs of unpaced blocks are still to come, ON afterwards."""
        return PaceArm.AA if self._pairs_planned < self._settings.aa_pairs else PaceArm.ON

    @property
    def is_last_window(self) -> bool:
        """Whether the window assigned last is the last of its block."""
        return not self.is_over and self._current is not None and self._current.num_windows == self._size(self._current)

    def next_window(self) -> PaceArm:
        """Return the arm of the next window; call this once for each."""
        if self.is_over:
            self._asked.append(None)
            return PaceArm.ON if self._outcome == TrialOutcome.GAIN else PaceArm.OFF
        if self._current is None or self._current.num_windows == self._size(self._current):
            self._current = self._next_block()
        self._current.num_windows += 1
        self._asked.append(self._current)
        return self._current.arm

    def add_window(self, steps_ns: Sequence[float]) -> None:
        """Take the durations of the steps of the oldest window without them.

        Args:
            steps_ns: (num_steps,), the same on all ranks; NaN for a step that does not count.
        """
        block = self._asked.popleft()
        if block is None or self.is_over:
            return
        block.steps_ns.extend(steps_ns)
        if not any(other is block for other in self._asked) and block.num_windows == self._size(block):
            self._end_block(block)

    def stop(self, outcome: TrialOutcome) -> None:
        """Stop the trial from outside, when there is nothing to try."""
        self._outcome = outcome

    def result(self) -> TrialResult:
        """Return the results so far."""
        off_ns, on_ns = self._steps_ns[PaceArm.OFF], self._steps_ns[PaceArm.ON]
        if not off_ns:
            off_ns = self._steps_ns[PaceArm.AA]
        return TrialResult(
            outcome=self._outcome,
            effect=self._interval(PaceArm.ON),
            aa_effect=self._interval(PaceArm.AA),
            step_off_ns=_mean(off_ns),
            step_on_ns=_mean(on_ns),
            variation_off=_variation(off_ns),
            variation_on=_variation(on_ns),
            num_pairs=len(self._effects[PaceArm.ON]),
            num_blocks_on=len(self._blocks_ns[PaceArm.ON]),
            worst_block=self._worst,
        )

    def _size(self, block: _Block) -> int:
        if block.arm == PaceArm.AA:
            return self._settings.block_steps // self._settings.window_steps
        return self.windows_per_block

    def _next_block(self) -> _Block:
        if not self._planned:
            untreated, treated = (PaceArm.AA, PaceArm.AA) if self.phase == PaceArm.AA else (PaceArm.OFF, PaceArm.ON)
            blocks = [(untreated, False), (treated, True)]
            self._random.shuffle(blocks)
            self._planned.extend(blocks)
            self._pairs_planned += 1
        arm, is_treated = self._planned.popleft()
        return _Block(arm=arm, is_treated=is_treated, pair=self._pairs_planned, num_windows=0)

    def _end_block(self, block: _Block) -> None:
        counted = [time_ns for time_ns in block.steps_ns[self._settings.dropped_steps :] if time_ns == time_ns]
        block.steps_ns = counted
        if 2 * len(counted) >= self._size(block) * self._settings.window_steps - self._settings.dropped_steps:
            self._steps_ns[block.arm].extend(counted)
            self._blocks_ns[block.arm].append(_mean(counted))
            if block.arm == PaceArm.ON:
                self._judge_block(_mean(counted), float(np.median(counted)))
            else:
                self._medians_ns.append(float(np.median(counted)))
        else:  # mostly checkpoints and evaluations
            block.steps_ns = []
        pair = self._done.setdefault(block.pair, [])
        pair.append(block)
        if len(pair) == 2 and not self.is_over:
            self._end_pair(*self._done.pop(block.pair))

    def _judge_block(self, mean_ns: float, median_ns: float) -> None:
        usual_ns = self._blocks_ns[PaceArm.OFF] + self._blocks_ns[PaceArm.AA]
        if not usual_ns:
            return
        center_ns = float(np.median(usual_ns))
        slower = mean_ns / center_ns - 1
        self._worst = slower if self._worst != self._worst else max(self._worst, slower)
        if slower <= _HARM_SHARE or len(usual_ns) < _MIN_BLOCKS_OF_HARM:
            return
        # A few long steps, which also occur without pacing, do not make most steps longer.
        if median_ns / float(np.median(self._medians_ns)) - 1 <= _HARM_SHARE:
            return
        # A dozen blocks give a poor estimate of the deviation; that of their steps gives a lower bound.
        steps_ns = self._steps_ns[PaceArm.OFF] + self._steps_ns[PaceArm.AA]
        least_ns = float(np.std(steps_ns, ddof=1)) * (len(usual_ns) / len(steps_ns)) ** 0.5
        # The block's own deviation, and that of the median to which it is compared.
        deviation_ns = max(float(np.std(usual_ns, ddof=1)), least_ns) * (1 + np.pi / 2 / len(usual_ns)) ** 0.5
        if mean_ns - center_ns > _HARM_STANDARD_DEVIATIONS * deviation_ns:
            self._outcome = TrialOutcome.HARM_AT_ONCE

    def _end_pair(self, first: _Block, second: _Block) -> None:
        if not first.steps_ns or not second.steps_ns:
            return
        off, on = (second, first) if first.is_treated else (first, second)
        self._effects[on.arm].append(math.log(_mean(off.steps_ns) / _mean(on.steps_ns)))
        num_pairs, found = len(self._effects[on.arm]), self._interval(on.arm)
        if found is None:
            return
        settings = self._settings
        if on.arm == PaceArm.AA:  # decided once, after the last such pair
            if num_pairs == settings.aa_pairs and not found.low <= 0 <= found.high:
                self._outcome = TrialOutcome.NO_CLAIM
        elif num_pairs < MIN_PAIRS:
            return
        elif found.low > 0:
            self._outcome = TrialOutcome.GAIN
        elif found.high < 0:
            self._outcome = TrialOutcome.HARM
        elif found.high < settings.least_gain or num_pairs >= settings.max_pairs:
            self._outcome = TrialOutcome.NO_EFFECT

    def _interval(self, arm: PaceArm) -> Interval | None:
        """Return the effect over the pairs with blocks of an arm; None with fewer than two.

        Before the first look the interval is only shown, with its bound; nothing is decided on it.
        """
        effects, settings = self._effects[arm], self._settings
        if len(effects) < 2:
            return None
        if arm == PaceArm.AA:
            return interval(effects, first=settings.aa_pairs, last=settings.aa_pairs, level=_AA_LEVEL)
        return interval(effects, first=MIN_PAIRS, last=settings.max_pairs, level=settings.level)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _variation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else float("nan")
