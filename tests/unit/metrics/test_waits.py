from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.communication import join_kinds, rank_totals, totals_by_kind
from hpcpace.metrics.lost_operations import open_operations
from hpcpace.metrics.matching import match
from hpcpace.metrics.operations import RankOperations, completed, gather_operations, select_rows
from hpcpace.metrics.propagation import last_partner
from hpcpace.metrics.waits import waits
from hpcpace.trace.schema import TABLES, ExitKind, Op


def row(op, enter, exit_, *, seq=0, peer=-1, group=0, blocked=0, kind=ExitKind.COMPLETION, step=0):
    return (step, group, seq, op, 100, peer, enter, exit_, blocked, kind)


def gathered(rows, *, members=None, names=None):
    """Return the operations of ranks 0, 1, ... with one list of rows each."""
    parts = []
    for rank, own in enumerate(rows):
        table = np.array(own, TABLES["collectives"].dtype)
        name = (names or {}).get(rank, b"default")
        groups = np.array([(0, m, name, b"gloo") for m in members or range(len(rows))], TABLES["groups"].dtype)
        parts.append(
            RankOperations(
                rank=rank, collectives=table, groups=groups, enter_ns=table["enter_ns"], exit_ns=table["exit_ns"]
            )
        )
    return gather_operations(parts)


def measured(rows, **options):
    operations = gathered(rows, **options)
    matching = match(operations)
    return operations, matching, waits(operations, matching)


@each_case("op", [Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BARRIER])
def test_all_wait_for_the_last_to_enter(op):
    _, _, found = measured([[row(op, 0, 52)], [row(op, 50, 55)], [row(op, 20, 53)]])
    assert found.wait_ns.tolist() == [50, 0, 30]
    assert found.transfer_ns.tolist() == [2, 5, 3]


@pytest.mark.parametrize("op", [Op.BROADCAST, Op.SCATTER])
def test_others_wait_for_a_late_root(op):
    _, _, found = measured([[row(op, 30, 40, peer=0)], [row(op, 10, 42, peer=0)], [row(op, 35, 41, peer=0)]])
    assert found.wait_ns.tolist() == [0, 20, 0]
    assert found.transfer_ns.tolist() == [10, 12, 6]


@pytest.mark.parametrize("op", [Op.BROADCAST, Op.SCATTER])
@pytest.mark.parametrize(
    ("exit_", "blocked", "kind", "wait"),
    [
        (60, 50, ExitKind.COMPLETION, 30),  # as gloo holds who gives the data to a late rank
        (60, 50, ExitKind.WAIT, 30),
        (60, 25, ExitKind.COMPLETION, 30),  # asynchronous: it came to its wait at 35
        (60, 15, ExitKind.COMPLETION, 0),  # at 45, when all were there
        (60, 0, ExitKind.COMPLETION, 0),
        (38, 28, ExitKind.COMPLETION, 0),  # it left before: its data is buffered
    ],
)
def test_who_was_blocked_as_the_last_one_came_waits_for_it_in_a_broadcast(op, exit_, blocked, kind, wait):
    own = row(op, 10, exit_, peer=0, blocked=blocked, kind=kind)
    of_reader, late = row(op, 5, 42, peer=0), row(op, 40, 45, peer=0)
    operations, matching, found = measured([[own], [of_reader], [late]])
    assert found.wait_ns.tolist() == [wait, 5, 0]
    assert found.transfer_ns.tolist() == [exit_ - 10 - wait, 32, 5]
    assert last_partner(operations, matching).tolist() == [2 if wait else -1, 0, -1]
    assert not found.may_contradict.any()
    operations, matching, found = measured([[row(op, 20, 25, peer=0)], [own], [late]])
    assert found.wait_ns.tolist() == [0, wait or 10, 0]
    assert last_partner(operations, matching).tolist() == [-1, 2 if wait else 0, -1]


@pytest.mark.parametrize("op", [Op.REDUCE, Op.GATHER])
def test_an_early_root_waits_for_the_others_and_they_do_not_wait(op):
    _, _, found = measured([[row(op, 10, 40, peer=0)], [row(op, 30, 32, peer=0)], [row(op, 5, 7, peer=0)]])
    assert found.wait_ns.tolist() == [20, 0, 0]
    assert found.transfer_ns.tolist() == [10, 2, 2]


def test_a_receiver_waits_for_a_late_sender():
    _, _, found = measured([[row(Op.SEND, 30, 31, peer=1)], [row(Op.RECV, 10, 35, peer=0)]])
    assert found.wait_ns.tolist() == [0, 20]
    assert found.transfer_ns.tolist() == [1, 5]


@pytest.mark.parametrize(("exit_", "wait"), [(60, 20), (35, 0)])
def test_a_sender_waits_only_at_a_rendezvous(exit_, wait):
    _, _, found = measured([[row(Op.SEND, 30, exit_, peer=1)], [row(Op.RECV, 50, 62, peer=0)]])
    assert found.wait_ns.tolist() == [wait, 0]


