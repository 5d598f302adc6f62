"""A journal gives every whole record, whatever stands behind the last one, and refuses what it cannot understand."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case
from rows import assert_table, header, random_rows, record

from hpcpace.core.errors import TraceError
from hpcpace.trace import journal
from hpcpace.trace.journal import RecordKind, encode_header, encode_records
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import TABLES, OtherVersion, header_values, row_dtypes

_DTYPES = row_dtypes()
_PHASES = list(_DTYPES).index("phases")
_HEADER = encode_header(header(), _DTYPES)
_ROWS = random_rows("phases", 20)
_RECORDS = encode_records(_PHASES, RecordKind.ROW, 0, _ROWS)
_RECORD_BYTES = len(_RECORDS) // len(_ROWS)


def _sealed(description: Any) -> bytes:
    text = description if isinstance(description, bytes) else json.dumps(description).encode()
    return struct.pack("<8sII", journal.MAGIC, len(text), zlib.crc32(text)) + text


def _described(**changes: Any) -> bytes:
    description = json.loads(_HEADER[16:])
    return _sealed({**description, **changes})


@each_case("num_left_bytes", range(1, _RECORD_BYTES))
def test_a_last_record_cut_at_any_byte_is_left_out_and_said_so(num_left_bytes):
    content = journal.decode(_HEADER + _RECORDS[: -_RECORD_BYTES + num_left_bytes], "here")
    numbers, rows = content.rows["phases"]
    assert numbers.tolist() == list(range(19))
    assert np.array_equal(rows, _ROWS[:19])
    assert content.num_left_bytes == num_left_bytes


@each_case("garbage", [b"\0", bytes(5000), b"\xff" * 5000, np.random.default_rng(1).bytes(5000)])
def test_garbage_behind_the_last_record_is_left_out(garbage):
    content = journal.decode(_HEADER + _RECORDS + garbage, "here")
    assert np.array_equal(content.rows["phases"][1], _ROWS)
    assert content.num_left_bytes == len(garbage)


@each_case("bit", range(8 * _RECORD_BYTES))
def test_a_record_with_any_bit_flipped_is_left_out_with_those_behind_it(bit):
    damaged = bytearray(_RECORDS)
    damaged[10 * _RECORD_BYTES + bit // 8] ^= 1 << bit % 8
    content = journal.decode(_HEADER + damaged, "here")
    assert content.rows["phases"][0].tolist() == list(range(10))


def test_records_of_many_tables_are_told_apart():
    parts, expected = [], {name: [] for name in _DTYPES}
    for part in range(300):
        for number, name in enumerate(_DTYPES):
            rows = random_rows(name, 2 + (part + number) % 5)
            parts.append(encode_records(number, RecordKind.ROW, sum(map(len, expected[name])), rows))
            expected[name].append(rows)
    content = journal.decode(_HEADER + b"".join(parts), "here")
    assert content.num_left_bytes == 0
    for name, rows in expected.items():
        assert np.array_equal(content.rows[name][1], np.concatenate(rows))


def test_rows_of_a_journal_without_optional_columns_have_zeros_in_them(tmp_path):
    table = TABLES["host"]
    rows = random_rows("host", 5)
    kept = [name for name in table.dtype.names or () if name not in table.optional]
    old = np.zeros(5, [(name, table.dtype[name]) for name in kept])
    for name in kept:
        old[name] = rows[name]
    content = encode_header(header(), {**_DTYPES, "host": old.dtype})
    content += encode_records(list(_DTYPES).index("host"), RecordKind.ROW, 0, old)
    (tmp_path / "rank-00000.journal").write_bytes(content)
    found = read_trace(tmp_path / "rank-00000.h5").tables["host"]
    assert all(np.array_equal(found[name], rows[name]) for name in kept)
    assert all(found[name].tolist() == [0] * 5 for name in table.optional)


def test_a_row_that_was_written_twice_counts_once():
    content = journal.decode(_HEADER + _RECORDS + encode_records(_PHASES, RecordKind.ROW, 15, _ROWS[15:]), "here")
    assert content.rows["phases"][0].tolist() == list(range(20))


@each_case(
    ("content", "message"),
    [
        (b"", "not an hpcpace journal"),
        (b"HCPJNL", "not an hpcpace journal"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "not an hpcpace journal"),
        (_HEADER[:-1], "ends after"),
        (_HEADER[:40], "ends after"),
        (_HEADER[:30] + b"?" + _HEADER[31:], "damaged"),
        (_sealed(b"{"), "not complete JSON"),
        (_sealed(b"\xff\xfe"), "not complete JSON"),
        (_sealed(b"[" * 100_000), "not complete JSON"),
        (_sealed([]), "does not describe a trace"),
        (_sealed({"header": 1}), "does not describe a trace"),
        (_described(tables=None), "it is None: expected a list"),
        (_described(tables=[{"name": "steps"}]), "has no 'columns'"),
        (_described(tables=[{"name": "steps", "columns": [["step", "O"]]}]), "'O'"),
        (_described(tables=[{"name": "steps", "columns": [["a", "<i4"], ["a", "<i4"]]}]), "does not describe a trace"),
        (_described(header={}), "its format is None"),
        (_described(header=header_values(header()) | {"format": ["hpcpace-trace"]}), "its format is"),
        (_described(header=header_values(header()) | {"format_version": "²³.0"}), "format_version"),
        (_described(header=header_values(header()) | {"format_version": "9" * 5000 + ".0"}), "format_version"),
        (_described(header=header_values(header()) | {"rank": float("inf")}), "Infinity is not valid JSON"),
        (_described(header=header_values(header()) | {"rank": 2}), "rank 2 of 2"),
        (_described(header=header_values(header()) | {"rank": -1}), "rank -1"),
        (_described(header=header_values(header()) | {"host": None}), "attribute host is None"),
        (_described(header=header_values(header()) | {"interfaces": 3}), "attribute interfaces is 3"),
    ],
)
def test_a_journal_that_cannot_be_understood_is_refused(content, message):
    with pytest.raises(TraceError, match=message) as error:
        journal.decode(content, "/run/rank-00007.journal")
    assert "/run/rank-00007.journal" in str(error.value)


def test_a_journal_of_another_major_version_says_who_can_read_it():
    with pytest.raises(OtherVersion, match=r"trace format 2\.0.*the hpcpace that wrote it"):
        journal.decode(_described(header=header_values(header()) | {"format_version": "2.0"}), "here")


def test_a_later_minor_version_may_have_further_attributes_tables_and_columns(start, path):
    dtypes = {"power": np.dtype([("watts", "<i8")])} | {
        name: np.dtype([*dtype.descr, ("further", "<i8")]) for name, dtype in _DTYPES.items()
    }
    rows = np.zeros(3, dtype=dtypes["phases"])
    rows["step"] = [4, 5, 6]
    later = header_values(header()) | {"format_version": "1.7", "planet": "Mars"}
    description = json.loads(encode_header(header(), dtypes)[16:]) | {"header": later}
    path.parent.mkdir()
    path.with_suffix(".journal").write_bytes(
        _sealed(description) + encode_records(list(dtypes).index("phases"), RecordKind.ROW, 0, rows)
    )
    phases = read_trace(path).tables["phases"]
    assert phases["step"].tolist() == [4, 5, 6]
    assert "further" not in phases


def _replace_journal(path: Path, first: int, rows: np.ndarray, dtypes: dict[str, np.dtype] = _DTYPES) -> None:
    content = encode_header(header(), dtypes) + encode_records(_PHASES, RecordKind.ROW, first, rows)
    path.with_suffix(".journal").write_bytes(content)


@pytest.mark.parametrize(
    ("first", "expected", "num_lost"),
    [
        (0, 25, 0),
        (5, 25, 0),
        (20, 40, 0),
        (24, 44, 0),
        (25, 45, 0),
        (30, 45, 5),
    ],
)
def test_file_and_journal_are_merged_by_row_number(start, path, first, expected, num_lost):
    """The file has rows 0 to 24, and the journal has 20 rows from `first`."""
    recorder = start()
    rows = random_rows("phases", 50)
    record(recorder, "phases", rows[:25])
    recorder.close()
    _replace_journal(path, first, rows[first : first + 20])
    trace = read_trace(path)
    kept = np.concatenate([rows[:25], rows[max(first, 25) : first + 20]])
    assert len(kept) == expected
    assert_table(trace.tables["phases"], kept)
    assert [problem for problem in trace.problems if f"{num_lost} rows after row 24" in problem] == list(trace.problems)
    assert bool(trace.problems) == bool(num_lost)
    assert not trace.closed_cleanly


def test_a_journal_with_other_columns_is_left_out(start, path):
    recorder = start()
    record(recorder, "phases", _ROWS[:10])
    recorder.close()
    dtypes = _DTYPES | {"phases": np.dtype([("step", "<i4"), ("begin_ns", "<i4")])}
    _replace_journal(path, 10, np.zeros(5, dtype=dtypes["phases"]), dtypes)
    trace = read_trace(path)
    assert len(trace.tables["phases"]) == 10
    assert len(trace.problems) == 1 and "lacks phase, begin_ns, end_ns, microbatch" in trace.problems[0]


@pytest.mark.parametrize("change", [{"run_id": "other"}, {"attempt": 1}, {"rank": 1}])
def test_the_journal_of_another_run_is_left_out(start, path, change):
    recorder = start()
    record(recorder, "phases", _ROWS[:10])
    recorder.close()
    other = encode_header(header(**change), _DTYPES) + _RECORDS
    path.with_suffix(".journal").write_bytes(other)
    trace = read_trace(path)
    assert len(trace.tables["phases"]) == 10
    assert len(trace.problems) == 1 and "another run, attempt or rank" in trace.problems[0]
