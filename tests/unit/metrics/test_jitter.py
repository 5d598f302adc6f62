from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.amplification import amplification, noise_amplification, noise_intensity, noise_shares


def noisy(num_ranks, num_steps, num_segments=1, *, mean=1e6, noise=1e4, seed=0):
    return np.random.default_rng(seed).normal(mean, noise, (num_ranks, num_steps, num_segments))


@each_case(("num_ranks", "largest"), [(2, 0.56419), (4, 1.02938), (8, 1.42360), (100, 2.50759)])
def test_normal_noise_costs_the_normal_order_statistic(num_ranks, largest):
    found = amplification(noisy(num_ranks, 4000))
    assert found.loss_ns == pytest.approx(largest * 1e4, rel=0.03)
    assert found.amplification == pytest.approx(1 + largest * 0.01, abs=4e-4)
    low, high = found.interval
    assert low < 1 + largest * 0.01 < high


def test_exponential_noise_costs_the_harmonic_number():
    work = np.random.default_rng(0).exponential(1e6, (16, 8000, 1))
    harmonic = sum(1 / k for k in range(1, 17))
    assert amplification(work).amplification == pytest.approx(harmonic, rel=0.02)


@each_case("seed", range(5))
def test_the_parts_multiply_and_add_up_exactly(seed):
    rng = np.random.default_rng(seed)
    found = amplification(rng.gamma(2.0, 1e5, (rng.integers(1, 9), rng.integers(1, 50), rng.integers(1, 5))))
    assert found.persistent * found.transient == pytest.approx(found.amplification, rel=1e-14)
    assert found.transient >= 1.0
    assert found.persistent >= 1.0


def test_one_slow_rank_is_persistent_and_no_jitter():
    work = np.full((8, 100, 1), 1e6)
    work[3] *= 1.5
    found = amplification(work + noisy(8, 100, mean=0.0, noise=1e2))
    assert found.transient == pytest.approx(1.0, abs=1e-9)
    assert found.persistent == pytest.approx(1.5 / 1.0625, rel=1e-3)
    assert found.persistent_null == pytest.approx(1.0, abs=1e-4)


def test_a_delay_that_rotates_is_transient_only():
    work = np.full((4, 400, 1), 1e6)
    work[np.arange(400) % 4, np.arange(400)] = 2e6
    found = amplification(work)
    assert found.persistent == pytest.approx(1.0)
    assert found.amplification == found.transient == pytest.approx(2 / 1.25)


def test_what_strikes_all_at_once_costs_nothing():
    work = np.repeat(noisy(1, 50, noise=3e5), 8, axis=0)
    assert amplification(work).loss_ns == pytest.approx(0.0, abs=1e-6)


def test_different_segments_add_up_where_step_sums_would_hide_the_loss():
    work = np.full((2, 10, 2), 1e6)
    work[0, :, 0] = work[1, :, 1] = 2e6
    assert amplification(work).loss_ns == pytest.approx(1e6)
    assert amplification(work.sum(axis=2, keepdims=True)).loss_ns == pytest.approx(0.0)


def test_the_null_of_the_persistent_part_is_the_largest_mean_of_noise():
    found = amplification(noisy(16, 400), num_draws=200)
    # The largest of 16 normal means, each with noise / sqrt(steps).
    assert found.persistent_null == pytest.approx(1 + 1.76599 * 0.01 / 20, abs=6e-5)


def test_noise_alone_is_as_persistent_as_its_null():
    found = [amplification(noisy(8, 100, 2, seed=seed), num_draws=39) for seed in range(200)]
    assert np.mean([one.persistent - 1 for one in found]) == pytest.approx(
        np.mean([one.persistent_null - 1 for one in found]), rel=0.05
    )


def test_serial_correlation_of_a_rank_is_not_taken_for_a_slow_rank():
    found = []
    for seed in range(100):
        walk = noisy(8, 600, noise=1e4, mean=0.0, seed=seed)
        for step in range(1, 600):
            walk[:, step] += 0.8 * walk[:, step - 1]
        found.append(amplification(1e6 + walk, num_draws=59))
    assert np.mean([one.persistent - 1 for one in found]) == pytest.approx(
        np.mean([one.persistent_null - 1 for one in found]), rel=0.15
    )


