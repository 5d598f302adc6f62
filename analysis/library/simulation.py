"""A bulk-synchronous job with noise and couplings, simulated step by step for all ranks.

    ready_(r,n) = exit_(n-1) + work_(r,n)      entry_(r,n) = ready_(r,n) + delay_(r,n)
    exit_n = max_r entry_(r,n) + transfer

This is linear in the (max,+) algebra (Baccelli, Cohen, Olsder & Quadrat 1992, Synchronization and Linearity, section
1.3) and so monotone: a longer delay never makes an exit earlier. Only couplings, which make work or transfer depend on
what other ranks do meanwhile, break that; all are off by default. Every kind of noise can hit the ranks independently,
or all of them in the same steps ("co-scheduled"). Each rank then sees the same noise, but the cost for a job that waits
for its slowest rank is quite different.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import UsageError
from hpcpace.core.records import dataclass

Sleep = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""How long ranks sleep once they are ready."""
NoiseKind = Literal["normal", "exponential", "pareto", "rare", "periodic"]
KINDS: tuple[NoiseKind, ...] = ("normal", "exponential", "pareto", "rare", "periodic")


@dataclass(frozen=True, kw_only=True)
class PollStealing:
    """Ranks that wait by polling take processor time from ranks of their node that still compute.

    A fluid model of a fair scheduler: on a node with C cores, k computing and q polling ranks, each computing rank
    advances at the rate min(1, C / (k + weight q)). A sleeping rank takes nothing.

    Attributes:
        ranks_per_node: ranks that share the cores; their numbers are consecutive.
        cores_per_node: computing power of a node, in cores: less than its ranks if these share cores; for two ranks on
            the hardware threads of one core, what both achieve together (about 1.3).
        weight: processor share of a polling rank relative to a computing one: 1 is the same, 0 nothing.
    """

    ranks_per_node: int
    cores_per_node: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.cores_per_node <= 0 or self.weight < 0:
            raise UsageError(f"poll stealing needs ranks, cores and a weight of at least 0, not {self}")


@dataclass(frozen=True, kw_only=True)
class PowerShare:
    """Sleeping ranks leave power to computing ranks of their node; polling ranks do not.

    Attributes:
        ranks_per_node: ranks that share the power budget.
        boost: how much faster a rank computes while all others of its node sleep; proportionally less with fewer.
    """

    ranks_per_node: int
    boost: float

    def __post_init__(self) -> None:
        if self.ranks_per_node < 2 or self.boost < 0:
            raise UsageError(f"a shared power budget needs 2 ranks per node and a boost of at least 0, not {self}")


@dataclass(frozen=True, kw_only=True)
class Incast:
    """All ranks send over one link, whose goodput falls when many send at once.

    A fluid link: k simultaneous messages share the goodput g(k) = 1 for k <= limit, else
    max(floor, 1 / (1 + collapse (k - limit) / limit)) of its rate (shape after Phanishayee et al. 2008, Measurement and
    Analysis of TCP Throughput Collapse; the parameters depend on the network and must be measured).

    Attributes:
        message_ns: time of one message alone on the link.
        limit: simultaneous messages that the link carries without loss.
        collapse: strength; 0 means no loss at all.
        floor: least goodput.
    """

    message_ns: float
    limit: int = 1
    collapse: float = 0.0
    floor: float = 0.05

    def __post_init__(self) -> None:
        if self.message_ns < 0 or self.limit < 1 or self.collapse < 0 or not 0 < self.floor <= 1:
            raise UsageError(f"incast needs a message, a limit of at least 1 and a collapse of at least 0, not {self}")

    def end_ns(self, entry_ns: NDArray[np.float64]) -> float:
        """Return when the last message has arrived.

        Equal messages under processor sharing end in the order in which they began, so a loop over begins and ends is
        exact.

        Args:
            entry_ns: when each rank begins to send, float64, (num_ranks,).
        """
        begins = np.sort(entry_ns)
        if self.collapse == 0.0:
            # Lindley's recursion: a link that never idles while there is work ends with its last busy period.
            after = np.arange(len(begins), 0, -1) * self.message_ns
            return float((begins + after).max())
        return self._shared(begins.tolist())

    def goodput(self, num_active: int) -> float:
        """Return the share of its rate that the link delivers with this many simultaneous messages."""
        excess = max(num_active - self.limit, 0) / self.limit
        return max(self.floor, 1.0 / (1.0 + self.collapse * excess))

    def _shared(self, begins: list[float]) -> float:
        served, now, first, last = 0.0, begins[0], 0, 0
        ends: list[float] = []  # of the messages that have begun, in attained service
        while first < len(begins):
            active = last - first
            until_begin = begins[last] - now if last < len(begins) else float("inf")
            rate = self.goodput(active) / active if active else 0.0
            until_end = (ends[first] - served) / rate if active else float("inf")
            if until_begin <= until_end:
                served, now = served + rate * until_begin, begins[last]
                ends.append(served + self.message_ns)
                last += 1
            else:
                served, now = ends[first], now + until_end
                first += 1
        return now


