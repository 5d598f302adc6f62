"""Pacing in real jobs: it changes no loss, leaves its results, and takes no job down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.trace.reader import RankTrace, read_trace
from hpcpace.trace.schema import PaceArm, PacePolicy, Phase, StepFlag

Run = Callable[..., CompletedProcess[str]]
PROGRAM = Path(__file__).with_name("paced_program.py")
OWN_SCRIPT = Path(__file__).with_name("own_script.py")


def _trial(run: Path) -> dict[str, Any]:
    (attempt,) = open_run(run).attempts()
    found: dict[str, Any] = json.loads(attempt.trial_json.read_text())
    return found


def _traces(run: Path) -> list[RankTrace]:
    (attempt,) = open_run(run).attempts()
    return [read_trace(path) for path in attempt.trace_files().values()]


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "policy"),
    only_nightly([(2, "dp=2", "published-window")], [(4, "dp=2,pp=2", "slack"), (1, "dp=1", "slack")]),
)
def test_losses_are_bit_identical(mpiexec: Run, tmp_path: Path, num_ranks: int, mesh: str, policy: str) -> None:
    losses = {}
    for pace in ("none", policy):
        result = mpiexec(num_ranks, PROGRAM, "reference", tmp_path / pace, pace, mesh)
        assert result.returncode == 0, result.stderr
        assert "warning" not in result.stderr
        losses[pace] = json.loads(result.stdout)
    assert len(losses["none"]) == 60
    assert losses[policy] == losses["none"]
    assert not (tmp_path / "none" / "attempt-0" / "trial.json").exists()
    trial = _trial(tmp_path / policy)
    assert trial["policy"] == policy
    # Replicas of a stage wait for each other in backward, first and last stage for their tied weight.
    assert [len(point["ranks"]) for point in trial["points"]] == [2] * (num_ranks // 2)
    assert sorted(rank for point in trial["points"] for rank in point["ranks"]) == [*range(num_ranks)][num_ranks == 1 :]


@pytest.mark.nightly
def test_a_job_of_sends_and_receives_has_no_pacing_point(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, "messages", tmp_path / "run", "slack", "")
    assert result.returncode == 0, result.stderr
    assert "hpcpace: pacing off: no operation blocks a group of ranks exactly once in every step" in result.stderr


@pytest.mark.parametrize(("num_ranks", "program"), [(2, "torch"), (4, "mpi")])
def test_an_own_script_is_paced(mpiexec: Run, tmp_path: Path, program: str, num_ranks: int) -> None:
    result = mpiexec(num_ranks, PROGRAM, program, tmp_path / "run", "slack", "")
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr
    assert result.stderr.count("hpcpace: pacing ") == 1
    trial = _trial(tmp_path / "run")
    (point,) = trial["points"]
    assert point["name"] == {"torch": "all_reduce 0", "mpi": "exchange 0"}[program]
    assert point["ranks"] == list(range(num_ranks))
    assert trial["trial"]["num_blocks_on"] >= 1
    for trace in _traces(tmp_path / "run"):
        rows = trace.tables["pacing"]
        assert (rows["policy"] == PacePolicy.SLACK).all()
        assert set(rows["arm"]) == set(PaceArm)
        assert (rows["ready_ns"] > 0).all()
        assert (rows["slack_ns"] >= -1).all()
        assert trace.header.rank == 1 or (rows["slack_ns"] > 0).any()
        assert not rows["delay_ns"][rows["arm"] != PaceArm.ON].any()
        paced = trace.tables["phases"]["phase"] == Phase.PACE
        assert np.count_nonzero(paced) >= np.count_nonzero(rows["delay_ns"])


def test_the_early_rank_is_held_back(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, "torch", tmp_path / "run", "published-spread", "untried")
    assert result.returncode == 0, result.stderr
    delays = [trace.tables["pacing"]["delay_ns"] for trace in _traces(tmp_path / "run")]
    assert np.count_nonzero(delays[0]) > 10


@pytest.mark.nightly
def test_garbage_is_collected_on_the_same_steps_and_these_are_marked(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, "torch", tmp_path / "run", "coschedule", "untried")
    assert result.returncode == 0, result.stderr
    marked = []
    for trace in _traces(tmp_path / "run"):
        steps = trace.tables["steps"]
        marked.append(steps["step"][(steps["flags"] & StepFlag.GC) > 0].tolist())
        assert set(marked[-1]) <= set(trace.tables["phases"]["step"][trace.tables["phases"]["phase"] == Phase.GC])
    assert marked[0] == marked[1] == list(range(marked[0][0], 90, 5))
    assert len(marked[0]) >= 12


def test_a_rank_that_dies_does_not_hang_the_others(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, "torch", tmp_path / "run", "slack", "killed")
    assert result.returncode != 0


def test_a_script_without_a_line_is_paced_under_torchrun(torchrun: Run, tmp_path: Path) -> None:
    script = ["-m", "hpcpace", "trace", "--pace", "observe", "--run-dir", tmp_path / "run", "--", OWN_SCRIPT, "70"]
    result = torchrun(2, *script)
    assert result.returncode == 0, result.stderr
    assert "hpcpace: pacing off: observed only" in result.stderr
    assert [point["name"] for point in _trial(tmp_path / "run")["points"]] == ["backward 0"]
    for trace in _traces(tmp_path / "run"):
        assert len(trace.tables["pacing"]) >= 40


@pytest.mark.nightly
def test_without_a_trace_nobody_is_paced(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(1, PROGRAM, "torch", tmp_path / "run", "slack", "untraced")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("the job is not paced: pacing needs a trace") == 1
