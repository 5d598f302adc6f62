from __future__ import annotations

import numpy as np
from cases import each_case

from hpcpace.metrics.communication import overlap_share, under_way_ns, union_ns


@each_case(
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
    assert under_way_ns(enter, leave, np.array([-1]), np.array([100])).tolist() == [length]


@each_case("seed", range(20))
def test_steps_have_the_time_under_way_in_them(seed):
    rng = np.random.default_rng(seed)
    enter = rng.integers(0, 300, 40)
    leave = enter + rng.integers(0, 30, 40)
    begin = np.sort(rng.choice(np.arange(300), 10, replace=False))
    end = np.append(begin[1:], 320)
    is_under_way = np.zeros(400, np.bool_)
    for first, stop in zip(enter, leave, strict=True):
        is_under_way[first:stop] = True
    expected = [int(is_under_way[first:stop].sum()) for first, stop in zip(begin, end, strict=True)]
    assert under_way_ns(enter, leave, begin, end).tolist() == expected


def test_what_nobody_waits_for_is_hidden():
    assert overlap_share(np.array([100.0, 100.0]), np.array([25.0, 75.0])) == 0.5


def test_more_exposed_than_under_way_is_no_overlap():
    assert overlap_share(np.array([100.0]), np.array([101.0])) == 0.0


def test_without_communication_there_is_none():
    assert overlap_share(np.zeros(2), np.zeros(2)) is None


def test_the_union_of_intervals_counts_each_moment_once():
    begins, ends = np.array([50, 0, 5, 20]), np.array([60, 10, 15, 30])
    assert union_ns(begins, ends) == 15 + 10 + 10
    assert union_ns(begins[:0], ends[:0]) == 0