def shared_ready_ns(
    work_ns: NDArray[np.float64], sleep: Sleep, *, poll: PollStealing | None, power: PowerShare | None
) -> NDArray[np.float64]:
    """Return when each rank has done its work, counted from their common begin, if the ranks of a node interact.

    This loops over the ends of work and of delays, for all nodes at once: rates are constant in between.

    Args:
        work_ns: time of the work at full rate, float64, (num_nodes, ranks_per_node).
        sleep: returns how long each rank sleeps from when each is ready, both shaped like `work_ns`.
        poll: what polling costs; None for nothing.
        power: what sleeping gains; None for nothing.
    """
    left, ready = np.maximum(work_ns, 0.0), np.zeros_like(work_ns)
    entry = np.where(left > 0.0, np.inf, sleep(ready))
    now = np.zeros(len(work_ns))
    for _ in range(2 * work_ns.shape[1]):
        computing = left > 0.0
        num_computing = computing.sum(axis=1)
        if not num_computing.any():
            break
        sleeping = ~computing & (entry > now[:, np.newaxis])
        num_sleeping = sleeping.sum(axis=1)
        rate = _rates(num_computing, num_sleeping, work_ns.shape[1], poll, power)
        least = np.where(computing, left, np.inf).min(axis=1)
        end = now + least / rate
        wake = np.where(sleeping, entry, np.inf).min(axis=1)
        ends = (num_computing > 0) & (end <= wake)
        then = np.where(num_computing > 0, np.minimum(end, wake), now)
        done = computing & ends[:, np.newaxis] & (left <= least[:, np.newaxis])
        left = np.where(computing, left - ((then - now) * rate)[:, np.newaxis], 0.0)
        # Rounding must not leave a rank with a tiny rest of work.
        left = np.where(done, 0.0, np.where(computing, np.maximum(left, np.finfo(np.float64).tiny), 0.0))
        now = then
        ready = np.where(done, now[:, np.newaxis], ready)
        entry = np.where(done, now[:, np.newaxis] + sleep(ready), entry)
    return ready


def _rates(
    num_computing: NDArray[np.int64],
    num_sleeping: NDArray[np.int64],
    num_ranks: int,
    poll: PollStealing | None,
    power: PowerShare | None,
) -> NDArray[np.float64]:
    """Return how fast the computing ranks of each node advance, float64, (num_nodes,)."""
    rate = np.ones(len(num_computing))
    if poll is not None:
        num_polling = num_ranks - num_computing - num_sleeping
        wanted = np.maximum(num_computing + poll.weight * num_polling, 1.0)
        rate = np.minimum(rate, poll.cores_per_node / wanted)
    if power is not None:
        rate = rate * (1.0 + power.boost * num_sleeping / (num_ranks - 1))
    return rate


