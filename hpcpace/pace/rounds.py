"""Paces in rounds: measure a window of steps, exchange it during the next one, then decide.

So no rank waits for an exchange: it has a whole window of steps to complete, and decisions take effect two windows
later. All ranks decide from the same numbers, except for the delay, which depends on each rank's own slack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.pace.choice import CollectionCount, CollectionPlan, CollectionSchedule, CollectionWatch, PacingChoice
from hpcpace.pace.controller import Measurement, make_policy
from hpcpace.pace.trial import Trial, TrialOutcome, TrialResult
from hpcpace.trace.schema import PaceArm, PacePolicy, StepFlag

UNKNOWN_NS = -1
# The kernel wakes a sleeper some tens of microseconds late, so the last part of a delay spins.
_SPUN_NS = 80_000
_NOT_COUNTED = StepFlag.CHECKPOINT | StepFlag.EVAL | StepFlag.WARMUP
# Below this share of the steps `auto` finds garbage collection not worth a trial.
_MIN_GC_SHARE = 0.002
# Without a trial the first windows are unpaced, as the baseline for the cost of pacing.
_NUM_OFF_WINDOWS = 3
# In a vector for the others: a time that is not known, and the number of values before the times.
_UNKNOWN = -1.0
_NUM_HEADS = 3
# timing: an answer had a window of steps to arrive. A rank waits for it as long as the last one took, at least so long.
_MIN_WAIT_S = 0.01

Answered = TypeVar("Answered", covariant=True)


def most_waited_s(step_ns: int) -> float:
    """Return for how long a rank waits for an answer at the end of a step of some length.

    A rank that waits here may be the one that others wait for in the training.
    """
    return max(step_ns / NS_PER_S, _MIN_WAIT_S)


class Answer(Protocol[Answered]):
    """What all ranks have said, once it has arrived."""

    def result(self, timeout_s: float) -> Answered:
        """Return it; wait for it up to a timeout.

        Raises:
            RuntimeError, TimeoutError: a rank did not answer in time.
        """


class Exchange(Protocol):
    """Messages between all ranks, apart from those of the training; no method waits for another rank.

    Collective: every rank calls each method.
    """

    def allgather(self, value: Any) -> Answer[list[Any]]:
        """Send a value to all ranks; the answer is that of every rank, in order of rank."""

    def minimum(self, values: Sequence[float]) -> Answer[list[float]]:
        """Send values to all ranks; the answer is the minimum of each over the ranks."""

    def close(self) -> None:
        """Free all resources."""


class PacingTrace(Protocol):
    """Where pacing records what it does."""

    def add_pacing(self, *row: int) -> object:
        """Take the columns of a row of the trace's `pacing` table."""

    def add_delay(self, begin_ns: int, end_ns: int) -> object:
        """Take begin and end of a delay in the current step."""


@dataclass(frozen=True, kw_only=True)
class PacerClocks:
    """The clocks that pacing reads, each a function that returns nanoseconds; replaced in tests."""

    monotonic: Callable[[], int] = time.monotonic_ns
    thread: Callable[[], int] = time.thread_time_ns
    unix: Callable[[], int] = time.time_ns


