"""What `auto` costs a job that it cannot help: pairs of jobs with and without it, alternating."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, Tell
from experiments.pacing.jobs import at_most, run_job
from experiments.pacing.paced_job import JobSpec
from hpcpace.metrics.resampling import mean_of

NUM_SEEDS = {Effort.FULL: 20, Effort.TRY: 1}
STEPS = {Effort.FULL: 400, Effort.TRY: 120}
NUM_RANKS = 4
SPEC = JobSpec(work_ms=10.0, is_emulated=True, straggle_ms=3.0, transport="gloo")
FIRST_STEPS = 5


def run(effort: Effort, tell: Tell) -> Finding:
    costs, sentences, means = [], [], []
    for seed in range(NUM_SEEDS[effort]):
        spec = replace(SPEC, steps=STEPS[effort], seed=seed)
        # Every other pair begins with auto: what drifts strikes both alike.
        order = ("none", "auto") if seed % 2 else ("auto", "none")
        ran = {policy: run_job(replace(spec, policy=policy), NUM_RANKS) for policy in order}
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
        f"EMULATED: {NUM_RANKS} ranks sleep for {SPEC.work_ms:g} ms, a different one in each step for "
        f"{SPEC.straggle_ms:g} ms more, and meet in gloo's all_reduce. {STEPS[effort]} steps without the first "
        f"{FIRST_STEPS}, including the search for the pacing point and the trial.",
        f"auto says: {'; '.join(said)}.",
    ]
    return Finding(table=table, claims=claims, notes=notes)


EXPERIMENT = Experiment(name="auto", title="What auto costs where nothing helps", run=run)
