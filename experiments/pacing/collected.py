"""Full garbage collections on the same step of all ranks, against collections of each rank by itself: 4 to 32 ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, Tell
from experiments.pacing.jobs import HEAD, PUBLISHED, TRIAL, Scene, Series, run_scenes
from experiments.pacing.paced_job import JobSpec
from hpcpace.simulation import ParametricNoise, SimulatedJob, simulate

SIZES = {4: 3, 8: 3, 16: 3, 32: 2}
SPEC = JobSpec(
    pace={**TRIAL, "aa_pairs": 4, "max_pairs": 6, "max_delay_share": 0.3},
    steps=700,
    work_ms=30.0,
    is_emulated=True,
    collect_ms=30.0,
    collect_steps=15,
    transport="gloo",
    collective="barrier",
)


def scenes() -> list[Scene]:
    found = [
        Scene(name=f"{num_ranks} ranks", spec=SPEC, num_ranks=num_ranks, policies={"coschedule": num_jobs})
        for num_ranks, num_jobs in SIZES.items()
    ]
    return [*found, Scene(name="8 ranks", spec=SPEC, num_ranks=8, policies=dict.fromkeys(PUBLISHED, 1))]


def expected(series: Series) -> float:
    """Return the change of the step time that the model has for such jobs.

    It takes what is known of the job, how often and how long a rank collects by itself, and the unpaced step but for
    its collections; that they then fall together is all that it changes.
    """
    changes = []
    for ran in series.ran:
        off = ran.trial["collections"]["off"]
        period, cost_ns = max(round(off["num_steps"] / max(off["num_full"], 1)), 1), 1e6 * SPEC.collect_ms
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


def run(effort: Effort, tell: Tell) -> Finding:
    found = run_scenes(scenes(), effort, tell)
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
        f"EMULATED: ranks share a few cores, so that their work of {SPEC.work_ms:g} ms is a sleep, and so is the cost "
        f"of a full collection, {SPEC.collect_ms:g} ms. Python decides by itself when to collect, from garbage "
        f"that ranks make at random: about every {SPEC.collect_steps} steps. All meet in gloo's barrier, which costs "
        "32 processes on two cores less than an all_reduce.",
        "Unpaced and paced are blocks of one job. The model takes how often ranks collect by themselves, and the "
        "shortest tenth of the steps.",
    ]
    return Finding(table=table, claims=claims, notes=notes)


EXPERIMENT = Experiment(name="collections", title="Garbage collection on the same step", run=run)
