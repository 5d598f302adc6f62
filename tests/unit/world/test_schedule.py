from __future__ import annotations

import itertools

from cases import each_case

from hpcpace.core.text import NS_PER_S
from hpcpace.world.clock import SyncSchedule


def run(step_s, num_steps, interval_s=30.0):
    """Return the times of the synchronisations when step i takes step_s(i) seconds."""
    schedule = SyncSchedule(round(interval_s * NS_PER_S))
    now_ns, due, times_s = 0, 0, []
    for step in range(num_steps):
        schedule.note(step, now_ns)
        if step >= due:
            due = schedule.next_step(step, now_ns)
            assert due > step
            times_s.append(now_ns / NS_PER_S)
        now_ns += round(step_s(step) * NS_PER_S)
    return times_s


def gaps(times_s, after_s=0.0):
    return [b - a for a, b in itertools.pairwise(times_s) if a >= after_s]


@each_case("step_s", [0.01, 0.1, 0.7, 4.0])
def test_settles_at_the_interval(step_s):
    settled = gaps(run(lambda _: step_s, int(600 / step_s)), after_s=100)
    assert settled
    assert all(abs(gap - 30) <= step_s / 2 + 1e-6 for gap in settled)


def test_synchronises_each_step_that_is_longer_than_the_interval():
    assert gaps(run(lambda _: 90.0, 10)) == [90.0] * 9


def test_a_long_first_step_does_not_spread_the_next_ones():
    times_s = run(lambda step: 120.0 if step == 0 else 0.1, 5000)
    assert max(gaps(times_s[1:])) <= 31
    assert len(times_s) < 5000 * 0.1 / 30 + 15


def test_steps_that_become_slower_shorten_the_next_interval():
    times_s = run(lambda step: 0.1 if step < 2000 else 1.0, 4000)
    assert all(gap <= 31 for gap in gaps(times_s, after_s=600))


def test_steps_that_become_faster_reach_the_interval_again():
    times_s = run(lambda step: 1.0 if step < 300 else 0.01, 60000)
    assert all(29 <= gap <= 31 for gap in gaps(times_s, after_s=600))


def test_steps_that_slow_down_all_the_time_stay_near_the_interval():
    times_s = run(lambda step: 0.05 * 1.001**step, 4000)
    assert max(gaps(times_s)) <= 45


def test_steps_that_take_no_time_do_not_divide_by_it():
    run(lambda _: 0.0, 1000)
