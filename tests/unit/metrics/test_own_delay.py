from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from known_runs import MS, data_parallel, pipeline

from hpcpace.metrics.arrivals import agreement, arrival_lateness, duration_excess, own_delay
from hpcpace.metrics.segments import local_work


def works(num_ranks=6, num_steps=40, num_segments=1, seed=0, noise=0.02):
    random = np.random.default_rng(seed)
    return (random.normal(20, 20 * noise, (num_ranks, num_steps, num_segments)) * MS).astype(np.int64)


def worked(run, role=None):
    role = np.zeros(len(run.ranks), np.int64) if role is None else np.asarray(role)
    return local_work(run.operations, run.steps, ranks=run.ranks, role=role)


def compared(run, halfwidth_ns=20_000.0, **options):
    widths = np.full(len(run.ranks), halfwidth_ns)
    return agreement(run.operations, run.matching, worked(run), ranks=run.ranks, halfwidth_ns=widths, **options)


def test_delay_is_work_beyond_the_median_of_the_others():
    truth = works(3, 5)
    truth[:, :, 0] = np.array([[10], [12], [20]]) * MS
    run = data_parallel(truth)
    delay = own_delay(run.operations, worked(run)).reshape(3, 5)
    assert (delay == np.array([[-6], [-3], [9]]) * MS).all()


def test_of_two_ranks_the_other_one_is_usual():
    truth = np.full((2, 5, 1), 10 * MS)
    truth[1] += 4 * MS
    run = data_parallel(truth)
    assert own_delay(run.operations, worked(run)).reshape(2, 5).tolist() == [[-4 * MS] * 5, [4 * MS] * 5]


def test_a_rank_alone_in_its_role_is_compared_with_its_other_steps():
    truth = np.full((2, 5, 1), 10 * MS)
    truth[1] += 4 * MS
    truth[1, 3] += 2 * MS
    run = data_parallel(truth)
    delay = own_delay(run.operations, worked(run, role=[0, 1])).reshape(2, 5)
    assert delay.tolist() == [[0] * 5, [0, 0, 0, 2 * MS, 0]]


def test_heirs_of_a_delay_have_none_of_their_own():
    truth = np.full((4, 9), 10 * MS)
    truth[0, 4] += 30 * MS
    run = pipeline(truth)
    delay = own_delay(run.operations, worked(run, role=[0, 1, 2, 3]))
    by_rank_and_step = np.zeros((4, 9))
    np.add.at(by_rank_and_step, (run.operations.rank, run.operations.step), delay)
    assert by_rank_and_step[0, 4] == 30 * MS
    by_rank_and_step[0, 4] = 0
    assert (by_rank_and_step == 0).all()


def test_delay_does_not_depend_on_the_clocks():
    truth = works()
    runs = [data_parallel(truth, offsets_ns=offsets) for offsets in (None, [0, 5 * MS, 0, -3 * MS, 0, 0])]
    first, second = (own_delay(run.operations, worked(run)) for run in runs)
    assert (first == second).all()


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


def test_all_estimates_agree_on_a_slow_rank():
    truth = works()
    truth[2] += 3 * MS
    found = compared(data_parallel(truth))
    assert not found.is_suspected.any()
    assert found.is_late.tolist() == [False, False, True, False, False, False]
    assert found.arrival_ns[2] == pytest.approx(3 * MS, rel=0.2)
    assert found.duration_ns[2] == pytest.approx(found.own_delay_ns[2], rel=0.1)


@each_case("num_ranks", [2, 3, 4, 8])
@each_case("error_ns", [3 * MS, -3 * MS])
def test_a_wrong_clock_is_suspected_and_nobody_is_blamed(num_ranks, error_ns):
    offsets = np.zeros(num_ranks, np.int64)
    offsets[1] = error_ns
    found = compared(data_parallel(works(num_ranks), offsets_ns=offsets, transfer_ns=MS))
    assert found.is_suspected[1]
    assert found.is_suspected.any()
    assert not found.is_late.any()
    if num_ranks > 2:
        assert found.is_suspected.sum() == 1


def test_a_slow_rank_is_late_still_where_another_clock_is_wrong():
    truth = works()
    truth[2] += 3 * MS
    found = compared(data_parallel(truth, offsets_ns=[0, 0, 0, 0, 3 * MS, 0]))
    assert found.is_suspected.tolist() == [False, False, False, False, True, False]
    assert found.is_late.tolist() == [False, False, True, False, False, False]


def test_an_error_within_the_half_widths_is_not_suspected():
    found = compared(data_parallel(works(), offsets_ns=[0, 90_000, 0, 0, 0, 0]), halfwidth_ns=50_000.0)
    assert not found.is_suspected.any()


@each_case("seed", range(20))
def test_healthy_runs_are_not_suspected(seed):
    found = compared(data_parallel(works(seed=seed)))
    assert not found.is_suspected.any()


def test_arrival_is_relative_to_the_other_ranks():
    truth = np.full((3, 2, 1), 10 * MS)
    truth[1] += 5 * MS
    run = data_parallel(truth)
    assert arrival_lateness(run.operations, run.matching).reshape(3, 2)[:, 0].tolist() == [0, 5 * MS, 0]


@each_case("shape", [(1, 4, 1), (3, 0, 1), (2, 1, 1)])
def test_small_runs_do_not_fail(shape):
    run = data_parallel(np.full(shape, MS))
    found = compared(run)
    assert len(found.rank) == shape[0]
    assert not found.is_suspected.any()
    assert not found.is_late.any()
