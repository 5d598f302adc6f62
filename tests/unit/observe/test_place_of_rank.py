"""A session finds its place also where only torch's group knows it: in ranks that a script starts by itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hpcpace.core.errors import WorldError
from hpcpace.observe.joined import SessionSettings, _versions, find_rank

_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def _settings(environ: Mapping[str, str], comm: Any = None) -> SessionSettings:
    settings = SessionSettings(comm=comm)
    settings.environ = environ
    return settings


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    groups = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3, get_world_size=lambda: 4
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", groups)
    return groups


# What Lightning's own launcher leaves in rank 3 of 4 on one host.
_LIGHTNING = {"WORLD_SIZE": "4", "NODE_RANK": "0", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
_STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "comm", "place"),
    [
        ({}, None, (3, 4)),
        (_LIGHTNING, None, (3, 4)),
        ({"WORLD_SIZE": "many"}, None, (3, 4)),
        (_STEP, None, (3, 4)),  # one task per node, and each starts two ranks
        ({}, object(), (0, 1)),
        (_TORCHRUN, object(), (1, 2)),
    ],
)
def test_the_group_that_connects_the_ranks_knows_their_places(
    environ: Mapping[str, str], comm: Any, place: tuple[int, int]
) -> None:
    info = find_rank(_settings(environ, comm))
    assert (info.rank, info.world_size) == place


def test_what_a_launcher_says_of_the_same_place_is_kept(group: SimpleNamespace) -> None:
    group.get_rank, group.get_world_size = lambda: 1, lambda: 2
    info = find_rank(_settings(_TORCHRUN))
    assert (info.rank, info.world_size, info.local_rank, info.launcher) == (1, 2, 1, "torchrun")


def test_a_rank_without_a_group_is_alone(group: SimpleNamespace) -> None:
    group.is_initialized = lambda: False
    assert find_rank(_settings({})).world_size == 1


@pytest.mark.parametrize("environ", [{**_TORCHRUN, "WORLD_SIZE": "many"}, _LIGHTNING])
def test_variables_that_contradict_each_other_are_an_error_without_a_group(
    group: SimpleNamespace, environ: Mapping[str, str]
) -> None:
    group.is_initialized = lambda: False
    with pytest.raises(WorldError):
        find_rank(_settings(environ))


def test_the_version_of_mpi_is_one_line_with_single_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = SimpleNamespace(Get_library_version=lambda: "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx\n\0")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert _versions()["mpi"] == "MPICH Version: 5.0.2"
