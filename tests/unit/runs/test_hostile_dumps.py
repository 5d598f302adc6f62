"""Dumps that somebody made up: their values have types and sizes, and what is computed of them is linear in them."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from known_dumps import dump, entry, hung_job, unfinished, write

from hpcpace.core.errors import TraceError
from hpcpace.hang.graph import Graph, WaitGraph
from hpcpace.hang.rules import find_hang
from hpcpace.hang.views import Call, Channel, GroupView, HangKind, JobView, RankView
from hpcpace.runs.imports.dump_view import job_view
from hpcpace.runs.imports.dumps import read_dumps
from hpcpace.runs.imports.flight_recorder import read_dump

LONG = "x" * 1_000_000


def with_instructions(content: Any, instructions: bytes) -> bytes:
    """Return a pickle in which instructions stand in the place of the text `HERE`."""
    return pickle.dumps(content, 2).replace(b"X\x04\x00\x00\x00HERE", instructions)


def shared(levels: int) -> bytes:
    """Return the instructions for a tuple of two times the same tuple, and so on."""
    memo = [(1_000_000 + level).to_bytes(4, "little") for level in range(levels)]
    return b")" + b"".join(b"r" + place + b"j" + place + b"\x86" for place in memo)


FIELDS: dict[str, Callable[[Any], Any]] = {
    "line of a frame": lambda value: dump([entry(0, frames=[{"name": "f", "filename": "a.py", "line": value}])]),
    "name of a frame": lambda value: dump([entry(0, frames=[{"name": value, "filename": "a.py", "line": 1}])]),
    "state": lambda value: dump([entry(0, state=value)]),
    "time": lambda value: dump([entry(0, time_created_ns=value)]),
    "shape": lambda value: dump([entry(0, input_sizes=[value])]),
    "record": lambda value: dump([entry(0, record_id=value)]),
    "ranks": lambda value: dump([], pg_config={"0": {"name": "0", "desc": "", "ranks": value}}),
    "status": lambda value: dump([], pg_status={"0": {"last_enqueued_collective": value}}),
    "version": lambda value: dump([], version=value),
    "library": lambda value: dump([], comm_lib_version=value),
    "what nobody reads": lambda value: dump([], other=value),
}


@each_case("make", FIELDS.values(), ids=FIELDS)
def test_values_that_hold_each_other_are_refused_wherever_they_are(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    (tmp_path / "rank_0").write_bytes(with_instructions(make("HERE"), shared(60)))
    with pytest.raises(ValueError, match="its values hold each other more than"):
        read_dump(tmp_path / "rank_0")


@each_case(
    "content",
    [
        dump([entry(0, state=LONG)]),
        dump([entry(0, profiling_name=LONG)]),
        dump([entry(0, process_group=("0", LONG))]),
        dump([], version=f"2.{LONG}"),
        dump([], comm_lib_version=LONG),
        dump([], pg_config={LONG: {"desc": "", "ranks": "[]"}}),
        dump([], pg_config={"0": {"name": "0", "desc": LONG, "ranks": "[]"}}),
        dump([], pg_config={"0": {"name": "0", "desc": "", "ranks": f"[{'9' * 1_000_000}]"}}),
        dump([], pg_status={LONG: {}}),
        dump([], pg_status={"\N{ARABIC-INDIC DIGIT ONE}": {}}),
        dump([entry(0, input_sizes=[[2] * 1000])]),
        dump([entry(0, time_created_ns=10**600)]),
    ],
    ids=lambda _: "",
)
@each_case("name", ["rank_0", "rank_0.json"])
def test_what_is_too_long_is_refused_in_a_short_line(tmp_path: Path, content: Any, name: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_dump(write(tmp_path, {name: content}) / name)
    assert len(str(refused.value)) < 220


@each_case(
    ("frame", "where"),
    [
        ({"name": "f", "filename": "a.py", "line": [[1]]}, "a.py:? in f"),
        ({"name": ["f"], "filename": "a.py", "line": -1}, "a.py:? in ?"),
        ({"name": "f", "filename": LONG, "line": 1}, ""),
        ({"name": "f", "filename": "/d" * 1000 + "/a.py", "line": 7}, "/d" * 145 + "/a.py:7 in f"),
    ],
)
def test_a_line_of_code_has_a_file_a_number_and_a_name(tmp_path: Path, frame: Any, where: str) -> None:
    (found,) = read_dump(write(tmp_path, {"rank_0": dump([entry(0, frames=[frame])])}) / "rank_0").entries
    assert found.where[-len("/a.py:7 in f") :] == where[-len("/a.py:7 in f") :]
    assert len(found.where) <= 300


def test_one_table_is_not_a_hundred_thousand_operations(tmp_path: Path) -> None:
    one = pickle.dumps(entry(0), 2)[2:-1] + b"q\xff"
    content = with_instructions({**dump([]), "entries": "HERE"}, b"](" + one + b"h\xff" * 100_000 + b"e")
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(ValueError, match=r"hold each other|entries, more than"):
        read_dump(tmp_path / "rank_0")


def test_one_text_is_not_the_ranks_of_any_number_of_groups(tmp_path: Path) -> None:
    text = str(list(range(20_000)))
    groups = {f"{number}": {"name": f"{number}", "desc": "", "ranks": text} for number in range(1000)}
    with pytest.raises(ValueError, match="its groups have more than"):
        read_dump(write(tmp_path, {"rank_0": dump([], pg_config=groups)}) / "rank_0")


def test_a_message_of_two_other_ranks_is_not_one_of_the_rank(tmp_path: Path) -> None:
    message = unfinished(0, "send 2->3", is_p2p=True, p2p_seq_id=1)
    folder = write(tmp_path, {f"rank_{rank}": dump([message] if rank == 1 else []) for rank in range(4)})
    assert find_hang(job_view(read_dumps([folder]))) is None


def test_groups_that_nobody_describes_have_no_more_members_than_a_job(tmp_path: Path) -> None:
    calls = [unfinished(number, process_group=(f"g{number}", "")) for number in range(100)]
    with pytest.raises(TraceError, match="do not say who is in 100 groups"):
        job_view(read_dumps([write(tmp_path, {"rank_99999": dump(calls, pg_config={})})]))


def test_dumps_of_more_jobs_than_anybody_names_are_refused(tmp_path: Path) -> None:
    contents = {f"rank_{rank}": dump([], pg_config={"0": {"ranks": [0, rank]}}) for rank in range(1, 100)}
    with pytest.raises(TraceError, match="these dumps are of more than 4 jobs; name the files of one"):
        read_dumps([write(tmp_path, contents)])


def test_files_that_are_left_out_for_one_reason_are_one_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path, hung_job())
    for number in range(7):
        (folder / f"core.{number}").write_bytes(b"\x7fELF")
    assert read_dumps([folder]).problems == (
        "core.0, core.1, core.2, core.3 and 3 more files were left out: it is neither a pickle nor JSON",
    )


def _cpu_s(call: Callable[[], Any]) -> float:
    gc.disable()  # it looks through all that other tests have left
    try:
        begin_s = time.thread_time()
        call()
        return time.thread_time() - begin_s
    finally:
        gc.enable()


def _open_call(group: int, seq: int) -> Call:
    return Call(channel=Channel(group), seq=seq, op="all_reduce", entered_ns=seq, is_open=True)


def _job(members: list[tuple[int, ...]], calls: list[list[Call]]) -> JobView:
    groups = tuple(GroupView(name=str(number), members=ranks) for number, ranks in enumerate(members))
    ranks = {
        rank: RankView(rank=rank, calls=tuple(own), entered={call.channel: call.seq + 1 for call in own})
        for rank, own in enumerate(calls)
    }
    return JobView(groups=groups, ranks=ranks, now_ns=1 << 40)


def _is_linear(job: Callable[[int], JobView], size: int) -> bool:
    """Whether eight times as much takes less than a quarter of what it would in quadratic time."""
    small, large = job(size // 8), job(size)
    few_s = min(_cpu_s(lambda: find_hang(small)) for _ in range(3))
    return _cpu_s(lambda: find_hang(large)) < 16 * few_s


def test_operations_that_wait_for_their_own_rank_are_judged_in_linear_time() -> None:
    assert _is_linear(lambda size: _job([(0,)], [[_open_call(0, seq) for seq in range(size)]]), 10_000)


def test_operations_in_many_groups_are_judged_in_linear_time() -> None:
    def job(size: int) -> JobView:
        calls = [_open_call(group, 0) for group in range(size)]
        return _job([(0, 1)] * size, [calls, calls[::-1]])

    assert _is_linear(job, 3000)


def test_operations_of_many_ranks_that_all_differ_are_judged_in_linear_time() -> None:
    def job(size: int) -> JobView:
        sizes = range(size)
        calls = [[Call(channel=Channel(0), seq=0, op="all_reduce", size_bytes=one, is_open=True)] for one in sizes]
        return _job([tuple(sizes)], calls)

    assert _is_linear(job, 12_000)


def test_ranks_that_wait_for_the_same_others_share_what_is_known_of_them(tmp_path: Path) -> None:
    contents = {f"rank_{rank}": dump([unfinished(0), unfinished(1)], world=1000) for rank in range(20)}
    graph = Graph(WaitGraph(job_view(read_dumps([write(tmp_path, contents)]))))
    assert len(graph.edges) == 20
    assert len({id(edges) for edges in graph.edges.values()}) == 1


def test_ranks_that_each_hold_up_another_operation_are_named_together(tmp_path: Path) -> None:
    """Of a hundred pairs, one rank each waits for the other: the first operations are told apart."""
    contents = {}
    for pair in range(0, 200, 2):
        groups = {f"{pair + 1}": (f"tp{pair}", (pair, pair + 1))}
        call = unfinished(1, process_group=(f"{pair + 1}", f"tp{pair}"), pg_id=1, collective_seq_id=1)
        for rank, calls in ((pair, [entry(0), call]), (pair + 1, [entry(0)])):
            contents[f"rank_{rank}"] = dump(calls, world=200, groups=groups)
    hang = find_hang(job_view(read_dumps([write(tmp_path, contents)])))
    assert hang is not None
    assert (hang.kind, hang.culprits) == (HangKind.NEVER_CALLED, tuple(range(1, 200, 2)))
    assert hang.waiting == tuple(range(0, 200, 2))
    assert len(hang.also) == 16
