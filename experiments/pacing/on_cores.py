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

from analysis.library.estimates import mean_of
from analysis.library.simulation import ParametricNoise, SimulatedJob, simulate
from experiments.jobs import Tell
from experiments.pacing import experiment
from experiments.pacing.paced_job import JobSpec
from hpcpace.pace.trial import TrialOutcome

NUM_CORES = len(os.sched_getaffinity(0))
RANKS_PER_CORE = 4
SHARING_RANKS = RANKS_PER_CORE * NUM_CORES
POLLING_PACE = {**experiment.TRIAL, "max_delay_share": 0.3}
MOST_DELAY = f"{POLLING_PACE['max_delay_share']:.0%}"
YIELDING = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
"""MPICH then gives up the core after each poll, by a short sleep."""
POLLING_STEPS = 490
STRAGGLERS, YIELDED, ALONE = "stragglers", "stragglers, MPI yields", "one core each"
SHORTER, SHORTEST = "stragglers, half of the work", "stragglers, a quarter of the work"
BALANCED, BALANCED_PAIRS = "balanced", "balanced, two on a core"
SHARED = JobSpec(pace=POLLING_PACE, steps=POLLING_STEPS, work_ms=6.0, straggle_ms=12.0)
EVEN = JobSpec(pace=POLLING_PACE, steps=POLLING_STEPS, work_ms=10.0)


def _polling(name: str, spec: JobSpec, slack: int, published: int = 0, **more: Any) -> experiment.Scene:
    policies = {"slack": slack, **(dict.fromkeys(experiment.PUBLISHED, published) if published else {})}
    return experiment.Scene(**{"name": name, "spec": spec, "num_ranks": SHARING_RANKS, "policies": policies, **more})


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


def run_polling(effort: experiment.Effort, tell: Tell) -> experiment.Finding:
    found = experiment.run_scenes(POLLING_SCENES, effort, tell)
    slack = {series.scene.name: series for series in found if series.policy == "slack"}
    yielded_ms, polled_ms = slack[YIELDED].unpaced_ms, slack[STRAGGLERS].unpaced_ms
    nothing = (TrialOutcome.NO_EFFECT, TrialOutcome.HARM, TrialOutcome.HARM_AT_ONCE)
    claims = []
    for name in (STRAGGLERS, SHORTER, SHORTEST):
        change = slack[name].change
        text = (
            f"{name}: slack makes steps at least 10 % shorter, the interval clear of 5 %: {experiment.spelled(change)}"
        )
        holds = change is not None and change.value <= -0.10 and change.high < -0.05
        claims.append(experiment.Claim(text, holds))
    text = f"MPI's own yielding gains as well: {yielded_ms:.1f} ms a step without pacing, against {polled_ms:.1f} ms"
    claims.append(experiment.Claim(text, yielded_ms < polled_ms))
    for name in (BALANCED, BALANCED_PAIRS):
        change = slack[name].change
        text = f"{name}: slack does no harm beyond 0.5 %: {experiment.spelled(change)}"
        claims.append(experiment.Claim(text, change is None or experiment.at_most(change, 0.005)))
    text = "one core each: no policy is kept on, and slack's trials say that there is nothing to gain: "
    alone = [ran for series in found if series.scene.name == ALONE for ran in series.ran]
    holds = all(ran.outcome in nothing for ran in alone)
    claims.append(experiment.Claim(text + experiment.sentences(slack[ALONE]), holds))
    values = {"shared": SHARED, "even": EVEN, "yielding": YIELDING, "most_delay": MOST_DELAY}
    return experiment.finding_of(
        found, claims, experiment.notes("polling", ranks=SHARING_RANKS, cores=NUM_CORES, **values)
    )


POLLING = experiment.Experiment(name="polling", title="Ranks that poll for each other", run=run_polling)


COLLECTING_RANKS = {4: 3, 8: 3, 16: 3, 32: 2}
COLLECTING = JobSpec(
    pace={**experiment.TRIAL, "aa_pairs": 4, "max_pairs": 6, "max_delay_share": 0.3},
    steps=700,
    work_ms=30.0,
    is_emulated=True,
    collect_ms=30.0,
    collect_steps=15,
    transport="gloo",
    collective="barrier",
)


def collecting_scenes() -> list[experiment.Scene]:
    found = [
        experiment.Scene(
            name=f"{num_ranks} ranks", spec=COLLECTING, num_ranks=num_ranks, policies={"coschedule": num_jobs}
        )
        for num_ranks, num_jobs in COLLECTING_RANKS.items()
    ]
    return [
        *found,
        experiment.Scene(name="8 ranks", spec=COLLECTING, num_ranks=8, policies=dict.fromkeys(experiment.PUBLISHED, 1)),
    ]