class Noise(Protocol):
    """Noise whose size does not depend on when a step begins."""

    def draw(self, num_ranks: int, num_steps: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return what is added to the work in nanoseconds, float64, (num_steps, num_ranks)."""


@dataclass(frozen=True, kw_only=True)
class ParametricNoise:
    """Noise by formula, with the same distribution on every rank.

    Attributes:
        kind: normal (mean 0, may be negative), exponential, pareto (second kind, starting at 0), rare (an event with a
            probability, else nothing), periodic (an event at regular steps, each rank with its own first step).
        size_ns: standard deviation, mean, scale, or size of an event.
        probability: of a rare event, in each step of each rank.
        index: tail index of pareto noise; the mean is finite above 1.
        period: steps between two periodic events of a rank.
        is_coscheduled: whether all ranks have it in the same steps.
    """

    kind: NoiseKind
    size_ns: float
    probability: float = 0.01
    index: float = 3.0
    period: int = 50
    is_coscheduled: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown noise {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.size_ns < 0 or not 0 <= self.probability <= 1 or self.period < 1 or self.index <= 0:
            raise UsageError(f"noise needs a size of at least 0, a probability, an index and a period, not {self}")

    def draw(self, num_ranks: int, num_steps: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return what is added to the work in nanoseconds, float64, (num_steps, num_ranks)."""
        shape = (num_steps, 1 if self.is_coscheduled else num_ranks)
        match self.kind:
            case "normal":
                drawn = generator.standard_normal(shape)
            case "exponential":
                drawn = generator.standard_exponential(shape)
            case "pareto":
                drawn = generator.pareto(self.index, shape)
            case "rare":
                drawn = (generator.random(shape) < self.probability).astype(np.float64)
            case "periodic":
                first = generator.integers(self.period, size=shape[1])
                drawn = ((np.arange(num_steps)[:, np.newaxis] + first) % self.period == 0).astype(np.float64)
        drawn *= self.size_ns
        return _on_all(drawn, num_ranks)


@dataclass(frozen=True, kw_only=True)
class ResampledNoise:
    """Noise drawn from measured residuals in stretches, which keeps serial correlation.

    Attributes:
        residual_ns: work less its step and rank effects, float64, (num_measured_ranks, num_measured_steps), from
            `hpcpace.metrics.amplification.split_work`.
        length: steps of a stretch.
        is_coscheduled: whether all ranks get the same stretches of the same measured rank.
    """

    residual_ns: NDArray[np.float64]
    length: int = 16
    is_coscheduled: bool = False

    def __post_init__(self) -> None:
        if self.residual_ns.ndim != 2 or not self.residual_ns.size or not 1 <= self.length <= self.residual_ns.shape[1]:
            raise UsageError(
                f"residuals have shape {self.residual_ns.shape} and stretches {self.length} steps: give (ranks, "
                "steps), and a stretch no longer than the steps"
            )

    def draw(self, num_ranks: int, num_steps: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return what is added to the work in nanoseconds, float64, (num_steps, num_ranks)."""
        num_measured, num_measured_steps = self.residual_ns.shape
        shape = (-(-num_steps // self.length), 1 if self.is_coscheduled else num_ranks)
        rank = generator.integers(num_measured, size=shape)
        first = generator.integers(num_measured_steps - self.length + 1, size=shape)
        step = first[:, np.newaxis] + np.arange(self.length)[:, np.newaxis]
        drawn = self.residual_ns[rank[:, np.newaxis], step].reshape(-1, shape[1])[:num_steps]
        return _on_all(drawn, num_ranks)


@dataclass(frozen=True, kw_only=True)
class TracedNoise:
    """Noise from a trace of detours, times in which a rank was interrupted; the trace repeats for ever.

    Work that begins at a time of the trace ends when the time without detours has grown by the work (Hoefler, Schneider
    & Lumsdaine 2010, Characterizing the Influence of System Noise, section IV). Ranks start at random places of the
    trace, or all at the same place.

    Attributes:
        begin_ns: begin of each detour, ascending, float64, (num_detours,).
        duration_ns: length of each detour, without overlaps, float64, (num_detours,).
        period_ns: length of the trace.
        is_coscheduled: whether all ranks are at the same place of the trace.
    """

    begin_ns: NDArray[np.float64]
    duration_ns: NDArray[np.float64]
    period_ns: float
    is_coscheduled: bool = False

    def __post_init__(self) -> None:
        end_ns = self.begin_ns + self.duration_ns
        following_ns = np.append(self.begin_ns[1:], self.period_ns)
        if not len(end_ns) or self.begin_ns[0] < 0 or (self.duration_ns <= 0).any() or (end_ns > following_ns).any():
            raise UsageError("the detours of a noise trace must not overlap, and must all end within its period")
        if float(self.duration_ns.sum()) >= self.period_ns:
            raise UsageError("a noise trace must leave time without detours: otherwise no work would ever end")

    def places(self, num_ranks: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return where in the trace each rank is at time 0, float64, (num_ranks,)."""
        return np.broadcast_to(generator.random(1 if self.is_coscheduled else num_ranks) * self.period_ns, num_ranks)

    def end_ns(self, begin_ns: NDArray[np.float64], work_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when work that begins at times of the trace ends, float64, shaped like `begin_ns`."""
        time_ns, free_ns = self._curve
        period, of_period = np.divmod(begin_ns, self.period_ns)
        wanted = np.interp(of_period, time_ns, free_ns) + work_ns
        more, of_period = np.divmod(wanted, free_ns[-1])
        return np.asarray((period + more) * self.period_ns + np.interp(of_period, free_ns, time_ns))

    @cached_property
    def _curve(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the corners of the curve of time without detours over time, both ascending."""
        time_ns = np.column_stack([self.begin_ns, self.begin_ns + self.duration_ns]).ravel()
        held_ns = np.repeat(np.cumsum(self.duration_ns), 2)
        held_ns[::2] -= self.duration_ns
        time_ns = np.concatenate([[0.0], time_ns, [self.period_ns]])
        free_ns = time_ns - np.concatenate([[0.0], held_ns, held_ns[-1:]])
        # No free time passes in a detour; rounding must not make it go backwards.
        return time_ns, np.asarray(np.maximum.accumulate(free_ns))


def _on_all(drawn: NDArray[np.float64], num_ranks: int) -> NDArray[np.float64]:
    """Return the noise of one rank as that of all ranks; noise drawn for each rank is returned as is, writable."""
    return drawn if drawn.shape[1] == num_ranks else np.repeat(drawn, num_ranks, axis=1)


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
