"""Garbage collection on the same step of all ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hpcpace.pace.choice import CollectionCount, CollectionPlan, CollectionSchedule, CollectionWatch


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    assert gc.get_threshold() == before
    gc.set_threshold(*before)


def _collected_steps(schedule: CollectionSchedule, num_steps: int, *, last: int = -1) -> list[int]:
    return [step for step in range(num_steps) if schedule.begin_step(is_last=step == last)]


def test_collects_on_every_interval() -> None:
    calls: list[int] = []
    schedule = CollectionSchedule(collect=lambda: calls.append(1))
    schedule.turn_on(4)
    assert _collected_steps(schedule, 12) == [3, 7, 11]
    assert len(calls) == 3
    schedule.turn_off()
    assert _collected_steps(schedule, 12) == []


def test_what_is_owed_is_paid_before_the_schedule_goes_off() -> None:
    schedule = CollectionSchedule(collect=lambda: None)
    schedule.turn_on(8)
    assert _collected_steps(schedule, 15, last=14) == [7, 14]
    assert _collected_steps(schedule, 3, last=2) == []
    schedule.turn_off()


def test_holds_back_full_collections_only_and_gives_them_back() -> None:
    before = gc.get_threshold()
    schedule = CollectionSchedule(collect=lambda: None)
    schedule.turn_on(4)
    schedule.turn_on(4)
    assert gc.get_threshold()[:2] == before[:2]
    assert gc.get_threshold()[2] > 1_000_000
    schedule.turn_off()
    schedule.turn_off()
    assert gc.get_threshold() == before


def test_each_rank_takes_up_its_own_steps_again() -> None:
    before, calls = gc.get_threshold(), []
    schedule = CollectionSchedule(collect=lambda: calls.append(schedule.is_on))
    schedule.turn_on(4)
    _collected_steps(schedule, 4)
    schedule.turn_off(steps_until=3)
    assert not schedule.is_on
    assert _collected_steps(schedule, 2) == [] and calls == [True]
    assert gc.get_threshold()[2] > 1_000_000  # not before its own step
    assert _collected_steps(schedule, 5) == [] and calls == [True, False]
    assert gc.get_threshold() == before


def test_a_schedule_that_goes_on_before_a_rank_is_back_goes_on() -> None:
    schedule = CollectionSchedule(collect=lambda: None)
    schedule.turn_on(4)
    schedule.turn_off(steps_until=3)
    schedule.turn_on(4)
    assert _collected_steps(schedule, 8) == [3, 7]
    schedule.turn_off()


def test_knows_when_this_rank_would_collect_by_itself() -> None:
    watch = CollectionWatch()
    gc.disable()
    watch.start()
    try:
        for step in range(25):
            if step in (6, 16):
                gc.collect()
            watch.end_step(is_scheduled=False)
        assert watch.steps_until == 12 - 8
        gc.collect()
        watch.end_step(is_scheduled=True)  # another rank's step is not its own
        assert watch.steps_until == 12 - 8
    finally:
        watch.stop()
        gc.enable()
    assert CollectionWatch().steps_until is None


def test_counts_full_collections_apart() -> None:
    times = iter([0, 100, 1000, 1400])
    watch = CollectionWatch(clock=lambda: next(times))
    gc.disable()
    watch.start()
    try:
        gc.collect(0)
        gc.collect()
        watch.end_step(is_scheduled=False)
        gc.collect()
        watch.end_step(is_scheduled=True)
        watch.end_step(is_scheduled=True)
    finally:
        watch.stop()
        gc.enable()
    assert watch.counts[False] == CollectionCount(num_steps=1, num_full=1, time_ns=100)
    assert watch.counts[True] == CollectionCount(num_steps=2, num_full=1, time_ns=400)
    watch.stop()


def _plan(
    num_full: int, full_ns: int = 10_000_000, *, least_share: float = 0.0, num_steps: int = 240
) -> CollectionPlan:
    plan = CollectionPlan(least_share=least_share)
    for done in range(0, num_steps, 10):
        share = (done + 10) / num_steps
        plan.note((1e6,) * 10, num_full=int(num_full * share), full_ns=int(full_ns * share), is_scheduled=False)
    return plan


def test_collects_as_often_as_the_rank_that_did_so_most() -> None:
    plan = _plan(4)
    assert plan.decide() == ""
    assert plan.interval == 60 and plan.block_steps() == 120


def test_scheduled_steps_do_not_count() -> None:
    plan = _plan(4)
    plan.note((1e6,) * 10, num_full=99, full_ns=0, is_scheduled=True)
    assert plan.decide() == "" and plan.interval == 60


def test_there_is_nothing_to_plan_without_collections() -> None:
    assert _plan(0).decide() == "no full garbage collection in 240 steps"


def test_there_is_nothing_to_plan_below_a_share() -> None:
    assert _plan(4, 240_000, least_share=0.002).decide() == "garbage collection takes 0.10% of the steps"


def test_rare_collections_cannot_be_tried() -> None:
    plan = _plan(1)
    assert plan.decide() == "" and plan.block_steps() == 0


def test_an_interval_that_is_set_is_kept() -> None:
    plan = CollectionPlan(25)
    assert plan.decide() == "" and plan.interval == 25
