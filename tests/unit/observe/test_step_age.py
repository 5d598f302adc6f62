"""When a step lasts too long, and when not: looks at simulated ranks, one a second, on a clock of their own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from cases import each_case, only_nightly

from hpcpace.core.text import NS_PER_S
from hpcpace.observe.settings import HangConfig
from hpcpace.observe.watchdog import Age, Look, StepAge
from hpcpace.trace.schema import Phase

LIMITS = HangConfig()


@dataclass(frozen=True)
class Part:
    """A part of a step: how long it takes, in which phase, and whether its operations go on or it ends the step."""

    length_s: float
    phase: Phase | None = None
    moves: bool = False
    ends_step: bool = False
    is_asleep: bool = False


def step(length_s: float) -> Part:
    return Part(length_s, ends_step=True)


def new_age(limits: HangConfig = LIMITS, tick_s: float = 1.0) -> StepAge:
    return StepAge(limits, tick_ns=int(tick_s * NS_PER_S), now_ns=0)


def ages(parts: Iterable[Part], age: StepAge, *, tick_s: float = 1.0) -> Iterator[Age]:
    """Yield each step that a look finds too long. The process does not look while it is suspended."""
    now_s = next_look_s = 0.0
    num_steps = num_moves = 0
    before: set[int] = set()
    for part in parts:
        begin_s, end_s = now_s, now_s + part.length_s
        while next_look_s < end_s:
            under_way = None if part.phase is None else (part.phase, int(begin_s * NS_PER_S))
            num_moves += part.moves
            if not part.is_asleep:
                seen = Look(num_steps, num_moves, under_way, set(before))
                found = age.look(int(next_look_s * NS_PER_S), seen)
                if found is not None:
                    yield found
            next_look_s += tick_s
        now_s = end_s
        num_steps += part.ends_step
        num_moves += 1
        if part.phase is not None:
            before.add(part.phase)


def alarms(parts: Iterable[Part], limits: HangConfig = LIMITS, *, tick_s: float = 1.0) -> list[Age]:
    return [age for age in ages(parts, new_age(limits, tick_s), tick_s=tick_s) if not age.excuse]


def healthy(seed: int) -> Iterator[Part]:
    """Yield a training with first steps that compile, evaluations, checkpoints, and one step of 20 times the usual."""
    draw = random.Random(seed)
    usual_s = 10 ** draw.uniform(-2, 1)
    num_steps = 400
    slow = draw.randrange(20, num_steps)
    every, checkpoint_s, evaluation_s = draw.randrange(20, 80), draw.uniform(1, 600), draw.uniform(1, 600)
    for _ in range(draw.randrange(1, 5)):
        yield step(draw.uniform(1, 110))
    for number in range(num_steps):
        yield step(usual_s * draw.lognormvariate(0, 0.2) * (20 if number == slow else 1))
        if number % every == every - 1:
            yield Part(evaluation_s * draw.uniform(0.7, 1.4), Phase.EVAL)
        if number % every == every - 5:
            yield Part(checkpoint_s * draw.uniform(0.5, 2), Phase.CHECKPOINT)


@each_case("first_seed", only_nightly([0], [50, 100, 150]))
def test_nobody_is_late_in_50_healthy_trainings(first_seed: int) -> None:
    late = {seed for seed in range(first_seed, first_seed + 50) if alarms(healthy(seed))}
    assert late == set()


def test_a_step_that_never_ends_is_noticed_once_its_time_is_over() -> None:
    parts = [*(step(1.0) for _ in range(50)), Part(200)]
    first = alarms(parts)[0]
    assert first.step == 50
    assert 60 < first.step_age_ns / NS_PER_S < 63
    assert first.limit_ns == 60 * NS_PER_S
    assert first.usual_step_ns == pytest.approx(NS_PER_S, rel=0.1)
    assert not first.is_first_step


@each_case(("usual_s", "limit_s"), [(0.01, 60), (1.0, 60), (10.0, 300), (60.0, 1800)])
def test_the_limit_is_thirty_usual_steps_and_at_least_a_minute(usual_s: float, limit_s: float) -> None:
    age = new_age()
    assert list(ages([*(step(usual_s) for _ in range(40)), Part(1)], age)) == []
    assert age.limit_ns == pytest.approx(limit_s * NS_PER_S, rel=0.1)


def test_one_slow_step_does_not_change_what_is_usual() -> None:
    age = new_age()
    list(ages([*(step(1.0) for _ in range(20)), step(500), *(step(1.0) for _ in range(5)), Part(1)], age))
    assert age.usual_step_ns == pytest.approx(NS_PER_S, rel=0.1)


@each_case("num_ended", [0, 1, 4])
def test_the_first_steps_may_take_two_minutes(num_ended: int) -> None:
    first = alarms([*(step(1.0) for _ in range(num_ended)), Part(200)])[0]
    assert first.is_first_step
    assert 120 < first.step_age_ns / NS_PER_S < 123


def test_before_any_step_the_last_operation_counts() -> None:
    assert alarms([Part(10, moves=True) for _ in range(100)]) == []
    assert alarms([Part(500, moves=True), Part(200)])[0].step_age_ns < 123 * NS_PER_S


def test_a_step_whose_operations_go_on_may_take_ten_times_as_long() -> None:
    usual = [step(1.0) for _ in range(20)]
    assert alarms([*usual, Part(550, moves=True)]) == []
    assert alarms([*usual, Part(700, moves=True)])[0].step_age_ns >= 600 * NS_PER_S


def test_a_checkpoint_may_take_five_times_its_usual_length() -> None:
    steps = [step(1.0) for _ in range(20)]
    before = [*steps, Part(100, Phase.CHECKPOINT), *steps]
    assert alarms([*before, Part(490, Phase.CHECKPOINT)]) == []
    late = alarms([*before, Part(600, Phase.CHECKPOINT)])
    assert late[0].step_age_ns >= 500 * NS_PER_S


def test_a_first_checkpoint_or_evaluation_may_take_twenty_minutes() -> None:
    for phase in (Phase.CHECKPOINT, Phase.EVAL):
        usual = [step(1.0) for _ in range(20)]
        assert alarms([*usual, Part(1190, phase)]) == []
        assert alarms([*usual, Part(1300, phase)])[0].step_age_ns >= 1200 * NS_PER_S


def test_a_checkpoint_that_usually_ends_between_two_looks_may_not_take_long() -> None:
    usual = [part for _ in range(20) for part in (step(1.0), Part(0.2, Phase.CHECKPOINT))]
    assert alarms([*usual, Part(100, Phase.CHECKPOINT)])[0].step_age_ns < 70 * NS_PER_S


def test_the_rest_of_a_step_after_a_long_checkpoint_has_its_own_time() -> None:
    usual = [step(1.0) for _ in range(20)]
    assert alarms([*usual, Part(1000, Phase.CHECKPOINT), Part(55), *usual]) == []
    late = alarms([*usual, Part(1000, Phase.CHECKPOINT), Part(100)])
    assert 60 < late[0].step_age_ns / NS_PER_S < 63


def test_any_step_may_be_a_checkpoint_where_phases_are_not_observed() -> None:
    age, found = new_age(), []
    for second in range(1400):
        seen = Look(step=min(second, 20), num_moves=0, sees_phases=False)
        found += [age.look(second * NS_PER_S, seen)]
    late = [one for one in found if one is not None]
    assert late[0].step_age_ns == 1201 * NS_PER_S
    assert late[0].limit_ns == 1200 * NS_PER_S


def test_other_phases_are_no_reason_to_take_long() -> None:
    usual = [step(1.0) for _ in range(20)]
    assert alarms([*usual, Part(100, Phase.DATA)])[0].step_age_ns < 63 * NS_PER_S


def test_time_in_which_the_process_was_suspended_does_not_count() -> None:
    usual = [step(1.0) for _ in range(20)]
    assert alarms([*usual, Part(10), Part(10_000, is_asleep=True), Part(45), *usual]) == []
    late = alarms([*usual, Part(10_000, is_asleep=True), Part(100)])
    assert 60 < late[0].step_age_ns / NS_PER_S < 66


def test_time_that_the_watchdog_itself_takes_counts() -> None:
    age, seen = new_age(), Look(step=1, num_moves=0)
    age.look(NS_PER_S, seen)
    age.returned(190 * NS_PER_S)
    found = age.look(191 * NS_PER_S, seen)
    assert found is not None
    assert found.step_age_ns == 191 * NS_PER_S


def test_a_job_may_be_ended_after_twice_the_time_and_ten_times_in_the_first_steps() -> None:
    usual = [step(1.0) for _ in range(20)]
    found = list(ages([*usual, Part(200)], new_age()))
    assert min(age.step_age_ns for age in found if age.may_end_job) // NS_PER_S in (120, 121)
    found = list(ages([Part(1300)], new_age()))
    assert min(age.step_age_ns for age in found if age.may_end_job) // NS_PER_S in (1200, 1201)


def test_a_step_number_that_goes_back_is_progress_as_well() -> None:
    """Steps are numbered provisionally until it is known how they end."""
    age = new_age()
    numbers = [0, 1, 2, 3, 4, 5, 6, 2, 3]
    for second, number in enumerate(numbers):
        assert age.look(50 * second * NS_PER_S, Look(step=number, num_moves=0)) is None
        age.returned(50 * (second + 1) * NS_PER_S)
    assert age.usual_step_ns == 50 * NS_PER_S
