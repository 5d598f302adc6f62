from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from known_runs import MS, data_parallel, known_run, pipeline

from hpcpace.metrics.segments import local_work, segment_panels
from hpcpace.metrics.waits import Blocks
from hpcpace.trace.schema import ExitKind, Op


def works(seed=0, shape=(4, 12, 2)):
    return (np.random.default_rng(seed).normal(20, 1, shape) * MS).astype(np.int64)


def measured(run, role=None, **options):
    role = np.zeros(len(run.ranks), np.int64) if role is None else np.asarray(role)
    work = local_work(run.operations, run.steps, ranks=run.ranks, role=role, **options)
    return work, segment_panels(run.operations, run.steps, work, ranks=run.ranks, **options)


def overlapped(work_ns, *, launch_ns=30_000):
    """Return a run as of DDP: two buckets launched during backward and waited for together in grad_sync."""
    num_ranks, num_steps = work_ns.shape
    rows = [[] for _ in range(num_ranks)]
    begin, end = np.zeros((num_ranks, num_steps), np.int64), np.zeros((num_ranks, num_steps), np.int64)
    blocks = [], [], []
    now = np.full(num_ranks, 1000 * MS)
    for step in range(num_steps):
        begin[:, step] = now
        first, second = now + work_ns[:, step] // 2, now + work_ns[:, step]
        for bucket, enter in enumerate((first, second)):
            leave = int(enter.max()) + 3 * MS
            for rank in range(num_ranks):
                row = (step, 0, 2 * step + bucket, Op.ALL_REDUCE, 64, -1, int(enter[rank]), leave, launch_ns)
                rows[rank].append((*row, ExitKind.COMPLETION))
        for rank in range(num_ranks):
            for column, value in zip(blocks, (rank, int(second[rank]), leave), strict=True):
                column.append(value)
        now = np.full(num_ranks, leave)
        end[:, step] = now
    run = known_run(rows, begin, end)
    return run, Blocks(rank=np.array(blocks[0]), begin_ns=np.array(blocks[1]), end_ns=np.array(blocks[2]))


def test_work_runs_from_the_end_of_the_last_wait_to_the_enter():
    truth = works()
    work, _ = measured(data_parallel(truth))
    assert (work.work_ns.reshape(truth.shape) == truth).all()


def test_a_pause_is_no_work_and_ends_none():
    """Ranks that were held back in front of an operation have worked as long as without it."""
    truth = works()
    pause_ns = np.array([0, 2 * MS, 4 * MS, 0])[:, None, None]
    run = data_parallel(truth + pause_ns)
    enter_ns, rank = run.operations.enter_ns, run.operations.rank
    held = np.broadcast_to(pause_ns, truth.shape).ravel()
    assert (run.operations.rank == np.repeat(np.arange(4), truth[0].size)).all()
    chosen = held > 0
    blocks = Blocks(
        rank=rank[chosen],
        begin_ns=(enter_ns - held)[chosen],
        end_ns=enter_ns[chosen],
        is_pause=np.ones(int(chosen.sum()), np.bool_),
    )
    work, (panel,) = measured(run, blocks=blocks)
    assert (work.work_ns.reshape(truth.shape) == truth).all()
    assert (panel.work_ns == truth).all()


def test_work_is_the_same_whatever_the_clocks_say():
    truth = works()
    work, (panel,) = measured(data_parallel(truth, offsets_ns=[0, 3 * MS, -7 * MS, 900 * MS]))
    assert (work.work_ns.reshape(truth.shape) == truth).all()
    assert (panel.work_ns == truth).all()


def test_segments_are_the_work_between_synchronisations():
    truth = works()
    _, (panel,) = measured(data_parallel(truth))
    assert panel.members == (0, 1, 2, 3)
    assert panel.num_left_out == 0
    assert panel.op.tolist() == [Op.ALL_REDUCE, Op.ALL_REDUCE]
    assert (panel.work_ns == truth).all()


def test_segments_may_end_with_different_operations():
    truth = works()
    run = data_parallel(truth)
    # As of fully_shard: parameters are brought together, gradients summed up, in turn.
    run.operations.op[run.operations.seq % 2 == 0] = Op.ALL_GATHER
    _, (panel,) = measured(run)
    assert panel.op.tolist() == [Op.ALL_GATHER, Op.ALL_REDUCE]
    assert (panel.work_ns == truth).all()


