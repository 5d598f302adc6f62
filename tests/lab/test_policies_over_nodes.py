"""sbatch/pacing_trial.sh through a real Slurm: from the first job to the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.labs import JobQueue
from hpcpace.core.rundir import open_run
from hpcpace.lab.lab import Lab

SCRIPT = Path(__file__).parents[2] / "sbatch" / "pacing_trial.sh"
OPTIONS = ("--nodes", "2", "--ranks-per-node", "2", "--policies", "none,slack", "--repetitions", "1", "--steps", "40")
# It asks the queue every ten seconds whether its jobs have ended.
TIMEOUT_S = 240


@pytest.mark.nightly
def test_baseline_and_policy_run_one_after_the_other_and_end_in_a_table(
    lab: Lab, queue: JobQueue, tmp_path: Path
) -> None:
    study = tmp_path / "study"
    script = ("bash", SCRIPT, study, *OPTIONS)
    done = lab.run(*script, cwd=tmp_path, environ={"HPCPACE_STUDY_WAIT": "1"}, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr + "".join(log.read_text() for log in study.glob("*.out"))
    started, table = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:]
    assert [line.split(": job")[0] for line in started] == ["[1/2] n2x2-none-0", "[2/2] n2x2-slack-0"]
    rows = [line.split()[:2] for line in table]
    assert ["2", "none"] in rows and ["2", "slack"] in rows, done.stdout
    (attempt,) = open_run(study / "runs" / "n2x2-slack-0").attempts()
    assert json.loads(attempt.trial_json.read_text())["policy"] == "slack"
    again = lab.run(*script, cwd=tmp_path)
    assert again.stdout.splitlines()[0] == "all 2 runs are done"
