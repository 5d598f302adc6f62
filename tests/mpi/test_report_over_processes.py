"""`hpcpace report` by several MPI processes writes what one process writes, and ends with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import only_nightly

from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from hpcpace.core.rundir import RunDirectory

PROGRAM = Path(__file__).with_name("report_program.py")
SCENARIO = Scenario(seed=7, num_ranks=8, num_steps=120, fault="slow_rank", size=0.4, target=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return write_run(SCENARIO, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def expected(run, tmp_path_factory) -> bytes:
    """The summary that one process writes, without MPI."""
    from click.testing import CliRunner

    from hpcpace.cli import cli

    assert CliRunner().invoke(cli, ["report", str(run.path)]).exit_code == 1
    return run.summary_json.read_bytes()


@pytest.mark.parametrize("n", only_nightly([3], [2, 7]))
def test_any_number_of_processes_writes_the_same_summary(run, expected, mpiexec, n):
    run.summary_json.unlink()
    result = mpiexec(n, "-m", "hpcpace", "report", run.path)
    assert result.returncode == 1, result.stderr
    assert result.stdout.count("persistent straggler: rank 5") >= 1
    assert result.stdout.count("hpcpace report") == 1
    assert run.summary_json.read_bytes() == expected


@pytest.mark.parametrize(
    "start",
    [
        "",
        "from hpcpace.core import environment as e; from hpcpace.world.mpi import mpi_world; "
        "mpi_world(e.rank_info(e.process_environ()))",
    ],
)
def test_a_rank_that_asks_for_a_report_gets_one(run, expected, mpiexec, start):
    run.summary_json.unlink()
    code = (
        f"import os, subprocess, sys; {start}\nif os.environ['PMI_RANK'] == '0':"
        f" subprocess.run([sys.executable, '-m', 'hpcpace', 'report', {str(run.path)!r}], close_fds={not start})"
    )
    result = mpiexec(2, "-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("persistent straggler: rank 5") >= 1
    assert run.summary_json.read_bytes() == expected


def test_an_error_of_all_is_said_once(tmp_path, mpiexec):
    result = mpiexec(3, "-m", "hpcpace", "report", tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("hpcpace: ") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("case", "said"),
    only_nightly(
        [("bug", "process 1 of 3 on NAME failed: ZeroDivisionError")],
        [
            ("memory", "process 1 of 3 on NAME failed: not enough memory"),
            ("reads_less", "process 1 reads 7 traces"),
        ],
    ),
)
def test_a_process_that_fails_ends_all_with_its_name(run, mpiexec, case, said):
    result = mpiexec(3, PROGRAM, case, run.path)
    assert result.returncode not in (0, 1)
    assert said.replace("NAME", os.uname().nodename) in result.stderr
    assert result.stderr.count("failed:") <= 1


@pytest.mark.parametrize("case", only_nightly(["memory_between"], ["memory"]))
def test_a_process_without_memory_ends_all_with_what_to_do(run, mpiexec, case):
    result = mpiexec(3, PROGRAM, case, run.path)
    assert result.returncode == 2
    assert result.stderr.count("not enough memory to report") == 1 and "Traceback" not in result.stderr
    assert "`--steps A:B`" in result.stderr and "fewer processes each" in result.stderr


def test_a_process_that_is_killed_ends_all(run, mpiexec):
    result = mpiexec(3, PROGRAM, "killed", run.path)
    assert result.returncode != 0
