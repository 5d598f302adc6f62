"""Shared by experiments with real jobs: a scene, a policy, and several jobs with different seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from experiments.pacing.experiment import Effort, Tell
from experiments.pacing.launch import Ran, run_job
from experiments.pacing.paced_job import JobSpec
from hpcpace.metrics.resampling import Estimate, mean_of

HEAD = ("scene", "policy", "jobs", "step, unpaced", "change of the step, paced", "CV, unpaced to paced", "trial")
TRIAL = {"block_steps": 20, "window_steps": 10, "dropped_steps": 4, "aa_pairs": 3, "max_pairs": 8}
"""Trials of an experiment: shorter than the default, so that a job takes half a minute."""
PUBLISHED = ("published-window", "published-spread")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A kind of job.

    Attributes:
        name: in the table.
        spec: what ranks do, without a policy.
        num_ranks: of the job.
        environ: further environment variables.
        policies: each with the number of jobs.
    """

    name: str
    spec: JobSpec
    num_ranks: int
    policies: Mapping[str, int]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Series:
    """The jobs of one policy in one scene."""

    scene: Scene
    policy: str
    ran: tuple[Ran, ...]

    @property
    def change(self) -> Estimate | None:
        """Change of the step time in paced blocks, over the jobs that had paced blocks."""
        found = [ran.change for ran in self.ran if ran.change is not None]
        return mean_of(found) if found else None

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(Counter(ran.outcome for ran in self.ran).most_common())

    @property
    def unpaced_ms(self) -> float:
        """Mean step in unpaced blocks; of all steps if there were no blocks."""
        found = [(ran.trial.get("trial") or {}).get("step_off_ns") or 1e6 * ran.mean_ms() for ran in self.ran]
        return float(np.mean(found)) / 1e6

    def row(self) -> list[str]:
        variations = [ran.variations for ran in self.ran if ran.variations is not None]
        off, on = np.mean(variations, axis=0) if variations else (None, None)
        return [
            self.scene.name,
            self.policy,
            str(len(self.ran)),
            f"{self.unpaced_ms:.1f} ms",
            self.change.as_percent() if self.change and np.isfinite(self.change.low) else single(self.change),
            "" if off is None else f"{off:.2f} to {on:.2f}",
            ", ".join(f"{name} {count}" for name, count in self.outcomes.items()),
        ]


def single(change: Estimate | None) -> str:
    return "never paced" if change is None else f"{100 * change.value:+.1f} %"


def run_scenes(scenes: Sequence[Scene], effort: Effort, tell: Tell) -> list[Series]:
    """Run all jobs, one after the other; with little effort one short job of each scene and policy."""
    found = []
    for scene in scenes:
        for policy, num_jobs in scene.policies.items():
            ran = []
            for seed in range(num_jobs if effort == Effort.FULL else 1):
                spec = replace(scene.spec, policy=policy, seed=seed)
                if effort == Effort.TRY:
                    spec = replace(spec, steps=120, pace={**spec.pace, "block_steps": 10, "aa_pairs": 1})
                ran.append(run_job(spec, scene.num_ranks, environ=scene.environ))
                tell(f"{scene.name}, {policy}, seed {seed}: {ran[-1].mean_ms():.1f} ms a step; {ran[-1].sentence}")
            found.append(Series(scene=scene, policy=policy, ran=tuple(ran)))
    return found


def series_of(found: Sequence[Series], scene: str, policy: str) -> Series:
    return next(series for series in found if (series.scene.name, series.policy) == (scene, policy))


def at_most(found: Estimate | None, limit: float) -> bool | None:
    """Return whether a value is at most a limit by its interval; None if the interval includes the limit."""
    if found is None:
        return None
    if found.high <= limit:
        return True
    return False if found.low > limit else None


def never_kept_in_vain(found: Sequence[Series]) -> bool:
    """Return whether no trial kept a policy on."""
    return not any(ran.trial["is_on"] for series in found for ran in series.ran)


def spelled(found: Estimate | None) -> str:
    """Return an estimate as text, or a placeholder if there is no estimate."""
    if found is None:
        return "never paced"
    return found.as_percent() if np.isfinite(found.low) else f"{100 * found.value:+.1f} % (one job)"
