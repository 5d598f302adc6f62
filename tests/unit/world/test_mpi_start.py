from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest

from hpcpace.world.mpi import (
    _OneThread,
    is_misread_by_pmi2,
    load_mpi,
    may_call_mpi,
    start_in_a_thread,
    start_mpi,
)

UCX = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
PMI2 = {"PMI_FD": "10", "SLURM_STEP_ID": "0", "SLURM_MPI_TYPE": "pmi2"}


@pytest.mark.parametrize(
    ("library", "is_misread"),
    [(UCX, True), (UCX.replace("ucx ", ""), False), ("Open MPI v4.1.4", False)],
)
def test_pmi2_misreads_mpich_over_ucx_alone(library: str, is_misread: bool) -> None:
    assert is_misread_by_pmi2(library) is is_misread


@pytest.mark.parametrize(
    ("environ", "library", "in_thread"),
    [
        (PMI2, UCX, True),
        ({"PMI_FD": "10", "SLURM_STEP_ID": "0"}, UCX, True),
        ({"PMI_FD": "10"}, UCX, False),
        (PMI2 | {"SLURM_MPI_TYPE": "pmix"}, UCX, False),
        (PMI2, "Open MPI v4.1.4", False),
    ],
)
def test_mpi_is_loaded_and_started_in_one_thread_only_where_pmi2_may_misread_it(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], library: str, in_thread: bool
) -> None:
    mpi = FakeMpi(FakeMpi.THREAD_MULTIPLE, library)
    monkeypatch.setattr("hpcpace.world.mpi._import", lambda: mpi.note() or mpi)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    rc = types.SimpleNamespace(threads=True, thread_level="multiple")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(rc=rc))
    start_mpi(load_mpi(environ))
    assert (threading.get_ident() not in mpi.callers) is in_thread
    assert len(mpi.callers) == 1 + (environ is PMI2 and library != UCX)


class FakeRequest:
    def __init__(self, mpi: FakeMpi) -> None:
        self.mpi = mpi

    def Test(self) -> bool:
        self.mpi.note()
        return True


class FakeComm:
    def __init__(self, mpi: FakeMpi) -> None:
        self.mpi = mpi

    @property
    def rank(self) -> int:
        self.mpi.note()
        return 3

    def Idup(self) -> tuple[FakeComm, FakeRequest]:
        self.mpi.note()
        return FakeComm(self.mpi), FakeRequest(self.mpi)

    def allgather(self, value: Any) -> list[Any]:
        self.mpi.note()
        if value is None:
            raise ValueError("nothing to gather")
        return [value]


class FakeMpi:
    """An MPI that grants a level, and notes which threads call it."""

    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    Comm, Request = FakeComm, FakeRequest

    def __init__(self, granted: int, library: str = UCX) -> None:
        self.granted, self.library, self.callers = granted, library, set[int]()
        self.COMM_WORLD = FakeComm(self)

    def note(self) -> None:
        self.callers.add(threading.get_ident())

    def Is_initialized(self) -> bool:
        return False

    def Get_library_version(self) -> str:
        return self.library

    def Init_thread(self, level: int) -> int:
        self.note()
        return self.granted


@pytest.fixture(autouse=True)
def no_end_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.world.mpi.atexit.register", lambda *_: None)


@pytest.mark.parametrize("granted", [FakeMpi.THREAD_FUNNELED, FakeMpi.THREAD_SERIALIZED])
def test_below_thread_multiple_all_calls_stay_in_the_thread_that_started(granted: int) -> None:
    mpi = FakeMpi(granted)
    comm = start_in_a_thread(mpi, mpi.THREAD_MULTIPLE, _OneThread())
    duplicate, request = comm.Idup()
    assert (comm.rank, duplicate.allgather(7), request.Test()) == (3, [7], True)
    with pytest.raises(ValueError, match="nothing to gather"):
        duplicate.allgather(None)
    assert len(mpi.callers) == 1
    assert threading.get_ident() not in mpi.callers


@pytest.mark.parametrize(
    ("granted", "is_its_thread", "may"),
    [
        (FakeMpi.THREAD_MULTIPLE, False, True),
        (FakeMpi.THREAD_SERIALIZED, True, True),
        (FakeMpi.THREAD_SERIALIZED, False, False),
    ],
)
def test_a_thread_that_did_not_start_mpi_may_call_it_with_thread_multiple_only(
    monkeypatch: pytest.MonkeyPatch, granted: int, is_its_thread: bool, may: bool
) -> None:
    mpi = types.SimpleNamespace(
        Query_thread=lambda: granted, Is_thread_main=lambda: is_its_thread, THREAD_MULTIPLE=FakeMpi.THREAD_MULTIPLE
    )
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    assert may_call_mpi(object()) is may
    assert (
        may_call_mpi(start_in_a_thread(FakeMpi(FakeMpi.THREAD_SERIALIZED), FakeMpi.THREAD_MULTIPLE, _OneThread()))
        is True
    )


def test_with_thread_multiple_calls_are_made_where_they_are() -> None:
    mpi = FakeMpi(FakeMpi.THREAD_MULTIPLE)
    comm = start_in_a_thread(mpi, mpi.THREAD_MULTIPLE, _OneThread())
    assert comm is mpi.COMM_WORLD
    assert comm.allgather(1) == [1]
    assert len(mpi.callers) == 2
