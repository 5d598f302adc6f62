"""An experiment on pacing, its result, and the real jobs that it runs: a scene, a policy, and several seeds."""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.library.estimates import mean_of
from experiments.jobs import JobFailed, Tell, clean_environ, ended_in_time, mpiexec, started, verdict_of
from experiments.pacing.paced_job import JobSpec, specs_json
from experiments.pages import ROOT, listed, machine, minutes, page, table, today
from hpcpace.core.rundir import RunDirectory
from hpcpace.lab.lab import Lab
from hpcpace.metrics.resampling import Estimate


class Effort(StrEnum):
    """How long an experiment may take."""

    TRY = "try"
    """Seconds: shows that it runs; its figures mean nothing, and are not written down."""
    FULL = "full"
    """As long as its figures need."""


@dataclass(frozen=True)
class Claim:
    """What was expected, and whether it was found; None if the data cannot tell."""

    text: str
    holds: bool | None

    def line(self) -> str:
        word = {True: "holds", False: "DOES NOT HOLD", None: "cannot tell"}[self.holds]
        return f"{word}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of an experiment.

    Attributes:
        table: rows of cells, the head first.
        claims: what was expected of it.
        notes: how it was set up, and what else is to be known.
    """

    table: Sequence[Sequence[str]]
    claims: Sequence[Claim]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment; `run` takes an effort and a function that shows progress."""

    name: str
    title: str
    run: Callable[[Effort, Tell], Finding]
    needs_lab: bool = False


def notes(name: str, **values: Any) -> list[str]:
    """Return how an experiment was set up, from its part of templates/pacing-notes.md."""
    return page("pacing-notes", experiment=name, **values).splitlines()


def section_of(experiment: Experiment, finding: Finding, *, duration_s: float) -> str:
    """Return the text of one section."""
    head, *rows = finding.table
    return f"""## {experiment.title}

`python -m experiments.pacing {experiment.name} --write`, {today()}, {minutes(duration_s)}, {machine("torch")}.

{listed(finding.notes)}

{table(head, rows)}

{listed(claim.line() for claim in finding.claims)}"""


def write_section(path: Path, experiments: Sequence[Experiment], name: str, section: str) -> None:
    """Put a section into the document, in the order of the experiments; all others stay as they are.

    Args:
        path: of the document; it is made where it is missing.
        experiments: all, in their order.
        name: of the experiment whose section it is.
        section: its text.
    """
    found = sections_in(path.read_text(), experiments) if path.exists() else {}
    found[name] = section.strip()
    ordered = [found[experiment.name] for experiment in experiments if experiment.name in found]
    path.write_text("\n\n".join([page("pacing-experiments").strip(), *ordered]) + "\n")


def sections_in(text: str, experiments: Sequence[Experiment]) -> dict[str, str]:
    """Return the sections of a document by the names of their experiments; those of no experiment are dropped."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    titles = {f"## {experiment.title}": experiment.name for experiment in experiments}
    return {titles[part.partition("\n")[0]]: part.strip() for part in parts if part.partition("\n")[0] in titles}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The result of a job.

    Attributes:
        step_ns: durations of all steps on rank 0, int64, (num_steps,).
        trial: content of trial.json; empty where the job was not paced.
        verdict: that of `hpcpace report --json`; empty where it was not asked for.
    """

    step_ns: NDArray[np.int64]
    trial: Mapping[str, Any]
    verdict: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        return str(self.trial.get("sentence", "not paced"))

    @property
    def outcome(self) -> str:
        """The outcome of the trial; without a trial, what is said instead."""
        trial = self.trial.get("trial")
        return str(trial["outcome"]) if trial else str(self.trial.get("reason") or "no trial")

    @property
    def change(self) -> float | None:
        """Step time in paced blocks relative to unpaced ones, less 1; None without paced blocks."""
        trial = self.trial.get("trial")
        if not trial or not trial["step_on_ns"] or not trial["step_off_ns"]:
            return None
        return float(trial["step_on_ns"]) / float(trial["step_off_ns"]) - 1

    @property
    def variations(self) -> tuple[float, float] | None:
        """Coefficient of variation of the step time in unpaced and paced blocks."""
        trial = self.trial.get("trial")
        if not trial or trial["variation_on"] is None or trial["variation_off"] is None:
            return None
        return float(trial["variation_off"]), float(trial["variation_on"])

    def mean_ms(self, *, skipped: int = 20) -> float:
        """Mean duration of the steps behind the first ones, in milliseconds."""
        return float(self.step_ns[skipped:].mean()) / 1e6


