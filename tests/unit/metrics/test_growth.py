from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from cases import each_case
from scipy.special import beta

from hpcpace.metrics.amplification import amplification, split_work
from hpcpace.metrics.growth import (
    default_points,
    expected_maxima,
    growth_exponent,
    maximum_weights,
    work_growth,
)

HARMONIC = np.cumsum(1 / np.arange(1, 5000))


def curve(residual, mean=10.0):
    work = mean + residual.reshape(*residual.shape[:2], -1)
    return work_growth(work, split_work(work, np.arange(len(work))))


def exponent(residual, mean=10.0):
    residual = residual.reshape(*residual.shape[:2], -1)
    k = default_points(len(residual))
    return growth_exponent(expected_maxima(residual, k) / mean, k)


def slope_of(k, excess):
    begin = len(k) // 2
    return np.polyfit(np.log(k[begin:]), np.log(excess[begin:]), 1)[0]


def test_is_the_mean_over_all_choices_of_k_units():
    values = np.random.default_rng(0).normal(size=(6, 1, 1))
    k = np.arange(1, 7)
    expected = [np.mean([max(chosen) for chosen in combinations(values.ravel(), size)]) for size in k]
    assert expected_maxima(values, k)[0] == pytest.approx(expected)


@each_case("num_units", [1, 2, 7, 40])
def test_weights_are_ratios_of_binomial_coefficients(num_units):
    k = np.arange(1, num_units + 1)
    exact = [[comb(j - 1, size - 1) / comb(num_units, size) for j in k] for size in k]
    assert maximum_weights(num_units, k) == pytest.approx(np.array(exact), rel=1e-10)


def test_weights_are_stable_for_4096_units():
    k = np.array([1, 2, 64, 2048, 4095, 4096])
    weights = maximum_weights(4096, k)
    assert np.isfinite(weights).all()
    # Of the ranks 1 to P themselves, the expected maximum of k is k (P + 1) / (k + 1).
    assert weights @ np.arange(1, 4097) == pytest.approx(k * 4097 / (k + 1), rel=1e-9)


def test_exponential_noise_grows_as_the_harmonic_number():
    residual = np.random.default_rng(0).exponential(1.0, (256, 400)) - 1.0
    found = curve(residual)
    truth = (HARMONIC[found.k - 1] - 1) / 10
    low, high = found.interval
    assert found.amplification - 1 == pytest.approx(truth, rel=0.03, abs=4e-4)
    assert (low <= 1 + truth + 1e-3).all()
    assert (high >= 1 + truth - 1e-3).all()
    slope, (low, high) = exponent(residual)
    assert slope == pytest.approx(slope_of(found.k, truth), abs=0.02)
    assert low <= slope <= high


def test_bounded_noise_has_an_exponent_near_0():
    assert exponent(np.random.default_rng(0).uniform(-1, 1, (256, 300)))[0] < 0.05


@pytest.mark.parametrize("index", [2.5, 4.0])
def test_heavy_tails_have_one_over_their_index(index):
    residual = np.random.default_rng(0).pareto(index, (512, 1500)) - 1 / (index - 1)
    k, (slope, _) = default_points(512), exponent(residual)
    truth = k * beta(k, 1 - 1 / index) - 1 - 1 / (index - 1)
    assert slope == pytest.approx(slope_of(k, truth), abs=0.06)
    assert slope == pytest.approx(1 / index, abs=0.15)


def test_rare_events_have_an_exponent_of_1():
    residual = (np.random.default_rng(0).random((64, 4000)) < 1e-4) * 50.0
    assert exponent(residual - residual.mean())[0] == pytest.approx(1.0, abs=0.1)


def test_units_that_take_turns_grow_faster_than_independent_ones():
    work = 100 + 0.1 * np.random.default_rng(0).normal(size=(8, 400, 1))
    work[np.arange(400) % 8, np.arange(400)] += 20
    parts = split_work(work, np.arange(8))
    found = work_growth(work, parts)
    assert found.amplification[-1] > found.null[-1] + 0.03
    assert found.exponent > slope_of(found.k, found.null - 1)


def test_independent_units_grow_as_their_null():
    work = 100 + np.random.default_rng(0).normal(size=(16, 1000, 2))
    found = work_growth(work, split_work(work, np.arange(16)))
    assert found.null == pytest.approx(found.amplification, abs=3e-4)
    assert found.exponent == pytest.approx(slope_of(found.k, found.null - 1), abs=0.03)


def test_nodes_that_share_noise_are_counted_as_one():
    node = np.repeat(np.arange(8), 4)
    rng = np.random.default_rng(0)
    work = 100 + rng.normal(size=(8, 300, 1))[node] + 0.1 * rng.normal(size=(32, 300, 1))
    found = work_growth(work, split_work(work, node))
    assert found.k.tolist() == list(range(1, 9))
    # The largest of 8 normal values, and of the 4 ranks of one node.
    assert found.amplification[-1] - found.amplification[0] == pytest.approx(0.01423, rel=0.1)
    assert found.amplification[0] > 1.0005


@each_case("num_units", [1, 2, 5, 32, 33, 100, 4096])
def test_points_hold_1_2_and_all(num_units):
    k = default_points(num_units)
    assert len(k) <= 32
    assert (np.diff(k) > 0).all()
    assert {1, min(2, num_units), num_units} <= set(k.tolist())


def test_no_work_does_not_grow():
    assert curve(np.zeros((4, 4)), 0.0) is None


def test_constant_work_has_no_exponent():
    assert curve(np.zeros((8, 20))).amplification == pytest.approx(np.ones(8))
    assert exponent(np.zeros((8, 20))) == (None, None)


def test_one_unit_has_one_point_and_no_exponent():
    assert default_points(1).tolist() == [1]
    assert exponent(np.random.default_rng(0).normal(size=(1, 20))) == (None, None)


def test_two_units_have_no_exponent():
    assert exponent(np.random.default_rng(0).normal(size=(2, 200))) == (None, None)


def test_few_steps_have_no_interval():
    assert curve(np.random.default_rng(0).normal(size=(4, 3))).interval is None


def test_with_lasting_differences_the_curve_runs_from_1_to_the_amplification():
    work = 100 + np.random.default_rng(0).normal(size=(6, 200, 2))
    work[2] *= 1.4
    parts = split_work(work, np.arange(6))
    found = work_growth(work, parts)
    low, high = found.interval
    assert [found.amplification[0], low[0], high[0], found.null[0]] == pytest.approx([1.0] * 4)
    assert found.amplification[-1] == pytest.approx(amplification(work).amplification)
    assert (low <= found.amplification + 1e-12).all() and (found.amplification <= high + 1e-12).all()
    assert found.null == pytest.approx(found.amplification, abs=2e-3)


def test_lasting_differences_are_not_in_the_exponent():
    work = 100 + np.random.default_rng(0).normal(size=(6, 200, 1))
    slow = work + np.arange(6)[:, None, None]
    exponents = [work_growth(of, split_work(of, np.arange(6))).exponent for of in (work, slow)]
    assert exponents[0] == pytest.approx(exponents[1], abs=0.02)
