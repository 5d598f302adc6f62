"""Matching by number and waits by rank agree with sorting all rows, however irregular these are."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
from cases import each_case

from hpcpace.metrics.matching import match
from hpcpace.metrics.operations import Operations, ProcessGroup, rank_slices
from hpcpace.metrics.waits import waits
from hpcpace.trace.schema import ExitKind, Op

_NEVER_NS = np.iinfo(np.int64).min
_COLLECTIVES = [op for op in Op if op not in (Op.SEND, Op.RECV)]


def random_operations(seed, *, damage=True):
    """Return operations of several groups with messages; with damage, rows that are missing, doubled or contradict."""
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(1, 9))
    groups = [ProcessGroup("world", tuple(range(num_ranks)))]
    groups += [
        ProcessGroup(
            f"g{index}", tuple(sorted(rng.choice(num_ranks, rng.integers(1, num_ranks + 1), replace=False).tolist()))
        )
        for index in range(rng.integers(0, 4))
    ]
    rows = []
    for index, group in enumerate(groups):
        first = int(rng.choice([0, 5, 1 << 40]))
        for seq in range(first, first + rng.integers(0, 30)):
            op = int(rng.choice(_COLLECTIVES))
            root = int(rng.choice(group.ranks)) if op in (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER) else -1
            rows += [(rank, index, seq, op, root) for rank in group.ranks]
    for _ in range(rng.integers(0, 4)):
        source, target = (int(rank) for rank in rng.integers(0, num_ranks, 2))
        group = int(rng.integers(0, len(groups)))
        for seq in range(rng.integers(0, 20)):
            rows += [(source, group, seq, Op.SEND, target), (target, group, seq, Op.RECV, source)]
    if damage:
        rows = [row for row in rows if rng.random() > 0.03] + [row for row in rows if rng.random() < 0.02]
        rows = [damaged(row, rng) for row in rows]
    rows.sort(key=lambda row: (row[0], rng.random()))
    rank, group, seq, op, peer = (np.array(rows, np.int64).reshape(-1, 5)[:, column] for column in range(5))
    enter = rng.integers(0, 1000, len(rank))
    if not damage:
        enter = np.sort(enter)
    return Operations(
        groups=tuple(groups),
        rank=rank,
        step=np.zeros(len(rank), np.int64),
        group=group,
        seq=seq,
        op=op.astype(np.uint8),
        size_bytes=np.ones(len(rank), np.int64),
        peer=peer,
        enter_ns=enter,
        exit_ns=enter + rng.integers(0, 200, len(rank)),
        blocked_ns=np.zeros(len(rank), np.int64),
        exit_kind=rng.integers(0, 2, len(rank)).astype(np.uint8),
    )


def damaged(row, rng):
    rank, group, seq, op, peer = row
    chance = rng.random()
    if chance < 0.01:
        return rank, group, int(rng.choice([-(1 << 63), (1 << 63) - 1, 1 << 50, 3])), op, peer
    if chance < 0.02:
        return rank, -1, seq, op, peer
    if chance < 0.03:
        return rank, group, seq, int(rng.choice(list(Op))), peer
    return (rank, group, seq, op, -1) if chance < 0.04 else row


def match_by_sorting(operations, unknown_clocks):
    """Return the operation of each row as a key, and whether all its members are there once with a known clock."""
    keys = []
    for rank, group, seq, op, peer in zip(
        *(getattr(operations, name).tolist() for name in ("rank", "group", "seq", "op", "peer")), strict=True
    ):
        if op in (Op.SEND, Op.RECV):
            keys.append((group, seq, "message", *((rank, peer) if op == Op.SEND else (peer, rank))))
        else:
            keys.append((group, seq, op))
    ranks = {}
    for key, rank in zip(keys, operations.rank.tolist(), strict=True):
        ranks.setdefault(key, []).append(rank)
    matched = []
    for key in keys:
        found, group = ranks[key], key[0]
        expected = 2 if key[2] == "message" else len(operations.groups[group].ranks)
        is_whole = len(found) == len(set(found)) == expected and not set(found) & set(unknown_clocks)
        matched.append(group >= 0 and is_whole)
    return keys, matched


def waits_by_sorting(operations, keys, matched):
    """Return wait, transfer and negative transfer of each row, from the rules row by row."""
    last, previous, queues, members = {}, [_NEVER_NS] * len(keys), {}, {}
    is_root = operations.rank == operations.peer
    for row in np.argsort(operations.enter_ns, kind="stable").tolist():
        members.setdefault((operations.rank[row], operations.group[row]), []).append(row)
    for member, rows in members.items():
        overtakes = [
            operations.exit_ns[after] < operations.exit_ns[before]
            for before, after in pairwise(rows)
            if operations.op[before] != operations.op[after]
        ]
        is_apart = sum(overtakes) > 0.05 * len(overtakes)
        for row in rows:
            queue = (*member, operations.op[row] if is_apart else None)
            previous[row], queues[queue] = queues.get(queue, _NEVER_NS), int(operations.exit_ns[row])
    for row, key in enumerate(keys):
        op = operations.op[row]
        if is_root[row] if op in (Op.BROADCAST, Op.SCATTER) else not (op in (Op.REDUCE, Op.GATHER) and is_root[row]):
            last[key] = max(last.get(key, _NEVER_NS), int(operations.enter_ns[row]))
    found = []
    for row, key in enumerate(keys):
        op, enter, exit_ = operations.op[row], int(operations.enter_ns[row]), int(operations.exit_ns[row])
        release = _NEVER_NS
        if matched[row] and (op not in (Op.REDUCE, Op.GATHER) or is_root[row]):
            release = last.get(key, _NEVER_NS)
        if op == Op.SEND and not (exit_ >= release and operations.exit_kind[row] == ExitKind.COMPLETION):
            release = _NEVER_NS
        transfer = max(exit_ - max(release, enter, previous[row]), 0) if matched[row] else 0
        is_sync = matched[row] and op not in (
            Op.BROADCAST, Op.SCATTER, Op.REDUCE, Op.GATHER, Op.SEND, Op.RECV
        )  # fmt: skip
        negative = max(release - exit_, 0) if is_sync else 0
        found.append((min(max(release, enter), exit_) - enter, transfer, negative))
    return found


@each_case("seed", range(60))
def test_whatever_the_rows_matches_and_waits_are_those_of_sorting_them(seed):
    operations = random_operations(seed, damage=seed % 3 > 0)
    unknown = (1,) if seed % 4 == 0 else ()
    matching = match(operations, unknown_clocks=unknown)
    keys, matched = match_by_sorting(operations, unknown)
    assert matching.is_matched.tolist() == matched
    numbers = dict(zip(keys, matching.instance.tolist(), strict=True))
    assert len(set(numbers.values())) == len(numbers) == len(matching.num_rows)
    assert [numbers[key] for key in keys] == matching.instance.tolist()
    assert sorted(numbers.values()) == list(range(len(numbers)))
    found = waits(operations, matching)
    measured = zip(found.wait_ns.tolist(), found.transfer_ns.tolist(), found.negative_ns.tolist(), strict=True)
    assert list(measured) == waits_by_sorting(operations, keys, matched)


@each_case("seed", range(20))
def test_order_lays_the_rows_of_an_operation_side_by_side(seed):
    matching = match(random_operations(seed, damage=seed % 2 > 0))
    assert matching.order.tolist() == np.argsort(matching.instance, kind="stable").tolist()
    assert matching.starts.tolist() == np.unique(np.sort(matching.instance), return_index=True)[1].tolist()


@each_case("seed", range(5))
def test_rows_that_are_not_ordered_by_rank_match_the_same(seed):
    operations = random_operations(seed)
    mixed = np.random.default_rng(seed).permutation(len(operations))
    columns = {
        field.name: getattr(operations, field.name)[mixed]
        for field in dataclasses.fields(operations)
        if field.name != "groups"
    }
    shuffled = Operations(groups=operations.groups, **columns)
    assert match(shuffled).is_matched.tolist() == match(operations).is_matched[mixed].tolist()


def test_collectives_are_numbered_by_group_and_number():
    operations = random_operations(3, damage=False)
    rows = np.flatnonzero(~np.isin(operations.op, (Op.SEND, Op.RECV)))
    keys = list(zip(operations.group[rows].tolist(), operations.seq[rows].tolist(), strict=True))
    numbers = dict(zip(keys, match(operations).instance[rows].tolist(), strict=True))
    assert [numbers[key] for key in sorted(numbers)] == list(range(len(numbers)))


def test_the_rows_of_each_rank():
    assert rank_slices(np.array([0, 0, 3])) == [slice(0, 2), slice(2, 3)]
    assert rank_slices(np.zeros(0, np.int64)) == []
    assert rank_slices(np.array([1, 0])) is None
