"""Two jobs on one oversubscribed uplink, each by itself and taking turns by the time of day."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, Tell
from experiments.pacing.jobs import PUBLISHED, LabJob, run_together, slow_lab, spelled
from experiments.pacing.paced_job import JobSpec
from hpcpace.metrics.resampling import Estimate, mean_of

RATE = "50mbit"
STEPS = {Effort.FULL: 140, Effort.TRY: 70}
FIRST_STEPS = 50
"""Left out: the search for the pacing point, three windows without delays, and the way into the slot."""
PERIOD_MS = 175.0
HOSTS = (("n1", "n3"), ("n2", "n4"))
"""Of each job: one on each leaf, so that both use the uplinks."""
SPEC = JobSpec(
    pace={"trial": False, "max_delay_share": 0.4, "find_steps": 5},
    work_ms=100.0,
    is_emulated=True,
    transport="gloo",
    message_kb=500.0,
)
REPEATS = {"none": 3, "stagger": 3, **dict.fromkeys(PUBLISHED, 1)}


def jobs(policy: str, steps: int, seed: int) -> list[LabJob]:
    found = []
    for slot, hosts in enumerate(HOSTS):
        turns = {"stagger_slots": 2, "stagger_slot": slot, "stagger_period_ms": PERIOD_MS}
        pace = {**SPEC.pace, **(turns if policy == "stagger" else {})}
        found.append(LabJob(spec=replace(SPEC, policy=policy, pace=pace, steps=steps, seed=seed + slot), hosts=hosts))
    return found


def run(effort: Effort, tell: Tell) -> Finding:
    steps = STEPS[effort]
    measured: dict[str, list[tuple[float, ...]]] = {}
    with slow_lab(RATE) as lab:
        (alone,) = run_together(lab, jobs("none", steps, 0)[:1])
        alone_ms = alone.mean_ms(skipped=FIRST_STEPS)
        tell(f"one job alone: {alone_ms:.1f} ms a step")
        for repeat in range(max(REPEATS.values())):
            # In turn: what drifts strikes all policies alike.
            for policy, num_repeats in REPEATS.items():
                if repeat < (num_repeats if effort == Effort.FULL else 1):
                    both = run_together(lab, jobs(policy, steps, 10 * repeat))
                    means_ms = tuple(ran.mean_ms(skipped=FIRST_STEPS) for ran in both)
                    measured.setdefault(policy, []).append(means_ms)
                    tell(f"{policy}: {' and '.join(f'{mean_ms:.1f}' for mean_ms in means_ms)} ms; {both[0].sentence}")
    return finding(alone_ms, measured, steps)


def finding(alone_ms: float, measured: dict[str, list[tuple[float, ...]]], steps: int) -> Finding:
    usual = np.mean(measured["none"], axis=0)
    changes: dict[str, Estimate] = {}
    table = [("policy of both", "pairs", "step of the first", "of the second", "change, both together")]
    table.append(("one job alone", "1", f"{alone_ms:.1f} ms", "", ""))
    for policy, pairs in measured.items():
        means = np.mean(pairs, axis=0)
        changes[policy] = mean_of([float(np.mean(np.array(pair) / usual)) - 1 for pair in pairs])
        table.append((policy, str(len(pairs)), *(f"{value:.1f} ms" for value in means), spelled(changes[policy])))
    stagger = changes["stagger"]
    claims = [
        Claim(
            text=f"two jobs on one uplink hold each other up: {usual.mean():.1f} ms a step, against {alone_ms:.1f} ms "
            "alone",
            holds=bool(usual.mean() > 1.02 * alone_ms),
        ),
        Claim(
            text=f"taking turns makes the steps of both shorter: {spelled(stagger)}",
            holds=True if stagger.high < 0 else False if stagger.low > 0 else None,
        ),
    ]
    notes = [
        f"In the lab, links and uplinks of {RATE}: each job has a host on each leaf, so that both share the uplinks. "
        f"EMULATED: work of {SPEC.work_ms:g} ms is a sleep. Each reduces {SPEC.message_kb:g} kB by gloo in each of "
        f"{steps} steps, the first {FIRST_STEPS} of which are left out.",
        f"stagger has two slots in {PERIOD_MS:g} ms and, like the published rule, is on from the start: two trials at "
        "once would disturb each other.",
    ]
    return Finding(table=table, claims=claims, notes=notes)


EXPERIMENT = Experiment(name="turns", title="Two jobs on one uplink", run=run, needs_lab=True)
