from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.recurrence import find_period


@each_case("length", [7.0, 10.0, 13.5])
def test_finds_the_period_of_events(length):
    times = np.rint(np.arange(3.0, 200.0, length))
    found = find_period([times], span=200.0, least=2.0)
    assert found is not None
    assert found.length == pytest.approx(length, rel=0.05)
    assert found.p_value < 0.01


def test_independent_events_have_no_period():
    random = np.random.default_rng(1)
    p_values = []
    for _ in range(200):
        found = find_period([np.sort(random.uniform(0, 1000, 20))], span=1000.0, least=2.0)
        assert found is not None
        p_values.append(found.p_value)
    assert np.mean(np.array(p_values) < 0.01) <= 0.02


@each_case("times", [[], [1.0], [1.0, 2.0]])
def test_two_events_are_no_period(times):
    assert find_period([np.array(times)], span=100.0, least=2.0) is None


def test_a_span_of_fewer_than_three_periods_cannot_tell():
    assert find_period([np.arange(5.0)], span=5.0, least=2.0) is None


def test_units_with_phases_of_their_own_share_a_period():
    random = np.random.default_rng(2)
    events = [np.rint(phase + np.arange(0.0, 100.0, 13.0)) for phase in random.uniform(0, 13, 8)]
    found = find_period(events, span=112.0, least=2.0)
    assert found is not None and found.p_value < 1e-6
    assert found.length == pytest.approx(13.0, rel=0.05)


def test_events_of_many_units_at_random_share_none():
    random = np.random.default_rng(3)
    found = [
        find_period([np.sort(random.uniform(0, 200, 4)) for _ in range(16)], span=200, least=2) for _ in range(100)
    ]
    assert np.mean([period is not None and period.p_value < 0.01 for period in found]) <= 0.03


def test_four_events_at_equal_distances_are_enough():
    found = find_period([np.array([4.0, 17.0, 30.0, 43.0])], span=50.0, least=2.0)
    assert found is not None and found.p_value < 0.01
