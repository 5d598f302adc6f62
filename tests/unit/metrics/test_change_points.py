"""Changes of level in series of runs: lasting, recent and one-off."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.run_difference import Duration, level_changes, run_spread


def _noise(num_runs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 0.01, num_runs)


def test_a_level_that_stays_is_lasting_from_its_first_run_on() -> None:
    values = _noise(40)
    values[25:] += 0.1
    (change,) = level_changes(values)
    assert (change.duration, change.first, change.last, change.num_runs) == (Duration.LASTING, 25, 39, 15)
    assert change.size == pytest.approx(0.1, abs=0.01)


def test_there_and_back_are_two_lasting_changes() -> None:
    values = _noise(40)
    values[15:30] += 0.1
    assert [(change.first, change.duration) for change in level_changes(values)] == [
        (15, Duration.LASTING),
        (30, Duration.LASTING),
    ]


@pytest.mark.parametrize("length", [1, 2])
def test_a_run_or_two_that_are_off_are_a_one_off(length: int) -> None:
    values = _noise(40)
    values[20 : 20 + length] += 0.3
    (change,) = level_changes(values)
    assert (change.duration, change.first, change.num_runs) == (Duration.ONE_OFF, 20, length)


@pytest.mark.parametrize("length", [1, 2])
def test_too_few_runs_at_the_end_are_recent(length: int) -> None:
    values = _noise(40)
    values[-length:] += 0.3
    (change,) = level_changes(values)
    assert (change.duration, change.num_runs) == (Duration.RECENT, length)


def test_too_few_runs_at_the_begin_are_no_level_to_compare_with() -> None:
    values = _noise(40)
    values[:2] += 0.3
    assert level_changes(values) == []


@each_case("num_runs", [0, 1, 2, 3])
def test_few_runs_have_no_changes(num_runs: int) -> None:
    assert level_changes(np.arange(num_runs, dtype=np.float64)) == []


def test_runs_that_agree_closely_are_not_taken_apart() -> None:
    assert level_changes(np.tile([0.0, 0.004], 10)) == []


def test_equal_runs_have_no_lasting_change_and_hardly_a_one_off() -> None:
    found = [change for seed in range(100) for change in level_changes(_noise(60, seed))]
    assert not any(change.duration is Duration.LASTING for change in found)
    assert len(found) <= 15


def test_a_change_of_five_deviations_is_found_where_it_is() -> None:
    found = 0
    for seed in range(100):
        values = _noise(60, seed)
        values[40:] += 0.05
        lasting = [change for change in level_changes(values) if change.duration is Duration.LASTING]
        found += len(lasting) == 1 and abs(lasting[0].first - 40) <= 1
    assert found >= 95


def test_swings_of_the_week_and_drifts_are_no_changes_of_level() -> None:
    day = np.arange(180) // 3  # three runs a day
    swings = (0.03 * (day % 7 < 5), np.linspace(0.0, 0.15, 180), 0.02 * np.sin(day))
    found = [
        change
        for swing in swings
        for seed in range(20)
        for change in level_changes(_noise(180, seed) + swing)
        if change.duration is Duration.LASTING
    ]
    assert len(found) <= 6


@each_case(("num_runs", "total"), [(60, 0.3), (60, 0.15), (60, -0.15), (20, 0.15)])
def test_a_series_that_changes_gradually_has_a_drift_and_no_level(num_runs: int, total: float) -> None:
    found = [level_changes(_noise(num_runs, seed) + np.linspace(0.0, total, num_runs)) for seed in range(40)]
    drifts = [changes[0] for changes in found if changes and changes[0].duration is Duration.DRIFT]
    assert len(drifts) >= 38
    assert all(change.size == pytest.approx(total, abs=0.025) for change in drifts)
    assert {(change.first, change.last) for change in drifts} == {(0, num_runs - 1)}
    assert sum(change.duration is Duration.LASTING for changes in found for change in changes) <= 1


def test_a_run_that_is_off_from_a_drift_is_a_one_off_from_its_place() -> None:
    values = _noise(60) + np.linspace(0.0, 0.15, 60)
    values[30] += 0.2
    drift, off = level_changes(values)
    assert (drift.duration, off.duration, off.first) == (Duration.DRIFT, Duration.ONE_OFF, 30)
    assert off.before == pytest.approx(0.075, abs=0.01) and off.size == pytest.approx(0.2, abs=0.03)


def test_steps_swings_and_runs_that_are_off_are_no_drift() -> None:
    at = np.arange(60)
    drifts = 0
    for seed in range(60):
        random, noise = np.random.default_rng(seed), _noise(60, seed)
        first, second = int(random.integers(3, 30)), int(random.integers(30, 57))
        steps = 0.05 * (at >= first) + 0.05 * (at >= second)
        others = (
            0.03 * (at >= second),
            0.1 * (at >= first),
            steps,
            0.05 * (at % 7 < 5),
            0.1 * (random.random(60) < 0.1),
        )
        for other in others:
            drifts += any(change.duration is Duration.DRIFT for change in level_changes(noise + other))
    assert drifts <= 3


@each_case("num_runs", [6, 8, 12])
def test_few_equal_runs_have_hardly_a_change(num_runs: int) -> None:
    found = [level_changes(2 * _noise(num_runs, seed)) for seed in range(500)]
    assert sum(any(change.duration is Duration.LASTING for change in changes) for changes in found) <= 3
    assert sum(bool(changes) for changes in found) <= 35
    of_many = [level_changes(2 * _noise(num_runs, seed), num_series=16) for seed in range(500)]
    assert sum(bool(changes) for changes in of_many) <= 8


def test_runs_that_are_often_off_and_to_one_level_have_no_lasting_change() -> None:
    lasting = 0
    for seed in range(100):
        values = _noise(60, seed) / 2
        values[np.random.default_rng(seed).random(60) < 0.2] += 0.06
        lasting += any(change.duration is Duration.LASTING for change in level_changes(values))
    assert lasting <= 6


def test_a_level_that_stays_is_lasting_though_runs_were_there_for_once_before() -> None:
    values = _noise(40) / 2
    values[[5, 15]] += 0.1
    values[30:] += 0.1
    (change,) = [change for change in level_changes(values) if change.duration is Duration.LASTING]
    assert (change.first, change.num_runs) == (30, 10)


def test_the_spread_of_runs_is_not_that_of_their_changes() -> None:
    values = _noise(200)
    values[100:] += 1.0
    assert run_spread(values) == pytest.approx(0.01, rel=0.25)
