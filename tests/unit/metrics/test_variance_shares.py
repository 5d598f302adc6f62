from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.amplification import deal, dealt, shared_noise, split_work, unit_maxima, unit_means


def noise(num_ranks, num_steps=300, num_segments=1, *, seed=0):
    return 100 + np.random.default_rng(seed).normal(size=(num_ranks, num_steps, num_segments))


@pytest.mark.parametrize("node", [np.zeros(4, np.int64), np.arange(4)])
def test_one_node_or_one_rank_a_node_cannot_tell(node):
    assert shared_noise(np.random.default_rng(0).normal(size=(4, 50)), node) is None


def test_nodes_of_unequal_size_are_compared():
    node = np.array([0, 0, 0, 5, 5, 9])
    of_node = np.random.default_rng(1).normal(0, 3, (10, 400))
    correlation, chance = shared_noise(np.random.default_rng(0).normal(size=(6, 400)) + of_node[node], node)
    assert correlation == pytest.approx(0.9, abs=0.05)
    assert chance < 0.01


def test_separated_parts_add_up_to_the_work_for_many_ranks():
    work = noise(64, 100, 2) + np.random.default_rng(1).normal(0, 5, (1, 100, 2))
    parts = split_work(work, np.arange(64))
    assert parts.weight == pytest.approx([1.0, 1.0], abs=0.02)
    total = parts.location_ns + parts.rank_effect_ns[:, np.newaxis] + parts.residual_ns
    assert np.abs(total - work).max() < 0.05
    assert np.abs(parts.residual_ns.mean(axis=1)).max() < 1e-12


def test_few_steps_show_what_many_ranks_share():
    work = noise(64, 10) + np.random.default_rng(1).normal(0, 5, (1, 10, 1))
    assert split_work(work, np.arange(64)).weight[0] > 0.95


def test_nothing_in_common_leaves_the_work_alone():
    assert split_work(noise(4, 2000), np.arange(4)).weight.max() < 0.1


@each_case("length", [1, 3, 7, 50, 80])
def test_each_unit_is_dealt_every_step_once(length):
    order = deal(5, 50, length, np.random.default_rng(0))
    assert (np.sort(order, axis=1) == np.arange(50)).all()


def test_blocks_stay_together():
    order = deal(20, 60, 6, np.random.default_rng(0))
    assert (np.diff(order.reshape(20, 10, 6), axis=2) == 1).all()


def test_dealing_keeps_each_rank_and_its_segments_together():
    values = np.arange(24.0).reshape(2, 4, 3)
    order = np.array([[3, 2, 1, 0], [0, 1, 3, 2]])
    mixed = dealt(values, order)
    assert (mixed[0] == values[0, ::-1]).all()
    assert (mixed[1] == values[1, [0, 1, 3, 2]]).all()


@each_case("unit", [[0, 1, 2, 3], [1, 0, 1, 0], [0, 0, 0, 1], [2, 0, 1, 3]])
def test_maxima_and_means_are_those_of_each_unit(unit):
    unit, values = np.array(unit), np.random.default_rng(0).normal(size=(4, 3, 2))
    number = unit.max() + 1
    for measure, plain in ((unit_maxima, np.max), (unit_means, np.mean)):
        expected = [plain(values[unit == one], axis=0) for one in range(number)]
        assert measure(values, unit, number) == pytest.approx(np.array(expected))
