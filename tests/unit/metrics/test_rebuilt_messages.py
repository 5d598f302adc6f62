"""Steps of devices rebuilt from their graph: batches of messages, queues by peer, and marks that are slightly wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from known_runs import MS, known_run

from hpcpace.metrics.operations import ProcessGroup
from hpcpace.metrics.segments import local_work
from hpcpace.metrics.step_graph import step_graph
from hpcpace.metrics.waits import NO_BLOCKS, Blocks, waits
from hpcpace.metrics.what_if import START, Change, rebuild
from hpcpace.trace.schema import ExitKind, Op

STEP_MS, NUM_STEPS = 50, 8


def graph_of(rows_of_step, blocks=NO_BLOCKS):
    """Return the graph of steps; rows take the begin of their step and its number."""
    begin = np.tile(np.arange(NUM_STEPS) * STEP_MS * MS, (2, 1))
    rows = [[row for step in range(NUM_STEPS) for row in of_rank(step)] for of_rank in rows_of_step]
    run = known_run(rows, begin, begin + STEP_MS * MS, groups={0: (0, 1), 1: (0, 1)})
    groups = tuple(
        ProcessGroup(name=group.name, ranks=group.ranks, is_on_device=True) for group in run.operations.groups
    )
    done, role = replace(run.operations, groups=groups), np.arange(2)
    work = local_work(done, run.steps, ranks=run.ranks, role=role)
    waited = waits(done, run.matching)
    graph = step_graph(done, run.matching, waited, work, run.steps, ranks=run.ranks, role=role, blocks=blocks)
    assert graph is not None
    return graph


def gain_of_rank_1(rows_of_step, removed_ms):
    """Return the gain, milliseconds a step, if rank 1 works less; rows as of `graph_of`."""
    graph = graph_of(rows_of_step)
    removed_ns = np.array([[0.0], [removed_ms * MS]])
    rebuilt = rebuild(graph)
    assert rebuilt.base_ns[1:] == pytest.approx(graph.measured_ns[1:], abs=5_000)
    gain = rebuilt.gain(Change(kind="rank", id=1, removed_ns=removed_ns, is_at_begin=True))
    return gain.share.value * rebuilt.measured_ns / MS


def row(step, group, seq, op, peer, enter_ms, exit_ms, blocked_ms, kind=ExitKind.COMPLETION):
    at = (int((step * STEP_MS + of_ms) * MS) for of_ms in (enter_ms, exit_ms))
    return (step, group, seq, op, 8, peer, *at, int(blocked_ms * MS), kind)


def test_what_follows_a_wait_may_seem_to_be_entered_before_its_end():
    """By the errors of marks: else the wait would be work that the rank does before it goes on."""

    def rows(enter_ms):
        return lambda step: [
            row(step, 0, step, Op.ALL_REDUCE, -1, enter_ms, 21, 21 - enter_ms),
            row(step, 1, step, Op.ALL_REDUCE, -1, 20.998, 25, 0),
            row(step, 0, step + 100, Op.ALL_REDUCE, -1, 45, 46, 1),
        ]

    assert gain_of_rank_1([rows(10), rows(20)], removed_ms=10) == pytest.approx(10, abs=0.1)


def test_a_batch_that_blocked_nobody_ends_with_its_wait_and_took_as_long_as_others():
    """As in a ring of context parallelism: the slow rank comes to its wait when the messages are long there."""

    def rows(rank, wait_ms):
        def batch(step, number, enter_ms, exit_ms, blocked_ms):
            return [
                row(step, 1, 2 * step + number, op, 1 - rank, enter_ms, exit_ms, blocked, ExitKind.WAIT)
                for op, blocked in ((Op.SEND, 0), (Op.RECV, blocked_ms))
            ]

        def of_step(step):
            reduced = row(step, 0, step, Op.ALL_REDUCE, -1, wait_ms, 21, 21 - wait_ms)
            return [*batch(step, 0, 2, wait_ms, 0), reduced, *batch(step, 1, 30, 31, 1)]

        return of_step

    assert gain_of_rank_1([rows(0, 12), rows(1, 20)], removed_ms=8) == pytest.approx(8, abs=0.1)


def test_a_batch_of_messages_waits_for_both_sides_of_all_of_them():
    """Rank 0 has sent long before rank 1 comes; what its batch takes is no transfer of its own message."""

    def rows(rank, enter_ms):
        def of_step(step):
            places = ((enter_ms, 21, 0), (enter_ms, 21, 21 - enter_ms))
            ops = (Op.SEND, Op.RECV)
            batch = [row(step, 0, step, op, 1 - rank, *at, ExitKind.WAIT) for op, at in zip(ops, places, strict=True)]
            return [*batch, row(step, 1, step, Op.ALL_REDUCE, -1, 45, 46, 1)]

        return of_step

    assert gain_of_rank_1([rows(0, 10), rows(1, 20)], removed_ms=10) == pytest.approx(10, abs=0.1)


def test_a_message_alone_whose_wait_shows_its_end_waits_for_its_other_side_as_well():
    """Rank 0 is held from 10 ms on, until rank 1 receives at 20 ms: a batch of one message."""

    def rows(rank, op, enter_ms):
        return lambda step: [
            row(step, 0, step, op, 1 - rank, enter_ms, 21, 21 - enter_ms, ExitKind.WAIT),
            row(step, 1, step, Op.ALL_REDUCE, -1, 45, 46, 1),
        ]

    found = gain_of_rank_1([rows(0, Op.SEND, 10), rows(1, Op.RECV, 20)], removed_ms=10)
    assert found == pytest.approx(10, abs=0.1)


@pytest.mark.parametrize("rounded_ns", [(-128, 128), (0, 0), (128, -128), (128, 128)])
def test_what_is_entered_as_a_wait_for_all_begins_comes_before_it(rounded_ns):
    """Rank 0 enters its last operation at 30 ms and waits until 41 ms for rank 1, which works until 40 ms."""

    def rows(rank, enter_ms):
        at_ms = enter_ms + rounded_ns[rank] / MS
        return lambda step: [
            row(step, 0, step, Op.ALL_REDUCE, -1, 10, 11, 0),
            row(step, 1, step, Op.ALL_REDUCE, -1, at_ms, 41, 0),
        ]

    begin_ms = [step * STEP_MS + of for of in (30, 40) for step in range(NUM_STEPS)]
    end_ms = [step * STEP_MS + 41 for _ in range(2) for step in range(NUM_STEPS)]
    of_ranks = np.repeat(np.arange(2), NUM_STEPS)
    blocks = Blocks(rank=of_ranks, begin_ns=np.array(begin_ms) * MS, end_ns=np.array(end_ms) * MS)
    graph = graph_of([rows(0, 30), rows(1, 40)], blocks)
    assert (graph.weight_ns[graph.kind == START][:, 1:] < 5_000).all()  # both go on when it has ended


def test_a_message_does_not_wait_for_one_in_front_of_it_that_ends_later():
    """Rank 0 sends at 10 ms, which rank 1 takes at 40 ms, and has received another message by then."""
    first = [
        lambda step: [
            row(step, 0, step, Op.SEND, 1, 10, 41, 0),
            row(step, 0, step, Op.RECV, 1, 12, 31, 19),
            row(step, 1, step, Op.ALL_REDUCE, -1, 45, 46, 1),
        ],
        lambda step: [
            row(step, 0, step, Op.SEND, 0, 30, 31, 0),
            row(step, 0, step, Op.RECV, 0, 40, 41, 1),
            row(step, 1, step, Op.ALL_REDUCE, -1, 45, 46, 1),
        ],
    ]
    assert gain_of_rank_1(first, removed_ms=10) == pytest.approx(10, abs=0.1)


def test_a_slow_message_does_not_hold_the_next_where_others_of_their_kind_overtake_each_other():
    """The second message that rank 0 receives ends behind the slow one that it sends only because rank 1 is late."""
    rows = [
        lambda step: [
            row(step, 0, 2 * step, Op.SEND, 1, 2, 9, 0),
            row(step, 0, 2 * step, Op.RECV, 1, 3, 6, 3),
            row(step, 0, 2 * step + 1, Op.SEND, 1, 10, 30, 0),
            row(step, 0, 2 * step + 1, Op.RECV, 1, 11, 41, 30),
            row(step, 1, step, Op.ALL_REDUCE, -1, 45, 46, 1),
        ],
        lambda step: [
            row(step, 0, 2 * step, Op.SEND, 0, 5, 6, 0),
            row(step, 0, 2 * step, Op.RECV, 0, 8, 9, 1),
            row(step, 0, 2 * step + 1, Op.RECV, 0, 10, 30, 0),
            row(step, 0, 2 * step + 1, Op.SEND, 0, 40, 41, 0),
            row(step, 1, step, Op.ALL_REDUCE, -1, 41, 46, 5),
        ],
    ]
    assert gain_of_rank_1(rows, removed_ms=20) == pytest.approx(14.5, abs=0.3)
