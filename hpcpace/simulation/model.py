"""A bulk-synchronous job, simulated step by step for all ranks at once.

    ready_(r,n) = exit_(n-1) + work_(r,n)      entry_(r,n) = ready_(r,n) + delay_(r,n)
    exit_n = max_r entry_(r,n) + transfer

This is linear in the (max,+) algebra (Baccelli, Cohen, Olsder & Quadrat 1992, Synchronization and Linearity, section
1.3) and so monotone: a longer delay never makes an exit earlier. Only couplings, which make work or transfer depend on
what other ranks do meanwhile, break that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import UsageError
from hpcpace.simulation.couplings import Incast, PollStealing, PowerShare, Sleep, shared_ready_ns
from hpcpace.simulation.noise import Noise, TracedNoise


class DelayRule(Protocol):
    """A policy as the model calls it, for all ranks at once; it only knows the past."""

    def start(self, num_ranks: int) -> None:
        """Begin a job."""

    def delay_ns(self, work_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how long each rank sleeps once it is ready, float64, (num_ranks,), at least 0.

        Args:
            work_ns: time from the last exit until each rank is ready, (num_ranks,). The model may ask several times in
                a step, before it knows the work of all ranks: each delay may only depend on the rank's own work.
        """

    def learn(self, ready_ns: NDArray[np.float64], delay_ns: NDArray[np.float64], exit_ns: float) -> None:
        """Observe a step: when each rank was ready and how long it slept, (num_ranks,), and when all continued."""


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A job to simulate; all couplings are off unless given.

    Attributes:
        num_ranks: ranks that synchronise in each step.
        num_steps: steps.
        work_ns: work of a step without noise: one number, or one per rank, float64, (num_ranks,).
        transfer_ns: time from the last entry to the exit.
        noise: added to the work, which never falls below 0.
        overshoot_ns: mean by which a sleep ends late, exponentially distributed; work has none.
        poll: polling takes processor time.
        power: sleeping leaves power.
        incast: the messages of a step share a link, in addition to `transfer_ns`.
        seed: of the generator; jobs with the same seed and size have the same noise.
    """

    num_ranks: int
    num_steps: int
    work_ns: float | NDArray[np.float64]
    transfer_ns: float = 0.0
    noise: Noise | TracedNoise | None = None
    overshoot_ns: float = 0.0
    poll: PollStealing | None = None
    power: PowerShare | None = None
    incast: Incast | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_steps < 1 or self.transfer_ns < 0 or self.overshoot_ns < 0:
            raise UsageError("a job needs at least one rank, one step, and times of at least 0")
        if np.shape(self.work_ns) not in ((), (self.num_ranks,)) or np.min(self.work_ns) < 0:
            raise UsageError(f"work has shape {np.shape(self.work_ns)}: give one number, or one per rank, at least 0")
        if self.num_ranks % self.ranks_per_node:
            raise UsageError(f"{self.num_ranks} ranks do not fill nodes of {self.ranks_per_node}")

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node that a coupling connects; 1 without such a coupling.

        Raises:
            UsageError: two couplings have nodes of different size.
        """
        sizes = {coupling.ranks_per_node for coupling in (self.poll, self.power) if coupling is not None}
        if len(sizes) > 1:
            raise UsageError(f"couplings have {sorted(sizes)} ranks per node: give all of them the same number")
        return sizes.pop() if sizes else 1


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What a simulated job did, in nanoseconds since it began.

    Attributes:
        ready_ns: when each rank had done its work, float64, (num_ranks, num_steps).
        delay_ns: how long it then slept, float64, (num_ranks, num_steps).
        exit_ns: when all ranks continued, float64, (num_steps,).
    """

    ready_ns: NDArray[np.float64]
    delay_ns: NDArray[np.float64]
    exit_ns: NDArray[np.float64]

    @property
    def step_ns(self) -> NDArray[np.float64]:
        """Step times, float64, (num_steps,)."""
        return np.diff(self.exit_ns, prepend=0.0)

    @property
    def mean_step_ns(self) -> float:
        """Mean step time: the wall time over the steps."""
        return float(self.exit_ns[-1]) / len(self.exit_ns)

    @property
    def cv(self) -> float:
        """Coefficient of variation of the step time; 0 for a single step."""
        return float(self.step_ns.std(ddof=1)) / self.mean_step_ns if len(self.exit_ns) > 1 else 0.0


def simulate(job: SimulatedJob, rule: DelayRule | None = None) -> Simulated:
    """Simulate a job with a delaying policy, or without one.

    Args:
        job: the job.
        rule: the policy; must be new, because it remembers what it has observed.
    """
    generator = np.random.default_rng([job.seed, 0])
    sleep_generator = np.random.default_rng([job.seed, 1])
    shape = (job.num_steps, job.num_ranks)
    traced = job.noise if isinstance(job.noise, TracedNoise) else None
    places = np.zeros(0) if traced is None else traced.places(job.num_ranks, generator)
    # Looking times up in the order of the trace is faster, because neighbours find the same corners.
    order = np.argsort(places)
    places = places[order]
    # Each row of this first holds the work of a step, then when it was done.
    ready = _work(job, generator)
    delay = np.zeros(shape if rule is not None else (1, 1))
    exits = np.empty(job.num_steps)
    if rule is not None:
        rule.start(job.num_ranks)
    now = 0.0
    for step in range(job.num_steps):
        of_step = ready[step]
        of_delay = delay[step] if rule is not None else delay[0]
        if traced is not None:
            of_step[order] = traced.end_ns(places + now, of_step[order]) - places - now
        sleep = _sleep(rule, job, sleep_generator)
        if job.poll is not None or job.power is not None:
            of_step[:] = _shared(job, of_step, sleep)
        if rule is not None:
            of_delay[:] = sleep(of_step)
        of_step += now
        # Without a policy there is nothing to add: save a pass over all ranks.
        entry = of_step if rule is None else of_step + of_delay
        last = float(entry.max()) if job.incast is None else job.incast.end_ns(entry)
        now = last + job.transfer_ns
        exits[step] = now
        if rule is not None:
            rule.learn(of_step, of_delay, now)
    return Simulated(ready_ns=ready.T, delay_ns=np.broadcast_to(delay, shape).T, exit_ns=exits)


def _work(job: SimulatedJob, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the work of each step and rank with noise by formula or from residuals, (num_steps, num_ranks)."""
    shape = (job.num_steps, job.num_ranks)
    if job.noise is None or isinstance(job.noise, TracedNoise):
        return np.array(np.broadcast_to(np.asarray(job.work_ns, np.float64), shape))
    drawn = job.noise.draw(job.num_ranks, job.num_steps, generator)
    drawn += job.work_ns
    return np.asarray(np.maximum(drawn, 0.0, out=drawn))


def _sleep(rule: DelayRule | None, job: SimulatedJob, generator: np.random.Generator) -> Sleep:
    """Return a function from work to how long ranks sleep in the coming step; their overshoot is drawn here."""
    if rule is None:
        return np.zeros_like
    if job.overshoot_ns == 0.0:
        return rule.delay_ns
    late_ns = generator.standard_exponential(job.num_ranks) * job.overshoot_ns

    def slept(work_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        wanted_ns = rule.delay_ns(work_ns)
        return np.where(wanted_ns > 0.0, wanted_ns + late_ns, 0.0)

    return slept


def _shared(job: SimulatedJob, work_ns: NDArray[np.float64], sleep: Sleep) -> NDArray[np.float64]:
    nodes = (-1, job.ranks_per_node)

    def of_nodes(ready_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        return sleep(ready_ns.ravel()).reshape(nodes)

    return shared_ready_ns(work_ns.reshape(nodes), of_nodes, poll=job.poll, power=job.power).ravel()
