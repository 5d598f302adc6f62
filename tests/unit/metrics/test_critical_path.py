from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from known_runs import MESSAGE_NS, MS, TRANSFER_NS, data_parallel, known_run, pipeline

from hpcpace.metrics.critical_path import WORK, critical_path
from hpcpace.metrics.segments import local_work
from hpcpace.metrics.waits import Blocks
from hpcpace.trace.schema import ExitKind, Op


def path(run, role=None, **options):
    role = np.zeros(len(run.ranks), np.int64) if role is None else np.asarray(role)
    work = local_work(run.operations, run.steps, ranks=run.ranks, role=role, **options)
    return critical_path(run.operations, run.matching, work, run.steps, ranks=run.ranks, **options)


def work_by_rank(found, num_ranks):
    """Return each rank's local work on the path, summed over steps."""
    mine = found.kind == WORK
    return np.bincount(found.rank[mine], (found.end_ns - found.begin_ns)[mine], num_ranks)


def by_kind(found):
    """Return the nanoseconds of each kind on the path, summed over steps."""
    return {int(kind): int((found.end_ns - found.begin_ns)[found.kind == kind].sum()) for kind in np.unique(found.kind)}


def test_the_path_runs_through_the_slowest_rank_of_each_segment():
    truth = np.full((3, 5, 2), 10 * MS)
    truth[0, :, 0] += 4 * MS
    truth[2, :, 1] += 6 * MS
    found = path(data_parallel(truth))
    assert work_by_rank(found, 3).tolist() == [5 * 14 * MS, 0, 5 * 16 * MS]
    assert by_kind(found) == {WORK: 5 * 30 * MS, int(Op.ALL_REDUCE): 10 * TRANSFER_NS}


@each_case("seed", range(5))
def test_the_path_is_as_long_as_the_step(seed):
    random = np.random.default_rng(seed)
    run = data_parallel((random.exponential(10, (5, 9, 3)) * MS).astype(np.int64))
    found = path(run)
    length_ns = np.bincount(found.step, found.end_ns - found.begin_ns)
    assert length_ns == pytest.approx((run.steps.end_ns - run.steps.begin_ns)[0])
    assert (found.end_ns > found.begin_ns).all()


def test_the_path_of_a_pipeline_goes_back_through_all_stages():
    truth = np.full((4, 6), 10 * MS)
    found = path(pipeline(truth), role=[0, 1, 2, 3])
    assert work_by_rank(found, 4) == pytest.approx(np.full(4, 60 * MS), rel=1e-3)
    assert by_kind(found)[int(Op.RECV)] == 3 * 6 * MESSAGE_NS


def test_a_slow_first_stage_is_on_the_path_once_a_microbatch():
    truth = np.full((3, 4), 10 * MS)
    truth[0] += 20 * MS
    found = path(pipeline(truth, num_microbatches=4), role=[0, 1, 2])
    assert work_by_rank(found, 3) == pytest.approx([4 * 4 * 30 * MS, 4 * 10 * MS, 4 * 10 * MS], rel=1e-3)


def test_a_wait_inside_the_framework_is_followed_too():
    enter = [10 * MS, 30 * MS]
    rows = [[(0, 0, 0, Op.ALL_REDUCE, 8, -1, enter[rank], 32 * MS, 0, ExitKind.COMPLETION)] for rank in range(2)]
    run = known_run(rows, np.zeros((2, 1)), np.full((2, 1), 33 * MS))
    blocks = Blocks(rank=np.arange(2), begin_ns=np.array(enter), end_ns=np.full(2, 32 * MS))
    assert work_by_rank(path(run, blocks=blocks), 2).tolist() == [MS, 30 * MS]


def test_one_rank_is_its_own_path():
    found = path(data_parallel(np.full((1, 3, 1), 10 * MS)))
    assert work_by_rank(found, 1).tolist() == [30 * MS]


def test_without_steps_there_is_no_path():
    found = path(data_parallel(np.full((3, 0, 1), MS)))
    assert len(found.step) == 0
    assert by_kind(found) == {}
    assert work_by_rank(found, 3).tolist() == [0, 0, 0]
