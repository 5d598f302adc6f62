from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.amplification import split_work
from hpcpace.metrics.growth import (
    Algorithm,
    Extrapolation,
    Refusal,
    TransferTerm,
    extrapolate,
    extrapolated_transfer,
    fit_pareto,
)

HARMONIC = np.cumsum(1 / np.arange(1, 2000))


def predicted(work, num_nodes, **options):
    node = options.pop("node", np.arange(len(work)))
    return extrapolate(work, node, np.array(num_nodes), parts=split_work(work, node), **options)


def exponential(num_ranks, num_steps=1000, num_segments=1, *, seed=0):
    return 100 + np.random.default_rng(seed).exponential(size=(num_ranks, num_steps, num_segments))


def loss_of(work):
    return float((work.max(axis=0) - work.mean(axis=0)).mean(axis=0).sum())


@each_case("shape", [-0.4, 0.0, 0.3, 0.6])
def test_fits_the_shape_and_scale_of_a_generalised_pareto_distribution(shape):
    uniform = np.random.default_rng(0).random(20_000)
    excess = np.sort(-np.log(uniform) if shape == 0 else (uniform**-shape - 1) / shape) * 3.0
    found = fit_pareto(excess, np.ones((1, len(excess))))
    assert found.shape[0] == pytest.approx(shape, abs=0.05)
    assert found.scale[0] == pytest.approx(3.0, rel=0.06)


def test_a_weight_counts_as_that_many_values():
    excess = np.sort(np.random.default_rng(0).exponential(size=200))
    twice = fit_pareto(np.repeat(excess, 2), np.ones((1, 400)))
    assert fit_pareto(excess, np.full((1, 200), 2.0)).shape == pytest.approx(twice.shape, abs=0.01)


def test_the_measured_nodes_have_the_measured_loss():
    work = exponential(8, 500, 2)
    assert predicted(work, [8]).loss_ns[0] == pytest.approx(loss_of(work))


def test_exponential_noise_grows_as_the_harmonic_number():
    num_nodes = np.array([16, 32, 64, 128])
    truth = HARMONIC[num_nodes - 1] - 1
    found = [predicted(exponential(8, seed=seed), num_nodes) for seed in range(6)]
    assert np.mean([one.loss_ns for one in found], axis=0) == pytest.approx(truth, rel=0.04)
    covered = [(one.low_ns <= truth) & (truth <= one.high_ns) for one in found]
    assert np.mean(covered) > 0.75


def test_what_all_nodes_share_is_not_extrapolated():
    work = exponential(16) + np.random.default_rng(1).normal(0, 10.0, (1, 1000, 1))
    assert predicted(work, [64]).loss_ns[0] == pytest.approx(HARMONIC[63] - 1, rel=0.08)


def test_bounded_noise_stays_bounded():
    work = 100 + np.random.default_rng(0).uniform(0, 1, (8, 1000, 1))
    assert predicted(work, [128]).loss_ns[0] == pytest.approx(0.5, abs=0.02)


def test_a_slow_node_hides_the_new_ones():
    work = exponential(8)
    work[3] += 500.0
    found = predicted(work, [8, 64])
    assert found.loss_ns[1] - found.loss_ns[0] < 0.05 * found.loss_ns[0]


def test_ranks_of_one_node_are_one_unit():
    work = exponential(32)
    found = predicted(work, [8, 16], node=np.repeat(np.arange(8), 4))
    assert found.loss_ns == pytest.approx(HARMONIC[[31, 63]] - 1, rel=0.06)


def test_is_labelled_waiting_only_without_a_transfer_term():
    found = predicted(exponential(4), [4, 64, 65])
    assert found.label == "waiting only"
    assert found.is_speculative.tolist() == [False, False, True]


def test_transfer_adds_what_it_grows_by():
    work = exponential(4)
    term = TransferTerm(algorithm=Algorithm.TREE, transfer_ns=10.0)
    alone, both = predicted(work, [4, 16]), predicted(work, [4, 16], transfer=term)
    assert both.label == "waiting and transfer"
    assert both.loss_ns - alone.loss_ns == pytest.approx([0.0, 10.0])


def test_a_ring_approaches_its_bandwidth_and_pays_each_hop():
    term = TransferTerm(algorithm=Algorithm.RING, transfer_ns=75.0 + 3 * 2.0, latency_ns=2.0)
    assert extrapolated_transfer(term, 4, np.array([4, 10])) == pytest.approx([81.0, 90.0 + 18.0])


def test_latency_never_exceeds_the_measured_transfer():
    term = TransferTerm(algorithm=Algorithm.RING, transfer_ns=3.0, latency_ns=50.0)
    assert extrapolated_transfer(term, 4, np.array([4, 7])) == pytest.approx([3.0, 6.0])


@each_case(
    ("work", "num_nodes", "reason"),
    [
        (exponential(4, 100), [16], "20 values of a segment are in the tail, 30 are needed"),
        (np.full((4, 1000, 1), 0.1), [16], "0 values of a segment are in the tail, 30 are needed"),
        (exponential(1), [16], "one node cannot separate its own noise from what all nodes share"),
        (exponential(4, 3), [16], "3 steps were measured, at least 8 are needed"),
        (exponential(4, 0), [16], "0 steps were measured, at least 8 are needed"),
        (exponential(4), [2, 16], "2 nodes are fewer than the 4 measured: see the growth curve"),
    ],
)
def test_refuses_with_a_reason(work, num_nodes, reason):
    found = predicted(work, num_nodes)
    assert isinstance(found, Refusal)
    assert found.reason == reason


def test_refuses_without_ranks_or_segments():
    assert isinstance(predicted(np.ones((0, 50, 1)), [4]), Refusal)
    assert isinstance(predicted(np.ones((4, 50, 0)), [4]), Refusal)


def test_no_points_give_no_predictions():
    found = predicted(exponential(4), np.zeros(0, np.int64))
    assert isinstance(found, Extrapolation)
    assert found.loss_ns.shape == (0,)
