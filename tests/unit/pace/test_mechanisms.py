"""What could make pacing pay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cases import each_case

from hpcpace.pace.choice import PacingPoint, RankProfile, core_names, crowding, find_mechanisms, policy_for


def _ranks(num_ranks: int, *cores: str, polling_share: float = 1.0, hosts: int = 1) -> list[RankProfile]:
    return [
        RankProfile(host_key=f"host{rank % hosts}", cores=frozenset(cores), polling_share=polling_share)
        for rank in range(num_ranks)
    ]


def test_polling_matters_where_ranks_share_cores() -> None:
    assert find_mechanisms(_ranks(4, "0", "1"), []) == ["polling on shared cores"]
    assert find_mechanisms(_ranks(2, "0", "1"), []) == []
    assert find_mechanisms(_ranks(4, "0", "1", hosts=2), []) == []
    assert find_mechanisms(_ranks(4, "0", "1", polling_share=0.1), []) == []


def test_pollers_on_one_core_share_its_time() -> None:
    assert find_mechanisms(_ranks(8, "0", "1", polling_share=0.2), []) == ["polling on shared cores"]
    assert find_mechanisms(_ranks(3, "0", "1", polling_share=0.2), []) == []


def test_ranks_bound_to_cores_of_their_own_share_none() -> None:
    bound = [RankProfile(host_key="host", cores=frozenset({str(core)})) for core in range(4)]
    assert crowding(bound) == 1.0


def test_hardware_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2")):
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(siblings + "\n")
    assert core_names([0, 1, 2], root=tmp_path) == {"0,2", "1,3"}
    assert core_names([7], root=tmp_path) == {"7"}


@each_case(
    ("name", "num_ranks", "found"),
    [("gather 0", 8, ["many to one"]), ("gather 0", 4, []), ("all_gather 0", 8, []), ("all_reduce 0", 8, [])],
)
def test_many_ranks_that_send_to_one_may_overflow_its_buffers(name: str, num_ranks: int, found: list[str]) -> None:
    ranks = _ranks(num_ranks, *map(str, range(8)))
    point = PacingPoint(name=name, ranks=tuple(range(num_ranks)), wait_ns=1e6)
    assert find_mechanisms(ranks, [point]) == found


def test_garbage_collection_is_one_with_several_ranks() -> None:
    rank = RankProfile(host_key="host", cores=frozenset({"0", "1"}), gc_share=0.01)
    assert find_mechanisms([rank], []) == []
    assert find_mechanisms([rank, replace(rank, gc_share=0.0)], []) == ["garbage collection"]


@each_case(
    ("mechanisms", "has_turns", "policy"),
    [
        (["polling on shared cores"], False, "slack"),
        (["polling on shared cores", "garbage collection"], True, "slack"),
        (["garbage collection"], False, "coschedule"),
        ([], True, "stagger"),
        (["many to one"], False, "stagger"),
        (["polling on shared cores", "many to one"], False, "slack"),
        ([], False, "coschedule"),
    ],
)
def test_auto_tries_what_applies(mechanisms: list[str], has_turns: bool, policy: str) -> None:
    assert policy_for(mechanisms, has_turns=has_turns) == policy
