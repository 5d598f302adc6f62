from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys

import pytest
from cases import each_case

from hpcpace.core.environment import rank_info
from hpcpace.core.errors import CannotTell, HpcpaceError, MeshError, UsageError, WorldError
from hpcpace.world.mpi import abort_guard, check_world, mpi_world

SINGLE = rank_info({}, host="here")
SLURM = rank_info({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, host="here")
PMI = rank_info({"PMI_RANK": "1", "PMI_SIZE": "4"}, host="here")
TORCHRUN = rank_info({"RANK": "1", "WORLD_SIZE": "4"}, host="here")


@pytest.mark.parametrize("info", [SINGLE, TORCHRUN])
def test_imports_no_mpi_where_mpi_did_not_start_the_ranks(monkeypatch, info):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert mpi_world(info) is None


def test_says_how_to_get_a_missing_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(WorldError, match=r"4 ranks started by slurm need mpi4py.*pip install mpi4py mpich"):
        mpi_world(SLURM)


@each_case(
    ("info", "rank", "size", "message"),
    [
        (SLURM, 0, 1, r"4 ranks each see an MPI world of 1.*srun --mpi=pmi2.*srun --mpi=list"),
        (PMI, 0, 1, r"4 ranks each see an MPI world of 1.*mpiexec next to this Python"),
        (SLURM, 1, 8, r"SLURM_STEP_NUM_TASKS=4, but MPI_COMM_WORLD has size 8"),
        (PMI, 2, 4, r"PMI_RANK=1, but MPI_COMM_WORLD has rank 2"),
    ],
)
def test_rejects_an_mpi_world_that_the_launcher_did_not_start(info, rank, size, message):
    with pytest.raises(WorldError, match=message):
        check_world(info, rank, size)


@each_case(
    ("error", "code", "last_line"),
    [
        (MeshError("dp=3 does not fit"), 2, "error: dp=3 does not fit"),
        (CannotTell("too few steps"), 3, "hpcpace.core.errors.CannotTell: too few steps"),
        (HpcpaceError("the job failed"), 4, "hpcpace.core.errors.HpcpaceError: the job failed"),
        (ZeroDivisionError("no ranks"), 4, "ZeroDivisionError: no ranks"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(5), 5, ""),
        (SystemExit("no such command"), 1, "no such command"),
    ],
)
def test_a_single_process_ends_with_the_code_of_its_error(error, code, last_line):
    stream = io.StringIO()
    with pytest.raises(SystemExit) as raised, abort_guard(None, SINGLE, stream=stream):
        raise error
    assert raised.value.code == code
    assert (stream.getvalue().splitlines() or [""])[-1] == last_line


def test_an_error_that_quotes_a_secret_is_printed_without_it(monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", "correct-horse-7")
    stream = io.StringIO()
    with pytest.raises(SystemExit), abort_guard(None, SINGLE, stream=stream):
        raise UsageError("cannot open postgres://me:other-horse-7@host as correct-horse-7")
    assert stream.getvalue() == "error: cannot open postgres://[redacted]@host as [redacted]\n"


@pytest.mark.parametrize("code", [None, 0])
def test_a_normal_exit_passes(code):
    stream = io.StringIO()
    with pytest.raises(SystemExit) as raised, abort_guard(None, SINGLE, stream=stream):
        raise SystemExit(code)
    assert (raised.value.code, stream.getvalue()) == (code, "")


def test_only_rank_0_speaks_of_an_error_that_all_ranks_have():
    stream = io.StringIO()
    with pytest.raises(SystemExit), abort_guard(None, TORCHRUN, errors_alike=True, stream=stream):
        raise MeshError("dp=3 does not fit")
    assert stream.getvalue() == ""


@each_case(("launcher", "rank", "waits"), [("slurm", 1, True), ("slurm", 0, False), ("pmi", 1, False)])
def test_under_srun_rank_0_gets_the_time_to_speak(monkeypatch, launcher, rank, waits):
    slept: list[float] = []
    monkeypatch.setattr("hpcpace.world.mpi.time.sleep", slept.append)
    info = dataclasses.replace(TORCHRUN, launcher=launcher, rank=rank)
    with pytest.raises(SystemExit), abort_guard(None, info, errors_alike=True, stream=io.StringIO()):
        raise MeshError("dp=3 does not fit")
    assert bool(slept) == waits


def test_a_traceback_carries_the_rank_and_begins_at_the_job():
    stream = io.StringIO()
    with pytest.raises(SystemExit), abort_guard(None, TORCHRUN, stream=stream):
        raise ValueError("bad")
    lines = stream.getvalue().splitlines()
    assert all(line.startswith("[rank 1] ") for line in lines)
    assert "test_mpi.py" in lines[1]


def test_a_start_of_mpi_that_does_not_end_is_ended(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass")
    (tmp_path / "mpi4py" / "MPI.py").write_text("import threading\nthreading.Event().wait()")
    program = """
from hpcpace.core.environment import RankInfo
from hpcpace.world.mpi import mpi_world
info = RankInfo(rank=0, world_size=2, local_rank=0, local_size=2, node=0, num_nodes=1, launcher="pmi")
mpi_world(info, timeout_s=0.2)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGALRM
    assert done.stderr.startswith("Timeout (0:00:00.2")
    assert "in mpi_world" in done.stderr
