"""The trial that a policy has to pass inside the running job: a pure state machine, durations in, arms out.

First pairs of blocks that are both unpaced (aa), which must show nothing; then pairs with one block paced and one
not, in an order drawn from a seed that all ranks share. Each pair gives y = ln(T_off / T_on) from the mean durations
of its blocks' steps. All ranks feed the same numbers, and so decide the same without a message.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import log
from typing import Any

import numpy as np

from hpcpace.pace.sequential import Interval, interval
from hpcpace.pace.settings import LEAST_PAIRS, PaceSettings
from hpcpace.trace.schema import PaceArm

_AA_LEVEL = 0.01
_HARM_SHARE = 0.05
# Three would do for one block; a trial looks at twenty or more, and without any effect 1 in 11 trials ended on one. Of
# those that see rare long steps as well, 1 in 36 did with four.
_HARM_STANDARD_DEVIATIONS = 4.5
_LEAST_BLOCKS_OF_HARM = 3


class TrialOutcome(StrEnum):
    """What a trial came to."""

    RUNNING = "running"
    """The job ended before the trial did."""
    GAIN = "gain"
    """Steps are faster with the policy: it stays on."""
    NO_EFFECT = "no effect"
    """A gain worth having is ruled out, or was not seen in all pairs."""
    HARM = "harm"
    """Steps are slower with the policy."""
    HARM_AT_ONCE = "harm at once"
    """A single block was so much slower that the trial ended on it."""
    NO_CLAIM = "no claim"
    """Blocks that were both unpaced differed: here a trial would mislead."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial as far as it got; effects are ln(T_off / T_on), about the share of the step that is gained.

    Attributes:
        outcome: what came of it.
        effect: over the pairs; None with fewer than two.
        aa_effect: over the pairs that were both unpaced.
        step_off_ns, step_on_ns: mean duration of the steps that counted; NaN where there were none.
        variation_off, variation_on: coefficient of variation of these steps. A lower one alone is no gain.
        num_pairs: pairs of a paced and an unpaced block.
        num_blocks_on: blocks that were paced and measured.
        worst_block: how much longer the steps of the slowest paced block took than usual unpaced ones, as a share.
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
    """Consecutive windows of one arm; of a pair that is all unpaced, one block stands for the paced one."""

    arm: PaceArm
    is_treated: bool
    pair: int
    num_windows: int
    steps_ns: list[float] = field(default_factory=list)


class Trial:
    """Says which arm each window of steps belongs to, and takes the durations of its steps when they are known.

    Durations may come some windows later than their arms were asked for, but in the same order.

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
        self._aa_effects: list[float] = []
        self._effects: list[float] = []
        self._blocks_ns: dict[PaceArm, list[float]] = {arm: [] for arm in PaceArm}
        self._medians_ns: list[float] = []
        self._steps_ns: dict[PaceArm, list[float]] = {arm: [] for arm in PaceArm}
        self._worst = float("nan")

    @property
    def is_over(self) -> bool:
        """Whether it has come to an outcome."""
        return self._outcome != TrialOutcome.RUNNING

    @property
    def phase(self) -> PaceArm:
        """Return AA while blocks are still planned that are both unpaced, ON afterwards."""
        return PaceArm.AA if self._pairs_planned < self._settings.aa_pairs else PaceArm.ON

    @property
    def is_last_window(self) -> bool:
        """Whether the window that was asked for last is the last one of its block."""
        return not self.is_over and self._current is not None and self._current.num_windows == self._size(self._current)

    def next_window(self) -> PaceArm:
        """Return the arm of the window that begins; asked once for each."""
        if self.is_over:
            self._asked.append(None)
            return PaceArm.ON if self._outcome == TrialOutcome.GAIN else PaceArm.OFF
        if self._current is None or self._current.num_windows == self._size(self._current):
            self._current = self._next_block()
        self._current.num_windows += 1
        self._asked.append(self._current)
        return self._current.arm

    def add_window(self, steps_ns: Sequence[float]) -> None:
        """Take the durations of the steps of the oldest window that they were not given for.

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
        """End the trial from outside, where there is nothing to try."""
        self._outcome = outcome

    def result(self) -> TrialResult:
        """Return what is known so far."""
        off_ns, on_ns = self._steps_ns[PaceArm.OFF], self._steps_ns[PaceArm.ON]
        if not off_ns:
            off_ns = self._steps_ns[PaceArm.AA]
        return TrialResult(
            outcome=self._outcome,
            effect=self._interval(),
            aa_effect=self._aa_interval(),
            step_off_ns=_mean(off_ns),
            step_on_ns=_mean(on_ns),
            variation_off=_variation(off_ns),
            variation_on=_variation(on_ns),
            num_pairs=len(self._effects),
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
        if slower <= _HARM_SHARE or len(usual_ns) < _LEAST_BLOCKS_OF_HARM:
            return
        # A few long steps, which come without pacing as well, do not make most of them longer.
        if median_ns / float(np.median(self._medians_ns)) - 1 <= _HARM_SHARE:
            return
        # Of a dozen blocks the deviation is little known; that of their steps says how small it can be at least.
        steps_ns = self._steps_ns[PaceArm.OFF] + self._steps_ns[PaceArm.AA]
        least_ns = float(np.std(steps_ns, ddof=1)) * (len(usual_ns) / len(steps_ns)) ** 0.5
        # The block's own deviation, and that of the median which it is compared with.
        deviation_ns = max(float(np.std(usual_ns, ddof=1)), least_ns) * (1 + np.pi / 2 / len(usual_ns)) ** 0.5
        if mean_ns - center_ns > _HARM_STANDARD_DEVIATIONS * deviation_ns:
            self._outcome = TrialOutcome.HARM_AT_ONCE

    def _end_pair(self, first: _Block, second: _Block) -> None:
        if not first.steps_ns or not second.steps_ns:
            return
        off, on = (second, first) if first.is_treated else (first, second)
        effect = log(_mean(off.steps_ns) / _mean(on.steps_ns))
        if off.arm == PaceArm.AA:
            self._aa_effects.append(effect)
            self._judge_aa()
        else:
            self._effects.append(effect)
            self._judge()

    def _judge_aa(self) -> None:
        """Refuse to claim anything where pairs that were both unpaced differ; the looks come with the last pair."""
        found = self._aa_interval()
        if found is not None and len(self._aa_effects) == self._settings.aa_pairs and not found.low <= 0 <= found.high:
            self._outcome = TrialOutcome.NO_CLAIM

    def _judge(self) -> None:
        if len(self._effects) < LEAST_PAIRS:
            return
        found = self._interval()
        assert found is not None
        if found.low > 0:
            self._outcome = TrialOutcome.GAIN
        elif found.high < 0:
            self._outcome = TrialOutcome.HARM
        elif found.high < self._settings.least_gain or len(self._effects) >= self._settings.max_pairs:
            self._outcome = TrialOutcome.NO_EFFECT

    def _interval(self) -> Interval | None:
        if len(self._effects) < 2:
            return None
        # Below the first look an interval is shown, with its bound, and nothing is decided on it.
        return interval(self._effects, first=LEAST_PAIRS, last=self._settings.max_pairs, level=self._settings.level)

    def _aa_interval(self) -> Interval | None:
        num_pairs = self._settings.aa_pairs
        if len(self._aa_effects) < 2:
            return None
        return interval(self._aa_effects, first=num_pairs, last=num_pairs, level=_AA_LEVEL)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _variation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else float("nan")