def test_kinds_of_operations_that_overtake_each_other_have_queues_of_their_own():
    """As those of FSDP, which gathers on one stream and reduces on another."""
    gather, reduce = Op.ALL_GATHER, Op.REDUCE_SCATTER
    of_rank = [row(gather, 0, 10), row(reduce, 5, 40), row(gather, 6, 16, seq=1), row(reduce, 20, 60, seq=1)]
    _, _, found = measured([of_rank, of_rank])
    assert found.transfer_ns.tolist() == [10, 35, 6, 20] * 2


def test_send_and_recv_match_by_channel_and_number_and_not_by_time():
    zero = [row(Op.SEND, 0, 1, peer=1, seq=0), row(Op.SEND, 5, 6, peer=1, seq=1), row(Op.RECV, 8, 30, peer=1, seq=0)]
    one = [row(Op.RECV, 3, 9, peer=0, seq=1), row(Op.RECV, 2, 4, peer=0, seq=0), row(Op.SEND, 20, 21, peer=0, seq=0)]
    _, matching, found = measured([zero, one])
    assert matching.is_matched.all()
    assert found.wait_ns.tolist() == [0, 0, 12, 2, 0, 0]


def test_groups_match_by_members_and_name_whatever_number_a_file_gives_them():
    operations = gathered([[row(Op.BARRIER, 0, 9)], [row(Op.BARRIER, 5, 9)]], names={1: b"other"})
    assert len(operations.groups) == 2
    assert not match(operations).is_matched.any()


@each_case(
    "rows",
    [
        [[row(Op.BARRIER, 0, 9)], []],
        [[row(Op.BARRIER, 0, 9)], [row(Op.BARRIER, 0, 9, seq=1)]],
        [[row(Op.BARRIER, 0, 9)], [row(Op.ALL_REDUCE, 0, 9)]],
        [[row(Op.BARRIER, 0, 9)], [row(Op.BARRIER, 0, 9), row(Op.BARRIER, 0, 9)]],
        [[row(Op.BARRIER, 0, 9, group=7)], [row(Op.BARRIER, 0, 9, group=7)]],
        [[row(Op.RECV, 0, 9, peer=-1)], []],
        [[row(Op.SEND, 0, 9, peer=5)], []],
    ],
)
def test_what_has_no_counterpart_is_unmatched_and_waits_for_nothing(rows):
    _, matching, found = measured(rows)
    assert not matching.is_matched.any()
    assert not found.wait_ns.any()
    assert not found.transfer_ns.any()


def test_operations_with_an_unknown_clock_are_not_compared():
    operations = gathered([[row(Op.BARRIER, 0, 9)], [row(Op.BARRIER, 5, 9)]])
    assert not match(operations, unknown_clocks=(1,)).is_matched.any()


def test_a_wait_is_never_longer_than_the_operation():
    _, _, found = measured([[row(Op.BARRIER, 0, 9)], [row(Op.BARRIER, 5000, 5009)]])
    assert found.wait_ns.tolist() == [9, 0]


def test_an_exit_before_the_last_enter_is_an_error_of_the_clocks():
    _, _, found = measured([[row(Op.BARRIER, 0, 40)], [row(Op.BARRIER, 50, 60)]])
    assert found.negative_ns.tolist() == [10, 0]
    assert found.transfer_ns.tolist() == [0, 10]


def test_a_queued_operation_transfers_only_after_the_one_before_it():
    queue = [row(Op.ALL_REDUCE, 0, 50), row(Op.ALL_REDUCE, 10, 70, seq=1)]
    _, _, found = measured([queue, queue])
    assert found.transfer_ns.tolist() == [50, 20, 50, 20]


@pytest.mark.parametrize("num_groups", [2, 300])
def test_each_group_has_a_queue_of_its_own(num_groups):
    groups = np.array([(g, 0, b"%d" % g, b"gloo") for g in range(num_groups)], TABLES["groups"].dtype)
    rows = [row(Op.ALL_REDUCE, 10 * g + at, 10 * g + 50, seq=at, group=g) for at in (0, 5) for g in range(num_groups)]
    table = np.array(rows[::-1], TABLES["collectives"].dtype)
    part = RankOperations(
        rank=0, collectives=table, groups=groups, enter_ns=table["enter_ns"], exit_ns=table["exit_ns"]
    )
    operations = gather_operations([part])
    found = waits(operations, match(operations))
    assert found.transfer_ns.tolist() == [0] * num_groups + [50] * num_groups


def test_rows_without_an_end_are_not_completed():
    rows = [row(Op.BARRIER, 5, 9), row(Op.BARRIER, 5, 0, kind=ExitKind.NEVER), row(Op.BARRIER, 5, 4)]
    assert completed(np.array(rows, TABLES["collectives"].dtype)).tolist() == [True, False, False]


