"""What makes a simulated rank's work longer: noise by formula, from measured residuals, or from a trace of detours.

Every kind can hit the ranks independently, or all of them in the same steps ("co-scheduled"). Each rank then sees the
same noise, but the cost for a job that waits for its slowest rank is quite different.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcpace.errors import UsageError

NoiseKind = Literal["normal", "exponential", "pareto", "rare", "periodic"]
KINDS: tuple[NoiseKind, ...] = ("normal", "exponential", "pareto", "rare", "periodic")


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
            `hpcpace.metrics.jitter.variance_shares.split_work`.
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
