"""Flight Recorder dumps: what one file holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from known_dumps import BEGIN_NS, MS, dump, entry, unfinished, write

from hpcpace.runs.imports import flight_recorder, input_files
from hpcpace.runs.imports.flight_recorder import Dump, operation_name, read_dump


def read(tmp_path: Path, content: Any, name: str = "rank_0") -> Dump:
    return read_dump(write(tmp_path, {name: content}) / name)


@pytest.mark.parametrize("name", ["rank_0", "rank_0.json"])
def test_an_operation_has_its_place_state_times_size_and_line(tmp_path: Path, name: str) -> None:
    first, second = read(tmp_path, dump([entry(0), unfinished(1, "_reduce_scatter_base")]), name).entries
    assert (first.op, first.seq, first.is_open, first.size_bytes) == ("all_reduce", 1, False, 128)
    assert (first.created_ns, first.started_ns, first.completed_ns) == (BEGIN_NS, BEGIN_NS + MS, BEGIN_NS + 2 * MS)
    assert first.where == "train.py:44 in step"
    assert (second.op, second.seq, second.is_open, second.completed_ns) == ("reduce_scatter", 2, True, None)


def test_a_message_has_its_ends(tmp_path: Path) -> None:
    calls = [unfinished(0, "send 0->3", is_p2p=True, p2p_seq_id=7), entry(1, "recv 2<-1", is_p2p=True, p2p_seq_id=8)]
    sent, received = read(tmp_path, dump(calls)).entries
    assert (sent.op, sent.source, sent.destination, sent.seq) == ("send", 0, 3, 7)
    assert (received.op, received.source, received.destination) == ("recv", 1, 2)


def test_operations_that_were_put_together_end_with_the_whole(tmp_path: Path) -> None:
    # torch records no end for the parts.
    parts = [unfinished(number, "_all_gather_base", collective_seq_id=3) for number in (0, 1)]
    over = read(tmp_path, dump([*parts, entry(2, "coalesced", collective_seq_id=3)]))
    assert [(one.op, one.is_open) for one in over.entries] == [("all_gather", False)] * 2
    under_way = read(tmp_path, dump([*parts, unfinished(2, "coalesced", collective_seq_id=3)]))
    assert [one.is_open for one in under_way.entries] == [True, True]


def test_operations_of_gloo_are_over_when_they_are_retired(tmp_path: Path) -> None:
    calls = [unfinished(0, profiling_name="gloo:all_reduce", retired=over) for over in (True, False)]
    assert [one.is_open for one in read(tmp_path, dump(calls)).entries] == [False, True]


def test_one_that_ran_out_of_time_on_a_device_is_not_over(tmp_path: Path) -> None:
    assert read(tmp_path, dump([unfinished(0, retired=True)])).entries[0].is_open


@each_case("version", ["2.0", "2.4", "2.9", "2.10"])
def test_versions_of_the_format(tmp_path: Path, version: str) -> None:
    content = dump([entry(0)], version=version)
    content["nccl_version"] = content.pop("comm_lib_version")
    for optional in ("frames", "duration_ms", "thread_id", "pg_id", "timeout_ms"):
        content["entries"][0].pop(optional, None)
    found = read(tmp_path, content)
    assert (found.version, found.library, len(found.entries)) == (version, "NCCL 2.27.3", 1)


def test_a_dump_without_entries_is_one(tmp_path: Path) -> None:
    content = dump([])
    del content["entries"]
    assert read(tmp_path, content, "rank_0.json").entries == ()


@each_case(
    ("called", "op"),
    [
        ("_all_gather_base", "all_gather"),
        ("ALLGATHER_coalesced", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("all_reduce_barrier", "barrier"),
        ("_broadcast_oop", "broadcast"),
        ("all_to_all_v_single", "all_to_all"),
        ("barrier", "barrier"),
        ("something_new", "something_new"),
    ],
)
def test_names_of_one_operation_are_one(called: str, op: str) -> None:
    assert operation_name(called) == op


@each_case(
    ("content", "reason"),
    [
        ([], "no dump"),
        ({"version": "2.10"}, "no version and pg_config"),
        (dump([], version="3.0"), "version '3.0', and only 2.x"),
        (dump([], version=2), "version is 2: expected a text"),
        (dump([], pg_config=[]), r"pg_config is \[\]: expected an object"),
        (dump([], pg_config={"0": 1}), "pg_config.0 is 1: expected an object"),
        (dump([], pg_config={"0": {"name": "0", "desc": "", "ranks": "[0, 1"}}), "which are no list"),
        (dump([], pg_config={"0": {"name": "0", "desc": "", "ranks": "[-1]"}}), "ranks are 0 to 131071"),
        (dump([], pg_config={"0": {"name": "0", "desc": "", "ranks": [10**9]}}), "ranks are 0 to 131071"),
        (dump([], pg_config={"0": {"name": "0", "desc": "", "ranks": "[1, 1]"}}), "a rank twice"),
        (dump([], pg_status={"x": {}}), "no status of a group"),
        (dump([], pg_status={"0": {"last_enqueued_collective": "many"}}), "last_enqueued_collective is 'many'"),
        ({**dump([]), "entries": {}}, "entries is {}: expected a list"),
        ({**dump([]), "entries": [7]}, r"entries\[0\] is 7: expected an object"),
        (
            dump([entry(0), entry(1, collective_seq_id="x")]),
            r"entries\[1\].collective_seq_id is 'x': expected an int",
        ),
        (dump([entry(0, collective_seq_id=-1)]), "collective_seq_id is -1"),
        (dump([entry(0, collective_seq_id=True)]), "collective_seq_id is True"),
        (dump([entry(0, time_created_ns=2**63)]), "time_created_ns is"),
        (dump([entry(0, time_created_ns=1.5)]), "time_created_ns is 1.5"),
        (dump([entry(0, process_group="0")]), "process_group is '0'"),
        (dump([entry(0, process_group=("0", 1))]), r"process_group\[1\] is 1: expected a text"),
        (dump([entry(0, profiling_name=None)]), "profiling_name is None"),
        (dump([entry(0, input_sizes=[["a"]])]), r"input_sizes\[0\]\[0\] is 'a': expected an integer"),
        (dump([entry(0, input_sizes=7)]), "input_sizes is 7"),
        (dump([{**entry(0), "state": 1}]), "state is 1"),
    ],
)
@each_case("name", ["rank_0", "rank_0.json"])
def test_what_is_no_dump_is_refused_in_one_line(tmp_path: Path, content: Any, reason: str, name: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        read(tmp_path, content, name)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


@each_case(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"hello", "neither a pickle nor JSON"),
        (json.dumps(dump([entry(0)])).encode()[:-30], "cut off"),
        (json.dumps(dump([entry(0)])).encode()[:-1], "cut off"),
        (b'{"version": "2.10",, "pg_config": {}}', "no JSON"),
        (b'{"version": "\xff"}', "not in UTF-8"),
        (b'{"version": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"version": ' + b"1" * 5000 + b"}", "no JSON"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        read_dump(path)


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MAX_BYTES", 1000)
    with pytest.raises(OSError, match="more than 1000 bytes"):
        read(tmp_path, dump([entry(number) for number in range(20)]))


def test_json_of_very_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_VALUES", 50)
    with pytest.raises(ValueError, match="values, more than 50"):
        read(tmp_path, dump([entry(number) for number in range(20)]), "rank_0.json")
