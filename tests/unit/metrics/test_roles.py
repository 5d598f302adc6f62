from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.kernels import others_median
from hpcpace.metrics.resampling import trimmed_mean
from hpcpace.metrics.roles import excess_over_role, same_work


@each_case("num_ranks", [2, 3, 4, 5, 8])
def test_the_median_of_the_others_leaves_the_rank_out(num_ranks):
    values = np.random.default_rng(num_ranks).normal(size=(num_ranks, 30))
    expected = [np.median(np.delete(values, rank, axis=0), axis=0) for rank in range(num_ranks)]
    assert np.allclose(others_median(values), expected)


def excess_of(values, is_slow=None):
    found = excess_over_role(values, np.zeros(len(values), np.int64), is_slow)
    return [found.of_rank(rank) for rank in range(len(values))]


def work(num_ranks=4, num_steps=100, noise=0.05, seed=0):
    return 100.0 * np.random.default_rng(seed).normal(1.0, noise, (num_ranks, num_steps))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_slow_rank_is_marked_and_no_other_one(num_ranks):
    values = work(num_ranks)
    values[1] *= 1.3
    found = excess_of(values)
    assert [excess.is_marked for excess in found] == [rank == 1 for rank in range(num_ranks)]
    assert found[1].share == pytest.approx(0.3, abs=0.03)


def test_equal_ranks_are_not_marked_in_a_hundred_runs():
    marked = [e.is_marked for seed in range(100) for e in excess_of(work(noise=0.2, seed=seed))]
    assert not any(marked)


def test_a_certain_excess_below_the_floor_is_not_marked():
    values = work(noise=0.001)
    values[0] *= 1.03
    (excess, *_) = excess_of(values)
    assert excess.share > excess.noise
    assert not excess.is_marked


def test_noise_in_runs_of_steps_counts_as_noise():
    values = work(2, 100, 0.0)
    values[0, 40:45] *= 5
    (excess, _) = excess_of(values)
    assert excess.share == pytest.approx(0.2)
    assert not excess.is_marked


@each_case("shape", [(1, 100), (4, 5), (4, 1), (4, 0)])
def test_a_single_rank_or_few_steps_are_not_compared(shape):
    assert excess_of(np.ones(shape)) == [None] * shape[0]


def test_ranks_that_never_work_are_not_compared():
    assert excess_of(np.zeros((2, 50))) == [None, None]


@each_case("num_ranks", [3, 12, 31])
def test_usual_is_the_trimmed_mean_of_the_others(num_ranks):
    values = work(num_ranks, 60)
    blocks = values.reshape(num_ranks, 20, 3).mean(axis=2)
    expected = [
        (blocks[rank] / trimmed_mean(np.delete(blocks, rank, axis=0), 0.1) - 1).mean() for rank in range(num_ranks)
    ]
    assert [excess.share for excess in excess_of(values)] == pytest.approx(expected)


def test_slow_ranks_do_not_make_others_seem_fast():
    values = work(4, noise=0.0)
    values[:2] *= 1.5
    found = excess_of(values, np.array([True, True, False, False]))
    assert [excess.share for excess in found] == pytest.approx([0.5, 0.5, 0, 0])


def test_where_all_are_slow_they_are_compared_with_each_other():
    found = excess_of(work(2, noise=0.0) * np.array([[1.5], [1.0]]), np.array([True, True]))
    assert [excess.share for excess in found] == pytest.approx([0.5, -1 / 3])


def test_some_ranks_together_have_the_mean_of_their_excess():
    values = work(5)
    found = excess_over_role(values, np.zeros(5, np.int64))
    assert found.of([1, 2]).value == pytest.approx((found.of_rank(1).share + found.of_rank(2).share) / 2)


@pytest.mark.parametrize(
    ("stage", "slot", "role"),
    [
        ([0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 1]),  # with a replica
        ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1]),
        ([0, 1, 2], [0, 0, 0], [0, 1, 2]),
        ([-1, -1], [-1, -1], [0, 0]),
        ([], [], []),
    ],
)
def test_slots_of_a_stage_do_the_same_work_where_nobody_shares_one(stage, slot, role):
    assert same_work(np.array(stage, np.int64), np.array(slot, np.int64)).tolist() == role