def run_job(
    spec: JobSpec,
    num_ranks: int,
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 240,
    is_reported: bool = False,
) -> Ran:
    """Run one job.

    Args:
        spec: what it does.
        num_ranks: its ranks.
        environ: further environment variables.
        timeout_s: seconds that it may take.
        is_reported: whether to ask for the report's verdict.

    Raises:
        JobFailed: it ended with an error, or not in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = mpiexec(num_ranks, "-m", "experiments.pacing.paced_job", specs_json([spec]), folder)
        (stdout,) = ended_in_time([started(command, env=clean_environ(**(environ or {})))], timeout_s=timeout_s)
        (ran,) = what_came(Path(folder), stdout)
        return replace(ran, verdict=verdict_of(Path(folder) / "0")) if is_reported else ran


def what_came(folder: Path, stdout: str) -> list[Ran]:
    """Return what jobs measured that ran one after the other, from their folder and what rank 0 has printed."""
    found = []
    for number, line in enumerate(line for line in stdout.splitlines() if line.startswith('{"step_ns"')):
        trial_json = RunDirectory(folder / str(number)).attempt(0).trial_json
        trial = json.loads(trial_json.read_text()) if trial_json.exists() else {}
        found.append(Ran(step_ns=np.array(json.loads(line)["step_ns"], np.int64), trial=trial))
    return found


FOLDER = Path("/var/tmp")
"""Each host has its own /tmp; all hosts share this folder."""
_MAX_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class LabJob:
    """Jobs that the same ranks do one after the other, and where.

    Attributes:
        specs: the jobs.
        hosts: where; ranks have their order.
        environ: further environment variables.
    """

    specs: tuple[JobSpec, ...]
    hosts: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


def run_together(lab: Lab, jobs: Sequence[LabJob], *, timeout_s: float = 120) -> list[Ran]:
    """Run jobs at the same time and return the result of each of their specs, in that order.

    Where one of them does not come through, all are started once more.

    Raises:
        JobFailed: they failed several times.
    """
    for start in range(_MAX_STARTS):
        with tempfile.TemporaryDirectory(prefix="hpcpace-pacing-", dir=FOLDER) as folder:
            try:
                return _run_once(lab, jobs, Path(folder), timeout_s)
            except JobFailed:
                if start == _MAX_STARTS - 1:
                    raise
    raise AssertionError("unreachable: the last start returns or raises")


def _run_once(lab: Lab, jobs: Sequence[LabJob], folder: Path, timeout_s: float) -> list[Ran]:
    environ = {**lab.environ(), "OMP_NUM_THREADS": "1", "HPCPACE_WORLD_START_TIMEOUT_S": "40"}
    children = []
    for number, job in enumerate(jobs):
        of_job = folder / str(number)
        of_job.mkdir()
        host_file = of_job / "hosts"
        host_file.write_text("".join(f"{host}\n" for host in job.hosts))
        words = ["srun", "--distribution=arbitrary", f"--ntasks={len(job.hosts)}", f"--nodes={len(job.hosts)}"]
        program = [sys.executable, "-m", "experiments.pacing.paced_job", specs_json(job.specs), str(of_job)]
        of_ranks = {**environ, **job.environ, "SLURM_HOSTFILE": str(host_file)}
        children.append(started(lab.command([*words, "--kill-on-bad-exit=1", *program], folder=ROOT), env=of_ranks))
    said = ended_in_time(children, timeout_s=timeout_s, with_signal=signal.SIGTERM)
    return [ran for number, stdout in enumerate(said) for ran in what_came(folder / str(number), stdout)]


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

    @property
    def variations(self) -> str:
        """Coefficient of variation of the step, means over the jobs: unpaced to paced; empty without paced blocks."""
        found = [ran.variations for ran in self.ran if ran.variations is not None]
        return "{:.2f} to {:.2f}".format(*np.mean(found, axis=0)) if found else ""

    @property
    def ends(self) -> str:
        """How many trials ended in which way."""
        return ", ".join(f"{name} {count}" for name, count in self.outcomes.items())

    def row(self) -> list[str]:
        return [
            self.scene.name,
            self.policy,
            str(len(self.ran)),
            f"{self.unpaced_ms:.1f} ms",
            spelled(self.change, ""),
            self.variations,
            self.ends,
        ]


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


def finding_of(found: Sequence[Series], claims: Sequence[Claim], notes: Sequence[str]) -> Finding:
    """Return what series of jobs show, with a row for each."""
    return Finding(table=[HEAD, *(series.row() for series in found)], claims=claims, notes=notes)


def at_most(found: Estimate | None, limit: float) -> bool | None:
    """Return whether a value is at most a limit by its interval; None if the interval includes the limit."""
    if found is None or found.low <= limit < found.high:
        return None
    return found.high <= limit


def never_kept_in_vain(found: Sequence[Series]) -> bool:
    """Return whether no trial kept a policy on."""
    return not any(ran.trial["is_on"] for series in found for ran in series.ran)


def spelled(found: Estimate | None, of_one: str = " (one job)") -> str:
    """Return an estimate as text, or a placeholder if there is no estimate; `of_one` follows a value of one job."""
    if found is None:
        return "never paced"
    return found.as_percent() if np.isfinite(found.low) else f"{100 * found.value:+.1f} %{of_one}"


def sentences(series: Series) -> str:
    """Return what the trials of all jobs say."""
    return "; ".join(ran.sentence for ran in series.ran)
