"""Experiments on pacing on the links of a lab: two jobs take turns on one uplink, and messages meet on a link.

Two jobs share an oversubscribed uplink, each by itself and taking turns by the time of day; all ranks of a job send to
one; and a job is limited by its links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from experiments.jobs import Tell
from experiments.pacing import experiment
from experiments.pacing.paced_job import JobSpec
from hpcpace.metrics.resampling import Estimate, mean_of

RATE = "50mbit"
TURN_STEPS = {experiment.Effort.FULL: 140, experiment.Effort.TRY: 70}
FIRST_STEPS = 50
"""Left out: the search for the pacing point, three windows without delays, and the way into the slot."""
PERIOD_MS = 175.0
TURN_HOSTS = (("n1", "n3"), ("n2", "n4"))
"""Of each job: one on each leaf, so that both use the uplinks."""
TURN_JOB = JobSpec(
    pace={"trial": False, "max_delay_share": 0.4, "find_steps": 5},
    work_ms=100.0,
    is_emulated=True,
    transport="gloo",
    message_kb=500.0,
)
REPEATS = {"none": 3, "stagger": 3, **dict.fromkeys(experiment.PUBLISHED, 1)}


def turn_jobs(policy: str, steps: int, seed: int) -> list[experiment.LabJob]:
    found = []
    for slot, hosts in enumerate(TURN_HOSTS):
        turns = {"stagger_slots": 2, "stagger_slot": slot, "stagger_period_ms": PERIOD_MS}
        pace = {**TURN_JOB.pace, **(turns if policy == "stagger" else {})}
        found.append(
            experiment.LabJob(
                specs=(replace(TURN_JOB, policy=policy, pace=pace, steps=steps, seed=seed + slot),), hosts=hosts
            )
        )
    return found


def run_turns(effort: experiment.Effort, tell: Tell) -> experiment.Finding:
    steps = TURN_STEPS[effort]
    measured: dict[str, list[tuple[float, ...]]] = {}
    with experiment.slow_lab(RATE) as lab:
        (alone,) = experiment.run_together(lab, turn_jobs("none", steps, 0)[:1])
        alone_ms = alone.mean_ms(skipped=FIRST_STEPS)
        tell(f"one job alone: {alone_ms:.1f} ms a step")
        for repeat in range(max(REPEATS.values())):
            # In turn: what drifts strikes all policies alike.
            for policy, num_repeats in REPEATS.items():
                if repeat < (num_repeats if effort == experiment.Effort.FULL else 1):
                    both = experiment.run_together(lab, turn_jobs(policy, steps, 10 * repeat))
                    means_ms = tuple(ran.mean_ms(skipped=FIRST_STEPS) for ran in both)
                    measured.setdefault(policy, []).append(means_ms)
                    tell(f"{policy}: {' and '.join(f'{mean_ms:.1f}' for mean_ms in means_ms)} ms; {both[0].sentence}")
    return finding(alone_ms, measured, steps)


def finding(alone_ms: float, measured: dict[str, list[tuple[float, ...]]], steps: int) -> experiment.Finding:
    usual = np.mean(measured["none"], axis=0)
    changes: dict[str, Estimate] = {}
    table = [("policy of both", "pairs", "step of the first", "of the second", "change, both together")]
    table.append(("one job alone", "1", f"{alone_ms:.1f} ms", "", ""))
    for policy, pairs in measured.items():
        means = np.mean(pairs, axis=0)
        changes[policy] = mean_of([float(np.mean(np.array(pair) / usual)) - 1 for pair in pairs])
        table.append(
            (policy, str(len(pairs)), *(f"{value:.1f} ms" for value in means), experiment.spelled(changes[policy]))
        )
    stagger = changes["stagger"]
    both_ms = usual.mean()
    text = f"two jobs on one uplink hold each other up: {both_ms:.1f} ms a step, against {alone_ms:.1f} ms alone"
    shorter = f"taking turns makes the steps of both shorter: {experiment.spelled(stagger)}"
    claims = [
        experiment.Claim(text, bool(both_ms > 1.02 * alone_ms)),
        experiment.Claim(shorter, is_below_zero(stagger)),
    ]
    values = {"rate": RATE, "job": TURN_JOB, "steps": steps, "first": FIRST_STEPS, "period_ms": f"{PERIOD_MS:g}"}
    return experiment.Finding(table=table, claims=claims, notes=experiment.notes("turns", **values))


def is_below_zero(change: Estimate | None) -> bool | None:
    """Return whether a change is one for the better; None if its interval includes 0."""
    return None if change is None or change.low <= 0 <= change.high else change.high < 0


TURNS = experiment.Experiment(name="turns", title="Two jobs on one uplink", run=run_turns, needs_lab=True)


LINK_HOSTS = ("n1", "n2", "n3", "n4")
GATHER, LIMIT = "gather from 8 ranks", "links at their limit"
LINK_JOB = JobSpec(
    pace={**experiment.TRIAL, "max_delay_share": 0.4}, steps=490, work_ms=10.0, is_emulated=True, transport="gloo"
)
LINK_SCENES: Mapping[str, tuple[JobSpec, int, Mapping[str, int]]] = {
    GATHER: (
        replace(LINK_JOB, collective="gather", message_kb=40.0),
        2,
        {"stagger": 2, "slack": 1, **dict.fromkeys(experiment.PUBLISHED, 1), "auto": 1},
    ),
    LIMIT: (replace(LINK_JOB, message_kb=150.0), 1, {"slack": 2, **dict.fromkeys(experiment.PUBLISHED, 1), "auto": 1}),
}


def run_links(effort: experiment.Effort, tell: Tell) -> experiment.Finding:
    found = []
    with experiment.slow_lab(RATE) as lab:
        for name, (spec, per_host, policies) in LINK_SCENES.items():
            scene = experiment.Scene(name=name, spec=spec, num_ranks=per_host * len(LINK_HOSTS), policies=policies)
            for policy, num_jobs in policies.items():
                ran = []
                for seed in range(num_jobs if effort == experiment.Effort.FULL else 1):
                    of_job = replace(
                        spec, policy=policy, seed=seed, steps=spec.steps if effort == experiment.Effort.FULL else 60
                    )
                    job = experiment.LabJob(specs=(of_job,), hosts=LINK_HOSTS, ranks_per_host=per_host)
                    ran += experiment.run_together(lab, [job])
                    tell(f"{name}, {policy}, seed {seed}: {ran[-1].mean_ms():.1f} ms a step; {ran[-1].sentence}")
                found.append(experiment.Series(scene=scene, policy=policy, ran=tuple(ran)))
    stagger, slack = experiment.series_of(found, GATHER, "stagger"), experiment.series_of(found, LIMIT, "slack")
    gained = f"a gather that many ranks send at once gains by turns: {experiment.spelled(stagger.change)}; "
    in_vain = [series for series in found if series.scene.name == LIMIT]
    off = f"links at their limit: no policy is on at the end; slack: {experiment.sentences(slack)}"
    claims = [
        experiment.Claim(gained + experiment.sentences(stagger), is_below_zero(stagger.change)),
        experiment.Claim(off, experiment.never_kept_in_vain(in_vain)),
    ]
    names = {"gather": GATHER, "limit": LIMIT, "rate": RATE, "job": LINK_JOB}
    sizes = {"gather_kb": LINK_SCENES[GATHER][0].message_kb, "limit_kb": LINK_SCENES[LIMIT][0].message_kb}
    return experiment.finding_of(found, claims, experiment.notes("links", **names, **sizes))


LINKS = experiment.Experiment(name="links", title="Messages that meet on one link", run=run_links, needs_lab=True)
