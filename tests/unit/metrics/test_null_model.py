from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.amplification import deal, split_work
from hpcpace.metrics.growth import Comparison, null_model


def compared(work, *, node=None, seed=0):
    parts = split_work(work, np.arange(len(work)) if node is None else node, seed=seed)
    return null_model(work, parts, seed=seed, num_draws=99) if parts is not None else None


def loss_of(work):
    return float((work.max(axis=0) - work.mean(axis=0)).mean(axis=0).sum())


def expected_loss(found, work):
    """Return the loss of independent units in the units of the work."""
    return (found.amplification.value - 1) * float(work.mean(axis=(0, 1)).sum())


def noise(num_ranks, num_steps=300, num_segments=1, *, seed=0):
    return 100 + np.random.default_rng(seed).normal(size=(num_ranks, num_steps, num_segments))


@each_case("num_ranks", [2, 3, 4, 16])
def test_independent_noise_is_within_its_null(num_ranks):
    found = [compared(noise(num_ranks, seed=seed), seed=seed) for seed in range(10)]
    assert sum(one.comparison is Comparison.WITHIN for one in found) >= 8
    ratios = [
        expected_loss(one, work) / loss_of(work)
        for one, work in zip(found, [noise(num_ranks, seed=seed) for seed in range(10)], strict=True)
    ]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.02)


def test_independent_noise_is_seldom_outside_its_null():
    found = [compared(noise(8, 200, seed=seed), seed=seed).comparison for seed in range(100)]
    assert sum(one is not Comparison.WITHIN for one in found) <= 10


@each_case("num_ranks", [2, 4, 16])
def test_a_delay_that_rotates_is_above_the_null(num_ranks):
    work = noise(num_ranks)
    work[np.arange(300) % num_ranks, np.arange(300)] += 20.0
    found = compared(work)
    assert found.comparison is Comparison.ABOVE
    # Of P independent ranks, each late in 1 of P steps, none is in (1 - 1/P)^P of the steps.
    share = 1 - (1 - 1 / num_ranks) ** num_ranks
    expected = expected_loss(found, work) + 20 / num_ranks
    assert expected / (loss_of(work) + 20 / num_ranks) == pytest.approx(share, abs=0.06)


def test_a_cause_that_some_ranks_share_is_below_the_null():
    work = noise(16)
    work[:6] += 20.0 * (np.random.default_rng(1).random((1, 300, 1)) < 0.1)
    found = compared(work)
    assert found.comparison is Comparison.BELOW


def test_what_all_share_costs_nothing():
    work = noise(16) + np.random.default_rng(1).normal(0, 10.0, (1, 300, 1))
    found = compared(work)
    assert found.comparison is Comparison.WITHIN
    assert expected_loss(found, work) == pytest.approx(1.766, rel=0.05)


@each_case("num_ranks", [2, 3, 4])
def test_few_ranks_with_much_in_common_are_not_accused(num_ranks):
    rng = np.random.default_rng(2)
    work = 100 + rng.exponential(size=(num_ranks, 300, 1)) + rng.normal(0, 3.0, (1, 300, 1))
    assert compared(work).comparison is Comparison.WITHIN


def test_a_slow_rank_stays_slow_in_the_null():
    work = noise(8)
    work[2] += 50.0
    found = compared(work)
    assert found.comparison is Comparison.WITHIN
    assert found.amplification.value == pytest.approx(1 + loss_of(work) / float(work.mean()), rel=1e-3)


def test_segments_are_summed():
    one, three = (expected_loss(compared(work), work) for work in (noise(8, 300, 1), noise(8, 300, 3)))
    assert three == pytest.approx(3 * one, rel=0.05)


def test_serial_correlation_is_kept_and_makes_the_interval_wider():
    rng = np.random.default_rng(3)
    walk = rng.normal(size=(8, 500, 1))
    for step in range(1, 500):
        walk[:, step] += 0.9 * walk[:, step - 1]
    found, plain = compared(100 + walk), compared(100 + rng.permuted(walk, axis=1))
    widths = [one.amplification.high - one.amplification.low for one in (found, plain)]
    assert widths[0] > 1.5 * widths[1]


def test_noise_that_the_ranks_of_a_node_share_makes_nodes_the_units():
    node = np.repeat(np.arange(8), 4)
    of_node = np.random.default_rng(1).normal(size=(8, 300, 1))
    found = compared(noise(32) + of_node[node], node=node)
    assert found.is_node_unit
    assert found.comparison is Comparison.WITHIN


def test_ranks_are_units_where_their_noise_is_their_own():
    node = np.repeat(np.arange(8), 4)
    found = [compared(noise(32, 100, seed=seed), node=node).is_node_unit for seed in range(20)]
    assert sum(found) <= 1


@each_case("shape", [(0, 9, 1), (1, 20, 1), (4, 0, 1), (4, 1, 1), (4, 20, 0), (4, 5, 1)])
def test_too_little_has_no_null(shape):
    assert compared(np.ones(shape)) is None


def test_no_work_has_no_null():
    assert compared(np.zeros((4, 20, 1))) is None


def test_constant_work_is_within_a_null_of_nothing():
    found = compared(np.full((4, 20, 2), 0.1))
    assert found.comparison is Comparison.WITHIN
    assert found.amplification.value == pytest.approx(1.0)


def test_large_data_get_fewer_draws(monkeypatch):
    made = []
    monkeypatch.setattr("hpcpace.metrics.growth.deal", lambda *args: made.append(args) or deal(*args))
    monkeypatch.setattr("hpcpace.metrics.growth.MAX_ELEMENTS", 50 * 4 * 100)
    compared(noise(4, 100))
    assert len(made) == 50
    compared(noise(8, 100))
    assert len(made) == 50 + 39