@each_case("shape", [(0, 5, 1), (5, 0, 1), (5, 5, 0)])
def test_nothing_has_no_amplification(shape):
    assert amplification(np.ones(shape)) is None
    assert noise_intensity(np.ones(shape)) is None
    assert noise_shares(np.ones(shape)) is None
    assert noise_amplification(np.ones(5), np.ones(shape), np.ones(5)) is None


def test_no_work_has_no_amplification():
    assert amplification(np.zeros((4, 20, 1))) is None
    assert noise_intensity(np.zeros((4, 20, 1))) is None


def test_one_rank_and_constant_work_lose_nothing():
    for work in (noisy(1, 20), np.full((4, 20, 3), 0.1)):
        found = amplification(work)
        assert found.amplification == pytest.approx(1.0)
        assert found.loss_ns == pytest.approx(0.0, abs=1e-9)


def test_an_interval_does_not_go_below_no_loss():
    work = np.full((2, 40, 1), 1.0)
    work[0, 20] = 1e9
    found = amplification(work)
    low, high = found.interval
    assert 1.0 <= low <= found.amplification <= high


def test_few_steps_have_no_null_and_no_interval():
    found = amplification(noisy(4, 3))
    assert (found.interval, found.persistent_null) == (None, None)


def test_shares_of_variance_are_those_put_in():
    rng = np.random.default_rng(0)
    work = 100 + rng.normal(0, 3**0.5, (1, 2000, 1)) + rng.normal(0, 2.0, (200, 1, 1)) + rng.normal(size=(200, 2000, 1))
    found = noise_shares(work)
    assert found.common == pytest.approx(3 / 8, abs=0.04)
    assert found.rank == pytest.approx(4 / 8, abs=0.06)
    assert found.residual == pytest.approx(1 / 8, abs=0.02)
    assert found.common + found.rank + found.residual == pytest.approx(1.0)


def test_pure_noise_is_residual():
    found = noise_shares(noisy(16, 500, 2))
    assert found.residual > 0.98


def test_common_noise_is_common():
    assert noise_shares(np.repeat(noisy(1, 50), 4, axis=0)).common == pytest.approx(1.0)


@each_case("work", [np.full((4, 9, 2), 0.3), np.ones((1, 9, 1)), np.ones((4, 1, 1))])
def test_constant_or_single_work_has_no_shares(work):
    assert noise_shares(work) is None


def test_intensity_is_that_of_uniform_noise():
    work = np.random.default_rng(0).uniform(1e6, 2e6, (8, 20_000, 1))
    assert noise_intensity(work) == pytest.approx(1.5 / 1.05 - 1, rel=0.01)


def test_ranks_without_a_quiet_time_do_not_count():
    work = np.full((2, 20, 1), 1e6)
    work[1, :10] = 0.0
    assert noise_intensity(work) == 0.0


def test_synchronising_amplifies_noise():
    work = noisy(64, 2000, noise=1e4)
    step = work.max(axis=0)[:, 0] + 1e5
    nu = noise_intensity(work)
    ideal = np.quantile(work[:, :, 0], 0.05, axis=1).max() + 1e5
    assert noise_amplification(step, work, np.full(2000, 1e5)) == pytest.approx((step.mean() / ideal - 1) / nu)
    assert noise_amplification(step, work, np.full(2000, 1e5)) > 1.5


def test_noise_behind_a_long_transfer_is_absorbed():
    work = noisy(4, 2000, noise=1e4)
    assert noise_amplification(np.full(2000, 6.0e6), work, np.full(2000, 5e6)) < 0.2


def test_without_noise_there_is_no_noise_amplification():
    assert noise_amplification(np.full(9, 2.0), np.ones((2, 9, 1)), np.ones(9)) is None
    assert noise_amplification(np.zeros(0), noisy(2, 9), np.zeros(0)) is None
    barely = np.ones((2, 9, 1))
    barely[0, 3] += 1e-9
    assert noise_amplification(np.full(9, 2.0), barely, np.ones(9)) is None
