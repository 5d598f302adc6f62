from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from scipy.stats import trim_mean

from hpcpace.metrics.resampling import block_length, chance_above_zero, lag_one, moving_block_bootstrap, trimmed_mean


def autoregression(correlation, *, num_series, num_steps, seed=0):
    """Return stationary series of mean 0, (num_series, num_steps)."""
    noise = np.random.default_rng(seed).normal(size=(num_series, num_steps))
    series = np.empty_like(noise)
    series[:, 0] = noise[:, 0] / (1 - correlation**2) ** 0.5
    for step in range(1, num_steps):
        series[:, step] = correlation * series[:, step - 1] + noise[:, step]
    return series


@each_case("correlation", [0.0, 0.3, 0.6])
def test_covers_the_mean_of_correlated_steps_in_about_95_percent(correlation):
    series = autoregression(correlation, num_series=300, num_steps=500, seed=3)
    intervals = [moving_block_bootstrap(values, num_draws=300, seed=i) for i, values in enumerate(series)]
    assert 0.91 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.99


def test_is_as_wide_as_theory_says_for_independent_steps():
    values = np.random.default_rng(1).normal(5.0, 2.0, 10_000)
    low, high = moving_block_bootstrap(values)
    assert high - low == pytest.approx(2 * 1.96 * 2.0 / 100, rel=0.1)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.005)


def test_correlated_steps_give_a_wider_interval():
    width = [np.ptp(moving_block_bootstrap(autoregression(r, num_series=1, num_steps=2000)[0])) for r in (0.0, 0.8)]
    # The standard error grows by 1 / (1 - r) for noise of the same variance.
    assert 3.0 < width[1] / width[0] < 7.0


def test_takes_a_statistic_of_several_means():
    rng = np.random.default_rng(2)
    base = rng.normal(10.0, 1.0, 400)
    values = np.column_stack([3 * base, base])
    low, high = moving_block_bootstrap(values, lambda means: means[..., 0] / means[..., 1])
    assert low == pytest.approx(3.0)
    assert high == pytest.approx(3.0)
    assert np.shape(low) == ()


def test_returns_one_interval_for_each_column():
    low, high = moving_block_bootstrap(np.random.default_rng(2).normal(size=(100, 4)))
    assert low.shape == high.shape == (4,)
    assert (low < high).all()


def test_draws_without_a_value_do_not_count():
    values = np.random.default_rng(2).normal(size=200)
    low, high = moving_block_bootstrap(values, lambda means: np.where(means[..., 0] > 0, means[..., 0], np.nan))
    assert np.isnan(low) or low <= high


def test_a_statistic_that_never_has_a_value_has_no_interval():
    low, high = moving_block_bootstrap(np.arange(20.0), lambda means: np.full(len(means), np.nan))
    assert np.isnan(low)
    assert np.isnan(high)


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(2).normal(size=200)
    assert moving_block_bootstrap(values, seed=5) == moving_block_bootstrap(values, seed=5)


def test_constant_values_have_an_interval_of_no_width():
    low, high = moving_block_bootstrap(np.full(50, 7.0))
    assert (low, high) == (7.0, 7.0)


@each_case("num_steps", [0, 1, 7])
def test_too_few_steps_have_no_interval(num_steps):
    assert moving_block_bootstrap(np.ones(num_steps)) is None
    assert chance_above_zero(np.arange(float(num_steps))) is None


@each_case(
    ("num_steps", "correlation", "length"),
    [(1000, 0.0, 10), (1000, -0.5, 10), (27, 0.0, 3), (1, 0.0, 1), (60, 0.999, 10)],
)
def test_blocks_have_the_cube_root_of_the_steps_and_a_sixth_at_most(num_steps, correlation, length):
    assert block_length(num_steps, correlation) == length


def test_blocks_are_longer_for_correlated_steps():
    # (1.5 * 1000) ** (1/3) * (1.6 / 0.36) ** (2/3)
    assert block_length(1000, 0.8) == 31


def test_finds_the_correlation_of_neighbours():
    series = autoregression(0.6, num_series=1, num_steps=20_000)[0]
    assert lag_one(series) == pytest.approx(0.6, abs=0.02)


@each_case("values", [np.zeros(0), np.ones(1), np.ones(10), np.zeros((5, 0))])
def test_constant_or_missing_values_have_no_correlation(values):
    assert lag_one(values) == 0.0


def test_rejects_a_mean_of_0_as_often_as_its_p_value_says():
    series = autoregression(0.5, num_series=1000, num_steps=300, seed=4)
    rejected = np.mean([chance_above_zero(values) < 0.05 for values in series])
    assert 0.02 < rejected < 0.09


def test_finds_a_mean_above_0():
    assert chance_above_zero(np.random.default_rng(1).normal(1.0, 1.0, 200)) < 1e-6


@each_case("num_values", [1, 2, 9, 10, 11, 64])
@each_case("share", [0.0, 0.1, 0.25])
def test_a_trimmed_mean_is_that_of_scipy(num_values, share):
    values = np.random.default_rng(num_values).normal(size=(num_values, 7))
    assert trimmed_mean(values, share).tolist() == trim_mean(values, share, axis=0).tolist()
