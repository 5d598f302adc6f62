"""A session finds its place also where only torch's group knows it: in ranks that a script starts by itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hpcpace.errors import WorldError
from hpcpace.observe.session_settings import SessionSettings

_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def _settings(environ: Mapping[str, str], comm: Any = None) -> SessionSettings:
    return SessionSettings(
        environ=environ,
        name="train",
        run_dir=None,
        config=None,
        config_file=None,
        mesh={},
        coords={},
        samples_unit="samples",
        warmup_steps=0,
        first_step=0,
        record={},
        world=None,
        comm=comm,
        step_from=None,
        pace=None,
        trace_dir=None,
    )


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    groups = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3, get_world_size=lambda: 4
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", groups)
    return groups


@pytest.mark.parametrize(
    ("environ", "comm", "place"),
    [({}, None, (3, 4)), (_TORCHRUN, None, (1, 2)), ({}, object(), (0, 1))],
)
def test_the_group_counts_where_no_launcher_has_said_anything(
    environ: Mapping[str, str], comm: Any, place: tuple[int, int]
) -> None:
    info = _settings(environ, comm).find_rank()
    assert (info.rank, info.world_size) == place


def test_a_rank_without_a_group_is_alone(group: SimpleNamespace) -> None:
    group.is_initialized = lambda: False
    assert _settings({}).find_rank().world_size == 1


def test_variables_that_contradict_each_other_stay_an_error() -> None:
    with pytest.raises(WorldError):
        _settings({**_TORCHRUN, "WORLD_SIZE": "many"}).find_rank()
