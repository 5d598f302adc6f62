"""Whatever a file holds, reading it gives a trace or a TraceError that names the file, soon and in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import each_case
from rows import ADDERS, header, random_rows, record

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.trace.journal import encode_header
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import CHUNK_ROWS, OtherVersion, row_dtypes

_NUM_INPUTS = 400
_NUM_ROWS = dict.fromkeys(ADDERS, 50) | {"phases": CHUNK_ROWS + 50}


@pytest.fixture
def killed(start: Callable, tmp_path: Path) -> Path:
    """The files of a rank that was killed, with a chunk in one and the rest in the other."""
    recorder = start()
    for table, num_rows in _NUM_ROWS.items():
        record(recorder, table, random_rows(table, num_rows))
    assert recorder.flush()
    return Path(shutil.copytree(tmp_path / "trace", tmp_path / "killed"), "rank-00000.h5")


@pytest.fixture
def closed(start: Callable, path: Path) -> Path:
    recorder = start()
    for table in ADDERS:
        record(recorder, table, random_rows(table, 50))
    recorder.close()
    return path


def test_damage_of_any_kind_gives_a_trace_or_an_error_that_names_the_file(killed, tmp_path):
    # In a child, because HDF5 may crash on damage: its death must fail this test and no other.
    program = Path(__file__).with_name("damage_program.py")
    folder = tmp_path / "damaged"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", program, killed, folder, str(_NUM_INPUTS)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, ""), lines[-1:]
    assert len(lines) == 2 * _NUM_INPUTS
    for asked, outcome in zip(lines[::2], lines[1::2], strict=True):
        if "error" in outcome:
            assert outcome["names_file"], (asked, outcome)
        elif outcome["lengths"] != {**_NUM_ROWS, "account": outcome["lengths"]["account"]}:
            assert outcome["problems"], asked


@each_case(
    "content",
    [b"", b"\0", b"not HDF5", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(4096), b"HCPJNL1" * 100],
    ids=["empty", "a zero", "text", "magic", "magic and zeros", "a journal's magic"],
)
def test_a_foreign_file_is_refused_by_its_name(tmp_path, content):
    path = tmp_path / "rank-00003.h5"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"rank-00003\.h5"):
        read_trace(path)


def test_an_hdf5_file_of_another_program_is_refused(tmp_path):
    path = tmp_path / "weights.h5"
    with h5py.File(path, "w") as file:
        file["steps"] = np.arange(5)
    with pytest.raises(TraceError, match=r"weights\.h5 is not an hpcpace trace"):
        read_trace(path)


@each_case("name", ["/", ".", "..", "missing/rank-00000.h5", "x" * 300, "file/rank-00000.h5", "folder"])
def test_a_path_without_a_file_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the folder's place")
    Path("folder").mkdir()
    with pytest.raises(TraceError):
        read_trace(name)


def test_a_pipe_is_not_waited_for(killed):
    killed.with_suffix(".journal").unlink()
    os.mkfifo(killed.with_suffix(".journal"))
    assert any("no regular file" in problem for problem in read_trace(killed).problems)
    killed.unlink()
    os.mkfifo(killed)
    with pytest.raises(TraceError, match="no trace file"):
        read_trace(killed)


def _delete_table(file: h5py.File) -> None:
    del file["collectives"]


def _delete_column(file: h5py.File) -> None:
    del file["collectives/seq"]


def _replace_group(file: h5py.File) -> None:
    del file["collectives"]
    file["collectives"] = 3


def _replace_column(column: str, **dataset: object) -> Callable[[h5py.File], None]:
    def replace(file: h5py.File) -> None:
        del file[f"collectives/{column}"]
        file["collectives"].create_dataset(column, **dataset)

    return replace


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_delete_table, "missing"),
        (_delete_column, "damaged"),
        (_replace_group, "damaged"),
        (_replace_column("seq", data=3), "0 dimensions"),
        (_replace_column("seq", data=np.zeros((50, 2))), "2 dimensions"),
        (_replace_column("seq", data=np.zeros(50)), "of type float64"),
        (_replace_column("seq", data=["a"] * 50), "of type object"),
        (_replace_column("seq", data=h5py.Empty("i8")), "damaged"),
        (_replace_column("seq", shape=(50,), dtype="i8"), "claims 50 rows in 0 bytes"),
    ],
)
def test_a_damaged_table_is_left_out_and_said_so(closed, damage, message):
    with h5py.File(closed, "r+") as file:
        damage(file)
    trace = read_trace(closed)
    assert len(trace.tables["collectives"]) == 0
    assert [len(trace.tables[table]) for table in ADDERS if table != "collectives"] == [50] * (len(ADDERS) - 1)
    assert len(trace.problems) == 1
    assert "collectives" in trace.problems[0] and message in trace.problems[0]


def test_a_length_that_the_files_bytes_cannot_hold_does_not_fill_the_memory(closed):
    with h5py.File(closed, "r+") as file:
        del file["collectives"]
        for column in ("step", "group", "seq", "op", "bytes", "peer", "enter_ns", "exit_ns", "blocked_ns", "exit_kind"):
            file.create_dataset(f"collectives/{column}", shape=(1 << 50,), dtype="i8")
    assert any("claims 1125899906842624 rows" in problem for problem in read_trace(closed).problems)


def test_columns_that_differ_in_length_in_a_closed_file_are_said_so(closed):
    with h5py.File(closed, "r+") as file:
        file["collectives/seq"].resize((40,))
    trace = read_trace(closed)
    assert len(trace.tables["collectives"]) == 40
    assert len(trace.problems) == 1 and "40 to 50 rows" in trace.problems[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "other"),
        ("format", [1, 2]),
        ("format_version", "1"),
        ("format_version", 1.0),
        ("rank", -1),
        ("rank", 2),
        ("rank", 0.5),
        ("rank", [0]),
        ("rank", "0"),
        ("world_size", 0),
        ("host", 5),
        ("host", h5py.Empty("S1")),
    ],
)
def test_a_header_that_cannot_be_is_refused(closed, name, value):
    with h5py.File(closed, "r+") as file:
        file.attrs[name] = value
    with pytest.raises(TraceError, match=str(closed)):
        read_trace(closed)


def test_a_missing_attribute_is_named(closed):
    with h5py.File(closed, "r+") as file:
        del file.attrs["world_size"]
    with pytest.raises(TraceError, match="attribute world_size is missing"):
        read_trace(closed)


def test_attributes_groups_and_columns_of_a_later_minor_version_are_ignored(closed):
    with h5py.File(closed, "r+") as file:
        file.attrs["format_version"] = "1.9"
        file.attrs["power"] = h5py.Empty("f4")
        file["power/watts"] = np.arange(3.0)
        file["steps/further"] = np.arange(7)
    trace = read_trace(closed)
    assert trace.problems == ()
    assert "power" not in trace.tables and "further" not in trace.tables["steps"]


def test_one_device_time_without_the_other_is_ignored(closed):
    with h5py.File(closed, "r+") as file:
        file["steps/device_begin_ns"] = np.arange(7)
    trace = read_trace(closed)
    assert trace.problems == ()
    assert "device_begin_ns" not in trace.tables["steps"]


@pytest.mark.parametrize("has_journal", [False, True])
def test_another_major_version_is_refused(closed, has_journal):
    if has_journal:
        closed.with_suffix(".journal").write_bytes(encode_header(header(), row_dtypes()))
    with h5py.File(closed, "r+") as file:
        file.attrs["format_version"] = "2.0"
    with pytest.raises(OtherVersion, match=r"trace format 2\.0"):
        read_trace(closed)


@pytest.mark.parametrize("suffix", [".h5", ".journal"])
def test_a_file_that_may_not_be_read_is_named(killed, monkeypatch, suffix):
    # As root every file may be read, so the system's answer is put in its place.
    victim, open_file = killed.with_suffix(suffix), Folder.open_file

    def refuse(folder: Folder, name: str) -> int:
        if folder.path / name == victim:
            raise PermissionError(13, "Permission denied", str(victim))
        return open_file(folder, name)

    monkeypatch.setattr(Folder, "open_file", refuse)
    if suffix == ".h5":
        assert any(str(victim) in problem and "Permission denied" in problem for problem in read_trace(killed).problems)
        killed.with_suffix(".journal").unlink()
        with pytest.raises(TraceError, match="Permission denied"):
            read_trace(killed)
    else:
        assert any(str(victim) in problem and "Permission denied" in problem for problem in read_trace(killed).problems)


def test_a_heap_on_which_hdf5_would_hang_is_refused(closed):
    content = closed.read_bytes()
    # Behind the texts stands the space that is left, under the number 0 and with its size.
    begin = content.index(b"GCOL") + 16
    while content[begin : begin + 2] != bytes(2):
        begin += 16 + -(-int.from_bytes(content[begin + 8 : begin + 16], "little") // 8) * 8
    closed.write_bytes(content[: begin + 8] + bytes(8) + content[begin + 16 :])
    with pytest.raises(
        TraceError, match=r"rank-00000\.h5.*object 0 of the global heap at byte \d+ cannot have 0 bytes"
    ):
        read_trace(closed)
