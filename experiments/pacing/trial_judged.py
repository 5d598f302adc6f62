"""The trial itself, over 1,000 simulated runs for each truth: how often it is right, and how soon it ends harm."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, Tell, percent
from experiments.pacing.simulated_trial import SimulatedTrial, StepTimes, outcomes_of, run_trial
from hpcpace.metrics.resampling import Estimate, share_of
from hpcpace.pace.settings import PaceSettings
from hpcpace.pace.trial import POWER, TrialOutcome

USUAL = StepTimes()
SPIKY = StepTimes(spike_probability=0.005)
NUM_RUNS = {Effort.FULL: 1_000, Effort.TRY: 20}
MOST_BLOCKS_OF_HARM = 10


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
    quiet, quiet_spiky = (
        share_of(sum(trial.result.outcome == TrialOutcome.NO_EFFECT for trial in trials), num_runs)
        for trials in (nothing, nothing_spiky)
    )
    seen, seen_hard = (
        share_of(sum(trial.result.outcome == TrialOutcome.GAIN for trial in trials), num_runs)
        for trials in (easy, hardest)
    )
    ended = share_of(sum(trial.result.outcome != TrialOutcome.GAIN for trial in harm), num_runs)
    blocks = float(np.median([trial.num_blocks_on for trial in harm]))
    at_once = share_of(sum(trial.result.outcome == TrialOutcome.HARM_AT_ONCE for trial in much), num_runs)
    blocks_of_much = float(np.median([trial.num_blocks_on for trial in much]))
    claims = [
        Claim(text=f"off against off gives 'no effect' in 95 %: {shown(quiet)}", holds=quiet.high >= 0.95),
        Claim(text=f"also with rare long steps: {shown(quiet_spiky)}", holds=quiet_spiky.high >= 0.95),
        Claim(
            text=f"a gain of 3 % is found with at least the stated power of {POWER:.0%}: {shown(seen)} at the usual "
            f"noise, {shown(seen_hard)} where it is the smallest that could be seen",
            holds=min(seen.high, seen_hard.high) >= POWER,
        ),
        Claim(
            text=f"a harm of 3 % is ended, {shown(ended)}, within a median of {MOST_BLOCKS_OF_HARM} paced blocks: "
            f"{blocks:g}",
            holds=ended.high >= 0.95 and blocks <= MOST_BLOCKS_OF_HARM,
        ),
        Claim(
            text=f"a harm of 10 % is ended at once, {shown(at_once)}, after a median of {blocks_of_much:g} paced "
            "blocks",
            holds=at_once.high >= 0.95 and blocks_of_much <= 2,
        ),
    ]
    head = ["truth", "noise of a step", "outcome", "pairs, median", "paced blocks, median (95 %)"]
    notes = [
        f"{num_runs} runs for each truth. Steps of 100 ms with normal noise (correlation of neighbours "
        f"{USUAL.correlation:g}) and a drift of the machine of {percent(USUAL.drift, 0)} and back over 2,000 steps. "
        f"Rare long steps: {percent(SPIKY.spike, 0)} in {SPIKY.spike_probability:.1%} of them.",
        f"{settings.aa_pairs} unpaced pairs, then up to {settings.max_pairs} pairs of blocks of "
        f"{settings.block_steps} steps; durations reach the trial two windows late, as in a job, so that a paced block "
        "may begin while the one before it is judged.",
    ]
    return Finding(table=[head, *(row_of(truth, found[truth.name]) for truth in truths)], claims=claims, notes=notes)


EXPERIMENT = Experiment(name="trial", title="The trial, judged by simulation", run=judge)
