from __future__ import annotations

import types
from typing import Any

import pytest
from cases import each_case

from hpcpace.core.environment import rank_info
from hpcpace.core.errors import WorldError
from hpcpace.world import connection

MPICH = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
OPEN_MPI = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022\0"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29.0 (ANL base 3.4a2)\n"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS\n"
STEP = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
PMI2 = STEP | {"PMI_FD": "10", "PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_MPI_TYPE": "pmi2"}
PMIX = STEP | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.1.0", "SLURM_MPI_TYPE": "pmix"}
SHASTA = STEP | {"PMI_CONTROL_PORT": "20", "PMI_SHARED_SECRET": "1", "SLURM_MPI_TYPE": "cray_shasta"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "7", "MPI_LOCALNRANKS": "2"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}


def have(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setattr(connection, "load_mpi", lambda _: types.SimpleNamespace(library=library))


@each_case(
    ("library", "environ", "reason"),
    [
        (MPICH, PMI2, ""),
        (MPICH, PMIX, "MPICH 5.0.2 does not understand srun --mpi=pmix"),
        (MPICH, STEP, "MPICH 5.0.2 does not understand srun --mpi=none"),
        (MPICH, HYDRA, ""),
        (MPICH, MPIRUN, "MPICH 5.0.2 does not understand this mpiexec"),
        (OPEN_MPI, PMIX, ""),
        (OPEN_MPI, PMI2, "Open MPI v4.1.4 does not understand srun --mpi=pmi2"),
        (OPEN_MPI, HYDRA, "Open MPI v4.1.4 does not understand this mpiexec"),
        (OPEN_MPI, MPIRUN, ""),
        (CRAY, SHASTA, ""),
        (CRAY, STEP, "CRAY MPICH version 8.1.29.0 does not understand srun --mpi=none"),
        (INTEL, PMI2, ""),
        (INTEL, STEP, "Intel(R) MPI Library 2021.13 does not understand srun --mpi=none"),
        ("Some MPI 1.0", STEP, ""),
    ],
)
def test_mpi_is_used_where_its_library_understands_the_launcher(
    monkeypatch: pytest.MonkeyPatch, library: str, environ: dict[str, str], reason: str
) -> None:
    have(monkeypatch, library)
    info = rank_info(environ, host="n1")
    mpi, why_not = connection.usable_mpi(info, environ, is_forced=False)
    assert (mpi is None, why_not) == (bool(reason), reason)
    assert connection.usable_mpi(info, environ, is_forced=True)[1] == ""


def connect(environ: dict[str, str], coordination: str = "auto") -> connection.Connection:
    info = rank_info(environ, host="n1")
    return connection.connect(info, environ, coordination=coordination, rendezvous=None, timeout_s=1)


def test_what_was_chosen_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, MPICH)
    made = connect(STEP)
    assert made.line == (
        "ranks from Slurm (srun --mpi=none), rendezvous n1:20016, clocks over gloo; "
        "MPI not used: MPICH 5.0.2 does not understand srun --mpi=none"
    )
    assert "MPI not used: world.coordination is torch" in connect(PMI2, "torch").line


def test_a_world_of_one_that_mpi_sees_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = types.SimpleNamespace(Get_size=lambda: 1)
    module = types.SimpleNamespace(Is_initialized=lambda: True, COMM_WORLD=comm)
    fake = types.SimpleNamespace(library="Some MPI 1.0", module=module)
    monkeypatch.setattr(connection, "load_mpi", lambda _: fake)

    def alone(*_: Any, **__: Any) -> None:
        raise WorldError("2 ranks each see an MPI world of 1")

    monkeypatch.setattr(connection, "mpi_world", alone)
    assert connect(STEP).line.endswith("MPI not used: Some MPI 1.0 sees a world of one rank")
    with pytest.raises(WorldError, match="each see an MPI world of 1"):
        connect(STEP, "mpi")


def test_a_single_process_and_torchrun_need_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect({}).line == ""
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    assert connect(torchrun).line == "ranks from torchrun, clocks over gloo"
    with pytest.raises(WorldError, match="torchrun started the ranks"):
        connect(torchrun, "mpi")
