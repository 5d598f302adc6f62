"""What a study says of its runs, on numbers made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.studies.figures import Spread, counted_between, scaling_factor, spread, straight_line

READINGS_NS = np.array([0, 1, 2, 3, 4]) * 10**9
COUNT = np.array([100, 200, 300, 500, 700])


def test_spread_is_median_least_and_most_of_what_is_known() -> None:
    assert spread([3.0, None, 1.0, 2.0, float("nan")]) == Spread(median=2.0, low=1.0, high=3.0, num=3)
    assert spread([None, None]) is None


def test_scaling_of_one_rank_is_one() -> None:
    assert scaling_factor(29.5, 1, 29.5) == 1
    assert scaling_factor(55.01, 2, 29.575) == pytest.approx(0.93, abs=0.005)


def test_a_counter_grows_evenly_between_readings() -> None:
    assert counted_between(READINGS_NS, COUNT, 500_000_000, 2_500_000_000) == (pytest.approx(250), pytest.approx(2.0))


def test_a_time_beyond_the_readings_is_cut() -> None:
    assert counted_between(READINGS_NS, COUNT, -(10**9), 4 * 10**9) == (pytest.approx(600), pytest.approx(4.0))


@each_case(("begin_s", "end_s"), [(3, 9), (5, 9), (-9, 0), (2, 2), (3, 2)])
def test_readings_of_less_than_half_a_time_do_not_tell(begin_s: int, end_s: int) -> None:
    assert counted_between(READINGS_NS, COUNT, begin_s * 10**9, end_s * 10**9) is None


def test_one_reading_does_not_tell() -> None:
    assert counted_between(READINGS_NS[:1], COUNT[:1], 0, 10**9) is None


def test_large_counters_lose_nothing() -> None:
    found = counted_between(READINGS_NS, COUNT + 2**62, 0, 4 * 10**9)
    assert found == (pytest.approx(600), pytest.approx(4.0))


def test_a_straight_line_explains_all() -> None:
    line = straight_line([12, 24, 36, 48], [174, 226, 278, 330])
    assert line is not None
    assert line.slope == pytest.approx(52 / 12)
    assert line.r_squared == pytest.approx(1)


def test_a_line_through_noise_explains_little() -> None:
    line = straight_line([1, 2, 3, 4], [1, -1, -1, 1])
    assert line is not None and line.r_squared == pytest.approx(0)


def test_two_points_show_no_line() -> None:
    assert straight_line([1, 2], [1, 2]) is None
