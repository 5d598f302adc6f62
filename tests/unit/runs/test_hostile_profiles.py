"""Profiles that were made to take time or memory, to show other files, or to be numbers that no trace can hold."""

from __future__ import annotations

import gzip
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case
from kineto_files import event, facts, gloo_events, nccl_events, write

from hpcpace.core.errors import TraceError
from hpcpace.runs.imports import kineto, kineto_profile
from hpcpace.runs.imports.imported_run import rows_of, write_run
from hpcpace.runs.imports.kineto import import_kineto

MB = 500_000
MAX_CPU_S = 3.0
"""Ten times what any input here takes; what looks at the rest of a file for each of its parts takes minutes."""

STEP = '{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 1, "dur": 2}'
EMPTY_MEMBER = gzip.compress(b"", mtime=0)
HOSTILE = {
    "begins of events": b'{"a":[' + b'{"traceEvents":[' * (4 * MB // 16),
    "begins of events in a text": b'{"a":"' + b'\\"traceEvents\\":[' * (2 * MB // 17),
    "cuts in a text": b'{"traceEvents":[' + b"{}," * (8 * MB // 3) + b'{"a":"' + b"},{" * 70_000,
    "cuts in texts": b'{"traceEvents":[' + (b'{"a":"' + b"},{" * 70_000 + b'"},') * 20 + b"{}]}",
    "cuts in an event": f'{{"traceEvents":[{STEP},{{"a":['.encode() + b"{},{" * (3 * MB // 4) + b"}]}]}",
    "open brackets": b'{"traceEvents":[' + b"[" * (2 * MB),
    "backslashes": b'{"traceEvents":["' + b"\\" * (4 * MB),
    "other values": b'{"traceEvents":[' + b"3," * (2 * MB),
    "damage": b'{"traceEvents":[' + b"{}," * MB + b"{]" + b"{}," * MB,
    "members of gzip": gzip.compress(f'{{"traceEvents":[{STEP}'.encode(), mtime=0) + EMPTY_MEMBER * (8 * MB // 20),
    "a number": b'{"traceEvents":[{"ts":' + b"1" * (2 * MB) + b"}]}",
    "a number in the facts": b'{"x":' + b"1" * (2 * MB) + b',"traceEvents":[{}]}',
    "nested facts": b'{"x":' + b"[" * (2 * MB) + b"]" * (2 * MB) + b',"traceEvents":[{}]}',
}


def _used_s(work: Callable[[], object]) -> float:
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s


@each_case("name", HOSTILE)
def test_reading_takes_time_in_proportion_to_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(HOSTILE[name])

    def read() -> None:
        try:
            import_kineto([path])
        except TraceError as error:
            assert str(path) in str(error)

    assert _used_s(read) < MAX_CPU_S


def test_functions_of_autograd_in_many_steps_are_found_in_one_pass(tmp_path: Path) -> None:
    events = []
    for number in range(60_000):
        at = 10.0 * number
        events.append(event(f"ProfilerStep#{number}", "user_annotation", at, at + 10))
        events.append(event("autograd::engine::evaluate_function: A", "cpu_op", at + 1, 600_000))
        events.append(event("gloo:all_reduce", "user_annotation", at + 2, at + 3))
    path = write(tmp_path / "rank-0.json", events, facts(0))
    assert _used_s(lambda: import_kineto([path])) < MAX_CPU_S


def test_steps_that_overlap_do_not_multiply_the_idle_time_of_a_device(tmp_path: Path) -> None:
    events = nccl_events(0)
    end = max(one["ts"] + one["dur"] for one in events)
    steps = [event(f"ProfilerStep#{number}", "user_annotation", number, end) for number in range(500)]
    path = write(tmp_path / "rank-0.json", [*events, *steps], facts(0, backend="nccl"))
    found = import_kineto([path])
    assert len(found.ranks[0].tables["phases"]) < 2 * len(events) + len(steps)


def test_many_groups_of_two_ranks_are_compared_in_one_pass(tmp_path: Path) -> None:
    for rank in (0, 1):
        said = facts(rank)
        said["distributedInfo"]["pg_config"] = [{"pg_name": f"{number}", "ranks": [0, 1]} for number in range(12_000)]
        kernel = {"Collective name": "allreduce"}
        events = [
            event("ncclKernel", "kernel", 10 * n, 10 * n + 5, **kernel, **{"Process Group Name": f"{n}"})
            for n in range(12_000)
        ]
        write(tmp_path / f"rank-{rank}.json", events, said)
    assert _used_s(lambda: import_kineto([tmp_path])) < MAX_CPU_S


def test_many_files_without_a_common_group_are_compared_in_one_pass(tmp_path: Path) -> None:
    kernel = {"Collective name": "allreduce"}
    for rank in range(1_200):
        said = facts(rank, 1_200)
        said["distributedInfo"]["pg_config"] = [{"pg_name": f"{rank}", "ranks": [rank]}]
        one = event("ncclKernel", "kernel", 10, 15, **kernel, **{"Process Group Name": f"{rank}"})
        write(tmp_path / f"rank-{rank}.json", [one], said)
    assert _used_s(lambda: import_kineto([tmp_path])) < MAX_CPU_S


# -- numbers


def _of_groups(num_groups: int) -> list[dict[str, Any]]:
    return [
        event(
            "ncclKernel_AllReduce", "kernel", n, n + 1, **{"Process Group Name": f"{n}", "Process Group Ranks": "[0]"}
        )
        for n in range(num_groups)
    ]


def test_more_groups_than_a_trace_can_number_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match=r"a trace cannot hold 65536 in groups.id: 0 to 65535"):
        rows_of("groups", id=65_536, rank=[0])
    monkeypatch.setattr(kineto_profile, "MAX_GROUPS", 3)
    assert len(import_kineto([write(tmp_path / "rank-0.json", _of_groups(3), {})]).ranks) == 1
    with pytest.raises(TraceError, match=r"rank-1.json has more than 3 process groups, which no profile has"):
        import_kineto([write(tmp_path / "rank-1.json", _of_groups(5), {})])


@each_case(
    ("column", "value"),
    [
        ("step", 1 << 31),
        ("step", np.array([1 << 31])),
        ("step", -(1 << 40)),
        ("end_ns", np.array([1 << 63], np.uint64)),
    ],
)
def test_a_number_that_a_column_cannot_hold_is_refused(column: str, value: object) -> None:
    with pytest.raises(TraceError, match=rf"a trace cannot hold -?\d+ in steps.{column}"):
        rows_of("steps", begin_ns=np.zeros(1, np.int64), **{column: value})


ODD_VALUES = [True, None, -1, 0.5, 1e300, -(1 << 64), "9" * 20, "\ud800\x1b[1m", [[1]]]


@each_case("value", ODD_VALUES, ids=lambda value: str(value)[:12])
def test_values_of_any_kind_in_any_field_make_a_run_or_an_error(tmp_path: Path, value: object) -> None:
    sound = nccl_events(0)[:50]
    kernel = next(one for one in sound if one["cat"] == "kernel" and "Seq" in one["args"])
    changed = [{**kernel, name: value} for name in kernel]
    changed += [{**kernel, "args": {**kernel["args"], name: value}} for name in kernel["args"]]
    said = [{**facts(0), name: value} for name in facts(0)]
    said += [
        {**facts(0), "distributedInfo": {**facts(0)["distributedInfo"], name: value}} for name in ("rank", "world_size")
    ]
    said += [{**facts(0), "distributedInfo": {"pg_config": [{"pg_name": value, "ranks": [0]}, {"ranks": [value]}]}}]
    for number, (events, more) in enumerate([(changed, facts(0)), *(([], one) for one in said)]):
        path = write(tmp_path / f"rank-0-{number}.json", [*sound, *events], more)
        try:
            found = import_kineto([path])
            if number in (0, len(said)):
                write_run(tmp_path / f"run-{number}", found)
        except TraceError as error:
            assert str(path) in str(error) or "rank" in str(error)


def test_steps_that_would_be_numbered_beyond_the_trace_are_refused(tmp_path: Path) -> None:
    steps = [0, 999_999_999] * 4
    events = [event(f"ProfilerStep#{n}", "user_annotation", 10 * at, 10 * at + 9) for at, n in enumerate(steps)]
    with pytest.raises(TraceError, match=r"a trace cannot hold \d+ in steps.step"):
        import_kineto([write(tmp_path / "rank-0.json", events, facts(0))])


def test_times_that_are_decades_apart_are_refused(tmp_path: Path) -> None:
    events = [event(f"ProfilerStep#{n}", "user_annotation", at, at + 9) for n, at in enumerate((1.0, 2e15))]
    with pytest.raises(TraceError, match=r"times that are .* apart"):
        import_kineto([write(tmp_path / "rank-0.json", events, facts(0))])


def test_a_long_name_of_a_group_is_kept_once_and_in_part() -> None:
    calls = kineto_profile.Calls()
    names = [calls.group_name("x" * 1000), calls.group_name("x" * 2000)]
    assert names[0] is names[1] and len(names[0]) < 100


def test_profiles_that_would_take_more_memory_than_their_size_allows_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        packed = gzip.compress(json.dumps({**facts(rank), "traceEvents": gloo_events(rank) * 30}).encode())
        (tmp_path / f"rank-{rank}.json.gz").write_bytes(packed)
    monkeypatch.setattr(kineto, "FREE_BYTES", 3 << 20)
    found = import_kineto([tmp_path])
    assert [one.header.rank for one in found.ranks] == [0]
    assert "rank-1.json.gz would take more than the " in found.problems[0]


@each_case("value", ['"\xff\xfe"', '"\\ud800"', "[" * 3000 + "]" * 3000])
def test_an_event_that_cannot_be_decoded_does_not_lose_those_before_it(tmp_path: Path, value: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(f'{{"traceEvents": [{STEP}, {{"name": {value}}}]}}'.encode("latin-1"))
    found = import_kineto([path])
    assert found.num_steps == 1 and str(path) in found.problems[0]


# -- places


def _link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def _fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@each_case("make", [_link, _fifo, _socket])
def test_what_is_no_file_of_its_own_in_a_folder_is_left_out_and_named(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / "rank-2.json").mkdir()
    make(folder / "rank-1.json", secret)
    write(folder / "rank-0.json", gloo_events(0), facts(0))
    found = import_kineto([folder])
    assert len(found.ranks) == 1 and len(found.problems) == 1
    assert "rank-1.json" in found.problems[0] and "root:x" not in found.problems[0]
    assert "symbolic link" in found.problems[0] or "no regular file" in found.problems[0]


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "target.json", gloo_events(0), facts(0))
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    assert len(import_kineto([tmp_path / "link.json"]).ranks) == 1


def test_a_file_that_grows_while_it_is_read_is_read_to_its_first_end(tmp_path: Path) -> None:
    path = write(tmp_path / "rank-0.json", gloo_events(0), facts(0))

    def grow(done: int, total: int) -> None:
        with path.open("a") as file:
            file.write(" " * (done + total))
        assert path.stat().st_size < 100 * MB

    assert len(import_kineto([path], progress=grow).ranks) == 1


def test_a_folder_of_too_many_files_is_refused_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kineto, "_MAX_FILES", 3)
    for number in range(5):
        (tmp_path / f"{number}.json").touch()
    with pytest.raises(TraceError, match="has 5 files, more than 3"):
        import_kineto([tmp_path])
