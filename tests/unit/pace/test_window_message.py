"""The vector that the ranks exchange."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import each_case

from hpcpace.pace.rounds import Status, WindowMessage, pack, unpack

NAN = math.nan


def _message(rows: tuple[tuple[float, ...], ...], **values: object) -> WindowMessage:
    given = {"status": Status.GO_ON, "num_full": 0, "full_ns": 0, "step_ns": (7.0, 8.0)}
    return WindowMessage(**(given | values), least_ns=rows, most_ns=rows)


def _exchange(*vectors: list[float]) -> WindowMessage:
    return unpack(np.min(vectors, axis=0).tolist(), num_steps=2, num_groups=2)


def test_every_group_gets_minimum_and_maximum_of_each_step() -> None:
    nothing = (NAN, NAN)
    found = _exchange(
        pack(_message(((1.0, 0.0), nothing)), group=0, is_first=True),
        pack(_message(((3.0, 2.0), nothing), step_ns=(1.0, 1.0)), group=0, is_first=False),
        pack(_message((nothing, (5.0, 6.0)), step_ns=(1.0, 1.0)), group=1, is_first=False),
    )
    assert found.step_ns == (7.0, 8.0)
    assert found.least_ns == ((1.0, 0.0), (5.0, 6.0))
    assert found.most_ns == ((3.0, 2.0), (5.0, 6.0))
    assert found.status == Status.GO_ON


def test_the_lowest_wish_and_the_most_collections_win() -> None:
    rows = ((1.0, 1.0), (1.0, 1.0))
    found = _exchange(
        pack(_message(rows, num_full=3, full_ns=50), group=0, is_first=True),
        pack(_message(rows, num_full=5, full_ns=20, status=Status.RESET), group=1, is_first=False),
        pack(_message(rows, status=Status.END), group=-1, is_first=False),
    )
    assert (found.status, found.num_full, found.full_ns) == (Status.END, 5, 50)


@each_case("missing", [NAN, -1.0, math.inf])
def test_a_value_that_one_rank_misses_is_missing(missing: float) -> None:
    found = _exchange(
        pack(_message(((1.0, missing), (0.0, 0.0)), step_ns=(NAN, 8.0)), group=0, is_first=True),
        pack(_message(((3.0, 2.0), (0.0, 0.0))), group=0, is_first=False),
        pack(_message(((0.0, 0.0), (4.0, 4.0))), group=1, is_first=False),
    )
    assert found.least_ns[0][0] == 1.0 and found.most_ns[0][0] == 3.0
    assert math.isnan(found.least_ns[0][1]) and math.isnan(found.most_ns[0][1])
    assert math.isnan(found.step_ns[0]) and found.step_ns[1] == 8.0


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="an exchange of 4 values, not of 2 steps and 1 groups"):
        unpack([0.0] * 4, num_steps=2, num_groups=1)
