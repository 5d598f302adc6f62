from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics import clock_suspects
from hpcpace.metrics.clock_suspects import contradictions, judge, proven_leads
from hpcpace.metrics.matching import match
from hpcpace.metrics.operations import RankOperations, gather_operations
from hpcpace.metrics.waits import waits
from hpcpace.trace.schema import TABLES, ExitKind, Op

MS = 1_000_000
TRANSFER_NS = 100_000
HALFWIDTH_NS = 10_000
ROUNDING_NS = 256


def all_reduces(num_nodes, *, num_ops=60, ranks_per_node=2, late_ns=300_000, size_bytes=100, op=Op.ALL_REDUCE):
    """Return true enters and exits of operations in which every rank is the last one now and then."""
    random = np.random.default_rng(3)
    enter_ns = np.arange(num_ops)[:, None] * 10 * MS + random.integers(
        0, late_ns, (num_ops, num_nodes * ranks_per_node)
    )
    exit_ns = np.repeat(enter_ns.max(axis=1, keepdims=True) + TRANSFER_NS, enter_ns.shape[1], axis=1)
    rows = [
        [
            (0, 0, seq, op, size_bytes, -1, enter, exit_, 0, ExitKind.COMPLETION)
            for seq, (enter, exit_) in enumerate(times)
        ]
        for times in np.stack([enter_ns, exit_ns], axis=2).swapaxes(0, 1).tolist()
    ]
    return rows, np.repeat(np.arange(num_nodes), ranks_per_node)


def message(op, peer, enter, exit_, seq=0):
    return (0, 0, seq, op, 100, peer, enter, exit_, 0, ExitKind.COMPLETION)


