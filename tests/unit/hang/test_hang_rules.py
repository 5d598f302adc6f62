"""The rules on hangs, on simulated jobs of known truth."""

from __future__ import annotations

import random

from cases import each_case
from known_hangs import KINDS, broken_job

from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import Call, Channel, GroupView, HangKind, JobView, RankView

NAMED = [kind for kind in KINDS if kind not in ("network", "disorder")]


@each_case("seed", range(30))
@each_case("kind", NAMED)
def test_a_fault_is_named_with_its_kind_and_rank(kind: str, seed: int) -> None:
    job = broken_job(kind, seed)
    hang = find_hang(job.view())
    assert hang is not None
    assert (hang.kind, hang.culprits) == (KINDS[kind], (job.fault.rank,))


@each_case("seed", range(30))
def test_nobody_is_named_where_an_operation_that_all_have_entered_does_not_move(seed: int) -> None:
    hang = find_hang(broken_job("network", seed).view())
    assert hang is not None
    assert (hang.kind, hang.culprits, hang.could_be) == (HangKind.NETWORK, (), ())


@each_case("seed", range(30))
def test_operations_of_groups_in_another_order_are_found(seed: int) -> None:
    job = broken_job("disorder", seed)
    hang = find_hang(job.view())
    assert hang is not None
    assert hang.kind is HangKind.DISORDER
    assert hang.culprits == (job.fault.rank,) or job.fault.rank in hang.could_be


@each_case("seed", range(30))
@each_case("kind", KINDS)
def test_an_innocent_rank_is_never_named_where_records_are_missing(kind: str, seed: int) -> None:
    job = broken_job(kind, seed)
    chance = random.Random(seed)
    guilty = set() if kind == "network" else {job.fault.rank}
    for share in (0.2, 0.5, 0.8):
        hidden = {rank: chance.choice(("record", "end")) for rank in range(job.mesh.size) if chance.random() < share}
        hang = find_hang(job.view(hidden))
        if hang is None:  # no rank with a record waits
            continue
        assert set(hang.culprits) <= guilty
        # Of one order in a group with many unknown, it cannot be told that it is the wrong one.
        if kind not in ("network", "disorder") and hang.could_be:
            assert guilty <= set(hang.could_be)


@each_case("kind", KINDS)
def test_nothing_hangs_before_its_time(kind: str) -> None:
    job = broken_job(kind, 1).view()
    oldest = min(call.entered_ns or 0 for view in job.ranks.values() for call in view.calls if call.is_open)
    assert find_hang(job, least_ns=job.now_ns - oldest + 1) is None
    assert find_hang(job, least_ns=job.now_ns - oldest) is not None


def test_a_job_that_waits_for_nothing_does_not_hang() -> None:
    job = broken_job("stuck", 3)
    job.fault.at = -1
    job.run()
    assert not job.hangs
    assert find_hang(job.view()) is None


def view_of(
    groups: tuple[tuple[int, ...], ...], opened: dict[int, list[Channel]], sent: tuple[int, ...] = ()
) -> JobView:
    """Return a job whose ranks are in the first operations of channels, in this order; `sent` have finished theirs."""
    ranks = {}
    for rank, channels in opened.items():
        calls = tuple(
            Call(channel=channel, seq=0, op="all_reduce" if channel.source < 0 else "recv", is_open=True, entered_ns=at)
            for at, channel in enumerate(channels)
        )
        entered = dict.fromkeys(channels, 1) | ({Channel(1, rank, 0): 1} if rank in sent else {})
        ranks[rank] = RankView(rank=rank, entered=entered, calls=calls)
    views = tuple(GroupView(name=str(number), members=members) for number, members in enumerate(groups))
    return JobView(groups=views, ranks=ranks, now_ns=1)


def test_ranks_whose_first_operations_wait_for_each_other_are_a_circle_and_nobody_else() -> None:
    x, y, z, beside = map(Channel, range(4))
    opened = {0: [x, z, beside], 1: [y, x], 2: [z, y], 3: [beside]}
    hang = find_hang(view_of(((0, 1), (1, 2), (2, 0), (0, 3)), opened))
    assert hang is not None
    assert (hang.kind, hang.could_be) == (HangKind.DISORDER, (0, 1, 2))


def test_a_message_that_is_queued_behind_an_operation_is_not_held_up_by_its_receiver() -> None:
    """Ranks 0 and 1 are in an operation that does not move, and rank 0 has called a receive behind it."""
    hang = find_hang(view_of(((0, 1), (0, 2)), {0: [Channel(0), Channel(1, 2, 0)], 1: [Channel(0)], 2: []}, sent=(2,)))
    assert hang is not None
    assert (hang.kind, hang.could_be) == (HangKind.NETWORK, ())
    assert hang.call is not None
    assert hang.call.channel == Channel(0)
