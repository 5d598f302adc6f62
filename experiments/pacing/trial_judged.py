"""The trial itself, over 1,000 simulated runs for each truth: how often it is right, and how soon it ends harm."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analysis.library.estimates import share_of
from experiments.jobs import Tell
from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, notes
from hpcpace.metrics.resampling import Estimate
from hpcpace.pace.settings import PaceSettings
from hpcpace.pace.trial import POWER, Trial, TrialOutcome, TrialResult
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


USUAL = StepTimes()
SPIKY = StepTimes(spike_probability=0.005)
NUM_RUNS = {Effort.FULL: 1_000, Effort.TRY: 20}
MAX_BLOCKS_OF_HARM = 10


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What pacing does to a step, and the noise in which the trial must find it."""

    name: str
    gain: float
    times: StepTimes = USUAL


def simulated(truth: Truth, settings: PaceSettings, *, num_runs: int, first_seed: int = 0) -> list[SimulatedTrial]:
    """Return that many trials, each with a different seed."""
    return [
        run_trial(truth.times, settings, gain=truth.gain, seed=seed)
        for seed in range(first_seed, first_seed + num_runs)
    ]


def noise_that_hides(gain: float, settings: PaceSettings, *, num_runs: int = 60) -> StepTimes:
    """Return step times so noisy that a trial says: the smallest gain I could have seen is this one.

    The trial prints that figure, with a power of 80 %; here it is held to it.
    """
    never_ends = replace(settings, least_gain=0.0)
    low, high = 0.01, 1.0
    for _ in range(12):
        variation = (low * high) ** 0.5
        truth = Truth(name="", gain=0.0, times=replace(USUAL, variation=variation))
        found = simulated(truth, never_ends, num_runs=num_runs, first_seed=50_000)
        seen = [
            trial.result.effect.detectable
            for trial in found
            if trial.result.effect is not None and trial.result.effect.num_values == settings.max_pairs
        ]
        low, high = (variation, high) if np.mean(seen) < gain else (low, variation)
    return replace(USUAL, variation=(low * high) ** 0.5)


def row_of(truth: Truth, found: list[SimulatedTrial]) -> list[str]:
    """Return the cells of one truth."""
    outcomes = ", ".join(f"{name} {100 * count / len(found):.1f} %" for name, count in outcomes_of(found).items())
    pairs = [trial.result.effect.num_values for trial in found if trial.result.effect is not None]
    blocks = [trial.num_blocks_on for trial in found]
    return [
        truth.name,
        f"{100 * truth.times.variation:.1f} %",
        outcomes,
        f"{np.median(pairs):g}" if pairs else "0",
        f"{np.median(blocks):g} ({np.quantile(blocks, 0.95):g})",
    ]


def shown(share: Estimate) -> str:
    return share.as_percent(is_change=False)


def judge(effort: Effort, tell: Tell) -> Finding:
    settings = PaceSettings(policy="slack")
    num_runs = NUM_RUNS[effort]
    hard = noise_that_hides(0.03, settings, num_runs=60 if effort == Effort.FULL else 4)
    truths = (
        Truth(name="nothing", gain=0.0),
        Truth(name="nothing, with rare long steps", gain=0.0, times=SPIKY),
        Truth(name="gain of 3 %", gain=0.03),
        Truth(name="gain of 3 %, in noise where it is the smallest that could be seen", gain=0.03, times=hard),
        Truth(name="harm of 3 %", gain=-0.03),
        Truth(name="harm of 10 %", gain=-0.10),
    )
    found = {}
    for truth in truths:
        found[truth.name] = simulated(truth, settings, num_runs=num_runs)
        tell(f"{truth.name}: {outcomes_of(found[truth.name])}")
    nothing, nothing_spiky, easy, hardest, harm, much = found.values()
    quiet, quiet_spiky = (_share(trials, TrialOutcome.NO_EFFECT) for trials in (nothing, nothing_spiky))
    seen, seen_hard = (_share(trials, TrialOutcome.GAIN) for trials in (easy, hardest))
    at_once = _share(much, TrialOutcome.HARM_AT_ONCE)
    ended = share_of(sum(trial.result.outcome != TrialOutcome.GAIN for trial in harm), num_runs)
    blocks, blocks_of_much = (float(np.median([trial.num_blocks_on for trial in some])) for some in (harm, much))
    power = f"a gain of 3 % is found with at least the stated power of {POWER:.0%}: {shown(seen)} at the usual noise, "
    power += f"{shown(seen_hard)} where it is the smallest that could be seen"
    ends = f"a harm of 3 % is ended, {shown(ended)}, within a median of {MAX_BLOCKS_OF_HARM} paced blocks: {blocks:g}"
    soon = f"a harm of 10 % is ended at once, {shown(at_once)}, after a median of {blocks_of_much:g} paced blocks"
    claims = [
        Claim(f"off against off gives 'no effect' in 95 %: {shown(quiet)}", quiet.high >= 0.95),
        Claim(f"also with rare long steps: {shown(quiet_spiky)}", quiet_spiky.high >= 0.95),
        Claim(power, min(seen.high, seen_hard.high) >= POWER),
        Claim(ends, ended.high >= 0.95 and blocks <= MAX_BLOCKS_OF_HARM),
        Claim(soon, at_once.high >= 0.95 and blocks_of_much <= 2),
    ]
    head = ["truth", "noise of a step", "outcome", "pairs, median", "paced blocks, median (95 %)"]
    values = {"usual": USUAL, "spiky": SPIKY, "settings": settings}
    return Finding(
        table=[head, *(row_of(truth, found[truth.name]) for truth in truths)],
        claims=claims,
        notes=notes("trial", num_runs=num_runs, **values),
    )


def _share(trials: list[SimulatedTrial], outcome: TrialOutcome) -> Estimate:
    return share_of(sum(trial.result.outcome == outcome for trial in trials), len(trials))


EXPERIMENT = Experiment(name="trial", title="The trial, judged by simulation", run=judge)