def test_segments_of_a_step_sum_to_its_work_through_messages():
    truth = works(shape=(3, 10))
    _, (panel,) = measured(pipeline(truth, num_microbatches=4), role=[0, 1, 2])
    assert panel.work_ns.shape == (3, 10, 1)
    assert np.allclose(panel.work_ns[:, :, 0], 4 * truth, atol=4000)


def test_buckets_under_way_together_are_one_synchronisation():
    truth = works(shape=(4, 10))
    run, blocks = overlapped(truth)
    work, (panel,) = measured(run, blocks=blocks)
    assert (panel.work_ns[:, :, 0] == truth).all()
    assert (work.work_ns.reshape(4, 10, 2)[:, :, 0] == truth // 2).all()
    assert (work.work_ns.reshape(4, 10, 2)[:, :, 1] == truth).all()


@pytest.mark.parametrize("launch_ns", [30_000, 200_000])
def test_a_launch_is_not_a_wait_on_busy_cores_either(launch_ns):
    run, blocks = overlapped(works(shape=(4, 10)), launch_ns=launch_ns)
    work, _ = measured(run, blocks=blocks)
    assert not work.is_blocking.any()


def test_the_last_to_arrive_hardly_waits_and_its_wait_still_ends():
    truth = works(shape=(3, 10, 1))
    truth[0] += 10 * MS
    work, _ = measured(data_parallel(truth, transfer_ns=50_000))
    assert work.is_blocking.all()
    assert (work.work_ns.reshape(3, 10) == truth[:, :, 0]).all()


def test_steps_with_other_operations_are_left_out_and_counted():
    truth = works()
    run = data_parallel(truth)
    keep = ~((run.operations.step == 5) & (run.operations.seq == 10))
    fields = {name: getattr(run.operations, name) for name in run.operations.__dataclass_fields__}
    cut = type(run.operations)(**{name: value if name == "groups" else value[keep] for name, value in fields.items()})
    work = local_work(cut, run.steps, ranks=run.ranks, role=np.zeros(4, np.int64))
    (panel,) = segment_panels(cut, run.steps, work, ranks=run.ranks)
    assert panel.num_left_out == 1
    assert 5 not in panel.step
    assert (panel.work_ns == truth[:, panel.step]).all()


def test_positions_line_up_over_ranks_and_steps():
    work, _ = measured(data_parallel(works()))
    assert work.position.reshape(4, 12, 2).tolist() == [[[0, 1]] * 12] * 4


def test_groups_of_one_role_share_positions():
    rows = [[(0, rank // 2, 0, Op.ALL_REDUCE, 8, -1, 100, 200, 100, ExitKind.COMPLETION)] for rank in range(4)]
    run = known_run(rows, np.zeros((4, 1)), np.full((4, 1), 300), groups={0: (0, 1), 1: (2, 3)})
    work, panels = measured(run, role=[0, 1, 0, 1])
    assert len(set(work.position.tolist())) == 1
    assert [panel.members for panel in panels] == [(0, 1), (2, 3)]


def test_messages_to_different_roles_have_different_positions():
    work, _ = measured(pipeline(works(shape=(3, 4))), role=[0, 1, 2])
    run_positions = {tuple(work.position[work.role == role][:3].tolist()) for role in range(3)}
    assert len(run_positions) == 3


@each_case("shape", [(1, 5, 1), (3, 1, 2), (2, 0, 1)])
def test_small_runs_do_not_fail(shape):
    truth = works(shape=shape)
    work, panels = measured(data_parallel(truth))
    assert len(work.work_ns) == truth.size
    assert len(panels) == (1 if truth.size and shape[0] > 1 else 0)


def test_without_steps_nothing_is_known():
    run = data_parallel(works())
    none = run.steps.select(np.zeros(len(run.steps), np.bool_))
    work = local_work(run.operations, none, ranks=run.ranks, role=np.zeros(4, np.int64))
    assert not work.is_known.any()
    assert segment_panels(run.operations, none, work, ranks=run.ranks) == ()


def test_a_group_with_a_member_without_trace_has_no_panel():
    run = data_parallel(works())
    work = local_work(run.operations, run.steps, ranks=(0, 1, 2, 3), role=np.zeros(4, np.int64))
    assert segment_panels(run.operations, run.steps, work, ranks=(0, 1, 2, 7)) == ()
