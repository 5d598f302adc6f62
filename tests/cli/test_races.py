"""A small part of `python -m experiments.damage --races`: programs against an owner who swaps a folder's content."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path

import pytest
from cases import chosen

from experiments.damage import races
from experiments.damage.child import preload
from experiments.damage.swappers import NOBODY

ALL_PROGRAMS = (*races.PROGRAMS, *races.OF_TRAINING)
ROUNDS, MAX_ROUNDS_UNTIL_CAUGHT = 3, 100
BY_OWNER = pytest.mark.parametrize(
    "uid", [pytest.param(None, id="same-user"), pytest.param(NOBODY, id="nobody", marks=pytest.mark.root)]
)


def _name(value: object) -> str:
    return str(getattr(value, "name", value))


@pytest.fixture(scope="module", autouse=True)
def imported():
    preload()
    importlib.import_module("torch.distributed.checkpoint")  # once, and not in each child


@pytest.fixture
def ground(uid):
    if uid is not None:
        assert os.geteuid() == 0, "only root can give a swapper another user's rights"
    with tempfile.TemporaryDirectory(prefix="hpcpace-races-") as name, races.ground_in(Path(name), uid) as made:
        yield made


@BY_OWNER
@pytest.mark.parametrize(("program", "swapper"), races.races_of(races.NAIVE), ids=_name)
def test_a_naive_program_is_caught(ground, uid, program, swapper):
    found = races.race(program, swapper, ground, num_rounds=MAX_ROUNDS_UNTIL_CAUGHT, uid=uid, stop_at_first=True)
    assert found.problems
    assert "elsewhere is changed" in found.problems[0] or "the secret as" in found.problems[0]


@BY_OWNER
@pytest.mark.parametrize(
    ("program", "swapper"), chosen(races.races_of((*races.PROGRAMS, *races.OF_TRAINING)), 4), ids=_name
)
def test_nothing_elsewhere_is_read_or_changed(ground, uid, program, swapper):
    assert races.race(program, swapper, ground, num_rounds=ROUNDS, uid=uid).problems == ()
