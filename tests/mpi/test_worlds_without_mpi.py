"""Ranks that no MPI connects, as small processes on this host: they find each other, or all end with one message."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("meeting_program.py")
HOST = socket.gethostname()
TIMEOUT_S = 120
FIRST_OF_HOST_2 = {"SLURM_LOCALID": "0", "SLURM_NODEID": "1"}


class Ended:
    """What a process printed, and its exit code."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.stdout, self.stderr = child.communicate(timeout=TIMEOUT_S)
        self.code = child.returncode

    @property
    def said(self) -> dict[str, object]:
        """The result of a rank that reduced."""
        return dict(json.loads(self.stdout))


def start(rank: int, *, size: int = 2, device: str = "cpu", **variables: str) -> subprocess.Popen[str]:
    """Start a rank as `srun --mpi=none` would start it here."""
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": HOST,
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "HPCPACE_WORLD_START_TIMEOUT_S": "60",
    }
    known = ("PATH", "HOME", "PYTHONPATH", "LANG", "LD_LIBRARY_PATH")
    environ = {name: os.environ[name] for name in known if name in os.environ}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), device],
        env={**environ, "OMP_NUM_THREADS": "1", **slurm, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*children: subprocess.Popen[str]) -> list[Ended]:
    with ExitStack() as stack:
        for child in children:
            stack.callback(child.wait)
            stack.callback(child.kill)
        return [Ended(child) for child in children]


def after_one_of(*children: subprocess.Popen[str]) -> tuple[subprocess.Popen[str], ...]:
    """Return the processes once one of them has ended."""
    while all(child.poll() is None for child in children):
        time.sleep(0.05)
    return children


@pytest.fixture
def place() -> Iterator[Mapping[str, str]]:
    """The setting of a rendezvous that no other test uses."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    yield {"HPCPACE_WORLD_RENDEZVOUS": f":{port}"}


@pytest.fixture
def without_mpi4py(tmp_path: Path) -> Mapping[str, str]:
    """An environment whose mpi4py cannot be imported."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no mpi4py here')")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.quick
def test_ranks_without_mpi4py_reduce_over_gloo(without_mpi4py: Mapping[str, str]) -> None:
    results = ended(*(start(rank, **without_mpi4py) for rank in range(2)))
    assert [(each.code, each.said["sum"]) for each in results] == [(0, 2.0)] * 2, results[0].stderr
    assert results[0].said["line"] == (
        f"ranks from Slurm (srun --mpi=none), rendezvous {HOST}:21232, clocks over gloo; MPI not used: mpi4py is not "
        "installed"
    )


