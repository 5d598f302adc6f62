"""The pacing of one rank between the choice of its pacing point and the end: delays, rounds and garbage collections."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hpcpace.pace.arrivals import Arrival, ArrivalLog
from hpcpace.pace.choice import PacingChoice
from hpcpace.pace.coschedule import CollectionPlan, CollectionSchedule, CollectionWatch
from hpcpace.pace.exchange import Exchange
from hpcpace.pace.policies import Policy, make_policy
from hpcpace.pace.precise_sleep import PreciseSleep
from hpcpace.pace.rounds import Place, Rounds
from hpcpace.pace.trial import Trial, TrialResult
from hpcpace.pace.window_message import Status
from hpcpace.trace.schema import PaceArm, PacePolicy, StepFlag

_NOT_COUNTED = StepFlag.CHECKPOINT | StepFlag.EVAL | StepFlag.WARMUP
# Below this share of the steps `auto` finds garbage collection not worth a trial.
_LEAST_GC_SHARE = 0.002


@dataclass(frozen=True, kw_only=True)
class PacerClocks:
    """The clocks that pacing reads, each a function that returns nanoseconds; replaced in tests."""

    monotonic: Callable[[], int] = time.monotonic_ns
    thread: Callable[[], int] = time.thread_time_ns
    unix: Callable[[], int] = time.time_ns


class PacingTrace(Protocol):
    """Where pacing records what it does."""

    def add_pacing(self, *row: int) -> object:
        """Take the columns of a row of the trace's `pacing` table."""

    def add_delay(self, begin_ns: int, end_ns: int) -> object:
        """Take begin and end of a delay in the current step."""


class ActivePacing:
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
        self._settings, self._trace, self._clocks = choice.settings, trace, clocks
        self._watch, self._schedule, self._precise_sleep = watch, schedule, precise_sleep
        self._policy_column = PacePolicy[choice.policy.upper().replace("-", "_")]
        self._arrivals = ArrivalLog()
        self._size_bytes = -1
        group = next((index for index, point in enumerate(choice.points) if rank in point.ranks), -1)
        self.point = choice.points[group].name if group >= 0 else None
        members = choice.points[group].ranks if group >= 0 else (rank,)
        has_trial = self._settings.trial and choice.policy != "observe"
        self._trial = Trial(self._settings, seed=choice.seed) if has_trial else None
        self._rounds = Rounds(
            self._settings,
            policy=make_policy(choice.policy, self._settings, index=members.index(rank), num_members=len(members)),
            trial=self._trial,
            plan=_collection_plan(choice),
            exchange=exchange,
            place=Place(group=group, num_groups=len(choice.points), is_first=rank == 0),
            arm=PaceArm.OFF if choice.policy == "observe" else PaceArm.ON,
            on_row=self._add_row,
        )

    @property
    def policy(self) -> Policy:
        """The policy of this rank."""
        return self._rounds.policy

    @property
    def is_over(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._rounds.is_over

    @property
    def reason(self) -> str:
        """Why there was nothing to try; empty otherwise."""
        return self._rounds.reason

    @property
    def trial_result(self) -> TrialResult | None:
        """The trial as far as it got; None without one."""
        return None if self._trial is None else self._trial.result()

    def begin_step(self) -> StepFlag:
        """Collect garbage if that is due; return the flag of such a step."""
        interval = self._rounds.interval_steps
        if interval and not self._schedule.is_on:
            self._schedule.turn_on(interval)
        elif not interval and self._schedule.is_on:
            self._schedule.turn_off(steps_until=self._watch.steps_until)
        is_collected = self._schedule.begin_step(is_last=self._rounds.is_last_step)
        return StepFlag.GC if is_collected else StepFlag.NONE

    def arrive(self, name: str) -> Arrival:
        """Delay this rank at its pacing point as its policy wants, just before it is blocked."""
        ready_ns = self._clocks.monotonic()
        return Arrival(name, ready_ns, self._delay(ready_ns), 0)

    def leave(self, arrival: Arrival, exit_ns: int, size_bytes: int) -> None:
        """Note that the rank is released; where the size of the message changes, all ranks start to learn afresh."""
        self._arrivals.add(arrival, exit_ns)
        if size_bytes != self._size_bytes and self._size_bytes >= 0:
            self._rounds.status = min(self._rounds.status, Status.RESET)
        self._size_bytes = size_bytes

    def end_step(self, step: int, duration_ns: int, flags: int) -> None:
        """Take a step that has ended. Collective at the end of each window.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        rounds = self._rounds
        step_ns = float("nan") if flags & _NOT_COUNTED else float(duration_ns)
        rounds.window.add(step, self._arrivals.end_step(), step_ns=step_ns)
        if len(rounds.window.steps) == self._settings.window_steps:
            rounds.window.overshoot_ns = self._precise_sleep.take_overshoots()
        rounds.end_step(self._watch.counts[False])

    def withdraw(self) -> None:
        """Delay this rank no longer, and ask the others with the next exchange to end pacing."""
        self._rounds.status = Status.END
        self._rounds.policy = make_policy("observe", self._settings)

    def finish(self) -> None:
        """Wait for the exchange in flight, if there is one. Collective then.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        self._rounds.finish()

    def record_rest(self) -> None:
        """Record the steps of the window that has not ended."""
        self._rounds.record(self._rounds.window)

    def _delay(self, ready_ns: int) -> int:
        if self._rounds.window.arm != PaceArm.ON or self._arrivals:
            return ready_ns
        delay_ns = self.policy.delay_at(self._clocks.unix(), self._arrivals.work_ns(ready_ns))
        if delay_ns <= 0:
            return ready_ns
        end_ns = self._precise_sleep.delay(ready_ns, delay_ns)
        self._trace.add_delay(ready_ns, end_ns)
        return end_ns

    def _add_row(self, step: int, arm: PaceArm, *values: int) -> None:
        self._trace.add_pacing(step, self._policy_column, arm, *values)


def _collection_plan(choice: PacingChoice) -> CollectionPlan | None:
    if choice.policy != "coschedule":
        return None
    least_share = _LEAST_GC_SHARE if choice.settings.policy == "auto" else 0.0
    return CollectionPlan(choice.settings.gc_steps, least_share=least_share)