class PreciseSleep:
    """Delays the calling thread to within microseconds, leaves the core to others, and measures how much is too long.

    Args:
        clock, sleep: replaced in tests.
    """

    def __init__(
        self, *, clock: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._overshoots_ns: list[float] = []

    def delay(self, ready_ns: int, delay_ns: int) -> int:
        """Block until `delay_ns` after `ready_ns`, or a little longer; return the end."""
        until_ns = ready_ns + delay_ns
        slept_ns = until_ns - self._clock() - _SPUN_NS
        if slept_ns > 0:
            self._sleep(slept_ns / NS_PER_S)
        now_ns = self._clock()
        self._overshoots_ns.append(float(max(now_ns - until_ns, 0)))
        while now_ns < until_ns:
            now_ns = self._clock()
        return now_ns

    def take_overshoots(self) -> tuple[float, ...]:
        """Return by how much each delay since the last call was too long, in nanoseconds."""
        taken, self._overshoots_ns = tuple(self._overshoots_ns), []
        return taken


class Arrival(NamedTuple):
    """A rank that is about to be blocked, from `Pacer.arrive` to `Pacer.leave`.

    Attributes:
        name: the operation, like `all_reduce 0`.
        ready_ns: when the rank was ready.
        released_ns: when a delay ended; `ready_ns` without one.
        thread_ns: processor time of the thread when it was ready; 0 once the point is chosen.
    """

    name: str
    ready_ns: int
    released_ns: int
    thread_ns: int


class PointTiming(NamedTuple):
    """How long a rank worked and waited at the pacing point in one step.

    Attributes:
        ready_ns: when it was ready, on its own clock.
        work_ns: how long it had worked since it left the point in the step before; NaN if it did not meet it there.
        own_ns: exit - ready; NaN unless it met the point exactly once.
        delayed_ns: by how much it was delayed.
    """

    ready_ns: int = 0
    work_ns: float = math.nan
    own_ns: float = math.nan
    delayed_ns: int = 0


class Status(IntEnum):
    """What a rank asks for; the lowest value over the ranks applies to all."""

    END = -2
    RESET = -1
    GO_ON = 0


@dataclass(frozen=True, kw_only=True)
class WindowMessage:
    """What the ranks learn after each window: minimum and maximum, as means would hide stragglers that rotate.

    Attributes:
        status: the lowest that a rank asks for.
        num_full: the most full garbage collections of a rank so far, in steps without a schedule.
        full_ns: their total time, the most over the ranks.
        step_ns: duration of each step on rank 0, float64, (num_steps,); NaN if it does not count.
        least_ns: exit - ready in each step by group, float64, (num_groups, num_steps); NaN if any rank lacks it.
        most_ns: the same, the maximum.
    """

    status: Status
    num_full: int
    full_ns: int
    step_ns: NDArray[np.float64]
    least_ns: NDArray[np.float64]
    most_ns: NDArray[np.float64]


def pack(
    status: Status,
    count: CollectionCount,
    *,
    step_ns: Sequence[float] | None,
    own_ns: Sequence[float],
    group: int,
    num_groups: int,
) -> list[float]:
    """Return the vector of one rank, of which the minimum over the ranks is taken; maxima are negated.

    Args:
        status: what it asks for.
        count: its garbage collections in steps without a schedule.
        step_ns: duration of each step; None of another rank than 0, whose durations do not count.
        own_ns: exit - ready in each step.
        group: index of its group, -1 for none.
        num_groups: how many there are.
    """
    rows = np.full((1 + 2 * num_groups, len(own_ns)), math.inf)
    if step_ns is not None:
        rows[0] = np.where(_are_known(step_ns), step_ns, _UNKNOWN)
    if group >= 0:
        are_known = _are_known(own_ns)
        rows[1 + 2 * group] = np.where(are_known, own_ns, _UNKNOWN)
        # A missing value wins the minimum in both halves.
        rows[2 + 2 * group] = np.where(are_known, np.negative(own_ns), -math.inf)
    return [float(status), -float(count.num_full), -float(count.time_ns), *rows.ravel().tolist()]


def unpack(values: Sequence[float], *, num_steps: int, num_groups: int) -> WindowMessage:
    """Return what the ranks learn from the minimum of their vectors.

    Raises:
        ValueError: the vector has another length, or no rank gave its status.
    """
    if len(values) != _NUM_HEADS + num_steps * (1 + 2 * num_groups):
        raise ValueError(f"an exchange of {len(values)} values, not of {num_steps} steps and {num_groups} groups")
    rows = np.reshape(values[_NUM_HEADS:], (-1, num_steps))
    rows[2::2] *= -1
    rows = np.where(_are_known(rows), rows, math.nan)
    return WindowMessage(
        status=Status(int(values[0])),
        num_full=int(-values[1]),
        full_ns=int(-values[2]),
        step_ns=rows[0],
        least_ns=rows[1::2],
        most_ns=rows[2::2],
    )


def _are_known(times_ns: Sequence[float] | NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.isfinite(times_ns) & (np.asarray(times_ns) >= 0)


@dataclass(kw_only=True)
class Window:
    """Consecutive steps of this rank; lists grow to (window_steps,) as they are measured."""

    arm: PaceArm
    steps: list[int] = field(default_factory=list)
    timings: list[PointTiming] = field(default_factory=list)
    step_ns: list[float] = field(default_factory=list)
    overshoot_ns: tuple[float, ...] = ()

    @property
    def own_ns(self) -> tuple[float, ...]:
        """Exit - ready in each step."""
        return tuple(timing.own_ns for timing in self.timings)


class Rounds:
    """Paces one rank at the chosen point. Collective: all ranks make one after the same step.

    Args:
        choice: what the ranks agree on; without an obstacle.
        rank: this rank.
        exchange: to the other ranks.
        trace: takes rows and delays.
        watch: counts this rank's garbage collections.
        schedule: collects on the same steps of all ranks under `coschedule`.
        clocks: what to read times from.
        precise_sleep: delays the calling thread.

    Attributes:
        point: name of the operation at which this rank is paced; None where it belongs to no group.
        policy: this rank's.
        is_over: whether the ranks have agreed to stop.
        reason: why there was nothing to try; empty otherwise.
    """

    def __init__(
        self,
        choice: PacingChoice,
        *,
        rank: int,
        exchange: Exchange,
        trace: PacingTrace,
        watch: CollectionWatch,
        schedule: CollectionSchedule,
        clocks: PacerClocks,
        precise_sleep: PreciseSleep,
    ) -> None:
        settings = self._settings = choice.settings
        self._exchange, self._trace, self._clocks = exchange, trace, clocks
        self._watch, self._schedule, self._precise_sleep = watch, schedule, precise_sleep
        self._is_first, self._num_groups = rank == 0, len(choice.points)
        self._group = next((index for index, point in enumerate(choice.points) if rank in point.ranks), -1)
        self.point = choice.points[self._group].name if self._group >= 0 else None
        members = choice.points[self._group].ranks if self._group >= 0 else (rank,)
        self.policy = make_policy(choice.policy, settings, index=members.index(rank), num_members=len(members))
        self._policy_column = PacePolicy[choice.policy.upper().replace("-", "_")]
        self._arm = PaceArm.OFF if choice.policy == "observe" else PaceArm.ON
        has_trial = settings.trial and choice.policy != "observe"
        self._trial = Trial(settings, seed=choice.seed) if has_trial else None
        self._plan: CollectionPlan | None = None
        if choice.policy == "coschedule":
            self._plan = CollectionPlan(
                settings.gc_steps, least_share=_MIN_GC_SHARE if settings.policy == "auto" else 0.0
            )
        self._arrivals: list[PointTiming] = []
        self._last_exit_ns: int | None = None
        self._size_bytes = -1
        self._pending: tuple[Window, Answer[list[float]]] | None = None
        self._num_windows = 0
        self._status = Status.GO_ON
        self.is_over = False
        self.reason = ""
        self._window = self._new_window()

    @property
    def trial_result(self) -> TrialResult | None:
        """The trial as far as it got; None without one."""
        return None if self._trial is None else self._trial.result()

    def begin_step(self) -> StepFlag:
        """Collect garbage if that is due; return the flag of such a step."""
        is_scheduled = self._plan is not None and self._window.arm == PaceArm.ON
        interval = self._plan.interval if self._plan is not None and is_scheduled else 0
        if interval and not self._schedule.is_on:
            self._schedule.turn_on(interval)
        elif not interval and self._schedule.is_on:
            self._schedule.turn_off(steps_until=self._watch.steps_until)
        ends_block = self._trial is None or self._trial.is_last_window
        is_last = ends_block and len(self._window.steps) + 1 == self._settings.window_steps
        return StepFlag.GC if self._schedule.begin_step(is_last=is_last) else StepFlag.NONE

    def arrive(self, name: str) -> Arrival:
        """Delay this rank at its pacing point as its policy wants, just before it is blocked."""
        ready_ns = self._clocks.monotonic()
        released_ns = ready_ns
        if self._window.arm == PaceArm.ON and not self._arrivals:
            delay_ns = self.policy.delay_at(self._clocks.unix(), self._work_ns(ready_ns))
            if delay_ns > 0:
                released_ns = self._precise_sleep.delay(ready_ns, delay_ns)
                self._trace.add_delay(ready_ns, released_ns)
        return Arrival(name, ready_ns, released_ns, 0)

    def leave(self, arrival: Arrival, exit_ns: int, size_bytes: int) -> None:
        """Note that the rank is released; where the size of the message changes, all ranks start to learn afresh."""
        ready_ns = arrival.ready_ns
        delayed_ns = arrival.released_ns - ready_ns
        self._arrivals.append(PointTiming(ready_ns, self._work_ns(ready_ns), exit_ns - ready_ns, delayed_ns))
        if size_bytes != self._size_bytes and self._size_bytes >= 0:
            self._status = min(self._status, Status.RESET)
        self._size_bytes = size_bytes

    def end_step(self, step: int, duration_ns: int, flags: int) -> None:
        """Take a step that has ended. Collective at the end of each window.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        timing = self._arrivals[0] if len(self._arrivals) == 1 else None  # a step with several waits does not count
        self._arrivals.clear()
        self._last_exit_ns = None if timing is None else timing.ready_ns + round(timing.own_ns)
        window = self._window
        window.steps.append(step)
        window.timings.append(timing or PointTiming())
        window.step_ns.append(math.nan if flags & _NOT_COUNTED else float(duration_ns))
        if len(window.steps) == self._settings.window_steps:
            window.overshoot_ns = self._precise_sleep.take_overshoots()
            self.finish(most_waited_s(duration_ns))
            if not self.is_over:
                self._start_exchange(window)

    def withdraw(self) -> None:
        """Delay this rank no longer, and ask the others with the next exchange to end pacing."""
        self._status = Status.END
        self.policy = make_policy("observe", self._settings)

    def finish(self, timeout_s: float) -> None:
        """Finish the exchange in flight, if there is one, and decide on it.

        Args:
            timeout_s: how long to wait for it.

        Raises:
            RuntimeError, TimeoutError: a rank did not answer in time.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            window, answer = pending
            values = answer.result(timeout_s)
            self._decide(window, unpack(values, num_steps=len(window.steps), num_groups=self._num_groups))

    def record_rest(self) -> None:
        """Record the steps of the window that has not ended."""
        self._record(self._window)

    def _work_ns(self, ready_ns: int) -> float:
        """Return how long this rank has worked since it left the point in the step before; NaN if it did not."""
        return math.nan if self._last_exit_ns is None else ready_ns - self._last_exit_ns

    def _start_exchange(self, window: Window) -> None:
        values = pack(
            self._status,
            self._watch.counts[False],
            step_ns=window.step_ns if self._is_first else None,
            own_ns=window.own_ns,
            group=self._group,
            num_groups=self._num_groups,
        )
        self._pending = window, self._exchange.minimum(values)
        self._window = self._new_window()
        self._status = Status.GO_ON if self._status == Status.RESET else self._status

    def _decide(self, window: Window, message: WindowMessage) -> None:
        step_ns = tuple(message.step_ns.tolist())
        if message.status == Status.RESET:
            self.policy.reset()
        if self._group >= 0:
            measurement = Measurement(
                own_ns=window.own_ns,
                least_ns=tuple(message.least_ns[self._group].tolist()),
                most_ns=tuple(message.most_ns[self._group].tolist()),
                step_ns=step_ns,
                work_ns=tuple(timing.work_ns for timing in window.timings),
                delayed_ns=tuple(float(timing.delayed_ns) for timing in window.timings),
                overshoot_ns=window.overshoot_ns,
                arm=window.arm,
            )
            self.policy.update(measurement)
            self._record(window, measurement.slack_ns)
        if self._plan is not None:
            self._plan.note(
                step_ns,
                num_full=message.num_full,
                full_ns=message.full_ns,
                is_scheduled=window.arm == PaceArm.ON,
            )
        if self._trial is not None:
            self._trial.add_window(step_ns)
            self.is_over = self._trial.is_over and not self._trial.result().is_on
        self.is_over |= message.status == Status.END

    def _record(self, window: Window, slack_ns: Sequence[float] = ()) -> None:
        """Record a row for each step of a window; unknown slacks are -1."""
        for index, (step, timing) in enumerate(zip(window.steps, window.timings, strict=True)):
            slack = slack_ns[index] if index < len(slack_ns) else math.nan
            slack_column = UNKNOWN_NS if math.isnan(slack) else int(slack)
            columns = (timing.ready_ns, timing.delayed_ns, slack_column, self.policy.harm_ns)
            self._trace.add_pacing(step, self._policy_column, window.arm, *columns)

    def _new_window(self) -> Window:
        if self._trial is None:
            self.reason = "" if self._plan is None else self._plan.decide()
            self._num_windows += 1
            is_off = self.reason or self._num_windows <= _NUM_OFF_WINDOWS
            return Window(arm=PaceArm.OFF if is_off else self._arm)
        if self._plan is not None and not self._trial.is_over and self._trial.phase == PaceArm.ON:
            self._prepare(self._plan, self._trial)
        return Window(arm=self._trial.next_window())

    def _prepare(self, plan: CollectionPlan, trial: Trial) -> None:
        """Find out how often the ranks collect, and make the blocks long enough for it."""
        self.reason = plan.decide()
        if not self.reason and not plan.block_steps():
            self.reason = f"full garbage collections are {plan.interval} steps apart, too rare for a trial"
        if self.reason:
            trial.stop(TrialOutcome.NO_EFFECT)
            return
        windows = -(-plan.block_steps() // self._settings.window_steps)
        trial.windows_per_block = max(trial.windows_per_block, windows)
