from __future__ import annotations

import numpy as np
from cases import each_case
from known_runs import MS, data_parallel

from hpcpace.metrics.arrivals import arrival_lateness, duration_excess, suspected_clocks
from hpcpace.metrics.segments import local_work


def works(num_ranks=6, num_steps=40, num_segments=1, seed=0, noise=0.02):
    random = np.random.default_rng(seed)
    return (random.normal(20, 20 * noise, (num_ranks, num_steps, num_segments)) * MS).astype(np.int64)


def worked(run):
    return local_work(run.operations, run.steps, ranks=run.ranks, role=np.zeros(len(run.ranks), np.int64))


def compared(run, halfwidth_ns=20_000.0, **options):
    widths = np.full(len(run.ranks), halfwidth_ns)
    return suspected_clocks(run.operations, run.matching, worked(run), ranks=run.ranks, halfwidth_ns=widths, **options)


def test_the_late_rank_has_the_shortest_collective():
    truth = np.full((3, 4, 1), 10 * MS)
    truth[2] += 3 * MS
    run = data_parallel(truth, offsets_ns=[0, 8 * MS, 0])
    assert duration_excess(run.operations, run.matching).reshape(3, 4)[:, 0].tolist() == [3 * MS, 3 * MS, 0]


def test_exit_bias_within_a_node_is_taken_out():
    run = data_parallel(np.full((4, 6, 1), 10 * MS))
    run.operations.exit_ns[run.operations.rank == 1] += 400_000
    raw = duration_excess(run.operations, run.matching).reshape(4, 6)
    corrected = duration_excess(run.operations, run.matching, node=np.array([0, 0, 1, 1])).reshape(4, 6)
    assert raw[:, 0].tolist() == [0, 400_000, 0, 0]
    assert np.abs(corrected[0] - corrected[1]).max() == 0


def test_the_clock_of_a_slow_rank_is_not_suspected():
    truth = works()
    truth[2] += 3 * MS
    assert not compared(data_parallel(truth)).any()


@each_case("num_ranks", [2, 3, 4, 8])
@each_case("error_ns", [3 * MS, -3 * MS])
def test_a_wrong_clock_is_suspected(num_ranks, error_ns):
    offsets = np.zeros(num_ranks, np.int64)
    offsets[1] = error_ns
    found = compared(data_parallel(works(num_ranks), offsets_ns=offsets, transfer_ns=MS))
    assert found[1]
    if num_ranks > 2:
        assert found.sum() == 1


def test_only_the_wrong_clock_is_suspected_where_another_rank_is_slow():
    truth = works()
    truth[2] += 3 * MS
    found = compared(data_parallel(truth, offsets_ns=[0, 0, 0, 0, 3 * MS, 0]))
    assert found.tolist() == [False, False, False, False, True, False]


def test_an_error_within_the_half_widths_is_not_suspected():
    found = compared(data_parallel(works(), offsets_ns=[0, 90_000, 0, 0, 0, 0]), halfwidth_ns=50_000.0)
    assert not found.any()


@each_case("seed", range(20))
def test_healthy_runs_are_not_suspected(seed):
    found = compared(data_parallel(works(seed=seed)))
    assert not found.any()


def test_arrival_is_relative_to_the_other_ranks():
    truth = np.full((3, 2, 1), 10 * MS)
    truth[1] += 5 * MS
    run = data_parallel(truth)
    assert arrival_lateness(run.operations, run.matching).reshape(3, 2)[:, 0].tolist() == [0, 5 * MS, 0]


@each_case("shape", [(1, 4, 1), (3, 0, 1), (2, 1, 1)])
def test_small_runs_do_not_fail(shape):
    run = data_parallel(np.full(shape, MS))
    found = compared(run)
    assert found.tolist() == [False] * shape[0]
