"""The vector that the ranks exchange."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import each_case

from hpcpace.pace.choice import CollectionCount
from hpcpace.pace.rounds import Status, WindowMessage, pack, unpack

NAN = math.nan


def _vector(*own_ns: float, group: int, step_ns: tuple[float, ...] | None = None, **values: int) -> list[float]:
    count = CollectionCount(num_full=values.get("num_full", 0), time_ns=values.get("full_ns", 0))
    status = Status(values.get("status", 0))
    return pack(status, count, step_ns=step_ns, own_ns=own_ns, group=group, num_groups=2)


def _exchange(*vectors: list[float]) -> WindowMessage:
    return unpack(np.min(vectors, axis=0).tolist(), num_steps=2, num_groups=2)


def test_every_group_gets_minimum_and_maximum_of_each_step() -> None:
    found = _exchange(
        _vector(1.0, 0.0, group=0, step_ns=(7.0, 8.0)), _vector(3.0, 2.0, group=0), _vector(5.0, 6.0, group=1)
    )
    assert found.step_ns.tolist() == [7.0, 8.0]
    assert found.least_ns.tolist() == [[1.0, 0.0], [5.0, 6.0]]
    assert found.most_ns.tolist() == [[3.0, 2.0], [5.0, 6.0]]
    assert found.status == Status.GO_ON


def test_the_lowest_wish_and_the_most_collections_win() -> None:
    found = _exchange(
        _vector(1.0, 1.0, group=0, step_ns=(7.0, 8.0), num_full=3, full_ns=50),
        _vector(1.0, 1.0, group=1, num_full=5, full_ns=20, status=Status.RESET),
        _vector(1.0, 1.0, group=-1, status=Status.END),
    )
    assert (found.status, found.num_full, found.full_ns) == (Status.END, 5, 50)


@each_case("missing", [NAN, -1.0, math.inf])
def test_a_value_that_one_rank_misses_is_missing(missing: float) -> None:
    found = _exchange(
        _vector(1.0, missing, group=0, step_ns=(NAN, 8.0)), _vector(3.0, 2.0, group=0), _vector(4.0, 4.0, group=1)
    )
    assert found.least_ns[0][0] == 1.0 and found.most_ns[0][0] == 3.0
    assert math.isnan(found.least_ns[0][1]) and math.isnan(found.most_ns[0][1])
    assert math.isnan(found.step_ns[0]) and found.step_ns[1] == 8.0


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="an exchange of 4 values, not of 2 steps and 1 groups"):
        unpack([0.0] * 4, num_steps=2, num_groups=1)
