from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.amplification import bound_switches, collective_sensitivity


def test_counts_the_steps_of_each_regime_and_the_switches():
    compute = np.array([2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    communication = np.array([1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    found = bound_switches(compute, communication)
    assert (found.compute_share, found.num_switches) == (5 / 8, 2)


def test_a_balance_within_the_hysteresis_is_no_switch():
    compute = np.array([2.0, 1.02, 0.98, 1.03, 0.97, 1.0])
    found = bound_switches(compute, np.ones(6))
    assert (found.compute_share, found.num_switches) == (1.0, 0)
    assert bound_switches(compute, np.ones(6), margin=0.0).num_switches > 0


def test_first_steps_in_balance_have_the_regime_that_follows():
    assert bound_switches(np.array([1.0, 1.0, 1.0]), np.array([1.0, 1.0, 2.0])).compute_share == 0.0


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_undecided_steps_have_no_regime(value):
    found = bound_switches(np.full(5, value), np.full(5, value))
    assert (found.compute_share, found.num_switches) == (0.0, 0)


def test_no_steps_have_no_regimes():
    assert bound_switches(np.zeros(0), np.zeros(0)) is None


def test_finds_the_slope_of_contention():
    rng = np.random.default_rng(0)
    skew = rng.uniform(1e5, 1e6, 500)
    found = collective_sensitivity(3e6 - 0.7 * skew + rng.normal(0, 1e4, 500), skew, 1e4)
    assert found.slope == pytest.approx(-0.7, abs=4 * found.standard_error)
    assert found.standard_error == pytest.approx(1e4 / (9e5 / 12**0.5) / 500**0.5, rel=0.25)
    assert found.num_operations == 500


def test_the_standard_error_covers_a_slope_of_0_in_correlated_noise():
    rng = np.random.default_rng(1)
    within = []
    for _ in range(200):
        noise = rng.normal(size=(2, 400))
        for step in range(1, 400):
            noise[:, step] += 0.5 * noise[:, step - 1]
        found = collective_sensitivity(noise[0], noise[1] + 100, 0.1)
        within.append(abs(found.slope) < 1.96 * found.standard_error)
    assert np.mean(within) > 0.88


def test_skew_below_three_clock_errors_decides_nothing():
    rng = np.random.default_rng(0)
    assert collective_sensitivity(rng.normal(size=100), rng.uniform(0, 2.9e4, 100), 1e4) is None


def test_only_operations_with_enough_skew_count():
    rng = np.random.default_rng(0)
    skew = np.concatenate([rng.uniform(0, 2e4, 50), rng.uniform(1e5, 1e6, 60)])
    assert collective_sensitivity(np.ones(110), skew, np.full(110, 1e4)).num_operations == 60


@pytest.mark.parametrize("error", [np.inf, 1e6])
def test_an_unknown_clock_decides_nothing(error):
    assert collective_sensitivity(np.arange(50.0), np.arange(50.0) * 1e5, error) is None


@each_case("skew", [np.zeros(0), np.full(50, 1e6), np.zeros(50), np.arange(5.0) * 1e6])
def test_constant_or_missing_skew_has_no_slope(skew):
    assert collective_sensitivity(np.ones(len(skew)), skew, 0.0) is None


def test_transfer_that_never_changes_does_not_depend_on_skew():
    found = collective_sensitivity(np.full(50, 7.0), np.arange(50.0), 0.0)
    assert (found.slope, found.standard_error) == (0.0, 0.0)


def test_groups_whose_transfers_and_skews_differ_show_no_dependence():
    rng = np.random.default_rng(2)
    place = np.arange(400) % 2
    skew = np.where(place == 0, 8e6, 1e6) + rng.normal(0, 1e5, 400)
    transfer = np.where(place == 0, 2e6, 4e6) + rng.normal(0, 1e4, 400)
    assert collective_sensitivity(transfer, skew, 0.0).slope < -0.2
    within = collective_sensitivity(transfer, skew, 0.0, place)
    assert abs(within.slope) < 4 * within.standard_error < 0.1


def test_operations_of_a_place_each_have_no_slope():
    assert collective_sensitivity(np.arange(50.0), np.arange(50.0) ** 2, 0.0, np.arange(50)) is None
