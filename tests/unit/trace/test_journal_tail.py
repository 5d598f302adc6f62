"""Following the journal of a rank that runs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from rows import header

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.trace.journal import JournalTail
from hpcpace.trace.schema import TABLES, row_dtypes
from hpcpace.trace.writer import TraceWriter

DTYPES = row_dtypes()


def steps(first: int, stop: int) -> np.ndarray:
    rows = np.zeros(stop - first, DTYPES["steps"])
    rows["step"] = np.arange(first, stop)
    rows["begin_ns"] = rows["step"] * 1000
    rows["end_ns"] = rows["begin_ns"] + 900
    return rows


def one(table: str, **values: int) -> np.ndarray:
    row = np.zeros(1, DTYPES[table])
    for name, value in values.items():
        row[name] = value
    return row


@pytest.fixture
def writer(tmp_path: Path):
    made = TraceWriter(tmp_path / "rank-00000.h5", header())
    yield made
    made.abandon()


def flush(writer: TraceWriter, **tables: np.ndarray) -> None:
    for name, rows in {"account": one("account", time_ns=5), **tables}.items():
        writer.add(name, rows)
    writer.flush()


@pytest.fixture
def look(tmp_path: Path):
    tail = JournalTail("rank-00000.journal", most_bytes=4096)

    def call(*wanted: str):
        with Folder.open(tmp_path) as folder:
            return tail.look(folder, wanted or ("steps",))

    return call


def test_each_row_comes_once(writer, look) -> None:
    flush(writer, steps=steps(0, 3))
    assert look().rows["steps"]["step"].tolist() == [0, 1, 2]
    assert not look().has_changed
    flush(writer, steps=steps(3, 5))
    flush(writer, steps=steps(5, 6))
    found = look()
    assert found.has_changed and found.rows["steps"]["step"].tolist() == [3, 4, 5]
    assert len(found.rows["account"]) == 2


def test_tables_that_are_not_wanted_are_passed_over(writer, look) -> None:
    flush(
        writer, phases=np.zeros(7, DTYPES["phases"]), steps=steps(0, 1), collectives=np.zeros(9, DTYPES["collectives"])
    )
    assert set(look().rows) == {"steps", "account"}
    flush(writer, phases=np.zeros(2, DTYPES["phases"]), steps=steps(1, 2))
    found = look("steps", "phases")
    assert len(found.rows["phases"]) == 2 and found.rows["steps"]["step"].tolist() == [1]


def test_a_journal_begun_anew_gives_only_new_rows(writer, look) -> None:
    flush(writer, steps=steps(0, 3))
    look()
    flush(writer, phases=np.zeros(TABLES["phases"].chunk_rows, DTYPES["phases"]), steps=steps(3, 5))
    assert look().rows["steps"]["step"].tolist() == [3, 4]


def test_open_operations_are_told_apart_from_rows(writer, look) -> None:
    writer.set_open(one("collectives", seq=4, exit_kind=2))
    flush(writer, steps=steps(0, 1))
    found = look("steps", "collectives")
    assert found.open_rows is not None and found.open_rows["seq"].tolist() == [4] and "collectives" not in found.rows


def test_of_a_long_journal_only_the_end_is_read(writer, look) -> None:
    for first in range(0, 400, 4):
        flush(writer, steps=steps(first, first + 4))
    found = look()
    assert found.num_skipped_bytes > 0
    found_steps = found.rows["steps"]["step"].tolist()
    assert found_steps == list(range(found_steps[0], 400)) and 20 < len(found_steps) < 110


def test_a_torn_record_is_read_once_it_is_whole(writer, look, tmp_path: Path) -> None:
    flush(writer, steps=steps(0, 1))
    look()
    flush(writer, steps=steps(1, 2))
    path = tmp_path / "rank-00000.journal"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert "steps" not in look().rows
    path.write_bytes(whole)
    assert look().rows["steps"]["step"].tolist() == [1]


def test_damage_is_stepped_over_in_the_end(writer, look, tmp_path: Path) -> None:
    flush(writer, steps=steps(0, 1))
    look()
    flush(writer, steps=steps(1, 2))
    path = tmp_path / "rank-00000.journal"
    content = bytearray(path.read_bytes())
    content[-20] ^= 255
    path.write_bytes(content)
    for step in range(2, 8):
        look()
        flush(writer, steps=steps(step, step + 1))
    assert look().rows["steps"]["step"].tolist()[-1] == 7


def test_a_last_account_that_was_written_over_is_read_again(writer, look, tmp_path: Path) -> None:
    flush(writer, steps=steps(0, 1))
    assert look().amended_account is None
    assert writer._journal is not None
    writer._journal.amend_account(one("account")[:0], 12)
    os.utime(tmp_path / "rank-00000.journal", ns=(0, 0))  # file systems count in ticks of some milliseconds
    amended = look().amended_account
    assert amended is not None and amended["dropped"].tolist() == [12]
    flush(writer, steps=steps(1, 2))
    amended = look().amended_account
    assert amended is not None and amended["dropped"].tolist() == [0]


@pytest.mark.parametrize("content", [b"", b"HPCPJNL1", b"x" * 200, b"HPCPJNL1" + b"\xff" * 60])
def test_what_is_no_journal_is_refused(look, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank-00000.journal").write_bytes(content)
    with pytest.raises(TraceError):
        look()


def test_links_are_not_followed(look, tmp_path: Path) -> None:
    (tmp_path / "rank-00000.journal").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic link"):
        look()
