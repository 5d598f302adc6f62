from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from known_runs import MS, data_parallel, known_run, pipeline, with_buffers

from hpcpace.metrics.segments import local_work
from hpcpace.metrics.step_graph import step_graph
from hpcpace.metrics.waits import Blocks
from hpcpace.metrics.what_if import WORK, Change, IssuedNodes, rebuild, rebuilt_ns, replay, what_if
from hpcpace.trace.schema import ExitKind, Op


def graph_of(run, role=None, **options):
    role = np.zeros(len(run.ranks), np.int64) if role is None else np.asarray(role)
    work = local_work(run.operations, run.steps, ranks=run.ranks, role=role, **options)
    arguments = run.operations, run.matching, run.waits, work, run.steps
    return step_graph(*arguments, ranks=run.ranks, role=role, **options)


def works(seed=0, shape=(4, 20, 2)):
    return (np.random.default_rng(seed).normal(20, 1, shape) * MS).astype(np.int64)


@pytest.mark.parametrize("num_microbatches", [1, 5])
def test_a_rebuilt_pipeline_takes_as_long_as_measured(num_microbatches):
    graph = graph_of(pipeline(works(shape=(4, 12)), num_microbatches=num_microbatches), role=range(4))
    assert rebuilt_ns(graph, replay(graph)) == pytest.approx(graph.measured_ns, abs=2000)


@each_case("seed", range(4))
def test_a_rebuilt_run_takes_as_long_as_measured(seed):
    run = data_parallel(works(seed))
    graph = graph_of(run)
    assert (rebuilt_ns(graph, replay(graph)) == graph.measured_ns).all()
    assert (graph.measured_ns == (run.steps.end_ns - run.steps.begin_ns)[0]).all()


@pytest.mark.parametrize("num_buffered", [0, 3, 12])
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_rebuilt_run_takes_as_long_as_measured_however_often_a_broadcast_holds_ranks(num_buffered, num_ranks):
    graph = graph_of(with_buffers(works(shape=(num_ranks, 12)), num_buffered=num_buffered))
    assert (rebuilt_ns(graph, replay(graph)) == graph.measured_ns).all()


@pytest.mark.parametrize(
    ("late", "waits_ms"),
    [(1, [5, 0, 0, 5]), (2, [5, 0, 0, 0]), (3, [0, 5, 0, 0])],  # rank 3 gets the data from rank 1
)
def test_a_late_reader_put_back_no_longer_holds_those_that_give_it_the_data_or_get_it_from_there(late, waits_ms):
    slow = np.full((4, 20), 20 * MS)
    slow[late] += 10 * MS  # half of it before the broadcast, and half before the reduction
    run = with_buffers(slow)
    prediction = what_if(rebuild(graph_of(run)), [Change(kind="rank", id=late, ranks=(late,))])
    is_first = (run.operations.op == Op.BROADCAST) & (run.operations.step == 0)
    assert run.waits.wait_ns[is_first].tolist() == [wait * MS for wait in waits_ms]
    assert (prediction.measured_ns, step_ns(prediction)) == (34 * MS, pytest.approx(24 * MS))


def step_ns(prediction, number=0):
    """Return the predicted mean time of a step."""
    return prediction.measured_ns * (1 - prediction.gains[number].share.value)


def test_a_slow_rank_put_back_gives_what_it_cost():
    usual = np.full((4, 20, 2), 20 * MS)
    slow = usual.copy()
    slow[1] += 5 * MS
    prediction = what_if(
        rebuild(graph_of(data_parallel(slow))), [Change(kind="rank", id=rank, ranks=(rank,)) for rank in range(4)]
    )
    best = prediction.gains[0]
    assert best.change.id == 1
    assert prediction.measured_ns == 54 * MS
    assert step_ns(prediction) == pytest.approx(44 * MS)
    assert best.share.value == pytest.approx(10 / 54)
    assert best.share.interval == pytest.approx((10 / 54, 10 / 54))
    assert [gain.share.value for gain in prediction.gains[1:]] == [0, 0, 0]
    assert prediction.error_share == 0


