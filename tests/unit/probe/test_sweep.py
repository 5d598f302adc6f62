"""The sweep and its frame on ranks that are threads: what is measured, and what happens when one stops answering."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import each_case, only_nightly
from torch.distributed import HashStore

from hpcpace.probe.record import ProbeRecord
from hpcpace.probe.sweep import OPERATIONS, Sweep, node_counts
from hpcpace.probe.world import Board, ProbeWorld, RankZeroLost, measure_parts
from hpcpace.world.deadline import Deadline
from tests.unit.probe.empty_record import empty_record

CPU = torch.device("cpu")


def worlds(node_of_rank: tuple[int, ...], *, timeout_s: float = 10.0) -> list[ProbeWorld]:
    """Return the worlds of ranks that are threads of this process, each on hosts h0, h1, ..."""
    store, num_hosts = HashStore(), max(node_of_rank) + 1
    return [
        ProbeWorld(
            rank=rank,
            node_of_rank=node_of_rank,
            hosts=tuple(f"h{node}" for node in range(num_hosts)),
            topology_addrs=("",) * num_hosts,
            device=CPU,
            backend="gloo",
            board=Board(store),
            timeout_s=timeout_s,
        )
        for rank in range(len(node_of_rank))
    ]


def together(ranks: list[ProbeWorld], work: Callable[[ProbeWorld], Any]) -> list[Any]:
    """Return what each rank's work returns, all at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


@pytest.fixture
def record() -> ProbeRecord:
    return empty_record(time_s=3.0)


def test_every_operation_is_measured_on_every_number_of_hosts_with_the_right_sum(record: ProbeRecord) -> None:
    ranks = worlds((0, 0, 1))
    sweep = [Sweep(sizes_bytes=(64,)) for _ in ranks]
    found, *others = together(ranks, lambda world: measure_parts(world, [sweep[world.rank]], record))
    assert {(row.op, row.num_nodes, row.num_ranks) for row in found.sweep} == {
        (operation.name, num_nodes, num_ranks) for operation in OPERATIONS for num_nodes, num_ranks in ((1, 2), (2, 3))
    }
    assert not any("wrong data" in problem for problem in found.problems)
    assert all(row.p50_ns <= row.p95_ns <= row.p99_ns and row.rounds_ns for row in found.sweep)
    assert all(other.sweep == () for other in others)


