"""Streams of Chrome's trace format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.core.errors import TraceError
from hpcpace.runs.imports import input_files
from hpcpace.runs.imports.input_files import ChromeEvents, InputFile, json_bytes
from hpcpace.runs.imports.kineto_profile import KinetoEvent

TRICKY = [
    {"ph": "X", "name": "a }, { b", "ts": 1.5, "dur": 2},
    {"ph": "X", "name": 'quote " and \\', "ts": 3, "dur": 4, "args": {"list": [{"x": 1}, {"y": 2}], "correlation": 7}},
    {"ph": "M", "name": "æøå", "args": {"name": "thread }\n, {"}},
    *({"ph": "X", "name": f"event {number}", "ts": number, "dur": 1} for number in range(50)),
]


def read(path: Path) -> tuple[list[Any], ChromeEvents]:
    events = ChromeEvents(json_bytes(InputFile.at(path)), path, KinetoEvent)
    return [event for batch in events for event in batch], events


@each_case("piece", [1, 64, 300, 1 << 20])
@each_case("indent", [None, 2])
@each_case("is_list", [False, True])
def test_events_are_the_same_however_the_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, indent: int | None, is_list: bool
) -> None:
    monkeypatch.setattr(input_files, "_PIECE_BYTES", piece)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 97)
    facts = {"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}], "distributedInfo": {"rank": 3}}
    whole = TRICKY if is_list else {**facts, "traceEvents": TRICKY, "traceName": "x", "more": [{"a": 1}, {"b": 2}]}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(whole, indent=indent))
    found, events = read(path)
    assert [event.name for event in found] == [event["name"] for event in TRICKY]
    assert found[0].ts == 1.5 and found[1].args.correlation == 7 and events.problem == ""
    if not is_list:
        assert events.facts["distributedInfo"] == {"rank": 3} and events.facts["more"] == [{"a": 1}, {"b": 2}]


@each_case(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x00\x01\x02", "has no traceEvents"),
        (b"hello", "has no traceEvents"),
        (b'{"a": 1}', "has no traceEvents"),
        (b'{"traceEvents": [', "is cut off.*before its first event"),
        (b'{"traceEvents": [{"ph": "X", "na', "is cut off.*before its first event"),
        (b'{"traceEvents": [{"ph": 7}]}', "is no profile"),
        (b'{"traceEvents": [1, 2]}', "is no profile"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-12], "is cut off"),
        (gzip.compress(b'{"traceEvents": [' + b" " * 100_000 + b"]}", mtime=0)[:40] + b"\xff" * 60, "damaged"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read(path)


def test_a_file_that_is_cut_off_keeps_its_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps({"traceEvents": TRICKY})
    path.write_text(text[: text.index("event 40")])
    found, events = read(path)
    assert found[-1].name == "event 39" and f"cut off; copy it again (after event {len(found)};" in events.problem


def test_gzip_that_is_cut_off_keeps_its_whole_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "_PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 1 << 12)
    many = [{"ph": "X", "name": f"{number * 7919 % 10007}", "ts": number, "dur": 1} for number in range(20_000)]
    packed = gzip.compress(json.dumps({"traceEvents": many}).encode())
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    found, events = read(path)
    assert 1_000 < len(found) < 20_000 and "cut off" in events.problem


def test_gzip_that_is_cut_off_within_its_first_piece_keeps_its_whole_events(tmp_path: Path) -> None:
    many = [{"ph": "X", "name": f"{number} {number * 7919 % 10007}", "ts": number, "dur": 1} for number in range(2_000)]
    path = tmp_path / "trace.json.gz"
    packed = gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": many}).encode())
    path.write_bytes(packed[: len(packed) // 2])
    found, events = read(path)
    assert 500 < len(found) < 2_000 and [event.name for event in found] == [one["name"] for one in many[: len(found)]]
    assert "is cut off" in events.problem and f"after event {len(found)};" in events.problem
    assert events.facts == {"schemaVersion": 1}


def test_what_grows_implausibly_out_of_gzip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "_FREE_BYTES", 1 << 16)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (1 << 22)))
    with pytest.raises(TraceError, match="more than 200 times"):
        read(path)


def test_a_folder_and_a_pipe_are_no_files(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(TraceError, match="no regular file"):
            read(path)


@each_case("piece", [64, 1 << 20])
@each_case("value", ["inf", "-nan", "NaN", "-Infinity"])
def test_a_quotient_by_zero_is_no_reason_to_lose_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, piece: int
) -> None:
    """Profilers divide by numbers of processors that they do not know: `"blocks per SM": inf`."""
    monkeypatch.setattr(input_files, "_PIECE_BYTES", piece)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 97)
    kernel = '{"ph": "X", "name": "gemm", "ts": 1, "dur": 2, "args": {"blocks per SM": VALUE, "correlation": 7}}'
    path = tmp_path / "trace.json"
    path.write_text(
        '{"traceEvents": [' + ", ".join([kernel.replace("VALUE", value)] * 20) + '], "distributedInfo": {"rank": 3}}'
    )
    found, events = read(path)
    assert [event.args.correlation for event in found] == [7] * 20
    assert events.problem == "" and events.facts["distributedInfo"] == {"rank": 3}


def test_the_last_events_are_not_lost_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": "a"}, {"ph": "X", "name": "\\ud800"}], "more": 1}')
    found, events = read(path)
    assert [event.name for event in found][:1] == ["a"]
    assert len(found) == 2 or "is damaged (after event 1;" in events.problem


def test_a_text_of_brackets_is_not_searched_for_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "_PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 1 << 12)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([{"ph": "X", "name": "a"}, {"ph": "X", "name": "},{" * (1 << 16)}]))
    searched: list[int] = []
    piece = ChromeEvents._piece

    def counted(self: ChromeEvents, left: bytes) -> tuple[list[Any], bytes]:
        searched.append(len(left))
        return piece(self, left)

    monkeypatch.setattr(ChromeEvents, "_piece", counted)
    assert len(read(path)[0]) == 2
    assert sum(searched) < 4 * path.stat().st_size


def test_endless_text_without_events_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "_MAX_EVENT_BYTES", 1 << 16)
    monkeypatch.setattr(input_files, "_PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 1 << 12)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * (1 << 18))
    with pytest.raises(TraceError, match="an event of more than 0 MiB"):
        read(path)


@each_case("odd", ['{"ph": "X", "args": []}', '{"ph": 7}', "3", '{"ph": "X", "ts": "soon"}'])
@each_case("where", [0, 7, 20])
@each_case("piece", [64, 1 << 20])
def test_events_of_another_form_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str, where: int, piece: int
) -> None:
    monkeypatch.setattr(input_files, "_PIECE_BYTES", piece)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 97)
    rows = ['{"ph": "X", "name": "gemm", "ts": 1, "dur": 2}'] * 20
    rows.insert(where, odd)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [' + ", ".join(rows) + "]}")
    found, events = read(path)
    assert [event.name for event in found] == ["gemm"] * 20
    assert events.problem.startswith(f"{path}: 1 event left out, such as one with ")


def test_a_cut_is_not_believed_because_an_event_before_it_is_odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_PIECE_BYTES", 64)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 97)
    rows = ['{"ph": 7}', *['{"ph": "X", "name": "}, {", "ts": 1, "dur": 2}'] * 20]
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [' + ", ".join(rows) + "]}")
    found, events = read(path)
    assert [event.name for event in found] == ["}, {"] * 20
    assert "1 event left out" in events.problem