def test_ranks_of_mpiexec_without_mpi_meet_where_the_setting_says(
    place: Mapping[str, str], without_mpi4py: Mapping[str, str]
) -> None:
    environ = {"HPCPACE_WORLD_RENDEZVOUS": "localhost" + place["HPCPACE_WORLD_RENDEZVOUS"], "PMI_SIZE": "2"}
    none = dict.fromkeys(("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), "")
    children = []
    for rank in range(2):
        variables = {**none, **environ, **without_mpi4py, "PMI_RANK": str(rank), "MPI_LOCALNRANKS": "2"}
        children.append(start(rank, **{**variables, "MPI_LOCALRANKID": str(rank), "SLURM_STEP_NUM_TASKS": "1"}))
    results = ended(*children)
    assert [(each.code, each.said["sum"]) for each in results] == [(0, 2.0)] * 2, results[0].stderr


@pytest.mark.nightly
def test_a_second_rank_0_is_told_that_its_port_is_taken(place: Mapping[str, str]) -> None:
    results = ended(*after_one_of(start(0, **place), start(0, **place)), start(1, **place))
    (refused,) = (each for each in results if each.code)
    port = place["HPCPACE_WORLD_RENDEZVOUS"][1:]
    assert (refused.code, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith(f"error: {HOST} cannot listen on port {port}, where the ranks meet: ")
    assert "this rank was started twice" in refused.stderr


@pytest.mark.nightly
def test_a_rank_that_is_there_twice_is_named_with_both_processes(place: Mapping[str, str]) -> None:
    first = start(0, size=3, **place)
    twins = after_one_of(*(start(1, size=3, **place) for _ in range(2)))
    results = ended(first, start(2, size=3, **place), *twins)
    (refused,) = (each for each in results if each.code)
    assert refused.code == 2
    assert refused.stderr.startswith("[rank 1] error: rank 1 is there twice: process ")
    assert all(f"process {twin.pid} on {HOST}" in refused.stderr for twin in twins)


def test_a_rank_that_never_comes_is_named(place: Mapping[str, str]) -> None:
    results = ended(*(start(rank, size=3, **place, HPCPACE_WORLD_START_TIMEOUT_S="15") for rank in (0, 1)))
    assert [each.code for each in results] == [2, 2]
    assert results[0].stderr.startswith("error: rank 2 of 3 did not come within 15 s: ")
    assert results[1].stderr == ""


@pytest.mark.nightly
def test_a_host_that_cannot_resolve_the_first_one_says_so_once(place: Mapping[str, str]) -> None:
    unknown = {**place, "SLURM_STEP_NODELIST": "no-such-host.invalid"}
    spoken, silent = ended(start(1, **unknown, **FIRST_OF_HOST_2), start(1, **unknown))
    assert (spoken.code, silent.code, silent.stderr) == (2, 2, "")
    assert spoken.stderr.startswith(f"[rank 1] error: {HOST} cannot resolve no-such-host.invalid, where the ranks meet")
    assert f"fix DNS or /etc/hosts on {HOST}" in spoken.stderr


@pytest.mark.nightly
def test_a_first_host_that_does_not_answer_is_named(place: Mapping[str, str]) -> None:
    (result,) = ended(start(1, **place, **FIRST_OF_HOST_2, HPCPACE_WORLD_START_TIMEOUT_S="2"))
    port = place["HPCPACE_WORLD_RENDEZVOUS"]
    assert (result.code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"[rank 1] error: {HOST}: nothing answers at {HOST}{port} within 2 s (")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("no-such-host.invalid", f"{HOST} cannot resolve no-such-host.invalid, where the ranks meet"),
        ("127.0.0.1", f"{HOST}: nothing answers at 127.0.0.1"),
    ],
)
def test_a_master_that_cannot_be_reached_is_named(place: Mapping[str, str], address: str, message: str) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": "29999"}
    (result,) = ended(start(1, **torchrun, HPCPACE_WORLD_START_TIMEOUT_S="3"))
    assert (result.code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"[rank 1] error: {message}")
    assert "MASTER_ADDR with MASTER_PORT" in result.stderr


def test_something_else_at_the_port_ends_every_rank_in_time(place: Mapping[str, str]) -> None:
    port = int(place["HPCPACE_WORLD_RENDEZVOUS"][1:])
    with socket.create_server(("", port)):
        limit = {"HPCPACE_WORLD_START_TIMEOUT_S": "5"}
        results = ended(start(0, **place, **limit), start(1, **place, **limit, **FIRST_OF_HOST_2))
    assert [each.code for each in results] == [2, 2]
    assert results[0].stderr.startswith(f"error: {HOST} cannot listen on port {port}")
    assert results[1].stderr.startswith(f"[rank 1] error: {HOST}: what answers at {HOST}:{port} is no store of torch")


@pytest.mark.quick
def test_a_missing_gpu_ends_all_ranks_with_one_message(place: Mapping[str, str]) -> None:
    results = ended(start(0, **place), start(1, **place, device="cuda"))
    assert [each.code for each in results] == [2, 2]
    # torch may warn that nothing gives this host's name.
    told = [line for each in results for line in each.stderr.splitlines() if "[c10d]" not in line]
    assert len(told) == 1
    assert told[0].startswith(f"error: {HOST} (rank 1): device is cuda, but torch sees no GPU here: ")


@pytest.mark.nightly
def test_ranks_of_different_worlds_are_told_apart(place: Mapping[str, str]) -> None:
    results = ended(start(0, **place), start(1, size=3, **place))
    assert [each.code for each in results] == [2, 2]
    assert f"{HOST} (rank 0) to one of 2, {HOST} (rank 1) to one of 3" in results[0].stderr