def test_kinds_are_figured_apart_by_operation_and_size_of_group():
    rows = [[row(Op.ALL_REDUCE, 0, 52), row(Op.BARRIER, 60, 61)], [row(Op.ALL_REDUCE, 50, 55)]]
    operations, matching, found = measured(rows)
    first, second = join_kinds(totals_by_kind(operations, matching, found, np.ones(3, bool)))
    assert (first.op, first.group_size, first.num_rows, first.size_bytes) == ("all_reduce", 2, 2, 200)
    assert (first.mean_wait_ns, first.mean_transfer_ns, first.num_unmatched) == (25.0, 5.0, 0)
    assert (second.op, second.num_unmatched, second.ranks_unmatched) == ("barrier", 1, (0,))


def test_sums_by_rank_use_only_the_rows_asked_for():
    operations, _, found = measured(
        [[row(Op.ALL_REDUCE, 0, 52), row(Op.BARRIER, 60, 61)], [row(Op.ALL_REDUCE, 50, 55)]]
    )
    totals = rank_totals(operations, found, operations.op == Op.ALL_REDUCE, [0, 1])
    assert totals.num_operations.tolist() == [1, 1]
    assert totals.wait_ns.tolist() == [50, 0]


def test_no_operations_at_all():
    operations, matching, found = measured([[], []])
    assert totals_by_kind(operations, matching, found, np.zeros(0, bool)) == []
    assert rank_totals(operations, found, np.zeros(0, bool), [0, 1]).size_bytes.tolist() == [0, 0]


def test_a_hang_names_who_is_inside_and_who_never_came():
    never = {"kind": ExitKind.NEVER, "seq": 7, "step": 3}
    opened = gathered([[], [row(Op.BARRIER, 100, 0, **never)], [row(Op.BARRIER, 120, 0, **never)], []])
    done = gathered([[], [], [], [row(Op.BARRIER, 90, 95, seq=7)]])
    (found,) = open_operations(opened, done, end_ns=1100, ends_ns={1: 300, 2: 1080, 3: 90}, limit=5)
    assert (found.op, found.seq, found.step, found.age_ns) == ("barrier", 7, 3, 1000)
    assert (found.inside, found.completed, found.absent) == ((1, 2), (3,), (0,))
    assert found.inside_ns == 960  # rank 2: after rank 1 was killed nothing is known of it


def test_an_open_recv_names_the_sender_that_never_sent():
    opened = gathered([[row(Op.RECV, 5, 0, peer=1, kind=ExitKind.NEVER)], []])
    (found,) = open_operations(opened, gathered([[], []]), end_ns=10, ends_ns={}, limit=5)
    assert (found.members, found.inside, found.absent) == ((0, 1), (0,), (1,))
    assert found.inside_ns == 0


def test_the_oldest_open_operations_come_first_and_no_more_than_asked_for():
    rows = [row(Op.BARRIER, 100 - seq, 0, seq=seq, kind=ExitKind.NEVER) for seq in range(9)]
    found = open_operations(gathered([rows]), gathered([[]]), end_ns=200, ends_ns={0: 200}, limit=2)
    assert [operation.seq for operation in found] == [8, 7]


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_operation_that_failed_is_waited_in_and_moves_nothing(is_complete):
    # Rank 0 ran out of time before rank 1 came, which proves nothing against a clock.
    rows = [[row(Op.ALL_REDUCE, 10, 50, kind=ExitKind.FAILED)], [row(Op.ALL_REDUCE, 60, 70)] * is_complete]
    for order in (slice(None), slice(None, None, -1)):  # backwards, the rows of ranks are not ascending
        operations = select_rows(gathered(rows), np.arange(1 + is_complete)[order])
        matching = match(operations)
        found = waits(operations, matching)
        assert not matching.is_matched.any()
        assert found.wait_ns[order].tolist() == [40, 10][: 1 + is_complete]
        assert found.transfer_ns.tolist() == found.negative_ns.tolist() == [0] * (1 + is_complete)
        assert not found.may_contradict.any()


def test_a_failed_operation_tells_who_was_inside_came_late_or_never():
    failed = {"seq": 7, "step": 3, "kind": ExitKind.FAILED}
    rows = [[row(Op.BARRIER, 100, 400, **failed)], [row(Op.BARRIER, 500, 520, **failed)], []]
    opened = gathered(rows)
    (found,) = open_operations(opened, gathered([[], [], []]), end_ns=1000, ends_ns={0: 900, 1: 900}, limit=5)
    assert (found.inside, found.failed, found.late, found.absent) == ((0, 1), (0, 1), (1,), (2,))
    assert (found.age_ns, found.inside_ns) == (420, 300)
