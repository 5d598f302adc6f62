"""The law that turns slack into a delay: a pure state machine, measurements in, delay out.

A rank has slack where it is ready before the critical one, the last of those that meet at the pacing point; being
delayed by less than its slack costs nobody anything. The law takes less than that (a share of the lower quartile,
less a guard), watches what it costs (harm), and gives up where it costs anything. Whatever it cannot trust means no
delay.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from hpcpace.pace.measurement import Measurement
from hpcpace.pace.settings import PaceSettings
from hpcpace.trace.schema import PaceArm

_NUM_SLACKS = 16
_QUANTILE = 0.25
_NUM_STEPS_OF_MEDIAN = 64
_NUM_OFF_STEPS = 256
_NUM_ON_STEPS = 32
_LEAST_STEPS_OF_HARM = 8
_HARM_STANDARD_ERRORS = 3.0
_HARM_SHARE = 0.005
_GAIN_STANDARD_ERRORS = 2.0
_INCREASE = 0.05
_NUM_HALVINGS = 3
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 512
_NUM_WINDOWS_LATE = 2
# Variance of a median over that of a mean, of normal values.
_MEDIAN_VARIANCE = math.pi / 2


class Controller:
    """Decides on the delay of one rank, from window to window.

        delay = clip(share * q25(last 16 slacks) - guard, 0, bound)

    The share grows by 0.05 with each window without harm, from `share_low` to `share_high`; harm halves it, and after
    three halvings in a row the delay is zero for a while, twice as long each time. All ranks of a group see the same
    harm, and so they halve together.

    Where a different rank is critical in each step, that rank is sometimes delayed, and its delay is harm. It is none
    where the whole step gets shorter by more than its noise: ranks that poll on shared cores gain more than it costs.

    Attributes:
        delay_ns: what `update` returned last.
        harm_ns: mean of the critical rank's exit - ready while paced, less its median while not: what pacing costs
            each step; 0 while it is not known.
        is_harmful: whether the last update found harm above its noise.
        num_harms: how often it did.
    """

    def __init__(self, settings: PaceSettings) -> None:
        self._settings = settings
        self.num_harms = 0
        self._pause = _FIRST_PAUSE
        self.reset()

    def reset(self) -> None:
        """Forget everything: another world or other shapes make another problem."""
        self.delay_ns = 0
        self.harm_ns = 0
        self.is_harmful = False
        self._share = self._settings.share_low
        self._slacks_ns: deque[float] = deque(maxlen=_NUM_SLACKS)
        self._steps_ns: deque[float] = deque(maxlen=_NUM_STEPS_OF_MEDIAN)
        self._overshoots_ns: deque[float] = deque(maxlen=_NUM_STEPS_OF_MEDIAN)
        self._off_ns: deque[float] = deque(maxlen=_NUM_OFF_STEPS)
        self._on_ns: deque[float] = deque(maxlen=_NUM_ON_STEPS)
        self._off_steps_ns: deque[float] = deque(maxlen=_NUM_OFF_STEPS)
        self._on_steps_ns: deque[float] = deque(maxlen=_NUM_ON_STEPS)
        self._num_steps_above = 0
        self._is_engaged = False
        self._num_paused = self._num_rested = 0

    def update(self, measurement: Measurement) -> int:
        """Take a window of steps; return by how many nanoseconds to delay this rank in the steps to come.

        Never raises: what cannot be trusted is a delay of zero, and a new beginning of the windows that it rests on.
        """
        try:
            problem = measurement.problem()
            if not problem:
                self._note(measurement)
                self._judge(measurement.arm)
                self.delay_ns = self._decide(len(measurement.own_ns))
        except Exception as error:  # the boundary of a law that must not cost a job anything
            problem = str(error) or type(error).__name__
        if problem:
            self.delay_ns = 0
            self._slacks_ns.clear()
            self._forget_paced()
            self._is_engaged, self._num_steps_above = False, 0
        return self.delay_ns

    @property
    def bound_ns(self) -> float:
        """The most that a rank is ever delayed by; 0 while the duration of a step is not known."""
        return self._settings.max_delay_share * self._median_step_ns()

    def _note(self, measurement: Measurement) -> None:
        self._slacks_ns.extend(measurement.slack_ns)
        steps_ns = [time_ns for time_ns in measurement.step_ns if not math.isnan(time_ns)]
        self._steps_ns.extend(steps_ns)
        self._overshoots_ns.extend(measurement.overshoot_ns)
        # A pause ends on all ranks at once: behind the windows on their way when it began, nobody is delayed in it.
        is_free = measurement.arm != PaceArm.ON or self._num_rested >= _NUM_WINDOWS_LATE
        (self._off_ns if is_free else self._on_ns).extend(measurement.least_ns)
        (self._off_steps_ns if is_free else self._on_steps_ns).extend(steps_ns)

    def _median_step_ns(self) -> float:
        return float(np.median(self._steps_ns)) if self._steps_ns else 0.0

    def _judge(self, arm: PaceArm) -> None:
        """Find harm, and change the share for it."""
        self.is_harmful = False
        if self._num_paused:
            self._num_paused -= 1
            self._num_rested = self._num_rested + 1 if self._num_paused else 0
            self._forget_paced()
        if arm != PaceArm.ON or self._num_paused:
            return
        num_on, num_off = len(self._on_ns), len(self._off_ns)
        if num_on < _LEAST_STEPS_OF_HARM or num_off < _LEAST_STEPS_OF_HARM:
            return
        on_ns, off_ns = np.array(self._on_ns), np.array(self._off_ns)
        harm_ns = float(on_ns.mean() - np.median(off_ns))
        error_ns = math.sqrt(on_ns.var(ddof=1) / num_on + _MEDIAN_VARIANCE * off_ns.var(ddof=1) / num_off)
        self.harm_ns = round(harm_ns)
        is_above = harm_ns > max(_HARM_STANDARD_ERRORS * error_ns, _HARM_SHARE * self._median_step_ns())
        if is_above and not self._is_step_shorter():
            self.is_harmful = True
            self.num_harms += 1
            self._back_off()
        else:
            self._share = min(self._share + _INCREASE, self._settings.share_high)

    def _is_step_shorter(self) -> bool:
        """Whether paced steps are shorter than unpaced ones by more than two standard errors."""
        num_on, num_off = len(self._on_steps_ns), len(self._off_steps_ns)
        if num_on < _LEAST_STEPS_OF_HARM or num_off < _LEAST_STEPS_OF_HARM:
            return False
        on_ns, off_ns = np.array(self._on_steps_ns), np.array(self._off_steps_ns)
        error_ns = math.sqrt(on_ns.var(ddof=1) / num_on + off_ns.var(ddof=1) / num_off)
        return bool(off_ns.mean() - on_ns.mean() > _GAIN_STANDARD_ERRORS * error_ns)

    def _forget_paced(self) -> None:
        self._on_ns.clear()
        self._on_steps_ns.clear()

    def _back_off(self) -> None:
        self._share /= 2
        self._forget_paced()
        if self._share <= self._settings.share_low / 2**_NUM_HALVINGS:
            self._num_paused, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            self._share = self._settings.share_low

    def _decide(self, num_steps: int) -> int:
        settings, median_ns = self._settings, self._median_step_ns()
        if self._num_paused or len(self._slacks_ns) < _NUM_SLACKS or not median_ns:
            self._is_engaged, self._num_steps_above = False, 0
            return 0
        guard_ns = settings.guard_ns
        if self._overshoots_ns:
            guard_ns += 2 * float(np.quantile(self._overshoots_ns, 0.99))
        wanted_ns = self._share * float(np.quantile(self._slacks_ns, _QUANTILE)) - guard_ns
        threshold_ns = settings.engage_share * median_ns
        self._num_steps_above = self._num_steps_above + num_steps if wanted_ns >= threshold_ns else 0
        if self._is_engaged:
            self._is_engaged = wanted_ns >= threshold_ns / 2
        else:
            self._is_engaged = self._num_steps_above >= settings.engage_steps
        return int(min(max(wanted_ns, 0.0), self.bound_ns)) if self._is_engaged else 0
