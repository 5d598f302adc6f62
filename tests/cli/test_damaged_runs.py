"""A small part of `python -m experiments.damage`: always the same first inputs of each row of its table."""

from __future__ import annotations

import pytest
from cases import chosen, only_nightly

from experiments.damage.engine import Input, run_inputs
from experiments.damage.kinds import DAMAGED as KINDS
from experiments.damage.specimen import Shelf

GROUPS = tuple(dict.fromkeys(kind.group for kind in KINDS))
BY_NAME = {kind.name: kind for kind in KINDS}
FAILED_ONCE = {
    "record-fifo": 0,
    "record-sparse": 0,
    "record-link-to-zero": 0,
    "record-bytes": 4,
    "journal-sparse": 0,
    "ragged": 0,
    "absurd-steps": 10,
    "absurd-times": 0,
    "size-world_size": 4,
    "size-node": 1,
    "clock-near-times": 1,
    "same-step": 3,
    "zero-steps": 0,
    "copied-over": 1,
    "bomb-many-heaps": 0,
    "bomb-billion-rows": 3,
    "bomb-million-rows": 1,
}
"""Inputs that a report did not survive once: a traceback, no end, gigabytes of memory, sound ranks left out."""


def inputs_of(group: str) -> list[Input]:
    """Return an input of the middle kind of a group; nightly, two of that and of the first kind."""
    kinds = [kind for kind in KINDS if kind.group == group]
    tried = only_nightly([kinds[len(kinds) // 2]], [kinds[0]])
    return [Input(kind=kind, number=number) for kind in tried for number in range(len(tried))]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return Shelf(tmp_path_factory.mktemp("specimens"))


@pytest.fixture
def problems_of(shelf):
    """Report inputs and return what does not hold, by input."""

    def call(inputs: list[Input]) -> dict[str, tuple[str, ...]]:
        outcomes = run_inputs(inputs, shelf=shelf)
        return {outcome.input.name: outcome.problems for outcome in outcomes if outcome.problems}

    return call


@pytest.mark.parametrize("group", chosen(GROUPS, 12))
def test_damage_is_reported_or_a_clear_error(problems_of, group):
    assert problems_of(inputs_of(group)) == {}


@pytest.mark.slow
def test_what_failed_once_does_not_fail_again(problems_of):
    assert problems_of([Input(kind=BY_NAME[name], number=number) for name, number in FAILED_ONCE.items()]) == {}


def test_a_fresh_interpreter_ends_the_same(shelf):
    one = [Input(kind=BY_NAME["truncate"], number=0)]
    (forked,), (fresh,) = run_inputs(one, shelf=shelf), run_inputs(one, shelf=shelf, fresh=True)
    assert (forked.result.code, forked.problems) == (fresh.result.code, fresh.problems)