@pytest.mark.parametrize(("lead_ms", "gained_ms"), [(30, 10), (22, 7), (20, 5), (0, 10)])
def test_a_straggler_put_back_gains_no_more_than_hosts_let_the_others_gain(lead_ms, gained_ms):
    """They come to the last operation 5 ms earlier then, or by what their hosts were ahead beyond 20 ms of work."""
    slow = np.full((4, 20, 2), 20 * MS)
    slow[1] += 5 * MS
    graph = graph_of(data_parallel(slow))
    rebuilt, lead_ns = rebuild(graph), np.zeros((4, int(graph.position.max()) + 1, 20))
    last = int(graph.position[(graph.kind == WORK) & (graph.rank == 0)].max())
    lead_ns[[0, 2, 3], last] = lead_ms * MS
    gain = rebuilt.gain_beside_hosts(Change(kind="rank", id=1, ranks=(1,)), IssuedNodes.of(graph, lead_ns))
    assert gain.share.value == pytest.approx(gained_ms / 54)


def test_the_prediction_is_what_a_run_without_the_straggler_takes():
    cured = works(shape=(6, 60, 1))
    slow = cured.copy()
    slow[2] += 4 * MS
    prediction = what_if(rebuild(graph_of(data_parallel(slow))), [Change(kind="rank", id=2, ranks=(2,))])
    (gain,) = prediction.gains
    assert step_ns(prediction) == pytest.approx(graph_of(data_parallel(cured)).measured_ns.mean(), rel=0.005)
    assert gain.share.low < gain.share.value < gain.share.high


def test_a_slow_stage_among_alike_ones_of_another_replica_is_put_back_through_the_pipeline():
    rows, begin, end = [], None, None
    first, second = pipeline(np.full((2, 6), 10 * MS), num_microbatches=2), np.full((2, 6), 10 * MS)
    second[0] += 5 * MS
    runs = first, pipeline(second, num_microbatches=2)
    for number, run in enumerate(runs):
        operations = run.operations
        for rank in range(2):
            of_rank = operations.rank == rank
            columns = [
                operations.step, np.full(len(operations), number), operations.seq, operations.op, operations.size_bytes,
                np.where(operations.peer >= 0, operations.peer + 2 * number, -1), operations.enter_ns,
                operations.exit_ns, operations.blocked_ns, operations.exit_kind,
            ]  # fmt: skip
            rows.append(list(zip(*(column[of_rank].tolist() for column in columns), strict=True)))
    begin, end = (np.concatenate([getattr(run.steps, name) for run in runs]) for name in ("begin_ns", "end_ns"))
    both = known_run(rows, begin, end, groups={0: (0, 1), 1: (2, 3)})
    (gain,) = what_if(rebuild(graph_of(both, role=[0, 1, 0, 1])), [Change(kind="rank", id=2, ranks=(2,))]).gains
    assert gain.share.value > 0.15


def test_a_change_may_be_limited_to_a_position():
    slow = np.full((3, 10, 2), 20 * MS)
    slow[1] += 5 * MS
    graph = graph_of(data_parallel(slow))
    changes = [Change(kind="phase", id=position, ranks=(1,), positions=(position,)) for position in range(2)]
    prediction = what_if(rebuild(graph), changes)
    assert [step_ns(prediction, number) for number in range(2)] == pytest.approx([49 * MS, 49 * MS])


def test_a_change_may_take_away_a_share_of_the_excess():
    slow = np.full((3, 10, 1), 20 * MS)
    slow[1] += 8 * MS
    change = Change(kind="phase", id=1, ranks=(1,), share=0.25)
    assert step_ns(what_if(rebuild(graph_of(data_parallel(slow))), [change])) == pytest.approx(28 * MS)


def test_a_slow_transfer_put_back_gives_what_it_cost():
    run = data_parallel(np.full((3, 10, 1), 20 * MS))
    late = run.operations.step == 9
    run.operations.exit_ns[late] += 6 * MS
    run.operations.blocked_ns[late] += 6 * MS
    run.waits.transfer_ns[late] += 6 * MS
    prediction = what_if(rebuild(graph_of(run)), [Change(kind="operation", id=0, positions=(0,), is_transfer=True)])
    assert step_ns(prediction) == pytest.approx(22 * MS)


