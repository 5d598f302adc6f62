"""Ranks that poll in MPI's collectives, on cores that they share, with and without stragglers, and on their own."""

from __future__ import annotations

import os
from dataclasses import replace

from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, Tell
from experiments.pacing.jobs import HEAD, PUBLISHED, TRIAL, Scene, at_most, run_scenes, series_of, spelled
from experiments.pacing.paced_job import JobSpec
from hpcpace.pace.trial import Outcome

NUM_CORES = len(os.sched_getaffinity(0))
RANKS_PER_CORE = 4
PACE = {**TRIAL, "max_delay_share": 0.3}
YIELDING = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
"""MPICH then gives up the core after each poll, by a short sleep."""
STEPS = 490
STRAGGLERS, YIELDED, ALONE = "stragglers", "stragglers, MPI yields", "one core each"
SHORTER, SHORTEST = "stragglers, half of the work", "stragglers, a quarter of the work"
BALANCED, BALANCED_PAIRS = "balanced", "balanced, two on a core"
SHARED = JobSpec(pace=PACE, steps=STEPS, work_ms=6.0, straggle_ms=12.0)
EVEN = JobSpec(pace=PACE, steps=STEPS, work_ms=10.0)
SCENES = (
    Scene(
        name=STRAGGLERS,
        spec=SHARED,
        num_ranks=RANKS_PER_CORE * NUM_CORES,
        policies={"slack": 5, **dict.fromkeys(PUBLISHED, 2)},
    ),
    Scene(
        name=SHORTER,
        spec=replace(SHARED, work_ms=SHARED.work_ms / 2, straggle_ms=SHARED.straggle_ms / 2),
        num_ranks=RANKS_PER_CORE * NUM_CORES,
        policies={"slack": 5, **dict.fromkeys(PUBLISHED, 2)},
    ),
    Scene(
        name=SHORTEST,
        spec=replace(SHARED, work_ms=SHARED.work_ms / 4, straggle_ms=SHARED.straggle_ms / 4),
        num_ranks=RANKS_PER_CORE * NUM_CORES,
        policies={"slack": 5},
    ),
    Scene(
        name=YIELDED,
        spec=SHARED,
        num_ranks=RANKS_PER_CORE * NUM_CORES,
        policies={"slack": 2},
        environ=YIELDING,
    ),
    Scene(
        name=BALANCED,
        spec=EVEN,
        num_ranks=RANKS_PER_CORE * NUM_CORES,
        policies={"slack": 10, **dict.fromkeys(PUBLISHED, 1)},
    ),
    Scene(name=BALANCED_PAIRS, spec=EVEN, num_ranks=2 * NUM_CORES, policies={"slack": 24}),
    Scene(
        name=ALONE,
        spec=JobSpec(pace=PACE, steps=STEPS, work_ms=10.0, straggle_ms=10.0, is_bound=True),
        num_ranks=NUM_CORES,
        policies={"slack": 2, **dict.fromkeys(PUBLISHED, 1)},
    ),
)


def run(effort: Effort, tell: Tell) -> Finding:
    found = run_scenes(SCENES, effort, tell)
    slack = series_of(found, STRAGGLERS, "slack")
    yielded = series_of(found, YIELDED, "slack")
    balanced = [series_of(found, name, "slack") for name in (BALANCED, BALANCED_PAIRS)]
    alone = [series for series in found if series.scene.name == ALONE]
    gains = {name: series_of(found, name, "slack").change for name in (STRAGGLERS, SHORTER, SHORTEST)}
    claims = [
        *(
            Claim(
                text=f"{name}: slack makes steps at least 10 % shorter, the interval clear of 5 %: {spelled(change)}",
                holds=change is not None and change.value <= -0.10 and change.high < -0.05,
            )
            for name, change in gains.items()
        ),
        Claim(
            text=f"MPI's own yielding gains as well: {yielded.unpaced_ms:.1f} ms a step without pacing, beside "
            f"{slack.unpaced_ms:.1f} ms",
            holds=yielded.unpaced_ms < slack.unpaced_ms,
        ),
        *(
            Claim(
                text=f"{series.scene.name}: slack does no harm beyond 0.5 %: {spelled(series.change)}",
                holds=True if series.change is None else at_most(series.change, 0.005),
            )
            for series in balanced
        ),
        Claim(
            text="one core each: no policy is kept on, and slack's trials say that there is nothing to gain: "
            + "; ".join(ran.sentence for ran in series_of(found, ALONE, "slack").ran),
            holds=all(
                ran.outcome in (Outcome.NO_EFFECT, Outcome.HARM, Outcome.HARM_AT_ONCE)
                for series in alone
                for ran in series.ran
            ),
        ),
    ]
    notes = [
        f"MPICH's Allreduce, which polls. On shared cores {RANKS_PER_CORE * NUM_CORES} ranks have {NUM_CORES} cores; "
        f"each works for {SHARED.work_ms:g} ms of processor time, and one of them, another one in each step, for "
        f"{SHARED.straggle_ms:g} ms more. Balanced ones work for {EVEN.work_ms:g} ms each. Nothing is emulated.",
        f"Delays are bounded by {PACE['max_delay_share']:.0%} of the step; the change is that "
        "of the trial's own blocks, paced against unpaced, in one job, over jobs with other seeds.",
        f"MPI yields: {' '.join(f'{name}={value}' for name, value in YIELDING.items())}.",
    ]
    return Finding(table=[HEAD, *(series.row() for series in found)], claims=claims, notes=notes)


EXPERIMENT = Experiment(name="polling", title="Ranks that poll for each other", run=run)
