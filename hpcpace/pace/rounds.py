"""Rounds of pacing: measure a window of steps, exchange it while the next one runs, then decide.

So no rank waits for an exchange: it has a whole window of steps to complete, and decisions take effect two windows
later. All ranks decide from the same numbers, except for the delay, which depends on each rank's own slack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcpace.core.config import PaceSettings
from hpcpace.pace.arrivals import PointTiming
from hpcpace.pace.coschedule import CollectionCount, CollectionPlan
from hpcpace.pace.exchange import Exchange
from hpcpace.pace.measurement import Measurement
from hpcpace.pace.policies import Policy
from hpcpace.pace.trial import Trial, TrialOutcome
from hpcpace.pace.window_message import Status, WindowMessage, pack, unpack
from hpcpace.trace.schema import PaceArm

UNKNOWN_NS = -1
# Without a trial the first windows are unpaced, as the baseline for the cost of pacing.
_NUM_OFF_WINDOWS = 3


@dataclass(kw_only=True)
class Window:
    """Consecutive steps of this rank; sequences grow to (window_steps,) as they are measured."""

    arm: PaceArm
    steps: list[int] = field(default_factory=list)
    ready_ns: list[int] = field(default_factory=list)
    work_ns: list[float] = field(default_factory=list)
    own_ns: list[float] = field(default_factory=list)
    delayed_ns: list[float] = field(default_factory=list)
    step_ns: list[float] = field(default_factory=list)
    overshoot_ns: tuple[float, ...] = ()

    def add(self, step: int, timing: PointTiming, *, step_ns: float) -> None:
        """Take a step that has ended."""
        self.steps.append(step)
        self.ready_ns.append(timing.ready_ns)
        self.work_ns.append(timing.work_ns)
        self.own_ns.append(timing.own_ns)
        self.delayed_ns.append(float(timing.delayed_ns))
        self.step_ns.append(step_ns)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a rank in the exchanges.

    Attributes:
        group: index of the group in which it is paced; -1 for none.
        num_groups: number of groups.
        is_first: whether it is rank 0.
    """

    group: int
    num_groups: int
    is_first: bool


class Rounds:
    """Runs the rounds of one rank.

    Args:
        settings: how.
        policy: this rank's.
        trial: None if the policy need not prove itself.
        plan: of garbage collections; None for none.
        exchange: to the other ranks.
        place: of this rank in the exchanges.
        arm: of all windows if there is no trial.
        on_row: takes step, arm, ready, delay, slack and harm of each step.

    Attributes:
        window: the one being measured.
        delay_ns: delay of this rank in it, unless the time of day decides.
        policy: this rank's.
        status: what this rank asks of all ranks.
        is_over: whether the ranks have agreed to stop.
        reason: why there was nothing to try; empty otherwise.
    """

    def __init__(
        self,
        settings: PaceSettings,
        *,
        policy: Policy,
        trial: Trial | None,
        plan: CollectionPlan | None,
        exchange: Exchange,
        place: Place,
        arm: PaceArm,
        on_row: Callable[..., Any],
    ) -> None:
        self._settings, self.policy, self._trial, self._plan = settings, policy, trial, plan
        self._arm = arm
        self._exchange, self._place, self._on_row = exchange, place, on_row
        self._pending: Window | None = None
        self._wanted_ns = 0
        self._num_windows = 0
        self.status = Status.GO_ON
        self.is_over = False
        self.reason = ""
        self.window = self._new_window()

    @property
    def delay_ns(self) -> int:
        """Delay of this rank in the window that is being measured."""
        return self._wanted_ns if self.window.arm == PaceArm.ON else 0

    @property
    def interval_steps(self) -> int:
        """Steps between two garbage collections in this window; 0 without a schedule."""
        return self._plan.interval if self._plan is not None and self.window.arm == PaceArm.ON else 0

    @property
    def is_last_step(self) -> bool:
        """Whether the step that begins is the last of its block."""
        is_last = self._trial is None or self._trial.is_last_window
        return is_last and len(self.window.steps) + 1 == self._settings.window_steps

    def end_step(self, count: CollectionCount) -> None:
        """Start the next round if the window is full. Collective then.

        Args:
            count: this rank's full garbage collections so far, without a schedule.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        if len(self.window.steps) < self._settings.window_steps:
            return
        self.finish()
        if self.is_over:
            return
        own_ns = tuple(self.window.own_ns)
        nothing = (math.nan,) * len(own_ns)
        rows = tuple(own_ns if group == self._place.group else nothing for group in range(self._place.num_groups))
        message = WindowMessage(
            status=self.status,
            num_full=count.num_full,
            full_ns=count.time_ns,
            step_ns=tuple(self.window.step_ns),
            least_ns=rows,
            most_ns=rows,
        )
        self._exchange.start(pack(message, group=self._place.group, is_first=self._place.is_first))
        self._pending, self.window = self.window, self._new_window()
        self.status = Status.GO_ON if self.status == Status.RESET else self.status

    def finish(self) -> None:
        """Finish the exchange in flight, if there is one, and decide on it. Collective then."""
        window, self._pending = self._pending, None
        if window is None:
            return
        num_steps = len(window.steps)
        self._decide(window, unpack(self._exchange.finish(), num_steps=num_steps, num_groups=self._place.num_groups))

    def _decide(self, window: Window, message: WindowMessage) -> None:
        if message.status == Status.RESET:
            self.policy.reset()
        if self._place.group >= 0:
            measurement = Measurement(
                own_ns=tuple(window.own_ns),
                least_ns=message.least_ns[self._place.group],
                most_ns=message.most_ns[self._place.group],
                step_ns=message.step_ns,
                work_ns=tuple(window.work_ns),
                delayed_ns=tuple(window.delayed_ns),
                overshoot_ns=window.overshoot_ns,
                arm=window.arm,
            )
            self._wanted_ns = self.policy.update(measurement)
            self.record(window, measurement.slack_ns)
        if self._plan is not None:
            self._plan.note(
                message.step_ns,
                num_full=message.num_full,
                full_ns=message.full_ns,
                is_scheduled=window.arm == PaceArm.ON,
            )
        if self._trial is not None:
            self._trial.add_window(message.step_ns)
            self.is_over = self._trial.is_over and not self._trial.result().is_on
        self.is_over |= message.status == Status.END

    def record(self, window: Window, slack_ns: Sequence[float] = ()) -> None:
        """Pass on a window's rows; unknown slacks are -1."""
        for index, step in enumerate(window.steps):
            slack = slack_ns[index] if index < len(slack_ns) else math.nan
            self._on_row(
                step,
                window.arm,
                window.ready_ns[index],
                int(window.delayed_ns[index]),
                UNKNOWN_NS if math.isnan(slack) else int(slack),
                self.policy.harm_ns,
            )

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