@pytest.mark.parametrize("unblocked", [(), ((1, 2),)])
def test_buckets_that_overlap_backward_are_waited_for_at_its_end(unblocked):
    """A rank that finds all transfers done is not blocked in that step."""
    enter, leave = np.array([[10, 20], [15, 40]]) * MS, np.array([17, 43]) * MS
    rows, blocks = [[], []], [[], [], []]
    for step in range(4):
        start = step * 50 * MS
        for rank in range(2):
            for bucket in range(2):
                at = int(start + enter[rank, bucket]), int(start + leave[bucket])
                rows[rank].append((step, 0, 2 * step + bucket, Op.ALL_REDUCE, 8, -1, *at, 0, ExitKind.COMPLETION))
            if (rank, step) not in unblocked:
                for column, value in zip(
                    blocks, (rank, int(start + enter[rank, 1]), int(start + 43 * MS)), strict=True
                ):
                    column.append(value)
    begin = np.tile(np.arange(4) * 50 * MS, (2, 1))
    run = known_run(rows, begin, begin + 50 * MS)
    columns = (np.array(column) for column in blocks)
    graph = graph_of(run, blocks=Blocks(**dict(zip(("rank", "begin_ns", "end_ns"), columns, strict=True))))
    assert rebuilt_ns(graph, replay(graph)) == pytest.approx(graph.measured_ns)
    gains = what_if(rebuild(graph), [Change(kind="rank", id=1, ranks=(1,))]).gains
    assert gains[0].share.value > 0.3


def test_a_wait_that_blocked_nobody_does_not_make_another_one_work():
    """Rank 0 waits from 20 to 50 ms; another operation, which it does not need yet, ends at 25 ms."""
    rows = [[], []]
    for step in range(4):
        start = step * 70 * MS
        for rank, enters in enumerate(((10, 20, 60), (18, 49, 60))):
            for group, (enter, leave, held) in enumerate(
                zip(enters, (25, 50, 62), (1, 50 - enters[1], 2), strict=True)
            ):
                at = start + enter * MS, start + leave * MS
                rows[rank].append((step, group, step, Op.ALL_REDUCE, 8, -1, *at, held * MS, ExitKind.COMPLETION))
    begin = np.tile(np.arange(4) * 70 * MS, (2, 1))
    run = known_run(rows, begin, begin + 70 * MS, groups=dict.fromkeys(range(3), (0, 1)))
    graph = graph_of(run)
    assert rebuilt_ns(graph, replay(graph)) == pytest.approx(graph.measured_ns)


def test_steps_with_several_waits_inside_torch_are_not_rebuilt():
    """As those of a GAN, whose two models each wait for their gradients: see step_graph."""
    begin = np.tile(np.arange(4) * 50 * MS, (2, 1))
    rows = [
        [(step, 0, step, Op.ALL_REDUCE, 8, -1, at + MS, at + 9 * MS, 0, ExitKind.COMPLETION) for step, at in steps]
        for steps in (list(enumerate(own.tolist())) for own in begin)
    ]
    run = known_run(rows, begin, begin + 50 * MS)

    def blocks(*after_ms):
        first_ns = np.concatenate([begin.ravel() + after * MS for after in after_ms])
        rank = np.tile(np.repeat(np.arange(2), 4), len(after_ms))
        return Blocks(rank=rank, begin_ns=first_ns, end_ns=first_ns + 5 * MS)

    assert graph_of(run, blocks=blocks(20)) is not None
    assert graph_of(run, blocks=blocks(4, 20)) is None


def test_steps_with_other_operations_are_left_out():
    run = data_parallel(works())
    run.operations.step[(run.operations.step == 3) & (run.operations.rank == 0)] = 99
    graph = graph_of(run)
    assert graph.num_left_out == 1
    assert 3 not in graph.step


@pytest.mark.parametrize("shape", [(3, 0, 1), (1, 0, 1)])
def test_without_steps_nothing_can_be_rebuilt(shape):
    assert graph_of(data_parallel(np.full(shape, MS))) is None


def test_one_rank_is_rebuilt_too():
    prediction = what_if(
        rebuild(graph_of(data_parallel(np.full((1, 5, 1), MS)))), [Change(kind="rank", id=0, ranks=(0,))]
    )
    assert prediction.gains[0].share.value == 0
