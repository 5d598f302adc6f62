"""The flushes of many ranks are spread over the interval, whatever else makes one of them flush."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.trace.recorder import FlushSchedule


def _times(rank: int, *, first_s: float = 100.0, num_flushes: int = 5, took_s: float = 0.0) -> list[float]:
    """Return when a rank flushes of which all start at 100 s; the first flush ends at `first_s`."""
    schedule, now_s, found = FlushSchedule(rank, 1.0, 100.0), first_s, []
    while len(found) < num_flushes:
        now_s += schedule.wait_s(now_s)
        found.append(now_s)
        now_s += took_s
    return found


@each_case("num_ranks", [2, 4, 8, 100, 1000, 10_000])
def test_any_number_of_ranks_is_spread_evenly(num_ranks: int) -> None:
    places = np.sort([_times(rank)[-1] % 1 for rank in range(num_ranks)])
    gaps = np.diff([*places, places[0] + 1])
    assert gaps.max() < 2.7 / num_ranks


def test_a_rank_flushes_once_an_interval() -> None:
    assert np.diff(_times(3)) == pytest.approx([1.0] * 4)


def test_a_flush_of_all_ranks_at_the_start_does_not_bring_them_together() -> None:
    for rank in range(1, 8):
        assert _times(rank, first_s=100.02)[-1] % 1 == pytest.approx(_times(rank)[-1] % 1)


@each_case("took_s", [0.4, 1.7, 5.2])
def test_flushes_that_take_long_keep_their_place(took_s: float) -> None:
    assert np.array(_times(1, took_s=took_s)) % 1 == pytest.approx(np.full(5, 0.618034), abs=1e-6)


@each_case("error_s", [-1e-4, 0.0, 1e-4])
def test_a_wait_that_ends_a_little_early_or_late_is_followed_by_a_whole_one(error_s: float) -> None:
    schedule = FlushSchedule(1, 1.0, 0.0)
    assert schedule.wait_s(0.6180339887 + error_s) == pytest.approx(1 - error_s)
