"""`srun -n N hpcpace report` over the hosts of the lab writes what one process writes, and ends when a process dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.labs import JobQueue
from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from hpcpace.core.rundir import RunDirectory

REPORT = (sys.executable, "-P", "-m", "hpcpace", "report")
PROGRAM = Path(__file__).parent.parent / "mpi" / "report_program.py"
SCENARIO = Scenario(seed=7, num_ranks=8, num_steps=120, fault="slow_rank", size=0.4, target=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_run(SCENARIO, tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_processes_on_several_hosts_write_what_one_writes(queue: JobQueue, run: RunDirectory, num_hosts: int) -> None:
    alone = queue.run(*REPORT, str(run.path))
    expected = run.summary_json.read_bytes()
    run.summary_json.unlink()
    done = queue.run("srun", f"-N{num_hosts}", "--ntasks-per-node=2", *REPORT, str(run.path))
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout), done.stderr
    assert run.summary_json.read_bytes() == expected


def test_a_process_that_is_killed_ends_the_step_with_its_name(queue: JobQueue, run: RunDirectory) -> None:
    program = (sys.executable, "-P", str(PROGRAM), "killed", str(run.path))
    done = queue.run("timeout", "60", "srun", "--kill-on-bad-exit=1", "-N3", *program)
    assert done.returncode not in (0, 1, 124)
    assert "task 1: Killed" in done.stderr
