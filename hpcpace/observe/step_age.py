"""How long the step that is running has lasted, and how long it may: from looks at a rank, about one a second.

A look costs the training thread nothing. What lasts shorter than the time between two looks needs no exact figure: no
limit is that low.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from hpcpace.config import HangConfig
from hpcpace.core.text import NS_PER_S
from hpcpace.trace.schema import Phase

# The first steps compile, warm caches up, and connect ranks.
_FIRST_STEPS = 5
_MOST_STEPS = 64
_MOST_PHASES = 16
_TIMES_USUAL_PHASE = 5
# What has no usual length yet, such as the first checkpoint, may last this many times `first_step_s`.
UNSEEN = 10
# A step whose operations go on may last this many times its limit.
_TIMES_MOVING = 10
# Looks this late were made by a process that was suspended meanwhile, or whose GIL was held.
_LEAST_GAP_NS = 3 * NS_PER_S

_EXCUSES = {Phase.CHECKPOINT: "it saves a checkpoint", Phase.EVAL: "it evaluates"}


class Seen(NamedTuple):
    """What one look at a rank shows.

    Attributes:
        step: number of the step that is running, also where it is provisional.
        num_moves: operations called and phases ended so far.
        under_way: the phase in which the rank is, and when it began; None in none.
        phases_before: codes of the phases that ended earlier.
        sees_phases: whether phases are observed; any step may be a checkpoint where they are not.
    """

    step: int
    num_moves: int
    under_way: tuple[Phase, int] | None = None
    phases_before: Collection[int] = ()
    sees_phases: bool = True


@dataclass(frozen=True, kw_only=True)
class Age:
    """How long a step has lasted that lasts too long; see `Notice` for the fields of the same names.

    Attributes:
        excuse: why that may be, as far as the rank itself can know; empty without a reason.
    """

    step: int
    step_age_ns: int
    limit_ns: int
    usual_step_ns: int
    is_first_step: bool
    excuse: str

    @property
    def may_end_job(self) -> bool:
        """Whether it has lasted so long that a job may be ended for it."""
        return self.step_age_ns > self.limit_ns * (UNSEEN if self.is_first_step else 2) and not self.excuse


class StepAge:
    """Follows the steps of one rank.

    Time in which the whole process did not run does not count. Where no step was found, the last operation or phase
    takes the place of the last step.

    Args:
        limits: the settings.
        tick_ns: time between two looks.
        now_ns: the time of the start.

    Attributes:
        has_slept: whether the process was suspended before the last look.
    """

    def __init__(self, limits: HangConfig, *, tick_ns: int, now_ns: int) -> None:
        self._least_ns = int(limits.least_s * NS_PER_S)
        self._first_ns = int(limits.first_step_s * NS_PER_S)
        self._factor = limits.factor
        self._tick_ns = tick_ns
        self._last_look_ns = self._begin_ns = self._moved_ns = self._phase_begin_ns = now_ns
        self._suspended_ns = 0
        self.has_slept = False
        self._step: int | None = None
        self._num_ended = self._num_moves = 0
        self._steps_ns: deque[int] = deque(maxlen=_MOST_STEPS)
        self._phase: tuple[Phase, int] | None = None
        self._phases_ns: dict[Phase, deque[int]] = {phase: deque(maxlen=_MOST_PHASES) for phase in _EXCUSES}

    def returned(self, now_ns: int) -> None:
        """Count no time as suspended that the watchdog itself has spent since the last look."""
        self._last_look_ns = now_ns

    def look(self, now_ns: int, seen: Seen) -> Age | None:
        """Return the age of a step that lasts too long, None for others; each look counts for the next ones."""
        gap_ns = now_ns - self._last_look_ns - self._tick_ns
        self.has_slept = gap_ns > max(_LEAST_GAP_NS, 2 * self._tick_ns)
        if self.has_slept:
            self._suspended_ns += gap_ns
        self._last_look_ns = now_ns
        awake_ns = now_ns - self._suspended_ns
        self._follow_step(awake_ns, seen)
        self._follow_phase(awake_ns, seen)
        age_ns = awake_ns - (self._begin_ns if self._num_ended else self._moved_ns)
        if age_ns <= self._least_ns:
            return None
        limit_ns = self.limit_ns if seen.sees_phases else max(self.limit_ns, UNSEEN * self._first_ns)
        if age_ns <= limit_ns:
            return None
        return Age(
            step=seen.step,
            step_age_ns=age_ns,
            limit_ns=limit_ns,
            usual_step_ns=self.usual_step_ns,
            is_first_step=self._is_first_step,
            excuse=self._excuse(awake_ns, seen, is_moving=age_ns < _TIMES_MOVING * limit_ns),
        )

    @property
    def usual_step_ns(self) -> int:
        """The median of recent steps; 0 where none is known."""
        return int(median(self._steps_ns)) if self._steps_ns else 0

    @property
    def limit_ns(self) -> int:
        """How long the step that is running may last."""
        usual_ns = int(self._factor * self.usual_step_ns)
        return max(usual_ns, self._least_ns, self._first_ns if self._is_first_step else 0)

    @property
    def _is_first_step(self) -> bool:
        return self._num_ended < _FIRST_STEPS

    def _follow_step(self, awake_ns: int, seen: Seen) -> None:
        if self._step is None:
            self._step = seen.step
        elif seen.step != self._step:
            num_steps = max(1, seen.step - self._step)
            if self._num_ended:  # the first steps of all take longer
                self._steps_ns.append((awake_ns - self._begin_ns) // num_steps)
            self._num_ended += num_steps
            self._step, self._begin_ns, self._moved_ns = seen.step, awake_ns, awake_ns
        if seen.num_moves != self._num_moves:
            self._num_moves, self._moved_ns = seen.num_moves, awake_ns

    def _follow_phase(self, awake_ns: int, seen: Seen) -> None:
        phase = seen.under_way if seen.under_way is not None and seen.under_way[0] in _EXCUSES else None
        if phase != self._phase:
            if self._phase is not None:
                self._phases_ns[self._phase[0]].append(awake_ns - self._phase_begin_ns)
                # What is over counts no longer: the rest of the step has its own time.
                self._begin_ns += awake_ns - max(self._phase_begin_ns, self._begin_ns)
                self._moved_ns = awake_ns
            self._phase, self._phase_begin_ns = phase, awake_ns

    def _excuse(self, awake_ns: int, seen: Seen, *, is_moving: bool) -> str:
        if self._phase is not None and awake_ns - self._phase_begin_ns < self._allowed_ns(self._phase[0], seen):
            return _EXCUSES[self._phase[0]]
        if self._num_ended and is_moving and awake_ns - self._moved_ns < self._least_ns:
            return "its operations go on"
        return ""

    def _allowed_ns(self, phase: Phase, seen: Seen) -> int:
        """Return how long a phase may last; one that ended before the next look each time is as long as that."""
        if self._phases_ns[phase]:
            return _TIMES_USUAL_PHASE * int(median(self._phases_ns[phase]))
        return _TIMES_USUAL_PHASE * self._tick_ns if phase in seen.phases_before else UNSEEN * self._first_ns
