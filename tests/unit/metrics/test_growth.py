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
    growth_curve,
    growth_of,
    maximum_weights,
    work_growth,
)

HARMONIC = np.cumsum(1 / np.arange(1, 5000))


def curve(residual, mean=10.0, **options):
    return growth_curve(residual, mean, **options)


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


def test_the_last_point_is_the_measured_loss_and_the_first_is_none():
    work = 100 + np.random.default_rng(0).gamma(2.0, 1.0, (12, 200, 2))
    residual = work - work.mean(axis=1, keepdims=True)
    found = curve(residual, 204.0)
    assert found.amplification[0] == pytest.approx(1.0)
    assert found.amplification[-1] == pytest.approx(1 + residual.max(axis=0).sum(axis=1).mean() / 204.0)


def test_exponential_noise_grows_as_the_harmonic_number():
    residual = np.random.default_rng(0).exponential(1.0, (256, 400)) - 1.0
    found = curve(residual)
    truth = (HARMONIC[found.k - 1] - 1) / 10
    assert found.amplification - 1 == pytest.approx(truth, rel=0.03, abs=4e-4)
    assert (found.low <= 1 + truth + 1e-3).all()
    assert (found.high >= 1 + truth - 1e-3).all()
    assert found.exponent == pytest.approx(slope_of(found.k, truth), abs=0.02)
    low, high = found.exponent_interval
    assert low <= found.exponent <= high


def test_bounded_noise_has_an_exponent_near_0():
    assert curve(np.random.default_rng(0).uniform(-1, 1, (256, 300))).exponent < 0.05


@pytest.mark.parametrize("index", [2.5, 4.0])
def test_heavy_tails_have_one_over_their_index(index):
    residual = np.random.default_rng(0).pareto(index, (512, 1500)) - 1 / (index - 1)
    found = curve(residual)
    truth = found.k * beta(found.k, 1 - 1 / index) - 1 - 1 / (index - 1)
    assert found.exponent == pytest.approx(slope_of(found.k, truth), abs=0.06)
    assert found.exponent == pytest.approx(1 / index, abs=0.15)


def test_rare_events_have_an_exponent_of_1():
    residual = (np.random.default_rng(0).random((64, 4000)) < 1e-4) * 50.0
    assert curve(residual - residual.mean()).exponent == pytest.approx(1.0, abs=0.1)


def test_units_that_take_turns_grow_faster_than_independent_ones():
    work = 100 + 0.1 * np.random.default_rng(0).normal(size=(8, 400, 1))
    work[np.arange(400) % 8, np.arange(400)] += 20
    parts = split_work(work, np.arange(8))
    found = growth_of(parts, float(work.mean()))
    assert found.amplification[-1] > found.null[-1] + 0.03
    assert found.exponent > slope_of(found.k, found.null - 1)


def test_independent_units_grow_as_their_null():
    work = 100 + np.random.default_rng(0).normal(size=(16, 1000, 2))
    found = growth_of(split_work(work, np.arange(16)), 200.0)
    assert found.null == pytest.approx(found.amplification, abs=3e-4)
    assert found.exponent == pytest.approx(slope_of(found.k, found.null - 1), abs=0.03)


def test_nodes_that_share_noise_are_counted_as_one():
    node = np.repeat(np.arange(8), 4)
    rng = np.random.default_rng(0)
    work = 100 + rng.normal(size=(8, 300, 1))[node] + 0.1 * rng.normal(size=(32, 300, 1))
    found = growth_of(split_work(work, node), 100.0)
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


@each_case("shape", [(0, 5), (5, 0), (5, 5, 0)])
def test_nothing_does_not_grow(shape):
    assert curve(np.zeros(shape)) is None
    assert curve(np.zeros((4, 4)), 0.0) is None


def test_constant_work_has_no_exponent():
    found = curve(np.zeros((8, 20)))
    assert (found.amplification == 1.0).all()
    assert (found.exponent, found.exponent_interval) == (None, None)


def test_one_unit_has_one_point_and_no_exponent():
    found = curve(np.random.default_rng(0).normal(size=(1, 20)))
    assert found.k.tolist() == [1]
    assert found.exponent is None


def test_two_units_have_no_exponent():
    assert curve(np.random.default_rng(0).normal(size=(2, 200))).exponent is None


def test_few_steps_have_no_interval():
    found = curve(np.random.default_rng(0).normal(size=(4, 3)))
    assert (found.low, found.high) == (None, None)


def test_with_lasting_differences_the_curve_runs_from_1_to_the_amplification():
    work = 100 + np.random.default_rng(0).normal(size=(6, 200, 2))
    work[2] *= 1.4
    parts = split_work(work, np.arange(6))
    found = work_growth(work, parts)
    assert [found.amplification[0], found.low[0], found.high[0], found.null[0]] == pytest.approx([1.0] * 4)
    assert found.amplification[-1] == pytest.approx(amplification(work).amplification)
    assert (found.low <= found.amplification + 1e-12).all() and (found.amplification <= found.high + 1e-12).all()
    assert found.null == pytest.approx(found.amplification, abs=2e-3)


def test_lasting_differences_are_not_in_the_exponent():
    work = 100 + np.random.default_rng(0).normal(size=(6, 200, 1))
    slow = work + np.arange(6)[:, None, None]
    exponents = [work_growth(of, split_work(of, np.arange(6))).exponent for of in (work, slow)]
    assert exponents[0] == pytest.approx(exponents[1], abs=0.02)
