"""The shipped trial over step times whose truth is known: what pacing does to them is put in, not found."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.config import PaceSettings
from hpcpace.pace.trial import Trial, TrialOutcome, TrialResult
from hpcpace.trace.schema import PaceArm

_NUM_WINDOWS_LATE = 2
"""A real job learns the duration of a window only after the next ones have begun."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Durations of steps: serially correlated normal noise, rare long steps, and a slow drift of the whole machine.

    Attributes:
        step_ns: usual duration.
        variation: standard deviation of the noise as a share of the step.
        correlation: of neighbouring steps.
        spike: what a rare long step adds, as a share, with `spike_probability`.
        drift: by how much the machine gets slower and faster again over 2,000 steps, as a share.
    """

    step_ns: float = 1e8
    variation: float = 0.05
    correlation: float = 0.3
    spike: float = 0.5
    spike_probability: float = 0.0
    drift: float = 0.02

    def draw(self, num_steps: int, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return durations in nanoseconds, float64, (num_steps,)."""
        fresh = generator.standard_normal(num_steps) * self.variation * (1 - self.correlation**2) ** 0.5
        noise = np.empty(num_steps)
        last = generator.standard_normal() * self.variation
        for step in range(num_steps):
            last = self.correlation * last + fresh[step]
            noise[step] = last
        spikes = self.spike * (generator.random(num_steps) < self.spike_probability)
        turn = 2 * np.pi * (np.arange(num_steps) / 2_000 + generator.random())
        return np.asarray(self.step_ns * np.maximum(1 + noise + spikes + self.drift * np.sin(turn), 0.1))


@dataclass(frozen=True, kw_only=True)
class SimulatedTrial:
    """A trial that has ended.

    Attributes:
        result: what the trial says.
        num_blocks_on: paced blocks until it ended, those on their way at that time included.
    """

    result: TrialResult
    num_blocks_on: float


def run_trial(times: StepTimes, settings: PaceSettings, *, gain: float, seed: int) -> SimulatedTrial:
    """Run a trial to its end.

    Args:
        times: of steps that are not paced.
        settings: of the trial.
        gain: share of the step by which pacing shortens it; below 0 it makes it longer.
        seed: of the step times and the order of the blocks.
    """
    most_steps = 2 * settings.block_steps * (settings.aa_pairs + settings.max_pairs + 2)
    durations = times.draw(most_steps, np.random.default_rng([seed, 17]))
    trial = Trial(settings, seed=seed)
    waiting: deque[list[float]] = deque()
    num_windows_on = 0
    for begin in range(0, most_steps, settings.window_steps):
        if trial.is_over:
            break
        arm = trial.next_window()
        is_on = arm == PaceArm.ON
        num_windows_on += is_on
        window = durations[begin : begin + settings.window_steps] * (1 - gain if is_on else 1.0)
        waiting.append(window.tolist())
        if len(waiting) > _NUM_WINDOWS_LATE:
            trial.add_window(waiting.popleft())
    num_blocks_on = num_windows_on * settings.window_steps / settings.block_steps
    return SimulatedTrial(result=trial.result(), num_blocks_on=num_blocks_on)


def outcomes_of(found: list[SimulatedTrial]) -> dict[TrialOutcome, int]:
    """Return how often each outcome came, the most frequent first."""
    names = [trial.result.outcome for trial in found]
    return {name: names.count(name) for name in sorted(set(names), key=lambda name: -names.count(name))}
