from __future__ import annotations

import numpy as np
import pytest

from hpcpace.metrics.operations.overlap import communication_ns, overlap_share


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 10)], 10),
        ([(0, 10), (20, 25)], 15),
        ([(0, 10), (5, 15)], 15),
        ([(0, 30), (5, 15), (20, 40)], 40),
        ([(20, 25), (0, 10)], 15),
        ([(5, 15), (0, 20), (30, 35)], 25),
        ([(5, 5)], 0),
    ],
)
def test_operations_under_way_at_once_count_once(intervals, length):
    enter, leave = (np.array([pair[side] for pair in intervals], np.int64) for side in (0, 1))
    assert communication_ns(enter, leave) == length


def test_what_nobody_waits_for_is_hidden():
    assert overlap_share(np.array([100.0, 100.0]), np.array([25.0, 75.0])) == 0.5


def test_more_exposed_than_under_way_is_no_overlap():
    assert overlap_share(np.array([100.0]), np.array([101.0])) == 0.0


def test_without_communication_there_is_none():
    assert overlap_share(np.zeros(2), np.zeros(2)) is None
