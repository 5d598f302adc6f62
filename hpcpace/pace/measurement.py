"""The input of a policy: what was measured in the last steps, the same on every rank but for the rank's own values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcpace.trace.schema import PaceArm

# A wait longer than this is a hang or a broken clock, not a reason to delay a rank.
_LONGEST_NS = 3_600e9


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The pacing point in a window of consecutive steps; sequences are (num_steps,), times in nanoseconds.

    Attributes:
        own_ns: exit - ready of this rank; NaN if missing.
        least_ns: its minimum over the ranks that meet at the point.
        most_ns: its maximum.
        step_ns: duration of the step on rank 0; NaN where it does not count (checkpoint, evaluation).
        work_ns: from this rank's release in the step before until it was ready; NaN if unknown.
        delayed_ns: delay of this rank.
        overshoot_ns: how much too long each sleep was, (num_sleeps,).
        arm: whether the ranks were paced.
    """

    own_ns: tuple[float, ...]
    least_ns: tuple[float, ...]
    most_ns: tuple[float, ...]
    work_ns: tuple[float, ...]
    step_ns: tuple[float, ...]
    delayed_ns: tuple[float, ...] = ()
    overshoot_ns: tuple[float, ...] = ()
    arm: PaceArm = PaceArm.ON

    @property
    def slack_ns(self) -> tuple[float, ...]:
        """How far this rank was ahead of the critical rank, whose slack is 0: (exit - ready) - minimum."""
        return tuple(own - least for own, least in zip(self.own_ns, self.least_ns, strict=True))

    def problem(self) -> str:
        """Return why this measurement cannot be used, or an empty text."""
        if not self.own_ns:
            return "it holds no step"
        if not len(self.own_ns) == len(self.least_ns) == len(self.most_ns) == len(self.work_ns) == len(self.step_ns):
            return "its columns differ in length"
        for own, least, most in zip(self.own_ns, self.least_ns, self.most_ns, strict=True):
            if not (math.isfinite(own) and math.isfinite(least) and math.isfinite(most)):
                return "a wait is missing"
            if not 0 <= least <= own <= most <= _LONGEST_NS:
                return "the waits contradict each other"
        if any(time_ns < 0 or math.isinf(time_ns) for time_ns in self.step_ns):
            return "a step has no duration"
        if any(time_ns < 0 or math.isinf(time_ns) for time_ns in self.work_ns):
            return "the time between two waits contradicts itself"
        if any(not 0 <= late_ns <= _LONGEST_NS for late_ns in (*self.delayed_ns, *self.overshoot_ns)):
            return "a delay has no duration"
        return ""
