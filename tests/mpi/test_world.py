from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import only_nightly

PROGRAM = Path(__file__).with_name("world_program.py")
# mpiexec of MPICH now and then reports how it ended the other ranks rather than the code of the abort.
KILLED = 9


def said(result):
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("n", only_nightly([4], [1, 2]))
def test_ranks_of_one_host_are_counted_from_their_host_keys(mpiexec, n):
    result = mpiexec(n, PROGRAM, "places")
    assert result.returncode == 0, result.stderr
    places = sorted(said(result), key=lambda place: place["rank"])
    assert places == [{"rank": r, "local_rank": r, "local_size": n, "node": 0, "keys": n} for r in range(n)]


@pytest.mark.parametrize("n", only_nightly([2], [1, 4]))
def test_a_process_group_over_mpi_reduces_over_the_loopback(mpiexec, n):
    result = mpiexec(n, PROGRAM, "all_reduce")
    assert result.returncode == 0, result.stderr
    interface = "lo" if n > 1 else None
    assert said(result) == [{"sum": n * (n + 1) / 2, "backend": "gloo", "interface": interface}] * n


@pytest.mark.quick
def test_a_process_group_under_torchrun_starts_no_mpi(torchrun):
    result = torchrun(2, PROGRAM, "all_reduce", MPI4PY_RC_INITIALIZE="no")
    assert result.returncode == 0, result.stderr
    assert said(result) == [{"sum": 3.0, "backend": "gloo", "interface": "lo"}] * 2


def test_the_interface_of_the_user_is_kept(mpiexec):
    result = mpiexec(2, PROGRAM, "all_reduce", GLOO_SOCKET_IFNAME="lo,lo")
    assert result.returncode == 0, result.stderr
    assert [line["interface"] for line in said(result)] == ["lo,lo"] * 2


@pytest.mark.quick
def test_an_interface_that_does_not_exist_is_one_error(mpiexec):
    result = mpiexec(2, PROGRAM, "all_reduce", GLOO_SOCKET_IFNAME="nosuch0")
    assert result.returncode == 2
    assert result.stderr.startswith("error: interface 'nosuch0' is not up")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("n", only_nightly([2], [1, 4]))
def test_a_usage_error_of_all_ranks_is_one_line(mpiexec, n):
    result = mpiexec(n, PROGRAM, "usage_error_everywhere")
    assert (result.returncode, result.stderr) == (2, "error: mesh dp=3 does not fit 2 ranks\n")


@pytest.mark.quick
def test_a_usage_error_of_one_rank_ends_the_others(mpiexec):
    result = mpiexec(2, PROGRAM, "usage_error_on_one")
    assert result.returncode in (2, KILLED)
    assert result.stderr == "[rank 1] error: no such file here\n"


def test_a_usage_error_of_one_rank_is_said_under_torchrun(torchrun):
    result = torchrun(2, PROGRAM, "usage_error_on_one")
    assert result.returncode != 0
    assert "[rank 1] error: no such file here\n" in result.stderr


@pytest.mark.parametrize("n", only_nightly([2], [4]))
def test_a_crash_of_one_rank_ends_all_with_its_traceback_last(mpiexec, n):
    result = mpiexec(n, PROGRAM, "crash_on_one")
    assert result.returncode in (4, KILLED)
    assert result.stderr.splitlines()[0] == f"[rank {n - 1}] Traceback (most recent call last):"
    assert result.stderr.splitlines()[-1] == f"[rank {n - 1}] RuntimeError: the disk is on fire"


@pytest.mark.parametrize(("case", "code"), only_nightly([("exit_everywhere", 3)], [("finish", 0)]))
def test_exit_codes_pass_through(mpiexec, case, code):
    assert mpiexec(2, PROGRAM, case).returncode == code


def test_an_exit_of_one_rank_ends_the_others(mpiexec):
    result = mpiexec(2, PROGRAM, "exit_on_one")
    assert result.returncode in (7, KILLED)
    assert result.stderr == "[rank 1] exit 7, on this rank alone\n"


@pytest.mark.parametrize("rank", only_nightly([1], [0]))
def test_rejects_a_world_of_one_under_srun_once(python, rank):
    result = python(PROGRAM, "places", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID=str(rank))
    assert result.returncode == 2
    if rank == 0:
        assert "4 ranks each see an MPI world of 1" in result.stderr
        assert "srun --mpi=pmi2" in result.stderr
    else:
        assert result.stderr == ""
