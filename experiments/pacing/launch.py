"""Starts jobs of an experiment under mpiexec, and returns what they measured and what their trials say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.pacing.paced_job import JobSpec
from hpcpace.core.rundir import RunDirectory

MPIEXEC = Path(sys.executable).with_name("mpiexec")
_LAUNCHER_VARIABLES = ("PMI", "SLURM_", "HYDI", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_")


class JobFailed(RuntimeError):
    """A job of an experiment failed; its last output is the message."""


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
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    clean |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(environ or {})}
    with TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        program = [sys.executable, "-m", "experiments.pacing.paced_job", spec.to_json(), run_dir]
        # A separate session, so that a timeout ends the launcher and all of its ranks.
        child = subprocess.Popen(
            list(map(str, [MPIEXEC, "-n", num_ranks, *program])),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean,
            start_new_session=True,
        )
        try:
            stdout, stderr = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            stdout, stderr = child.communicate()
            raise JobFailed(f"not done within {timeout_s:g} s: {stderr[-800:]}") from None
        if child.returncode:
            raise JobFailed(f"status {child.returncode}: {(stderr or stdout)[-800:]}")
        ran = what_came(run_dir, stdout)
        return replace(ran, verdict=verdict_of(run_dir)) if is_reported else ran


def verdict_of(run_dir: Path) -> Mapping[str, Any]:
    """Return the verdict of a run's report."""
    command = [sys.executable, "-m", "hpcpace", "report", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if not done.stdout:
        raise JobFailed(f"no report, status {done.returncode}: {done.stderr[-800:]}")
    verdict: Mapping[str, Any] = json.loads(done.stdout)["verdict"]
    return verdict


def what_came(run_dir: Path, stdout: str) -> Ran:
    """Return what a job measured, from its run directory and what rank 0 has printed."""
    trial_json = RunDirectory(run_dir).attempt(0).trial_json
    trial = json.loads(trial_json.read_text()) if trial_json.exists() else {}
    measured = json.loads(stdout.strip().splitlines()[-1])
    return Ran(step_ns=np.array(measured["step_ns"], np.int64), trial=trial)
