"""The shipped policies in a simulated job: the same state machines, fed with what they would observe in a real job."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hpcpace.pace.measurement import Measurement
from hpcpace.pace.policies import Policy, make_policy
from hpcpace.pace.settings import PaceSettings
from hpcpace.trace.schema import PaceArm


def off_then_on(num_off_steps: int) -> Callable[[int], PaceArm]:
    """Return the arm of each step: off for some steps, in which a policy learns what is usual, then on."""
    return lambda step: PaceArm.OFF if step < num_off_steps else PaceArm.ON


class PacedRanks:
    """A policy of `hpcpace.pace` on every rank, as a rule of the model.

    Args:
        settings: of pacing, with the name of the policy.
        arm: returns whether the step with a number is paced; changes only between windows of `settings.window_steps`.
    """

    def __init__(self, settings: PaceSettings, *, arm: Callable[[int], PaceArm]) -> None:
        self._settings = settings
        self._arm = arm
        self._policies: list[Policy] = []

    def start(self, num_ranks: int) -> None:
        """Begin a job."""
        self._policies = [
            make_policy(self._settings.policy, self._settings, index=rank, num_members=num_ranks)
            for rank in range(num_ranks)
        ]
        self._wanted_ns = np.zeros(num_ranks)
        self._usual_ns = np.full(num_ranks, np.inf)
        self._own_share = np.ones(num_ranks)
        self._step = 0
        self._last_exit_ns = 0.0
        self._clear()

    def delay_ns(self, work_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how long each rank sleeps if it is ready after `work_ns`, float64, both (num_ranks,)."""
        if self._arm(self._step) != PaceArm.ON:
            return np.zeros_like(work_ns)
        # `Habit.delay_ns` of all ranks at once.
        late_ns = self._own_share * np.maximum(work_ns - self._usual_ns, 0.0)
        return np.where(np.isnan(late_ns), 0.0, np.maximum(self._wanted_ns - late_ns, 0.0))

    def learn(self, ready_ns: NDArray[np.float64], delay_ns: NDArray[np.float64], exit_ns: float) -> None:
        """Observe a step; at the end of a window the policies decide."""
        work_ns = ready_ns - self._last_exit_ns
        self._own_ns.append(exit_ns - ready_ns)
        self._works_ns.append(work_ns)
        self._delays_ns.append(delay_ns.copy())
        self._overshoots_ns.append(delay_ns - self.delay_ns(work_ns))
        self._steps_ns.append(exit_ns - self._last_exit_ns)
        self._last_exit_ns = exit_ns
        self._step += 1
        if self._step % self._settings.window_steps == 0:
            self._decide()

    def _decide(self) -> None:
        own_ns = np.array(self._own_ns)
        works_ns, delays_ns, overshoots_ns = map(np.array, (self._works_ns, self._delays_ns, self._overshoots_ns))
        least_ns, most_ns = tuple(own_ns.min(axis=1).tolist()), tuple(own_ns.max(axis=1).tolist())
        arm = self._arm(self._step - 1)
        for rank, policy in enumerate(self._policies):
            overshoot_ns = overshoots_ns[delays_ns[:, rank] > 0.0, rank]
            self._wanted_ns[rank] = policy.update(
                Measurement(
                    own_ns=tuple(own_ns[:, rank].tolist()),
                    least_ns=least_ns,
                    most_ns=most_ns,
                    work_ns=tuple(works_ns[:, rank].tolist()),
                    step_ns=tuple(self._steps_ns),
                    delayed_ns=tuple(delays_ns[:, rank].tolist()),
                    overshoot_ns=tuple(np.maximum(overshoot_ns, 0.0).tolist()),
                    arm=arm,
                )
            )
            self._usual_ns[rank], self._own_share[rank] = policy.habit.usual_ns, policy.habit.own_share
        self._clear()

    def _clear(self) -> None:
        self._own_ns: list[NDArray[np.float64]] = []
        self._works_ns: list[NDArray[np.float64]] = []
        self._delays_ns: list[NDArray[np.float64]] = []
        self._overshoots_ns: list[NDArray[np.float64]] = []
        self._steps_ns: list[float] = []