def expected(series: experiment.Series) -> float:
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


def run_collected(effort: experiment.Effort, tell: Tell) -> experiment.Finding:
    found = experiment.run_scenes(collecting_scenes(), effort, tell)
    together = [series for series in found if series.policy == "coschedule"]
    model = [expected(series) for series in together]
    gains = [series.change.value if series.change is not None else None for series in together]
    known = [(gain, of_model) for gain, of_model in zip(gains, model, strict=True) if gain is not None]
    gained_ms = [-gain * series.unpaced_ms for gain, series in zip(gains, together, strict=True) if gain is not None]
    table = [(*experiment.HEAD, "change in the model")]
    for series in found:
        of_model = f"{100 * model[together.index(series)]:+.1f} %" if series in together else ""
        table.append((*series.row(), of_model))
    is_known = len(known) == len(gains)
    spelled = ", ".join("unknown" if gain is None else f"{100 * gain:+.1f} %" for gain in gains)
    both = ", ".join(f"{100 * gain:+.1f} % against {100 * of_model:+.1f} %" for gain, of_model in known)
    shorter = f"collections on one step make steps shorter at every number of ranks: {spelled}"
    grows = "the time that a step gains grows with the ranks: " + ", ".join(f"{ms:.1f} ms" for ms in gained_ms)
    judged = {
        shorter: all(gain < 0 for gain, _ in known),
        grows: all(after > before for before, after in pairwise(gained_ms)),
        f"it is within 8 points of what the model says: {both}": all(abs(gain - of) <= 0.08 for gain, of in known),
    }
    claims = [experiment.Claim(text, holds if is_known else None) for text, holds in judged.items()]
    return experiment.Finding(table=table, claims=claims, notes=experiment.notes("collections", job=COLLECTING))


COLLECTIONS = experiment.Experiment(name="collections", title="Garbage collection on the same step", run=run_collected)


WAITING_PACE = {**experiment.TRIAL, "max_delay_share": 0.3}
SLOW, MEMORY = "one rank always slow", "memory-bound node"
WAITING_POLICIES = {"slack": 2, **dict.fromkeys(experiment.PUBLISHED, 1), "auto": 1}
_ONE_SLOW = JobSpec(
    pace=WAITING_PACE, steps=490, work_ms=15.0, is_emulated=True, slow_rank=3, slow_ms=8.0, transport="gloo"
)
_COPYING = JobSpec(pace=WAITING_PACE, steps=490, work_ms=2.0, straggle_ms=6.0, memory_mb=40.0, transport="gloo")
WAITING_SCENES = (
    experiment.Scene(name=SLOW, spec=_ONE_SLOW, num_ranks=4, policies=WAITING_POLICIES),
    experiment.Scene(
        name=MEMORY, spec=replace(_COPYING, is_bound=True), num_ranks=NUM_CORES, policies=WAITING_POLICIES
    ),
)


def run_waiting(effort: experiment.Effort, tell: Tell) -> experiment.Finding:
    found = experiment.run_scenes(WAITING_SCENES, effort, tell)
    steps = 200 if effort == experiment.Effort.FULL else 60
    reported = experiment.run_job(
        replace(WAITING_SCENES[0].spec, policy="observe", steps=steps), WAITING_SCENES[0].num_ranks, is_reported=True
    )
    verdict = reported.verdict
    advice = f"{verdict['headline']}; {'; '.join(verdict['next'])}"
    tell(f"report: {advice}")
    claims = []
    for scene in WAITING_SCENES:
        said = experiment.sentences(experiment.series_of(found, scene.name, "slack"))
        holds = experiment.never_kept_in_vain([series for series in found if series.scene.name == scene.name])
        claims.append(experiment.Claim(f"{scene.name}: no policy is on at the end; slack: {said}", holds))
    named = [(one["kind"], one["id"]) for one in verdict["culprits"]]
    is_named = ("rank", str(WAITING_SCENES[0].spec.slow_rank)) in named
    claims.append(experiment.Claim(f"{SLOW}: the report says what to do instead: {advice}", is_named))
    return experiment.finding_of(found, claims, experiment.notes("waiting", slow=SLOW, memory=MEMORY, cores=NUM_CORES))


WAITING = experiment.Experiment(name="waiting", title="A slow rank, and a memory-bound node", run=run_waiting)


