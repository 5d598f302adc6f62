from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.lost_operations import LostOperations, lost_operations, records_of
from hpcpace.metrics.matching import match
from hpcpace.metrics.operations import RankOperations, gather_operations
from hpcpace.trace.schema import TABLES, ExitKind, Op

ALL_KILLED = dict.fromkeys(range(4), False)


def row(op, seq, *, step=None, peer=-1, group=0, size_bytes=100, kind=ExitKind.COMPLETION):
    return (seq if step is None else step, group, seq, op, size_bytes, peer, 10 * seq, 10 * seq + 5, 0, kind)


def all_reduces(*seqs, **options):
    return [row(Op.ALL_REDUCE, seq, **options) for seq in seqs]


def gathered(rows, groups):
    parts = []
    for rank, own in rows.items():
        table = np.array(own, TABLES["collectives"].dtype)
        members = [(index, m, b"g%d" % index, b"gloo") for index, group in enumerate(groups) for m in group]
        mine = np.array(members, TABLES["groups"].dtype)
        parts.append(
            RankOperations(
                rank=rank, collectives=table, groups=mine, enter_ns=table["enter_ns"], exit_ns=table["exit_ns"]
            )
        )
    return gather_operations(parts)


def lost(rows, *, opened=None, ranks=None, groups=((0, 1, 2, 3),), first_steps=None):
    opened = {rank: (opened or {}).get(rank, []) for rank in rows}
    done = gathered(rows, groups)
    return lost_operations(
        records_of(done, match(done)), gathered(opened, groups), ALL_KILLED if ranks is None else ranks, first_steps
    )


def test_what_others_completed_after_the_end_of_a_trace_is_lost():
    whole = all_reduces(*range(50))
    found = lost({0: whole, 1: whole, 2: all_reduces(*range(13)), 3: whole})
    assert found == {2: LostOperations(num_operations=37, step=49)}


def test_one_completion_is_proof_enough():
    found = lost({0: all_reduces(0, 1, 2), 1: all_reduces(0), 2: all_reduces(0), 3: all_reduces(0)})
    assert {rank: of_rank.num_operations for rank, of_rank in found.items()} == {1: 2, 2: 2, 3: 2}


def test_nothing_is_lost_where_all_have_all():
    assert lost({rank: all_reduces(*range(50)) for rank in range(4)}) == {}


def test_a_rank_that_was_inside_when_it_died_has_not_lost_that_operation():
    rows = {rank: all_reduces(0, 1) for rank in range(3)}
    opened = {3: all_reduces(1, kind=ExitKind.NEVER)}
    assert lost({**rows, 3: all_reduces(0)}, opened=opened) == {}


def test_an_operation_that_nobody_completed_is_not_lost():
    rows = {rank: all_reduces(0) for rank in range(4)}
    assert lost(rows, opened={rank: all_reduces(1, kind=ExitKind.NEVER) for rank in (0, 1, 2)}) == {}


def test_a_rank_without_a_trace_has_lost_all_that_it_entered():
    found = lost({rank: all_reduces(*range(20)) for rank in (0, 1, 2)})
    assert found == {3: LostOperations(num_operations=20, step=19)}


def test_only_members_of_a_group_lose_its_operations():
    rows = {0: all_reduces(0, 1), 1: all_reduces(0, 1), 2: all_reduces(0, group=1), 3: []}
    assert lost(rows, groups=((0, 1), (2, 3))) == {3: LostOperations(num_operations=1, step=0)}


@each_case(
    ("op", "root", "completed_by", "losers"),
    [
        (Op.BROADCAST, 0, 0, []),
        (Op.BROADCAST, 0, 1, [0]),
        (Op.SCATTER, 2, 1, [2]),
        (Op.REDUCE, 0, 0, [1, 2, 3]),
        (Op.REDUCE, 0, 1, []),
        (Op.GATHER, 3, 3, [0, 1, 2]),
        (Op.BARRIER, -1, 0, [1, 2, 3]),
        (Op.ALL_TO_ALL, -1, 0, []),
    ],
)
def test_a_completion_proves_only_what_the_operation_depends_on(op, root, completed_by, losers):
    rows = {rank: [row(op, 0, peer=root)] if rank == completed_by else [] for rank in range(4)}
    assert sorted(lost(rows)) == losers


