"""The snapshot that every session leaves for the audit: under MPI, under torchrun, and switched off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

from hpcpace.audit.snapshot_files import load_snapshots
from hpcpace.core.rundir import open_run

Run = Callable[..., CompletedProcess[str]]
PROGRAM = Path(__file__).with_name("session_program.py")
OWN_SCRIPT = Path(__file__).with_name("own_script.py")


def _ranks(run: Path) -> list[int]:
    (attempt,) = open_run(run).attempts()
    (snapshot,), problems = load_snapshots(attempt.snapshot_dir)
    assert problems == []
    assert all(rank.cpus and rank.world_size == len(snapshot.ranks) for rank in snapshot.ranks)
    return [rank.rank for rank in snapshot.ranks]


@pytest.mark.parametrize("num_ranks", only_nightly([2], [1, 4]))
def test_one_file_a_host_has_all_of_its_ranks(mpiexec: Run, tmp_path: Path, num_ranks: int) -> None:
    result = mpiexec(num_ranks, PROGRAM, tmp_path / "run", "in order")
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr
    assert _ranks(tmp_path / "run") == list(range(num_ranks))


@pytest.mark.nightly
def test_under_torchrun_too(torchrun: Run, tmp_path: Path) -> None:
    result = torchrun(2, OWN_SCRIPT, 5, "--session", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert _ranks(tmp_path / "run") == [0, 1]


def test_switched_off_there_is_none(mpiexec: Run, tmp_path: Path) -> None:
    result = mpiexec(2, PROGRAM, tmp_path / "run", "in order", HPCPACE_TRACE_SNAPSHOT="off")
    assert result.returncode == 0, result.stderr
    (attempt,) = open_run(tmp_path / "run").attempts()
    assert not attempt.snapshot_dir.exists()
    assert len(attempt.trace_files()) == 2
