"""The job of the experiments on pacing runs, is paced, and says what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from experiments.pacing.experiment import what_came
from experiments.pacing.paced_job import JobSpec, specs_json
from hpcpace.core.rundir import open_run

Run = Callable[..., CompletedProcess[str]]
PROGRAM = Path(__file__).parents[2] / "experiments" / "pacing" / "paced_job.py"


SPECS = (
    JobSpec(policy="slack", pace={"trial": False, "find_steps": 4}, steps=30, work_ms=1.0, straggle_ms=1.0),
    JobSpec(
        policy="observe", pace={"find_steps": 4}, steps=30, work_ms=1.0, is_emulated=True, transport="gloo",
        collective="gather", collect_ms=1.0, collect_steps=5, event_share=0.1, event_ms=1.0, tick_period_ms=5.0,
        tick_ms=1.0, parts=2,
    ),
)  # fmt: skip


def test_jobs_one_after_the_other_measure_their_steps_and_are_paced(mpiexec: Run, tmp_path: Path) -> None:
    done = mpiexec(2, PROGRAM, specs_json(SPECS), tmp_path)
    assert done.returncode == 0, done.stderr
    found = what_came(tmp_path, done.stdout)
    assert len(found) == len(SPECS)
    for number, (spec, ran) in enumerate(zip(SPECS, found, strict=True)):
        assert len(ran.step_ns) == 30
        assert ran.step_ns.min() >= 1_000_000
        assert ran.trial["tried"] == spec.policy
        record = json.loads(open_run(tmp_path / str(number)).attempts()[-1].run_json.read_text())
        assert record["config"]["pace"]["policy"] == spec.policy