def test_wrong_data_is_named(record: ProbeRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.probe.sweep.SweptOperation.is_right", lambda *_: False)
    ranks = worlds((0, 1))
    sweep = [Sweep(sizes_bytes=(64,), operations=OPERATIONS[:1]) for _ in ranks]
    found, _ = together(ranks, lambda world: measure_parts(world, [sweep[world.rank]], record))
    assert any("all_reduce of 64 B returned wrong data on 2 of 2 ranks" in problem for problem in found.problems)


@pytest.mark.parametrize(
    "error",
    only_nightly(
        [RuntimeError("Backend gloo does not support alltoall_base\nException raised from ...")],
        [
            NotImplementedError("no such thing"),
            AttributeError("ProcessGroupGloo has no attribute alltoall_base"),
        ],
    ),
    ids=lambda error: type(error).__name__,
)
def test_a_backend_without_an_operation_is_said_and_the_others_are_measured(
    record: ProbeRecord, error: Exception
) -> None:
    def missing(*_: object) -> list[Any]:
        raise error

    broken = type(OPERATIONS[0])(**{**vars(OPERATIONS[0]), "name": "strange", "issue": missing})
    ranks = worlds((0, 1))
    sweep = [Sweep(sizes_bytes=(64,), operations=(broken, OPERATIONS[0])) for _ in ranks]
    found, _ = together(ranks, lambda world: measure_parts(world, [sweep[world.rank]], record))
    assert {row.op for row in found.sweep} == {"all_reduce"}
    assert f"gloo has no strange here: {str(error).partition(chr(10))[0]}" in found.problems


def test_one_rank_alone_says_that_it_has_nobody_to_send_to(record: ProbeRecord) -> None:
    (world,) = worlds((0,))
    found = measure_parts(world, [Sweep()], record)
    assert found.sweep == () and "one rank has nobody to send to" in found.problems[0]


@each_case(
    ("node_of_rank", "counts"),
    [
        ((0, 1), [2]),
        ((0, 0), [1]),
        ((0, 1, 2), [3, 2]),
        ((0, 0, 1, 1, 2, 2, 3, 3), [4, 2, 1]),
        (tuple(range(6)), [6, 4, 2]),
    ],
)
def test_numbers_of_hosts_are_all_and_powers_of_two(node_of_rank: tuple[int, ...], counts: list[int]) -> None:
    assert node_counts(worlds(node_of_rank)[0]) == counts


def test_a_host_that_stops_answering_is_named_and_the_others_go_on() -> None:
    ranks = worlds((0, 1, 2), timeout_s=0.01)
    failures = together(ranks[:2], lambda world: world.meet("the sweep"))
    assert failures == [[], []]
    for world in ranks[:2]:
        assert (world.lost_hosts, world.alive, world.nodes) == (["h2"], [0, 1], [0, 1])
        assert world.problems == ["h2 stopped answering during the sweep; the others went on"]


def test_a_host_loses_all_its_ranks_with_one() -> None:
    ranks = worlds((0, 1, 1), timeout_s=0.01)

    def meet(world: ProbeWorld) -> str:
        try:
            world.meet("the sweep")
        except Exception as error:
            return str(error)
        return "went on"

    assert together(ranks[:2], meet) == ["went on", "h1 answered too late; the others went on"]


def test_problems_of_ranks_reach_all_with_the_host_of_the_first() -> None:
    ranks = worlds((0, 1, 2))
    found = together(ranks, lambda world: world.meet("it", "broken" if world.rank else ""))
    assert found == [["h1: broken"]] * 3


def test_without_rank_zero_all_end_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.probe.world.GRACE_S", 0.01)
    _, other = worlds((0, 1), timeout_s=0.01)
    with pytest.raises(RankZeroLost, match="h0 does not answer"):
        other.meet("it")
    with pytest.raises(RankZeroLost, match="h0 does not answer"):
        other.agree(1)


class Slow:
    """A part that takes what it is given."""

    def __init__(self, name: str, weight: float, given: list[float]) -> None:
        self.name, self.weight, self._given = name, weight, given

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        self._given.append(deadline.timeout_s)
        return record


def test_time_is_shared_by_weight_and_what_is_left_goes_to_the_next(record: ProbeRecord) -> None:
    given: list[float] = []
    now = iter(range(100))  # each look at the clock costs a tenth of a second
    (world,) = worlds((0,))
    found = measure_parts(world, [Slow("a", 3, given), Slow("b", 1, given)], record, clock=lambda: next(now) / 10)
    assert given == pytest.approx([2.9 * 3 / 4, 2.5])
    assert set(found.part_s) == {"a", "b"}


class Meeting:
    """A part whose ranks meet three times, a second apart."""

    name, weight = "meeting", 1.0

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def measure(self, world: ProbeWorld, deadline: Deadline, record: ProbeRecord) -> ProbeRecord:
        for _ in range(3):
            self._wait()
            world.agree(1)
        return record


def test_progress_is_told_when_the_ranks_meet_and_each_part_ends_whole(record: ProbeRecord) -> None:
    seconds = [0.0]
    told: list[tuple[str, int, int]] = []
    (world,) = worlds((0,))

    def wait() -> None:
        seconds[0] += 1

    measure_parts(
        world,
        [Meeting(wait), Meeting(wait)],
        replace(record, time_s=8.0),
        clock=lambda: seconds[0],
        begin_stage=lambda name: lambda done, total: told.append((name, done, total)),
    )
    assert told[:4] == [("meeting", done, 4000) for done in (1000, 2000, 3000, 4000)]
    assert told[4:] == [("meeting", done, 5000) for done in (1000, 2000, 3000, 5000)]
