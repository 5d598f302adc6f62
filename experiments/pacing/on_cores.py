"""Experiments on pacing with real jobs on this machine's cores: where it helps, where it cannot, and what it costs.

Ranks that poll in MPI's collectives on shared cores; full garbage collections on the same step; a rank that is always
slow and ranks that wait for memory, where pacing has to say that it cannot help; what `auto` costs a job that it cannot
help, and what it keeps of the gain of `slack` after its trial.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.jobs import Tell
from experiments.pacing.experiment import (
    HEAD,
    PUBLISHED,
    TRIAL,
    Claim,
    Effort,
    Experiment,
    Finding,
    Scene,
    Series,
    at_most,
    never_kept_in_vain,
    run_job,
    run_scenes,
    series_of,
    spelled,
)
from experiments.pacing.paced_job import JobSpec
from hpcpace.metrics.resampling import mean_of
from hpcpace.pace.trial import TrialOutcome
from hpcpace.simulation import ParametricNoise, SimulatedJob, simulate

NUM_CORES = len(os.sched_getaffinity(0))
RANKS_PER_CORE = 4
SHARING_RANKS = RANKS_PER_CORE * NUM_CORES
POLLING_PACE = {**TRIAL, "max_delay_share": 0.3}
YIELDING = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
"""MPICH then gives up the core after each poll, by a short sleep."""
POLLING_STEPS = 490
STRAGGLERS, YIELDED, ALONE = "stragglers", "stragglers, MPI yields", "one core each"
SHORTER, SHORTEST = "stragglers, half of the work", "stragglers, a quarter of the work"
BALANCED, BALANCED_PAIRS = "balanced", "balanced, two on a core"
SHARED = JobSpec(pace=POLLING_PACE, steps=POLLING_STEPS, work_ms=6.0, straggle_ms=12.0)
EVEN = JobSpec(pace=POLLING_PACE, steps=POLLING_STEPS, work_ms=10.0)


def _polling(name: str, spec: JobSpec, slack: int, published: int = 0, **more: Any) -> Scene:
    policies = {"slack": slack, **(dict.fromkeys(PUBLISHED, published) if published else {})}
    return Scene(**{"name": name, "spec": spec, "num_ranks": SHARING_RANKS, "policies": policies, **more})


def _scaled(divisor: int) -> JobSpec:
    return replace(SHARED, work_ms=SHARED.work_ms / divisor, straggle_ms=SHARED.straggle_ms / divisor)


POLLING_SCENES = (
    _polling(STRAGGLERS, SHARED, 5, 2),
    _polling(SHORTER, _scaled(2), 5, 2),
    _polling(SHORTEST, _scaled(4), 5),
    _polling(YIELDED, SHARED, 2, environ=YIELDING),
    _polling(BALANCED, EVEN, 10, 1),
    _polling(BALANCED_PAIRS, EVEN, 24, num_ranks=2 * NUM_CORES),
    _polling(ALONE, replace(EVEN, straggle_ms=10.0, is_bound=True), 2, 1, num_ranks=NUM_CORES),
)


def run_polling(effort: Effort, tell: Tell) -> Finding:
    found = run_scenes(POLLING_SCENES, effort, tell)
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
            text=f"MPI's own yielding gains as well: {yielded.unpaced_ms:.1f} ms a step without pacing, against "
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
                ran.outcome in (TrialOutcome.NO_EFFECT, TrialOutcome.HARM, TrialOutcome.HARM_AT_ONCE)
                for series in alone
                for ran in series.ran
            ),
        ),
    ]
    notes = [
        f"MPICH's Allreduce, which polls. On shared cores, {SHARING_RANKS} ranks have {NUM_CORES} "
        f"cores. Each rank uses {SHARED.work_ms:g} ms of processor time per step, and a different one in each step "
        f"uses {SHARED.straggle_ms:g} ms more. Balanced ranks use {EVEN.work_ms:g} ms each. Nothing is emulated.",
        f"Delays are at most {POLLING_PACE['max_delay_share']:.0%} of the step. The change compares paced and unpaced "
        "blocks of the trial within one job, over jobs with different seeds.",
        f"MPI yields: {' '.join(f'{name}={value}' for name, value in YIELDING.items())}.",
    ]
    return Finding(table=[HEAD, *(series.row() for series in found)], claims=claims, notes=notes)


POLLING = Experiment(name="polling", title="Ranks that poll for each other", run=run_polling)


COLLECTING_RANKS = {4: 3, 8: 3, 16: 3, 32: 2}
COLLECTING = JobSpec(
    pace={**TRIAL, "aa_pairs": 4, "max_pairs": 6, "max_delay_share": 0.3},
    steps=700,
    work_ms=30.0,
    is_emulated=True,
    collect_ms=30.0,
    collect_steps=15,
    transport="gloo",
    collective="barrier",
)


def collecting_scenes() -> list[Scene]:
    found = [
        Scene(name=f"{num_ranks} ranks", spec=COLLECTING, num_ranks=num_ranks, policies={"coschedule": num_jobs})
        for num_ranks, num_jobs in COLLECTING_RANKS.items()
    ]
    return [*found, Scene(name="8 ranks", spec=COLLECTING, num_ranks=8, policies=dict.fromkeys(PUBLISHED, 1))]


def expected(series: Series) -> float:
    """Return the change of the step time that the model has for such jobs.

    It takes what is known of the job, how often and how long a rank collects by itself, and the unpaced step but for
    its collections; that they then fall together is all that it changes.
    """
    changes = []
    for ran in series.ran:
        off = ran.trial["collections"]["off"]
        period, cost_ns = max(round(off["num_steps"] / max(off["num_full"], 1)), 1), 1e6 * COLLECTING.collect_ms
        usual_ns = float(np.quantile(ran.step_ns, 0.1))
        means = [
            simulate(
                SimulatedJob(
                    num_ranks=series.scene.num_ranks,
                    num_steps=4_000,
                    work_ns=usual_ns,
                    noise=ParametricNoise(
                        kind="rare", size_ns=cost_ns, probability=1 / period, is_coscheduled=is_coscheduled
                    ),
                )
            ).mean_step_ns
            for is_coscheduled in (False, True)
        ]
        changes.append(means[1] / means[0] - 1)
    return float(np.mean(changes))


def run_collected(effort: Effort, tell: Tell) -> Finding:
    found = run_scenes(collecting_scenes(), effort, tell)
    together = [series for series in found if series.policy == "coschedule"]
    model = [expected(series) for series in together]
    gains = [series.change.value if series.change is not None else None for series in together]
    known = [(gain, of_model) for gain, of_model in zip(gains, model, strict=True) if gain is not None]
    gained_ms = [-gain * series.unpaced_ms for gain, series in zip(gains, together, strict=True) if gain is not None]
    table = [(*HEAD, "change in the model")]
    for series in found:
        of_model = f"{100 * model[together.index(series)]:+.1f} %" if series in together else ""
        table.append((*series.row(), of_model))
    claims = [
        Claim(
            text="collections on one step make steps shorter at every number of ranks: "
            + ", ".join("unknown" if gain is None else f"{100 * gain:+.1f} %" for gain in gains),
            holds=None if len(known) < len(gains) else all(gain < 0 for gain, _ in known),
        ),
        Claim(
            text="the time that a step gains grows with the ranks: " + ", ".join(f"{ms:.1f} ms" for ms in gained_ms),
            holds=None if len(known) < len(gains) else all(after > before for before, after in pairwise(gained_ms)),
        ),
        Claim(
            text="it is within 8 points of what the model says: "
            + ", ".join(f"{100 * gain:+.1f} % against {100 * of_model:+.1f} %" for gain, of_model in known),
            holds=None if len(known) < len(gains) else all(abs(gain - of_model) <= 0.08 for gain, of_model in known),
        ),
    ]
    notes = [
        f"EMULATED: ranks share a few cores, so their work of {COLLECTING.work_ms:g} ms is a sleep, and so is a full "
        f"collection, {COLLECTING.collect_ms:g} ms. Python itself decides when to collect. Ranks create "
        "garbage at random, "
        f"so it collects about every {COLLECTING.collect_steps} steps. All ranks meet in gloo's barrier, "
        "which costs 32 "
        "processes on two cores less than an all_reduce.",
        "Unpaced and paced blocks belong to the same job. The model's inputs are how often ranks collect on their own "
        "and the shortest tenth of the steps.",
    ]
    return Finding(table=table, claims=claims, notes=notes)


COLLECTIONS = Experiment(name="collections", title="Garbage collection on the same step", run=run_collected)


WAITING_PACE = {**TRIAL, "max_delay_share": 0.3}
SLOW, MEMORY = "one rank always slow", "memory-bound node"
WAITING_POLICIES = {"slack": 2, **dict.fromkeys(PUBLISHED, 1), "auto": 1}
WAITING_SCENES = (
    Scene(
        name=SLOW,
        spec=JobSpec(
            pace=WAITING_PACE, steps=490, work_ms=15.0, is_emulated=True, slow_rank=3, slow_ms=8.0, transport="gloo"
        ),
        num_ranks=4,
        policies=WAITING_POLICIES,
    ),
    Scene(
        name=MEMORY,
        spec=JobSpec(
            pace=WAITING_PACE, steps=490, work_ms=2.0, straggle_ms=6.0, memory_mb=40.0, transport="gloo", is_bound=True
        ),
        num_ranks=NUM_CORES,
        policies=WAITING_POLICIES,
    ),
)


def run_waiting(effort: Effort, tell: Tell) -> Finding:
    found = run_scenes(WAITING_SCENES, effort, tell)
    steps = 200 if effort == Effort.FULL else 60
    reported = run_job(
        replace(WAITING_SCENES[0].spec, policy="observe", steps=steps), WAITING_SCENES[0].num_ranks, is_reported=True
    )
    verdict = reported.verdict
    advice = f"{verdict['headline']}; {'; '.join(verdict['next'])}"
    tell(f"report: {advice}")
    claims = [
        Claim(
            text=f"{scene.name}: no policy is on at the end; slack: "
            + "; ".join(ran.sentence for ran in series_of(found, scene.name, "slack").ran),
            holds=never_kept_in_vain([series for series in found if series.scene.name == scene.name]),
        )
        for scene in WAITING_SCENES
    ]
    claims.append(
        Claim(
            text=f"{SLOW}: the report says what to do instead: {advice}",
            holds=any(
                (one["kind"], one["id"]) == ("rank", str(WAITING_SCENES[0].spec.slow_rank))
                for one in verdict["culprits"]
            ),
        )
    )
    notes = [
        f"{SLOW}: EMULATED: 4 ranks sleep for 15 ms, rank 3 for 8 ms more. The others only wait.",
        f"{MEMORY}: {NUM_CORES} ranks with a core each. Each copies 40 MB per step, and a different one in each step "
        "has 6 ms more work.",
    ]
    return Finding(table=[HEAD, *(series.row() for series in found)], claims=claims, notes=notes)


WAITING = Experiment(name="waiting", title="A slow rank, and a memory-bound node", run=run_waiting)


COST_SEEDS = {Effort.FULL: 20, Effort.TRY: 1}
COST_STEPS = {Effort.FULL: 400, Effort.TRY: 120}
COST_RANKS = 4
COST_JOB = JobSpec(work_ms=10.0, is_emulated=True, straggle_ms=3.0, transport="gloo")
FIRST_STEPS = 5


def run_auto_cost(effort: Effort, tell: Tell) -> Finding:
    costs, sentences, means = [], [], []
    for seed in range(COST_SEEDS[effort]):
        spec = replace(COST_JOB, steps=COST_STEPS[effort], seed=seed)
        # Every other pair begins with auto: what drifts strikes both alike.
        order = ("none", "auto") if seed % 2 else ("auto", "none")
        ran = {policy: run_job(replace(spec, policy=policy), COST_RANKS) for policy in order}
        none_ms, auto_ms = (ran[policy].mean_ms(skipped=FIRST_STEPS) for policy in ("none", "auto"))
        costs.append(auto_ms / none_ms - 1)
        means.append(none_ms)
        sentences.append(ran["auto"].sentence)
        tell(f"seed {seed}: {100 * costs[-1]:+.2f} %; {sentences[-1]}")
    cost = mean_of(costs)
    said = dict.fromkeys(sentences)
    is_known = len(costs) > 1
    claims = [
        Claim(text=f"auto costs at most 0.5 %: {cost.as_percent(2)}", holds=cost.value <= 0.005 if is_known else None),
        Claim(
            text="the upper end of the interval is at most 1 %", holds=at_most(cost, 0.01) is True if is_known else None
        ),
    ]
    table = [
        ("policy", "jobs", "step", "throughput lost"),
        ("none", str(len(costs)), f"{np.mean(means):.2f} ms", ""),
        ("auto", str(len(costs)), f"{np.mean(means) * (1 + cost.value):.2f} ms", cost.as_percent(2)),
    ]
    notes = [
        f"EMULATED: {COST_RANKS} ranks sleep for {COST_JOB.work_ms:g} ms, a different one in each step for "
        f"{COST_JOB.straggle_ms:g} ms more, and meet in gloo's all_reduce. {COST_STEPS[effort]} steps without "
        "the first "
        f"{FIRST_STEPS}, including the search for the pacing point and the trial.",
        f"auto says: {'; '.join(said)}.",
    ]
    return Finding(table=table, claims=claims, notes=notes)


AUTO_COST = Experiment(name="auto", title="What auto costs where nothing helps", run=run_auto_cost)


LONGER, DEFAULT, TIGHT = "200 steps more", "default bounds", "at most 5 %"
GAIN_SCENES = (
    Scene(name=STRAGGLERS, spec=SHARED, num_ranks=SHARING_RANKS, policies={"slack": 3}),
    Scene(name=LONGER, spec=replace(SHARED, steps=POLLING_STEPS + 200), num_ranks=SHARING_RANKS, policies={"auto": 4}),
    Scene(name=DEFAULT, spec=replace(SHARED, pace=dict(TRIAL)), num_ranks=SHARING_RANKS, policies={"auto": 2}),
    Scene(
        name=TIGHT,
        spec=replace(SHARED, pace={**TRIAL, "polling_delay_share": 0.0}),
        num_ranks=SHARING_RANKS,
        policies={"slack": 1},
    ),
)


def late_change(series: Series) -> float:
    """Return the change of the step time in the last 100 steps, mean over the jobs: what is left on is in it."""
    changes = []
    for ran in series.ran:
        trial = ran.trial.get("trial") or {}
        usual_ns = trial.get("step_off_ns") or float(np.mean(ran.step_ns))
        changes.append(float(ran.step_ns[-100:].mean()) / usual_ns - 1)
    return mean_of(changes).value


def run_auto_gain(effort: Effort, tell: Tell) -> Finding:
    found = run_scenes(GAIN_SCENES, effort, tell)
    slack, auto = series_of(found, STRAGGLERS, "slack"), series_of(found, LONGER, "auto")
    kept = late_change(auto)
    gain = slack.change
    claims = [
        Claim(
            text=f"auto keeps at least half of slack's gain, {spelled(gain)}, in its last 100 steps: "
            f"{100 * kept:+.1f} % ({'; '.join(ran.sentence for ran in auto.ran)})",
            holds=None if gain is None or gain.value >= 0 else kept <= gain.value / 2,
        )
    ]
    notes = [
        f"Jobs with stragglers as in the first section on real jobs: {SHARING_RANKS} ranks, {NUM_CORES} "
        "cores, delays of "
        f"at most {POLLING_PACE['max_delay_share']:.0%} of the step. With 200 more steps, the last 100 come "
        "after the trial.",
        "Default bounds: those of a job that sets none. At most 5 %: `polling_delay_share` 0.",
    ]
    return Finding(table=[HEAD, *(series.row() for series in found)], claims=claims, notes=notes)


AUTO_GAIN = Experiment(name="kept", title="What auto keeps where slack helps", run=run_auto_gain)
