"""Where pacing cannot help and has to say so: a rank that is always slow, and ranks that wait for memory."""

from __future__ import annotations

from dataclasses import replace

from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, Tell
from experiments.pacing.jobs import HEAD, PUBLISHED, TRIAL, Scene, never_kept_in_vain, run_job, run_scenes, series_of
from experiments.pacing.paced_job import JobSpec
from experiments.pacing.polling import NUM_CORES

PACE = {**TRIAL, "max_delay_share": 0.3}
SLOW, MEMORY = "one rank always slow", "memory-bound node"
POLICIES = {"slack": 2, **dict.fromkeys(PUBLISHED, 1), "auto": 1}
SCENES = (
    Scene(
        name=SLOW,
        spec=JobSpec(
            pace=PACE,
            steps=490,
            work_ms=15.0,
            is_emulated=True,
            slow_rank=3,
            slow_ms=8.0,
            transport="gloo",
        ),
        num_ranks=4,
        policies=POLICIES,
    ),
    Scene(
        name=MEMORY,
        spec=JobSpec(
            pace=PACE, steps=490, work_ms=2.0, straggle_ms=6.0, memory_mb=40.0, transport="gloo", is_bound=True
        ),
        num_ranks=NUM_CORES,
        policies=POLICIES,
    ),
)


def run(effort: Effort, tell: Tell) -> Finding:
    found = run_scenes(SCENES, effort, tell)
    steps = 200 if effort == Effort.FULL else 60
    reported = run_job(replace(SCENES[0].spec, policy="observe", steps=steps), SCENES[0].num_ranks, is_reported=True)
    verdict = reported.verdict
    advice = f"{verdict['headline']}; {'; '.join(verdict['next'])}"
    tell(f"report: {advice}")
    claims = [
        Claim(
            text=f"{scene.name}: no policy is on at the end; slack: "
            + "; ".join(ran.sentence for ran in series_of(found, scene.name, "slack").ran),
            holds=never_kept_in_vain([series for series in found if series.scene.name == scene.name]),
        )
        for scene in SCENES
    ]
    claims.append(
        Claim(
            text=f"{SLOW}: the report says what to do instead: {advice}",
            holds=any(
                (one["kind"], one["id"]) == ("rank", str(SCENES[0].spec.slow_rank)) for one in verdict["culprits"]
            ),
        )
    )
    notes = [
        f"{SLOW}: EMULATED: 4 ranks sleep for 15 ms, rank 3 for 8 ms more. The others only wait.",
        f"{MEMORY}: {NUM_CORES} ranks with a core each. Each copies 40 MB per step, and a different one in each step "
        "has 6 ms more work.",
    ]
    return Finding(table=[HEAD, *(series.row() for series in found)], claims=claims, notes=notes)


EXPERIMENT = Experiment(name="waiting", title="A slow rank, and a memory-bound node", run=run)
