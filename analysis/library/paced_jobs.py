"""The coupling, and its strength, that the model needs to show a published gain of pacing.

First, the throughput and variation of the baseline are fitted for each number of nodes separately: noise, imbalance and
transfer are what the table requires, not what anybody measured. Then policies run in the fitted job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.pace.controller import Measurement, Policy, make_policy
from hpcpace.pace.settings import PaceSettings
from hpcpace.trace.schema import PaceArm

from .simulation import Incast, ParametricNoise, PollStealing, PowerShare, SimulatedJob, simulate

Coupling = Literal["none", "poll stealing", "power share", "goodput collapse"]
Cause = Literal["rotating", "lasting"]
CAUSES: tuple[Cause, ...] = ("rotating", "lasting")
"""Why ranks wait: rare events that hit a different rank each time, or one rank per node that always has more work."""
STRENGTHS: dict[Coupling, tuple[float, ...]] = {
    "none": (0.0,),
    "poll stealing": (0.25, 0.5, 1.0),
    "power share": (0.1, 0.3, 1.0),
    "goodput collapse": (0.05, 0.2, 0.5),
}
"""Strengths by coupling: weight of a polling rank, boost of a rank whose node is asleep, collapse of goodput."""
RANKS_PER_NODE = 2
_PROBABILITY = 0.01
_TOLERANCE = 0.05
_MESSAGES_SHARE = 0.2
_MESSAGES_WITHOUT_LOSS = 16
_NUM_FITS = 14
_BASE_NS = 1e8


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
        self._window: list[tuple[Any, ...]] = []

    def delay_ns(self, work_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how long each rank sleeps if it is ready after `work_ns`, float64, both (num_ranks,)."""
        if self._arm(self._step) != PaceArm.ON:
            return np.zeros_like(work_ns)
        # `UsualPattern.delay_ns` of all ranks at once.
        late_ns = self._own_share * np.maximum(work_ns - self._usual_ns, 0.0)
        return np.where(np.isnan(late_ns), 0.0, np.maximum(self._wanted_ns - late_ns, 0.0))

    def learn(self, ready_ns: NDArray[np.float64], delay_ns: NDArray[np.float64], exit_ns: float) -> None:
        """Observe a step; at the end of a window the policies decide."""
        work_ns = ready_ns - self._last_exit_ns
        overshoot_ns = delay_ns - self.delay_ns(work_ns)
        step_ns = exit_ns - self._last_exit_ns
        self._window.append((exit_ns - ready_ns, work_ns, delay_ns.copy(), overshoot_ns, step_ns))
        self._last_exit_ns = exit_ns
        self._step += 1
        if self._step % self._settings.window_steps == 0:
            self._decide()

    def _decide(self) -> None:
        *columns, steps_ns = zip(*self._window, strict=True)
        own_ns, works_ns, delays_ns, overshoots_ns = map(np.array, columns)
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
                    step_ns=steps_ns,
                    delayed_ns=tuple(delays_ns[:, rank].tolist()),
                    overshoot_ns=tuple(np.maximum(overshoot_ns, 0.0).tolist()),
                    arm=arm,
                )
            )
            self._usual_ns[rank], self._own_share[rank] = policy.usual.work_ns, policy.usual.own_share
        self._window = []


@dataclass(frozen=True, kw_only=True)
class Target:
    """A row of a published table: throughput and variation without and with pacing, at a number of nodes."""

    nodes: int
    samples_per_s: float
    variation: float
    paced_samples_per_s: float
    paced_variation: float

    @property
    def gain(self) -> float:
        """The gain of pacing, as a share of the throughput."""
        return self.paced_samples_per_s / self.samples_per_s - 1


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The kind of job in which a table may be reproduced.

    Attributes:
        coupling: how ranks interact.
        strength: see `STRENGTHS`.
        cause: why ranks wait.
    """

    coupling: Coupling
    strength: float
    cause: Cause


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A job fitted to the baseline of a row.

    Attributes:
        job: the job.
        is_fit: whether its step time and variation are within 5 % of the row's.
    """

    job: SimulatedJob
    is_fit: bool


@dataclass(frozen=True, kw_only=True)
class PacedOutcome:
    """What a policy did in a fitted job.

    Attributes:
        nodes: number of nodes.
        gain: throughput relative to the baseline, less 1.
        variation: coefficient of variation of the step time, with pacing.
        baseline_variation: the same without pacing.
    """

    nodes: int
    gain: float
    variation: float
    baseline_variation: float


