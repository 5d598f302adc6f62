"""Messages that meet on one link of the lab: a gather from all ranks, and a job limited by its links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, Tell
from experiments.pacing.jobs import (
    HEAD,
    PUBLISHED,
    TRIAL,
    LabJob,
    Scene,
    Series,
    never_kept_in_vain,
    run_together,
    series_of,
    slow_lab,
    spelled,
)
from experiments.pacing.paced_job import JobSpec

RATE = "50mbit"
HOSTS = ("n1", "n2", "n3", "n4")
GATHER, LIMIT = "gather from 8 ranks", "links at their limit"
BASE = JobSpec(
    pace={**TRIAL, "max_delay_share": 0.4},
    steps=490,
    work_ms=10.0,
    is_emulated=True,
    transport="gloo",
)
SCENES: Mapping[str, tuple[JobSpec, int, Mapping[str, int]]] = {
    GATHER: (
        replace(BASE, collective="gather", message_kb=40.0),
        2,
        {"stagger": 2, "slack": 1, **dict.fromkeys(PUBLISHED, 1), "auto": 1},
    ),
    LIMIT: (replace(BASE, message_kb=150.0), 1, {"slack": 2, **dict.fromkeys(PUBLISHED, 1), "auto": 1}),
}


def run(effort: Effort, tell: Tell) -> Finding:
    found = []
    with slow_lab(RATE) as lab:
        for name, (spec, per_host, policies) in SCENES.items():
            scene = Scene(name=name, spec=spec, num_ranks=per_host * len(HOSTS), policies=policies)
            for policy, num_jobs in policies.items():
                ran = []
                for seed in range(num_jobs if effort == Effort.FULL else 1):
                    of_job = replace(spec, policy=policy, seed=seed, steps=spec.steps if effort == Effort.FULL else 60)
                    job = LabJob(spec=of_job, hosts=HOSTS, ranks_per_host=per_host)
                    ran += run_together(lab, [job])
                    tell(f"{name}, {policy}, seed {seed}: {ran[-1].mean_ms():.1f} ms a step; {ran[-1].sentence}")
                found.append(Series(scene=scene, policy=policy, ran=tuple(ran)))
    stagger, slack = series_of(found, GATHER, "stagger"), series_of(found, LIMIT, "slack")
    change = stagger.change
    claims = [
        Claim(
            text=f"a gather that many ranks send at once gains by turns: {spelled(change)}; "
            + "; ".join(ran.sentence for ran in stagger.ran),
            holds=None if change is None else True if change.high < 0 else False if change.low > 0 else None,
        ),
        Claim(
            text="links at their limit: no policy is on at the end; slack: "
            + "; ".join(ran.sentence for ran in slack.ran),
            holds=never_kept_in_vain([series for series in found if series.scene.name == LIMIT]),
        ),
    ]
    notes = [
        f"In the lab, four hosts with links and uplinks of {RATE}. EMULATED: work of {BASE.work_ms:g} ms is a sleep.",
        f"{GATHER}: two ranks on each host. With gloo each sends {SCENES[GATHER][0].message_kb:g} kB to rank 0; all "
        "but one of the messages cross the link of its host. TCP shares a shaped link without collapsing as long as "
        "the queue holds.",
        f"{LIMIT}: one rank on each host, {SCENES[LIMIT][0].message_kb:g} kB reduced by gloo.",
    ]
    return Finding(table=[HEAD, *(series.row() for series in found)], claims=claims, notes=notes)


EXPERIMENT = Experiment(name="links", title="Messages that meet on one link", run=run, needs_lab=True)
