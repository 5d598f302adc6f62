"""The job of the experiments on pacing runs, is paced, and says what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from experiments.pacing.experiment import what_came
from experiments.pacing.paced_job import JobSpec
from hpcpace.core.rundir import open_run

Run = Callable[..., CompletedProcess[str]]
PROGRAM = Path(__file__).parents[2] / "experiments" / "pacing" / "paced_job.py"


@pytest.mark.parametrize(
    "spec",
    [
        JobSpec(policy="slack", pace={"trial": False, "find_steps": 4}, steps=30, work_ms=1.0, straggle_ms=1.0),
        JobSpec(
            policy="observe", pace={"find_steps": 4}, steps=30, work_ms=1.0, is_emulated=True, transport="gloo",
            collective="gather", collect_ms=1.0, collect_steps=5,
        ),
    ],
    ids=["mpi", "gloo"],
)  # fmt: skip
def test_a_job_measures_its_steps_and_is_paced(mpiexec: Run, tmp_path: Path, spec: JobSpec) -> None:
    done = mpiexec(2, PROGRAM, spec.to_json(), tmp_path / "run")
    assert done.returncode == 0, done.stderr
    ran = what_came(tmp_path / "run", done.stdout)
    assert len(ran.step_ns) == 30
    assert ran.step_ns.min() >= 1_000_000
    assert ran.trial["tried"] == spec.policy
    record = json.loads(open_run(tmp_path / "run").attempts()[-1].run_json.read_text())
    assert record["config"]["pace"]["policy"] == spec.policy