def fit(target: Target, smallest: Target, scene: Scene, *, num_steps: int = 280, seed: int = 0) -> Fitted:
    """Return a job whose step time has the mean and the variation of a row.

    Rotating: each rank has an event in 1 % of the steps, whose size gives the variation; the transfer gets what is left
    of the mean. Lasting: the variation is noise that all ranks share, and the mean is that of the slow ranks.

    Args:
        target: the row.
        smallest: the row with the fewest nodes, whose step is 100 ms here.
        scene: the kind of job.
        num_steps: steps of the job.
        seed: of its noise.
    """
    wanted_ns = target.nodes / target.samples_per_s / (smallest.nodes / smallest.samples_per_s) * _BASE_NS
    spread_ns = target.variation * wanted_ns

    def job(size_ns: float, transfer_ns: float = 0.0) -> SimulatedJob:
        return _job(target.nodes, scene, size_ns, spread_ns, transfer_ns, num_steps=num_steps, seed=seed)

    low, high = 1e-4 * _BASE_NS, 4 * wanted_ns
    for _ in range(_NUM_FITS):
        size_ns = (low * high) ** 0.5
        found = simulate(job(size_ns))
        is_below = found.mean_step_ns < wanted_ns
        if scene.cause == "rotating":
            is_below = found.cv * found.mean_step_ns < spread_ns
        low, high = (size_ns, high) if is_below else (low, size_ns)
    rest_ns = max(wanted_ns - simulate(job(low)).mean_step_ns, 0.0)
    fitted = job(low, rest_ns)
    found = simulate(fitted)
    is_fit = abs(found.mean_step_ns / wanted_ns - 1) < _TOLERANCE and abs(found.cv / target.variation - 1) < _TOLERANCE
    return Fitted(job=fitted, is_fit=is_fit)


def paced(fitted: Fitted, settings: PaceSettings, *, nodes: int) -> PacedOutcome:
    """Return what a policy does in a fitted job, after the steps in which it learns what is usual.

    Args:
        fitted: the job.
        settings: of pacing, with the policy.
        nodes: number of nodes.
    """
    num_off = 4 * settings.window_steps
    baseline = simulate(fitted.job).step_ns[2 * num_off :]
    steps = simulate(fitted.job, PacedRanks(settings, arm=off_then_on(num_off))).step_ns[2 * num_off :]
    return PacedOutcome(
        nodes=nodes,
        gain=float(baseline.mean() / steps.mean()) - 1,
        variation=float(steps.std(ddof=1) / steps.mean()),
        baseline_variation=float(baseline.std(ddof=1) / baseline.mean()),
    )


def distance(targets: Sequence[Target], outcomes: Sequence[PacedOutcome]) -> float:
    """Return the largest difference between a published gain and the model's, over all numbers of nodes."""
    return max(abs(target.gain - found.gain) for target, found in zip(targets, outcomes, strict=True))


def _job(
    nodes: int, scene: Scene, size_ns: float, spread_ns: float, transfer_ns: float, *, num_steps: int, seed: int
) -> SimulatedJob:
    num_ranks = nodes * RANKS_PER_NODE
    work_ns = np.full(num_ranks, _BASE_NS * (1 - _MESSAGES_SHARE))
    if scene.cause == "rotating":
        noise = ParametricNoise(kind="rare", size_ns=size_ns, probability=_PROBABILITY)
    else:
        work_ns[::RANKS_PER_NODE] += size_ns
        noise = ParametricNoise(kind="normal", size_ns=spread_ns, is_coscheduled=True)
    job = SimulatedJob(
        num_ranks=num_ranks,
        num_steps=num_steps,
        work_ns=work_ns,
        transfer_ns=transfer_ns,
        noise=noise,
        overshoot_ns=1e5,
        seed=seed,
    )
    return _coupled(job, scene, work_ns, noise)


def _coupled(job: SimulatedJob, scene: Scene, work_ns: NDArray[np.float64], noise: ParametricNoise) -> SimulatedJob:
    """Return a job of some work and noise with the coupling of a scene."""
    match scene.coupling:
        case "poll stealing":
            # Two ranks on one core: each has half of the work, which then takes just as long.
            poll = PollStealing(ranks_per_node=RANKS_PER_NODE, cores_per_node=1.0, weight=scene.strength)
            halved = replace(noise, size_ns=noise.size_ns / RANKS_PER_NODE)
            return replace(job, work_ns=work_ns / RANKS_PER_NODE, noise=halved, poll=poll)
        case "power share":
            return replace(job, power=PowerShare(ranks_per_node=RANKS_PER_NODE, boost=scene.strength))
        case "goodput collapse":
            message_ns = _BASE_NS * _MESSAGES_SHARE / job.num_ranks
            link = Incast(message_ns=message_ns, limit=_MESSAGES_WITHOUT_LOSS, collapse=scene.strength)
            return replace(job, incast=link)
        case _:
            return job
