"""A hang in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpcpace.core.text import NS_PER_S
from hpcpace.hang.rules import find_hang
from hpcpace.hang.verdict import HangWords, describe
from hpcpace.hang.views import Activity, Call, Channel, Doing, GroupView, JobView, ProcessState, RankView

DP = Channel(0)


def rank_in(rank: int, *, entered: int, is_open: bool, **known: Any) -> RankView:
    call = Call(
        channel=DP, seq=entered - 1, op="all_reduce", entered_ns=(entered + rank) * NS_PER_S, is_open=is_open, step=44
    )
    return RankView(rank=rank, host=f"n{rank // 2}", entered={DP: entered}, calls=(call,), **known)


def words(views: Sequence[RankView]) -> HangWords:
    group = GroupView(name="dp", members=tuple(sorted(view.rank for view in views)))
    job = JobView(groups=(group,), ranks={view.rank: view for view in views}, now_ns=40 * NS_PER_S)
    hang = find_hang(job)
    assert hang is not None
    return describe(hang, job)


def test_a_hang_names_the_operation_the_rank_and_the_time() -> None:
    said = words([rank_in(rank, entered=4 if rank == 2 else 5, is_open=rank != 2) for rank in range(4)])
    assert said.headline == (
        "hang: all_reduce 4 of group dp (step 44) waits for rank 2 on n1, which never called it; 35.0 s so far"
    )
    assert said.why == ("ranks 0-1, 3 wait", "rank 2 last called all_reduce 3 of group dp (step 44)")


def test_what_a_rank_does_instead_is_said_with_its_stack() -> None:
    busy = rank_in(
        1,
        entered=4,
        is_open=False,
        doing=Doing.LOADING,
        doing_since_ns=10 * NS_PER_S,
        stack=(
            "train.py:9 in main",
            "/lib/site-packages/torch/utils/dataloader.py:7 in f",
            "data.py:5 in read",
        ),
    )
    said = words([rank_in(0, entered=5, is_open=True), busy])
    assert "waits for rank 1, which is loading data" in said.headline
    assert said.why == (
        "rank 0 waits",
        "rank 1 has been loading data for 30.0 s",
        "stack of rank 1: data.py:5 in read <- train.py:9 in main",
    )


def test_what_usually_comes_next_is_called_a_guess_beside_what_the_kernel_says() -> None:
    asleep = Activity(state=ProcessState.ASLEEP, cores=0.01, over_ns=20 * NS_PER_S, is_now=False)
    since = {"doing": Doing.LOADING, "doing_since_ns": 10 * NS_PER_S, "is_guess": True, "after": "the optimizer"}
    guessed = rank_in(1, entered=4, is_open=False, activity=asleep, **since)
    said = words([rank_in(0, entered=5, is_open=True), guessed])
    assert "waits for rank 1, which is in its own code after the optimizer, asleep" in said.headline
    assert said.why == (
        "rank 0 waits",
        "rank 1 has been in its own code after the optimizer for 30.0 s; loading data usually comes next, which is a"
        " guess",
        "rank 1 used 0.01 cores in the last 20.0 s that it recorded: it is asleep",
    )
    assert "storage" not in said.advice and "(py-spy dump --pid)" in said.advice
    here = replace(guessed, activity=replace(asleep, pid=4711))
    assert "(py-spy dump --pid 4711)" in words([rank_in(0, entered=5, is_open=True), here]).advice


def test_of_a_rank_without_a_sign_of_life_it_is_not_said_what_it_does_now() -> None:
    views = [rank_in(rank, entered=5, is_open=True, seen_ns=39 * NS_PER_S) for rank in (0, 1, 3)]
    silent = rank_in(2, entered=4, is_open=False, seen_ns=5 * NS_PER_S, doing=Doing.COMPUTING, doing_since_ns=0)
    said = words([*views, silent])
    assert said.headline == (
        "hang: all_reduce 4 of group dp (step 44) waits for rank 2 on n1, which has shown no sign of life for 35.0 s;"
        " 35.0 s so far"
    )
    assert said.why == ("ranks 0-1, 3 wait", "rank 2 was last seen computing")
    assert said.advice.startswith("see whether the host of rank 2 on n1 answers")


def test_of_a_process_that_is_there_it_is_said_what_it_waits_for_though_nothing_of_it_is_recorded() -> None:
    waits = Activity(
        state=ProcessState.ASLEEP, cores=0.0, over_ns=NS_PER_S, is_now=True, pid=4711, waits="in a write to the pipe x"
    )
    views = [rank_in(rank, entered=5, is_open=True, seen_ns=39 * NS_PER_S) for rank in (0, 1, 3)]
    silent = rank_in(2, entered=4, is_open=False, seen_ns=5 * NS_PER_S, activity=waits)
    said = words([*views, silent])
    assert "rank 2 on n1, which is waiting in a write to the pipe x, and has shown no sign of life for" in said.headline
    assert said.advice.startswith("look at the stack of rank 2 (py-spy dump --pid 4711): its process is there")


def test_nobody_is_named_where_all_are_inside() -> None:
    said = words([rank_in(rank, entered=5, is_open=True) for rank in range(4)])
    assert said.headline == (
        "hang: all members are in all_reduce 4 of group dp (step 44), and nothing moves; 35.0 s so far"
    )


def test_a_rank_without_a_record_is_not_blamed() -> None:
    inside = [rank_in(rank, entered=5, is_open=True) for rank in (0, 1, 3)]
    said = words([*inside, RankView(rank=2, is_recorded=False)])
    assert said.headline == (
        "hang: all_reduce 4 of group dp (step 44) may wait for rank 2, but that is not sure: of 4 ranks, 3 are"
        " recorded; 35.0 s so far"
    )


def test_culprits_in_several_operations_are_said_with_each() -> None:
    groups = (GroupView(name="a", members=(0, 1)), GroupView(name="b", members=(2, 3)))
    waiting = [
        Call(channel=Channel(group), seq=7, op="barrier", entered_ns=group * NS_PER_S, is_open=True) for group in (0, 1)
    ]
    views = {
        0: RankView(rank=0, entered={Channel(0): 8}, calls=(waiting[0],)),
        1: RankView(rank=1, entered={Channel(0): 7}),
        2: RankView(rank=2, entered={Channel(1): 8}, calls=(waiting[1],)),
        3: RankView(rank=3, entered={Channel(1): 7}),
    }
    job = JobView(groups=groups, ranks=views, now_ns=3 * NS_PER_S, is_dated=True)
    hang = find_hang(job)
    assert hang is not None
    assert (hang.culprits, hang.waiting) == ((1, 3), (0, 2))
    said = describe(hang, job)
    assert said.headline == (
        "hang: barrier 7 of group a waits for rank 1, which never called it; and barrier 7 of group b waits for rank 3,"
        " which never called it; since 1970-01-01 00:00:00 UTC"
    )


def called(rank: int, **known: Any) -> RankView:
    call = Call(channel=DP, seq=7, entered_ns=NS_PER_S, is_open=True, step=44, **known)
    return RankView(rank=rank, entered={DP: 8}, calls=(call,))


def test_what_a_rank_called_stands_beside_what_the_others_called() -> None:
    others = [called(rank, op="barrier") for rank in (0, 2, 3)]
    said = words([*others, called(1, op="all_reduce", size_bytes=16_640, where="train.py:9 in main")])
    assert said.headline == (
        "hang: rank 1 called all_reduce of 16.6 kB where the others called barrier 7 of group dp (step 44);"
        " 39.0 s so far"
    )
    assert "rank 1 called all_reduce of 16.6 kB (train.py:9 in main)" in said.why


def test_of_two_sizes_of_one_operation_both_are_said() -> None:
    others = [called(rank, op="all_reduce", size_bytes=8) for rank in (0, 2, 3)]
    said = words([*others, called(1, op="all_reduce", size_bytes=16_640)])
    assert said.headline == (
        "hang: rank 1 called all_reduce of 16.6 kB where the others called all_reduce 7 of group dp (step 44), of 8 B;"
        " 39.0 s so far"
    )


def test_ranks_in_another_order_are_said_to_be_where_they_are() -> None:
    groups = tuple(GroupView(name=name, members=(0, 1, 2)) for name in ("a", "b"))
    views = {}
    for rank in range(3):
        own = Channel(int(rank == 2))
        call = Call(channel=own, seq=3, op="all_reduce", entered_ns=NS_PER_S, is_open=True)
        views[rank] = RankView(rank=rank, entered={own: 4, Channel(1 - own.group): 3}, calls=(call,))
    job = JobView(groups=groups, ranks=views, now_ns=40 * NS_PER_S)
    hang = find_hang(job)
    assert hang is not None
    said = describe(hang, job)
    assert said.headline.startswith("hang: rank 2 called the operations of two groups in another order than the others")
    assert "rank 2 is in all_reduce 3 of group b" in said.why
