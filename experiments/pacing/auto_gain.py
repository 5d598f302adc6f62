"""What `auto` keeps of the gain of `slack` after its trial, and how that gain depends on the bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.pacing.experiment import Claim, Effort, Experiment, Finding, Tell
from experiments.pacing.jobs import HEAD, TRIAL, Scene, Series, run_scenes, series_of, spelled
from experiments.pacing.polling import NUM_CORES, PACE, RANKS_PER_CORE, SHARED, STEPS, STRAGGLERS
from hpcpace.metrics.resampling import mean_of

LONGER, DEFAULT, TIGHT = "200 steps more", "default bounds", "at most 5 %"
NUM_RANKS = RANKS_PER_CORE * NUM_CORES
SCENES = (
    Scene(name=STRAGGLERS, spec=SHARED, num_ranks=NUM_RANKS, policies={"slack": 3}),
    Scene(name=LONGER, spec=replace(SHARED, steps=STEPS + 200), num_ranks=NUM_RANKS, policies={"auto": 4}),
    Scene(name=DEFAULT, spec=replace(SHARED, pace=dict(TRIAL)), num_ranks=NUM_RANKS, policies={"auto": 2}),
    Scene(
        name=TIGHT,
        spec=replace(SHARED, pace={**TRIAL, "polling_delay_share": 0.0}),
        num_ranks=NUM_RANKS,
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


def run(effort: Effort, tell: Tell) -> Finding:
    found = run_scenes(SCENES, effort, tell)
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
        f"Jobs with stragglers as in the first section on real jobs: {NUM_RANKS} ranks, {NUM_CORES} cores, delays of "
        f"at most {PACE['max_delay_share']:.0%} of the step. With 200 more steps, the last 100 come after the trial.",
        "Default bounds: those of a job that sets none. At most 5 %: `polling_delay_share` 0.",
    ]
    return Finding(table=[HEAD, *(series.row() for series in found)], claims=claims, notes=notes)


EXPERIMENT = Experiment(name="kept", title="What auto keeps where slack helps", run=run)
