from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import each_case
from known_runs import MS, data_parallel, pipeline

from hpcpace.metrics.arrivals import late_arrivals
from hpcpace.metrics.operations import ProcessGroup


def works(num_ranks=6, num_steps=40, num_segments=1, seed=0, noise=0.02):
    random = np.random.default_rng(seed)
    return (random.normal(20, 20 * noise, (num_ranks, num_steps, num_segments)) * MS).astype(np.int64)


def late(run, halfwidth_ns=20_000.0, is_on_device=None, level=0.005):
    usable = np.ones(len(run.operations), np.bool_) if is_on_device is None else is_on_device
    widths = np.full(len(run.ranks), halfwidth_ns)
    return late_arrivals(run.operations, run.matching, usable, ranks=run.ranks, halfwidth_ns=widths, level=level)


def test_a_rank_with_more_work_is_late_by_that_much():
    truth = works()
    truth[3] += 5 * MS
    (found,) = late(data_parallel(truth))
    assert found.rank == 3
    assert found.arrival_ns == pytest.approx(5 * MS, rel=0.1)
    assert found.duration_ns == pytest.approx(5 * MS, rel=0.1)
    assert found.interval_ns[0] < 5 * MS < found.interval_ns[1]
    assert found.late_share > 0.9
    assert found.p_value < 0.005


@each_case("num_ranks", [2, 3, 4, 16])
def test_ranks_that_work_alike_are_not_late(num_ranks):
    assert not [found for seed in range(20) for found in late(data_parallel(works(num_ranks, seed=seed)))]


def test_several_late_ranks_come_with_the_latest_first():
    truth = works(8)
    truth[[1, 6]] += np.array([4, 8])[:, None, None] * MS
    assert [found.rank for found in late(data_parallel(truth))] == [6, 1]


def test_a_wrong_clock_makes_nobody_late():
    run = data_parallel(works())
    shift = np.where(run.operations.rank == 2, 5 * MS, 0)
    wrong = replace(run.operations, enter_ns=run.operations.enter_ns + shift, exit_ns=run.operations.exit_ns + shift)
    assert not late(replace(run, operations=wrong))


def test_lateness_within_the_error_of_the_clocks_does_not_count():
    truth = works(noise=0.001)
    truth[3] += MS
    run = data_parallel(truth)
    assert [found.rank for found in late(run)] == [3]
    assert not late(run, halfwidth_ns=MS)


def test_a_rank_that_is_late_now_and_then_is_not_named():
    truth = works(noise=0.001)
    truth[3, ::4] += 40 * MS
    assert not late(data_parallel(truth))


def test_operations_of_which_one_rank_has_no_times_of_the_device_are_no_evidence():
    truth = works()
    truth[3] += 5 * MS
    run = data_parallel(truth)
    assert not late(run, is_on_device=run.operations.rank != 0)


def test_where_ranks_send_to_each_other_nobody_is_named():
    assert not late(pipeline(np.full((4, 40), 10 * MS)))


def test_few_steps_name_nobody():
    truth = works(num_steps=10)
    truth[3] += 5 * MS
    assert not late(data_parallel(truth))


def test_a_rank_that_inherits_a_delay_in_one_group_is_cleared_by_another():
    """Ranks 0 and 1 form a tensor group, as do 2 and 3; then ranks of equal slots reduce, 0 with 2 and 1 with 3."""
    truth = works(4, 60, 2, noise=0.005)
    truth[3, :, 0] += 6 * MS
    run = data_parallel(truth)
    is_first = run.operations.seq % 2 == 0
    rank = run.operations.rank
    groups = tuple(ProcessGroup(name=str(ranks), ranks=ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3)))
    group = np.where(is_first, rank // 2, 2 + rank % 2)
    # Rank 2 waits for rank 3 in their group, and both come late to the second operation.
    enter = run.operations.enter_ns + np.where(~is_first & (rank >= 2), 6 * MS, 0)
    leave = run.operations.exit_ns + 6 * MS
    operations = replace(run.operations, groups=groups, group=group, enter_ns=enter, exit_ns=leave)
    instance = np.unique(operations.step * 8 + (operations.seq % 2) * 4 + group, return_inverse=True)[1]
    matching = replace(run.matching, instance=instance, num_rows=np.bincount(instance))
    assert [found.rank for found in late(replace(run, operations=operations, matching=matching))] == [3]
