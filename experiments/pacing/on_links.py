"""An experiment on pacing in a lab: two jobs share an uplink, each by itself and taking turns by the time of day."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from analysis.library.estimates import mean_of
from experiments.jobs import Tell
from experiments.pacing import experiment
from experiments.pacing.paced_job import JobSpec
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig
from hpcpace.metrics.resampling import Estimate

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
    with Lab.up(LabConfig(name="pacing", link=RATE, uplink=RATE, clock_step_s=0)) as lab:
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
        experiment.Claim(shorter, experiment.at_most(stagger, 0.0)),
    ]
    values = {"rate": RATE, "job": TURN_JOB, "steps": steps, "first": FIRST_STEPS, "period_ms": f"{PERIOD_MS:g}"}
    return experiment.Finding(table=table, claims=claims, notes=experiment.notes("turns", **values))


TURNS = experiment.Experiment(name="turns", title="Two jobs on one uplink", run=run_turns, needs_lab=True)
