"""What a study says of its runs, on numbers made by hand."""

from __future__ import annotations

import pandas as pd
import pytest
from cases import each_case

from library.figures import Spread, scaling_factor, spread, straight_line, traffic_of


def test_spread_is_median_least_and_most_of_what_is_known() -> None:
    assert spread([3.0, None, 1.0, 2.0, float("nan")]) == Spread(median=2.0, low=1.0, high=3.0, num=3)
    assert spread([None, None]) is None


def test_scaling_of_one_rank_is_one() -> None:
    assert scaling_factor(29.5, 1, 29.5) == 1
    assert scaling_factor(55.01, 2, 29.575) == pytest.approx(0.93, abs=0.005)


def steps(ahead_ns: int = 0) -> pd.DataFrame:
    """Return 4 steps of a second on two servers of two ranks, the second of which is ahead of the first."""
    rows = [(step, rank, step * 10**9 - rank % 2 * ahead_ns) for rank in range(4) for step in range(4)]
    frame = pd.DataFrame(rows, columns=["step", "rank", "begin_ns"])
    return frame.assign(end_ns=frame.begin_ns + 10**9)


def network(first_s: int, stop_s: int) -> pd.DataFrame:
    """Return what counters grew by in each second: 300 bytes, and on the loopback more."""
    rows = [
        (host, interface, second * 10**9, (second + 1) * 10**9, num_bytes, 2 * num_bytes)
        for host in ("n1", "n2")
        for interface, num_bytes in (("lo", 900), ("eth0", 100), ("eth1", 10))
        for second in range(first_s, stop_s)
    ]
    return pd.DataFrame(rows, columns=["host", "interface", "begin_ns", "end_ns", "sent_bytes", "received_bytes"])


RANKS = pd.DataFrame({"rank": range(4), "host": ["n1", "n1", "n2", "n2"]})


def test_traffic_is_that_of_the_busiest_interface_but_the_loopback_by_hand() -> None:
    assert traffic_of(steps(), RANKS, network(0, 4)) == (pytest.approx(8 * 300), pytest.approx(4 * 300))


def test_ranks_that_are_not_at_the_same_step_make_no_traffic() -> None:
    assert traffic_of(steps(10**9), RANKS, network(-1, 4)) == (pytest.approx(8 * 300), pytest.approx(4 * 300))


def test_counters_of_a_part_of_the_time_count_for_all_of_it() -> None:
    assert traffic_of(steps(), RANKS, network(2, 4)) == (pytest.approx(8 * 300), pytest.approx(4 * 300))


@each_case("stop_s", [0, 1])
def test_counters_of_less_than_half_of_the_time_do_not_tell(stop_s: int) -> None:
    assert traffic_of(steps(), RANKS, network(0, stop_s)) is None


def test_the_loopback_alone_does_not_tell() -> None:
    counted = network(0, 4)
    assert traffic_of(steps(), RANKS, counted[counted.interface == "lo"]) is None


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