def verdict(rows, nodes, errors_ns, halfwidth_ns=HALFWIDTH_NS):
    """Return the verdict on rows of ranks whose times are wrong by `errors_ns`, by node, and rounded as in traces."""
    parts = []
    for rank, own in enumerate(rows):
        table = np.array(own, TABLES["collectives"].dtype)
        enter_ns, exit_ns = (
            (table[name] + errors_ns.get(int(nodes[rank]), 0) + ROUNDING_NS // 2) // ROUNDING_NS * ROUNDING_NS
            for name in ("enter_ns", "exit_ns")
        )
        groups = np.array([(0, member, b"all", b"gloo") for member in range(len(rows))], TABLES["groups"].dtype)
        parts.append(RankOperations(rank=rank, collectives=table, groups=groups, enter_ns=enter_ns, exit_ns=exit_ns))
    operations = gather_operations(parts)
    matching = match(operations)
    found = contradictions(operations, matching, waits(operations, matching))
    error_ns = np.full(len(found.rows), halfwidth_ns + ROUNDING_NS, np.float64)
    node = np.asarray(nodes)[operations.rank[found.rows]]
    return judge(proven_leads(operations, found, node=node, enter_error_ns=error_ns, exit_error_ns=error_ns))


@each_case("error_ns", [MS, -MS])
@each_case("node", [0, 2, 3])
def test_one_wrong_clock_is_named_with_its_sign_and_a_bound_below_the_truth(node, error_ns):
    found = verdict(*all_reduces(4), {node: error_ns})
    (suspect,) = found.suspects
    assert (found.num_wrong, suspect.node) == (1, node)
    assert (suspect.ahead_ns > 0, suspect.behind_ns > 0) == (error_ns > 0, error_ns < 0)
    assert 0.8 * MS < max(suspect.ahead_ns, suspect.behind_ns) < MS - TRANSFER_NS
    assert suspect.against == tuple(other for other in range(4) if other != node)


def test_a_wrong_reference_is_the_odd_one_out_when_all_others_shift_alike():
    found = verdict(*all_reduces(4), {1: MS, 2: MS, 3: MS})
    assert [(suspect.node, suspect.ahead_ns) for suspect in found.suspects] == [(0, 0)]


def test_of_two_hosts_either_may_be_wrong():
    found = verdict(*all_reduces(2), {1: MS})
    assert found.num_wrong == 1
    assert [(suspect.node, suspect.ahead_ns > 0) for suspect in found.suspects] == [(0, False), (1, True)]


@pytest.mark.parametrize("errors_ns", [{1: MS, 4: -MS}, {1: MS, 4: 2 * MS}])
def test_two_wrong_clocks_among_five_are_found_and_judged_by_the_sound_ones(errors_ns):
    found = verdict(*all_reduces(5), errors_ns)
    assert found.num_wrong == len(found.suspects) == 2
    for suspect in found.suspects:
        assert suspect.against == (0, 2, 3)
        assert max(suspect.ahead_ns, suspect.behind_ns) < abs(errors_ns[suspect.node])


def test_two_halves_that_contradict_each_other_are_all_suspect():
    found = verdict(*all_reduces(4), {2: MS, 3: MS})
    assert found.num_wrong == 2
    assert [suspect.node for suspect in found.suspects] == [0, 1, 2, 3]


def test_many_wrong_clocks_leave_everybody_suspect():
    found = verdict(*all_reduces(12), {node: (node + 1) * MS for node in range(6)})
    assert (found.num_wrong, len(found.suspects)) == (clock_suspects.MAX_WRONG + 1, 12)


@each_case("halfwidth_ns", [0, HALFWIDTH_NS, 10 * TRANSFER_NS])
def test_errors_up_to_the_half_width_are_nobodys_fault(halfwidth_ns):
    random = np.random.default_rng(5)
    for _ in range(20):
        errors_ns = dict(enumerate(random.integers(-halfwidth_ns, halfwidth_ns + 1, 4).tolist()))
        assert verdict(*all_reduces(4, late_ns=1), errors_ns, halfwidth_ns).num_wrong == 0


@each_case("error_ns", range(-600, 601, 40))
def test_rounding_alone_accuses_nobody(error_ns):
    rows, nodes = all_reduces(3, late_ns=5)
    instant = [[(*row[:7], row[6], *row[8:]) for row in own] for own in rows]
    last = [max(own[seq][6] for own in rows) for seq in range(len(rows[0]))]
    instant = [[(*row[:7], last[seq], *row[8:]) for seq, row in enumerate(own)] for own in instant]
    half_ns = abs(error_ns) / 2
    assert verdict(instant, nodes, {1: error_ns}, half_ns).num_wrong == 0


def test_a_rank_without_records_takes_nothing_from_what_the_others_prove():
    rows, nodes = all_reduces(4)
    found = verdict([[] if rank == 7 else own for rank, own in enumerate(rows)], nodes, {2: MS})
    assert [suspect.node for suspect in found.suspects] == [2]


def test_an_operation_that_a_rank_has_twice_proves_nothing():
    rows, nodes = all_reduces(4)
    assert verdict([own * 2 if rank == 7 else own for rank, own in enumerate(rows)], nodes, {2: MS}).num_wrong == 0


def test_ranks_of_one_host_that_contradict_each_other_accuse_no_host():
    rows, _ = all_reduces(2)
    assert verdict(rows, [0, 0, 1, 1], {1: MS}).num_wrong == 1
    shifted = [[(*row[:6], row[6] + MS, row[7] + MS, *row[8:]) for row in own] for own in rows[2:]]
    assert verdict(rows[:2] + shifted, [0, 0, 0, 0], {}).num_wrong == 0


@pytest.mark.parametrize("options", [{"op": Op.ALL_TO_ALL}, {"size_bytes": 0}])
def test_operations_that_need_not_wait_for_everybody_prove_nothing(options):
    assert verdict(*all_reduces(4, **options), {1: MS}).num_wrong == 0


def test_a_message_received_before_it_was_sent_proves_which_clock_is_ahead():
    zero = [message(Op.SEND, 1, 50, 60), message(Op.RECV, 2, 5 * MS, 6 * MS)]
    one = [message(Op.RECV, 0, 40, TRANSFER_NS)]
    two = [message(Op.SEND, 0, 5 * MS, 5 * MS + 10)]
    found = verdict([zero, one, two], [0, 1, 2], {0: MS})
    assert [(suspect.node, suspect.against) for suspect in found.suspects] == [(0, (1,)), (1, (0,))]
    assert found.suspects[0].ahead_ns == pytest.approx(MS - TRANSFER_NS - 2 * HALFWIDTH_NS, abs=4 * ROUNDING_NS)


def test_a_send_that_ends_before_its_receiver_came_proves_nothing():
    assert verdict([[message(Op.SEND, 1, 50, 60)], [message(Op.RECV, 0, 5 * MS, 6 * MS)]], [0, 1], {}).num_wrong == 0


@each_case(
    ("op", "root", "wrong", "num_wrong"),
    [
        (Op.BROADCAST, 0, {0: MS}, 1),
        (Op.BROADCAST, 0, {0: -MS}, 0),
        (Op.REDUCE, 0, {0: -MS}, 1),
        (Op.REDUCE, 0, {0: MS}, 0),
    ],
)
def test_a_root_is_known_in_one_direction_only(op, root, wrong, num_wrong):
    rows = [[(0, 0, 0, op, 100, root, 10 * MS + rank, 10 * MS + 500, 0, ExitKind.COMPLETION)] for rank in range(3)]
    assert verdict(rows, [0, 1, 2], wrong).num_wrong == num_wrong


def test_the_budget_of_pairs_leaves_the_largest_contradiction(monkeypatch):
    whole = verdict(*all_reduces(4), {2: MS})
    monkeypatch.setattr(clock_suspects, "_MAX_PAIRS", 1)
    (part,) = verdict(*all_reduces(4), {2: MS}).suspects
    assert part.ahead_ns == whole.suspects[0].ahead_ns


def test_no_operations_prove_nothing():
    assert verdict([[], []], [0, 1], {}).num_wrong == 0
