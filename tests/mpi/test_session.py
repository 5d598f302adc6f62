"""The session around real jobs: under MPI, under torchrun, alone; in order, killed, and with its folder gone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.observe.launch.launch import site_launch
from hpcpace.trace.reader import RankTrace, read_trace
from hpcpace.trace.schema import ExitKind, Op, Phase, StepFlag

Run = Callable[..., CompletedProcess[str]]
PROGRAM = Path(__file__).with_name("session_program.py")
OWN_SCRIPT = Path(__file__).with_name("own_script.py")


def _traces(run: Path) -> list[RankTrace]:
    (attempt,) = open_run(run).attempts()
    return [read_trace(path) for path in attempt.trace_files().values()]


def _losses(result: CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return sorted(line for line in result.stdout.splitlines() if line.startswith("loss"))


@pytest.fixture(scope="module")
def plain_losses(torchrun: Run) -> list[str]:
    """What two ranks of the script print without hpcpace."""
    return _losses(torchrun(2, OWN_SCRIPT, 5))


@pytest.mark.parametrize("num_ranks", only_nightly([2], [1, 4]))
def test_every_rank_leaves_a_whole_trace(mpiexec: Run, tmp_path: Path, num_ranks: int) -> None:
    result = mpiexec(num_ranks, PROGRAM, tmp_path / "run", "in order")
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr
    traces = _traces(tmp_path / "run")
    assert [trace.header.rank for trace in traces] == list(range(num_ranks))
    for rank, trace in enumerate(traces):
        steps = trace.tables["steps"]
        assert trace.closed_cleanly and not trace.problems
        assert steps["step"].tolist() == list(range(12))
        assert set(steps["samples"]) == {3 + rank}
        assert np.flatnonzero(steps["flags"] & StepFlag.WARMUP).tolist() == [0, 1]
        assert (steps["begin_ns"][1:] >= steps["end_ns"][:-1]).all()
        collectives = trace.tables["collectives"]
        assert collectives["op"].tolist() == [Op.ALL_REDUCE] * 12
        assert collectives["step"].tolist() == list(range(12))
        assert collectives["bytes"].tolist() == [4000] * 12
        assert len(trace.tables["clock"]) >= 2
        assert np.count_nonzero(trace.tables["phases"]["phase"] == Phase.DATA) == 12
    record = json.loads((tmp_path / "run" / "attempt-0" / "run.json").read_text())
    assert record["world_size"] == num_ranks and len(record["ranks"]) == num_ranks


@pytest.mark.quick
def test_survivors_and_the_killed_rank_are_read(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", "kill", HPCPACE_TRACE_FLUSH_INTERVAL_S="0.05")
    assert result.returncode != 0
    traces = _traces(tmp_path / "run")
    assert [trace.header.rank for trace in traces] == [0, 1]
    assert not any(trace.closed_cleanly and trace.header.rank == 1 for trace in traces)


@pytest.mark.nightly
def test_a_removed_folder_costs_a_warning_and_the_job_goes_on(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", "remove folder")
    assert result.returncode == 0, result.stderr
    assert "recorded" in result.stdout


def test_a_run_directory_that_cannot_be_made_costs_one_warning(mpiexec: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = mpiexec(2, PROGRAM, tmp_path / "file" / "run", "in order")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "recorded None"
    assert result.stderr.count("warning") == 1 and "file/run" in result.stderr


def test_traces_on_a_local_disk_are_moved_into_the_run(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", "in order", HPCPACE_TRACE_TRACE_DIR=str(tmp_path / "local"))
    assert result.returncode == 0, result.stderr
    assert all(trace.closed_cleanly for trace in _traces(tmp_path / "run"))
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.nightly
def test_two_jobs_with_one_local_disk_keep_their_traces_apart(mpiexec: Run, tmp_path: Path) -> None:
    def start(name: str) -> str:
        local = str(tmp_path / "local")
        return mpiexec(2, PROGRAM, tmp_path / name, "in order", HPCPACE_TRACE_TRACE_DIR=local).stderr

    with ThreadPoolExecutor() as pool:
        messages = list(pool.map(start, ["first", "second"]))
    assert [message for message in messages if "warning" in message] == []
    for name in ("first", "second"):
        traces = _traces(tmp_path / name)
        assert {trace.header.run_id for trace in traces} == {name}
        assert all(trace.closed_cleanly for trace in traces)


def test_a_terminated_rank_brings_its_trace_home_from_inside_a_collective(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", "terminate", HPCPACE_TRACE_TRACE_DIR=str(tmp_path / "local"))
    assert result.returncode != 0
    trace = next(trace for trace in _traces(tmp_path / "run") if trace.header.rank == 0)
    assert list((tmp_path / "local").glob("*-rank-0-*")) == []
    assert len(trace.tables["steps"]) == 6
    assert trace.open_collectives["op"].tolist() == [Op.ALL_REDUCE]


@pytest.mark.parametrize(("how", "num_ranks"), only_nightly([("mpi", 2), ("torch", 2)], [("mpi", 4), ("torch", 4)]))
def test_ranks_go_on_when_one_never_leaves_the_session(mpiexec: Run, tmp_path: Path, how: str, num_ranks: int) -> None:
    # Longer than ranks on loaded cores need for the first comparison, which all of them complete.
    result = mpiexec(num_ranks, PROGRAM, tmp_path / "run", how, "leave", HPCPACE_CLOCK_TIMEOUT_S="4", timeout_s=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("went on") == num_ranks
    # What all meet alike is told by two of them at the most, and once.
    assert result.stderr.count("warning") == min(num_ranks - 1, 2)
    assert result.stderr.count("clock comparisons stop") == min(num_ranks - 1, 2)
    assert f"rank {num_ranks - 1}: warning" not in result.stderr
    assert [trace.closed_cleanly for trace in _traces(tmp_path / "run")] == [True] * num_ranks


def test_a_rank_that_is_terminated_writes_what_it_has_in_memory(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", "default", "sigterm", HPCPACE_TRACE_FLUSH_INTERVAL_S="600")
    assert "EXIT CODE: 15" in result.stdout + result.stderr
    assert len(_traces(tmp_path / "run")[0].tables["steps"]) == 12


def test_a_handler_of_the_jobs_own_decides_what_sigterm_means(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", "own handler", "sigterm")
    assert result.returncode == 7, result.stderr


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ({"HPCPACE_TRACE_ENABLED": "off"}, ""),
        ({"HPCPACE_OPT_OUT": "1"}, "hpcpace: HPCPACE_OPT_OUT is set: this job runs without hpcpace\n"),
    ],
)
def test_switched_off_a_session_writes_nothing(
    mpiexec: Run, tmp_path: Path, variable: dict[str, str], said: str
) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", "in order", **variable)
    assert (result.returncode, result.stderr) == (0, said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_wrong_rule_of_the_site_costs_one_warning_and_nothing_is_recorded(
    torchrun: Run, plain_losses: list[str], tmp_path: Path
) -> None:
    site = tmp_path / "site.toml"
    site.write_text("[[rollout]]\npartitions = []\ntrace.enabled = true\n")
    arguments = ("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", "--", OWN_SCRIPT, 5)
    result = torchrun(2, *arguments, HPCPACE_SITE_FILE=str(site))
    assert _losses(result) == plain_losses
    warnings = [line for line in result.stderr.splitlines() if "hpcpace: " in line and "warning: " in line]
    assert len(warnings) == 1 and f"warning: nothing is recorded: rule 1 of {site}: partitions is []" in warnings[0]
    assert not (tmp_path / "run").exists()


def test_traces_a_script_under_torchrun_without_a_line_added(
    torchrun: Run, plain_losses: list[str], tmp_path: Path
) -> None:
    result = torchrun(2, "-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", "--", OWN_SCRIPT, 5)
    assert _losses(result) == plain_losses
    for trace in _traces(tmp_path / "run"):
        assert trace.closed_cleanly
        assert len(trace.tables["steps"]) == 5
        assert {Phase.BACKWARD, Phase.OPTIMIZER} <= set(trace.tables["phases"]["phase"])
        reduced = trace.tables["collectives"].select(trace.tables["collectives"]["op"] == Op.ALL_REDUCE)
        assert len(reduced) >= 5
        assert ExitKind.NEVER not in reduced["exit_kind"]


@pytest.mark.nightly
def test_a_job_that_ends_its_group_before_its_session_does_not_fail(torchrun: Run, tmp_path: Path) -> None:
    result = torchrun(2, OWN_SCRIPT, 5, "--session", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    for trace in _traces(tmp_path / "run"):
        assert trace.closed_cleanly
        assert trace.tables["steps"]["samples"].tolist() == [4] * 5


@pytest.mark.quick
def test_traces_a_script_alone(python: Run, tmp_path: Path) -> None:
    result = python("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", OWN_SCRIPT, 5)
    assert result.returncode == 0, result.stderr
    (trace,) = _traces(tmp_path / "run")
    assert len(trace.tables["steps"]) == 5


@pytest.mark.quick
def test_the_error_of_a_traced_script_is_its_own(python: Run, tmp_path: Path) -> None:
    result = python("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", OWN_SCRIPT, 5, "--fail")
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("ValueError: the script's own error")
    (trace,) = _traces(tmp_path / "run")
    assert len(trace.tables["steps"]) == 5


@pytest.mark.parametrize(
    "variables",
    only_nightly([{"RANK": "1"}], [{"SLURM_PROCID": "3"}, {"HPCPACE_CLOCK_INTERVAL_S": "inf"}]),
    ids=lambda v: next(iter(v)),
)
def test_an_environment_that_contradicts_itself_leaves_the_job_untraced(
    python: Run, tmp_path: Path, variables: dict[str, str]
) -> None:
    code = "import hpcpace\nwith hpcpace.session() as s:\n  s.step()\n  print('trained', s.is_recording)"
    result = python("-c", code, **variables)
    assert (result.returncode, result.stdout) == (0, "trained False\n"), result.stderr
    assert result.stderr.count("\n") == 1 and "nothing is recorded" in result.stderr


def test_a_script_is_run_untraced_where_its_world_is_unclear(python: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('trained')")
    result = python("-m", "hpcpace", "trace", script, SLURM_PROCID="3")
    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert result.stderr.count("warning") == 1 and "SLURM_PROCID" in result.stderr


@pytest.mark.quick
def test_a_missing_script_is_one_line_and_exit_2(python: Run, tmp_path: Path) -> None:
    result = python("-m", "hpcpace", "trace", tmp_path / "nothing.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and "nothing.py" in result.stderr


@pytest.mark.parametrize(("partition", "num_traces"), [("gpu", 2), ("cpu", 0)])
def test_a_site_traces_the_jobs_of_its_roll_out_without_a_word(
    torchrun: Run, plain_losses: list[str], tmp_path: Path, partition: str, num_traces: int
) -> None:
    site = tmp_path / "site.toml"
    site.write_text("[trace]\nenabled = false\n[[rollout]]\npartitions = ['gpu']\ntrace.enabled = true\n")
    launch = site_launch(tmp_path / "run", "job", {}).changes({})
    variables = {name: value for name, value in launch.items() if value is not None}
    job = {"SLURM_JOB_PARTITION": partition, "HPCPACE_SITE_FILE": str(site)}
    variables["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    result = torchrun(2, OWN_SCRIPT, 5, **variables, **job)
    assert _losses(result) == plain_losses
    assert "hpcpace" not in result.stderr, result.stderr
    assert len(list((tmp_path / "run").glob("attempt-0/trace/*.h5"))) == num_traces
