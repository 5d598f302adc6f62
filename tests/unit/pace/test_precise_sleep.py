"""A delay ends when it should, sleeps all but its end, and knows by how much it was too long."""

from __future__ import annotations

import pytest
from cases import each_case
from paced_ranks import Clock

from hpcpace.pace.rounds import PreciseSleep


@each_case("delay_ns", [1, 50_000, 80_001, 5_000_000])
def test_a_delay_is_as_long_as_asked_for(delay_ns: int) -> None:
    clock = Clock()
    end_ns = PreciseSleep(clock=clock, sleep=clock.spend).delay(clock.now_ns, delay_ns)
    assert delay_ns <= end_ns <= delay_ns + 3000


def test_only_the_end_is_spun() -> None:
    clock, slept = Clock(), []
    PreciseSleep(clock=clock, sleep=lambda time_s: (slept.append(time_s), clock.spend(time_s))).delay(0, 5_000_000)
    assert slept == [pytest.approx((5_000_000 - 80_000) / 1e9, abs=2e-6)]


def test_a_short_delay_does_not_sleep() -> None:
    def never(time_s: float) -> None:
        raise AssertionError(f"slept {time_s} s")

    PreciseSleep(clock=Clock(), sleep=never).delay(0, 80_000)


def test_what_was_too_long_is_told_once() -> None:
    clock = Clock()
    precise_sleep = PreciseSleep(clock=clock, sleep=lambda time_s: clock.spend(time_s + 0.001))
    end_ns = precise_sleep.delay(0, 5_000_000)
    (overshoot_ns,) = precise_sleep.take_overshoots()
    assert overshoot_ns == end_ns - 5_000_000 == pytest.approx(920_000, abs=5000)
    assert precise_sleep.take_overshoots() == ()


def test_a_rank_that_lost_its_core_until_after_the_end_is_released_at_once() -> None:
    def never(time_s: float) -> None:
        raise AssertionError(f"slept {time_s} s")

    clock = Clock()
    clock.spend(0.006)
    precise_sleep = PreciseSleep(clock=clock, sleep=never)
    assert precise_sleep.delay(0, 5_000_000) == 6_002_000
    assert precise_sleep.take_overshoots() == (1_002_000.0,)