def test_an_operation_without_content_proves_nothing_but_a_barrier_does():
    rows = {0: all_reduces(0, size_bytes=0), 1: [], 2: [], 3: []}
    assert lost(rows) == {}
    assert sorted(lost({**rows, 0: [row(Op.BARRIER, 0, size_bytes=0)]})) == [1, 2, 3]


def test_who_entered_an_operation_has_entered_those_before_it():
    mine = [row(Op.BROADCAST, 0, peer=0), row(Op.BROADCAST, 1, peer=0), *all_reduces(2)]
    assert lost({0: mine, 1: mine, 2: mine, 3: []})[3].num_operations == 3
    assert lost({0: mine[:2], 1: mine[:2], 2: mine[:2], 3: []}) == {}


def test_a_received_message_proves_its_sender_and_not_the_other_way_round():
    sends = [row(Op.SEND, seq, peer=1) for seq in range(5)]
    receives = [row(Op.RECV, seq, peer=0, step=3) for seq in range(5)]
    found = lost({0: sends[:2], 1: receives}, ranks={0: False, 1: False}, groups=((0, 1),))
    assert found == {0: LostOperations(num_operations=3, step=3)}
    assert lost({0: sends, 1: receives[:2]}, ranks={0: False, 1: False}, groups=((0, 1),)) == {}


def test_a_receive_that_failed_proves_nothing_about_its_sender():
    receives = [row(Op.RECV, 0, peer=0), row(Op.RECV, 1, peer=0, kind=ExitKind.FAILED)]
    assert lost({0: [row(Op.SEND, 0, peer=1)], 1: receives}, ranks={0: False, 1: False}, groups=((0, 1),)) == {}


def test_messages_to_different_ranks_are_numbered_apart():
    rows = {0: [row(Op.SEND, 0, peer=1)], 1: [row(Op.RECV, 0, peer=0)], 2: [row(Op.RECV, 0, peer=0)]}
    assert lost(rows) == {0: LostOperations(num_operations=1, step=0)}


def test_a_closed_trace_ends_its_own_recording_and_only_gaps_in_it_are_lost():
    rows = {0: all_reduces(*range(9)), 1: all_reduces(*range(9)), 2: all_reduces(*range(6)), 3: all_reduces(0, 1, 4)}
    assert lost(rows, ranks=dict.fromkeys(range(4), True)) == {3: LostOperations(num_operations=2, step=3)}


@pytest.mark.parametrize(("first_step", "num_lost"), [(0, 3), (4, 0)])
def test_what_a_rank_lacks_before_its_first_operation_is_lost_if_it_recorded_its_steps(first_step, num_lost):
    rows = {rank: all_reduces(*range(9)) for rank in range(3)} | {3: all_reduces(*range(4, 9))}
    found = lost(rows, ranks=dict.fromkeys(range(4), True), first_steps={3: first_step})
    assert found == ({3: LostOperations(num_operations=num_lost, step=3)} if num_lost else {})


def test_steps_that_ranks_number_differently_are_claimed_with_care():
    others = all_reduces(*range(10))
    shifted = [row(Op.ALL_REDUCE, seq, step=seq - 1) for seq in range(4)]
    assert lost({0: others, 1: others, 2: others, 3: shifted})[3] == LostOperations(num_operations=6, step=8)


def test_rows_of_unknown_groups_and_no_rows_at_all_prove_nothing():
    assert lost({0: all_reduces(0, group=7), 1: []}) == {}
    assert lost({0: [], 1: []}) == {}
    nothing = gathered({}, ())
    assert lost_operations(records_of(nothing, match(nothing)), nothing, ALL_KILLED) == {}