COST_SEEDS = {experiment.Effort.FULL: 20, experiment.Effort.TRY: 1}
COST_STEPS = {experiment.Effort.FULL: 400, experiment.Effort.TRY: 120}
COST_RANKS = 4
COST_JOB = JobSpec(work_ms=10.0, is_emulated=True, straggle_ms=3.0, transport="gloo")
FIRST_STEPS = 5


def run_auto_cost(effort: experiment.Effort, tell: Tell) -> experiment.Finding:
    costs, sentences, means = [], [], []
    for seed in range(COST_SEEDS[effort]):
        spec = replace(COST_JOB, steps=COST_STEPS[effort], seed=seed)
        # Every other pair begins with auto: what drifts strikes both alike.
        order = ("none", "auto") if seed % 2 else ("auto", "none")
        ran = {policy: experiment.run_job(replace(spec, policy=policy), COST_RANKS) for policy in order}
        none_ms, auto_ms = (ran[policy].mean_ms(skipped=FIRST_STEPS) for policy in ("none", "auto"))
        costs.append(auto_ms / none_ms - 1)
        means.append(none_ms)
        sentences.append(ran["auto"].sentence)
        tell(f"seed {seed}: {100 * costs[-1]:+.2f} %; {sentences[-1]}")
    cost = mean_of(costs)
    said = dict.fromkeys(sentences)
    is_known = len(costs) > 1
    is_cheap, is_surely_cheap = cost.value <= 0.005, experiment.at_most(cost, 0.01) is True
    claims = [
        experiment.Claim(f"auto costs at most 0.5 %: {cost.as_percent(2)}", is_cheap if is_known else None),
        experiment.Claim("the upper end of the interval is at most 1 %", is_surely_cheap if is_known else None),
    ]
    table = [
        ("policy", "jobs", "step", "throughput lost"),
        ("none", str(len(costs)), f"{np.mean(means):.2f} ms", ""),
        ("auto", str(len(costs)), f"{np.mean(means) * (1 + cost.value):.2f} ms", cost.as_percent(2)),
    ]
    values = {"job": COST_JOB, "steps": COST_STEPS[effort], "first": FIRST_STEPS, "said": list(said)}
    notes = experiment.notes("auto", ranks=COST_RANKS, **values)
    return experiment.Finding(table=table, claims=claims, notes=notes)


AUTO_COST = experiment.Experiment(name="auto", title="What auto costs where nothing helps", run=run_auto_cost)


LONGER, DEFAULT, TIGHT = "200 steps more", "default bounds", "at most 5 %"
_TIGHT_PACE = {**experiment.TRIAL, "polling_delay_share": 0.0}


def _sharing(name: str, policies: dict[str, int], **changes: Any) -> experiment.Scene:
    return experiment.Scene(name=name, spec=replace(SHARED, **changes), num_ranks=SHARING_RANKS, policies=policies)


GAIN_SCENES = (
    _sharing(STRAGGLERS, {"slack": 3}),
    _sharing(LONGER, {"auto": 4}, steps=POLLING_STEPS + 200),
    _sharing(DEFAULT, {"auto": 2}, pace=dict(experiment.TRIAL)),
    _sharing(TIGHT, {"slack": 1}, pace=_TIGHT_PACE),
)


def late_change(series: experiment.Series) -> float:
    """Return the change of the step time in the last 100 steps, mean over the jobs: what is left on is in it."""
    changes = []
    for ran in series.ran:
        trial = ran.trial.get("trial") or {}
        usual_ns = trial.get("step_off_ns") or float(np.mean(ran.step_ns))
        changes.append(float(ran.step_ns[-100:].mean()) / usual_ns - 1)
    return mean_of(changes).value


def run_auto_gain(effort: experiment.Effort, tell: Tell) -> experiment.Finding:
    found = experiment.run_scenes(GAIN_SCENES, effort, tell)
    slack, auto = experiment.series_of(found, STRAGGLERS, "slack"), experiment.series_of(found, LONGER, "auto")
    kept, gain = late_change(auto), slack.change
    text = f"auto keeps at least half of slack's gain, {experiment.spelled(gain)}, in its last 100 steps: "
    text += f"{100 * kept:+.1f} % ({experiment.sentences(auto)})"
    claim = experiment.Claim(text, None if gain is None or gain.value >= 0 else kept <= gain.value / 2)
    notes = experiment.notes("kept", ranks=SHARING_RANKS, cores=NUM_CORES, most_delay=MOST_DELAY)
    return experiment.finding_of(found, [claim], notes)


AUTO_GAIN = experiment.Experiment(name="kept", title="What auto keeps where slack helps", run=run_auto_gain)
