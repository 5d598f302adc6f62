"""A packed attempt is read as if it were not, and what cannot be packed without losing something stays as it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import only_nightly
from packs import (
    CLOSED,
    EMPTY,
    JOURNAL,
    KILLED,
    NUM_RANKS,
    SHORT,
    WITH_DEVICE,
    WITH_ENQUEUE,
    assert_same_attempt,
    assert_same_trace,
    write_attempt,
)
from rows import header

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import Attempt
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.pack_index import LACKING
from hpcpace.trace.pack_reader import open_pack
from hpcpace.trace.packing import PackPlan, PackResult, pack_attempt
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import TABLES
from hpcpace.trace.stream import StoredTable
from hpcpace.trace.writer import TraceWriter

ENDED = PackPlan(has_ended=True)


def pack(attempt: Attempt, plan: PackPlan = ENDED) -> PackResult:
    return pack_attempt(attempt, plan, begin_stage=lambda name: lambda done, total: None)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    return write_attempt(tmp_path_factory.mktemp("written"))


@pytest.mark.parametrize("version", LACKING)
def test_a_pack_of_an_earlier_version_reads_as_one_without_later_tables(original, attempt, version):
    assert not pack(attempt).kept
    for path in attempt.trace_dir.glob("pack-*.h5"):
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = version
            for table in LACKING[version]:
                del file[table], file[f"ranks/num_{table}"]
    expected, found = read_attempt(original).traces, read_attempt(attempt).traces
    assert [trace.header.rank for trace in found] == [trace.header.rank for trace in expected]
    for mine, theirs in zip(found, expected, strict=True):
        later = {table: theirs.tables[table] for table in LACKING[version]}
        for table, rows in later.items():
            assert len(mine.tables[table]) == 0 and list(mine.tables[table]) == list(rows)
        assert_same_trace(replace(mine, tables={**mine.tables, **later}), theirs)


@pytest.mark.parametrize("is_packed_first", [False, True], ids=["of old traces", "an old one"])
def test_a_pack_without_optional_columns_has_zeros_in_them(attempt, is_packed_first):
    if is_packed_first:
        assert not pack(attempt).kept
    lacking = TABLES["host"].optional
    for path in attempt.trace_dir.glob("pack-*.h5" if is_packed_first else f"rank-{CLOSED:05d}.h5"):
        with h5py.File(path, "r+") as file:
            for column in lacking:
                del file[f"host/{column}"]
    if not is_packed_first:
        assert CLOSED not in pack(attempt).kept
    trace = next(trace for trace in read_attempt(attempt).traces if trace.header.rank == CLOSED)
    table = trace.tables["host"]
    assert trace.problems == () and len(table) and np.any(table["nic_drops"])
    assert all(not np.any(table[column]) and len(table[column]) == len(table) for column in lacking)


@pytest.fixture
def original(written: Attempt) -> Attempt:
    return written


@pytest.fixture
def attempt(written: Attempt, tmp_path: Path) -> Iterator[Attempt]:
    shutil.copytree(written.path.parent, tmp_path / "run")
    yield Attempt(tmp_path / "run" / "attempt-0")


def names(attempt: Attempt) -> list[str]:
    return sorted(os.listdir(attempt.trace_dir))


def test_a_packed_attempt_is_read_like_its_files(attempt, original):
    result = pack(attempt)
    assert result.kept == [] and result.num_ranks == NUM_RANKS and sorted(result.removed) == list(range(NUM_RANKS))
    # Ranks with other columns are in another pack.
    assert names(attempt) == sorted(result.packs) and len(result.packs) == 4
    assert (result.files_before, result.files_after) == (NUM_RANKS + 2, 4)
    assert_same_attempt(attempt, original)


@pytest.mark.parametrize("most_ranks", only_nightly([2], [1, 100]))
def test_packs_have_at_most_as_many_ranks_as_asked_for(attempt, original, most_ranks):
    result = pack(attempt, PackPlan(has_ended=True, most_ranks=most_ranks))
    assert len(result.packs) == {1: 7, 2: 5, 100: 4}[most_ranks]
    assert_same_attempt(attempt, original)


def test_a_pack_ends_at_the_size_that_was_asked_for(attempt, original):
    assert len(pack(attempt, PackPlan(has_ended=True, size_bytes=1)).packs) == NUM_RANKS
    assert_same_attempt(attempt, original)


def test_little_memory_makes_more_packs(attempt, original):
    result = pack(attempt, PackPlan(has_ended=True, memory_bytes=3 << 20))
    assert result.kept == [] and len(result.packs) > 3
    assert_same_attempt(attempt, original)


@pytest.mark.parametrize("block_rows", only_nightly([500], [1 << 20]))
def test_blocks_of_any_size_give_the_same_rows(attempt, original, monkeypatch, block_rows):
    monkeypatch.setattr("hpcpace.trace.pack_writer.BLOCK_ROWS", block_rows)
    monkeypatch.setattr("hpcpace.trace.pack_writer._MIN_ROWS", 1)
    pack(attempt)
    assert_same_attempt(attempt, original)


def test_a_block_has_the_rows_of_about_the_same_steps(attempt, monkeypatch):
    monkeypatch.setattr("hpcpace.trace.pack_writer.BLOCK_ROWS", 1000)
    pack(attempt)
    for trace in read_attempt(attempt, most_rows=0).traces:
        table = trace.tables["collectives"]
        if not isinstance(table, StoredTable):
            continue
        stream = table.stream
        steps = [stream.blocks(number, number + 1, ["step"])["step"] for number in range(stream.num_blocks - 1)]
        largest = np.maximum.accumulate([rows.max(initial=-1) for rows in steps])
        least = [rows.min(initial=1 << 30) for rows in steps[1:]]
        # Rows are ordered by completion, so that some are a step behind.
        assert (np.array(least) >= largest[:-1] - 2).all()
        last = [int(rows[-1]) if len(rows) else -1 for rows in steps]
        assert (stream.last_steps >= last).all()


def test_rows_of_any_range_are_read_across_blocks_and_chunks(attempt, original, monkeypatch):
    monkeypatch.setattr("hpcpace.trace.pack_writer.BLOCK_ROWS", 3_000)
    pack(attempt)
    trace = read_attempt(attempt, most_rows=0).traces[CLOSED]
    stream = trace.tables["collectives"].stream
    whole = read_trace(original.trace_file(CLOSED)).tables["collectives"]
    for first, stop in [(0, 0), (0, 1), (0, 20_000), (2_999, 3_001), (19_999, 20_000), (7, 15_000)]:
        rows = stream.chunks.rows(first, stop, ["seq", "enter_ns"])
        assert np.array_equal(rows["seq"], whole["seq"][first:stop])
    lead = whole.select(slice(3))
    assert len(stream.blocks(0, 2, lead=lead)) == 3 + len(stream.blocks(0, 2))


def test_what_a_killed_rank_had_open_is_kept(attempt, original):
    pack(attempt)
    for rank in (KILLED, JOURNAL):
        packed, own = read_trace(attempt.trace_file(rank)), read_trace(original.trace_file(rank))
        assert not packed.closed_cleanly
        assert packed.open_collectives["seq"].tolist() == own.open_collectives["seq"].tolist() != []


def test_a_journal_alone_is_packed_with_what_it_lacks_named(attempt, original):
    for one in (attempt, original):
        assert one.trace_file(JOURNAL).exists()
    attempt.trace_file(JOURNAL).unlink()
    (kept,) = pack(attempt).kept
    assert "only its journal is read" in kept
    assert f"rank-{JOURNAL:05d}.journal" in names(attempt)


def test_originals_stay_when_asked_for_and_the_pack_is_read(attempt, original):
    before = names(attempt)
    result = pack(attempt, PackPlan(has_ended=True, keep=True))
    assert result.removed == [] and set(before) < set(names(attempt))
    assert_same_attempt(attempt, original)
    attempt.trace_file(CLOSED).chmod(0)  # who is not root cannot open it
    ours, theirs = read_attempt(attempt), read_attempt(original)
    assert ours.problems == theirs.problems
    for found, expected in zip(ours.traces, theirs.traces, strict=True):
        assert_same_trace(found, expected)


def test_packing_again_removes_what_was_kept(attempt, original):
    pack(attempt, PackPlan(has_ended=True, keep=True))
    result = pack(attempt)
    assert result.packs == [] and result.kept == [] and len(result.removed) == NUM_RANKS
    assert {name[:5] for name in names(attempt)} == {"pack-"}
    assert_same_attempt(attempt, original)


def test_packing_again_changes_nothing(attempt):
    pack(attempt)
    before = names(attempt)
    result = pack(attempt)
    assert (result.packs, result.removed, result.kept) == ([], [], []) and names(attempt) == before


def test_a_rank_whose_file_changed_is_read_from_its_file(attempt):
    pack(attempt, PackPlan(has_ended=True, keep=True))
    attempt.trace_file(SHORT).unlink()
    writer = TraceWriter(attempt.trace_file(SHORT), header(SHORT, world_size=NUM_RANKS, run_id="run"))
    writer.close()
    assert len(read_attempt(attempt).traces[SHORT].tables["steps"]) == 0
    result = pack(attempt)
    assert SHORT not in result.removed and attempt.trace_file(SHORT).exists()
    assert [sentence for sentence in result.kept if f"other contents than the files of rank {SHORT}" in sentence]


def test_a_damaged_chunk_stays_with_its_file_and_is_named(attempt):
    path = attempt.trace_file(CLOSED)
    with h5py.File(path) as file:
        place = file["collectives/enter_ns"].id.get_chunk_info(1)
    content = bytearray(path.read_bytes())
    content[place.byte_offset : place.byte_offset + 40] = bytes(40)
    path.write_bytes(content)
    (kept,) = pack(attempt).kept
    assert str(path) in kept and "damaged" in kept and "it is not packed" in kept
    assert path.read_bytes() == content
    assert [trace.header.rank for trace in read_attempt(attempt).traces] == list(range(NUM_RANKS))


def _add_attribute(file: h5py.File) -> None:
    file.attrs["later"] = 1


def _add_table(file: h5py.File) -> None:
    file["later/time_ns"] = np.arange(3)


def _add_column(file: h5py.File) -> None:
    file["phases/device_begin_ns"] = np.arange(3)


def _change_resolution(file: h5py.File) -> None:
    file["collectives/enter_ns"].attrs["resolution_ns"] = 128


def _raise_version(file: h5py.File) -> None:
    file.attrs["format_version"] = "1.99"


@pytest.mark.parametrize(
    "change",
    [_add_attribute, _add_table, _add_column, _change_resolution, _raise_version],
    ids=lambda one: one.__name__,
)
def test_what_a_pack_would_lose_stays_in_its_file(attempt, change):
    with h5py.File(attempt.trace_file(SHORT), "r+") as file:
        change(file)
    before = attempt.trace_file(SHORT).read_bytes()
    (kept,) = pack(attempt).kept
    assert f"rank-{SHORT:05d}.h5" in kept
    assert attempt.trace_file(SHORT).read_bytes() == before
    assert read_attempt(attempt).problems == ()


def test_a_rank_of_another_run_is_not_packed_with_the_others(attempt, tmp_path):
    other = write_attempt(tmp_path, run_id="other")
    shutil.copy(other.trace_file(EMPTY), attempt.trace_file(EMPTY))
    result = pack(attempt)
    assert result.kept == [] and len(result.packs) > 3
    assert [problem for problem in read_attempt(attempt).problems if "is of run 'other'" in problem]


def test_a_rank_that_wrote_a_moment_ago_may_still_run(attempt):
    with pytest.raises(TraceError, match=rf"rank {KILLED} has not closed .* --ended"):
        pack(attempt, PackPlan())
    assert not attempt.packs()
    for path in attempt.trace_dir.iterdir():
        os.utime(path, (0, 0))
    assert pack(attempt, PackPlan()).kept == []


def test_a_rank_that_writes_while_it_is_packed_ends_packing(attempt, monkeypatch):
    def write(*_: object) -> None:
        with attempt.trace_file(KILLED).with_suffix(".journal").open("ab") as file:
            file.write(b"more")

    before = names(attempt)
    monkeypatch.setattr("hpcpace.trace.packing.check_pack", write)
    with pytest.raises(TraceError, match="wrote to its trace while it was packed"):
        pack(attempt)
    assert names(attempt) == before


def test_a_pack_with_other_contents_is_thrown_away(attempt, monkeypatch):
    before = names(attempt)
    monkeypatch.setattr("hpcpace.trace.pack_writer.RankDigest.hex", lambda self: b"0" * 32)
    monkeypatch.setattr("hpcpace.trace.pack_writer.digests_of", lambda *_: {})
    with pytest.raises(TraceError, match="does not hold what the file of rank 0 held"):
        pack(attempt)
    assert names(attempt) == before


def test_a_pack_has_the_permissions_that_all_files_have(attempt):
    for path in attempt.trace_dir.iterdir():
        path.chmod(0o640)
    attempt.trace_file(CLOSED).chmod(0o644)
    pack(attempt)
    assert {path.stat().st_mode & 0o777 for path in attempt.packs()} == {0o640}


def test_ranks_are_read_when_they_are_packed_meanwhile(attempt, original):
    """The files were found, and are gone when they are opened."""
    files = attempt.trace_files()
    streams = read_attempt(attempt, most_rows=0).traces
    pack(attempt)
    for trace in streams:
        table, own = trace.tables["collectives"], read_trace(original.trace_file(trace.header.rank))
        assert np.array_equal(table["seq"], own.tables["collectives"]["seq"])
    late = _LateAttempt(attempt.path, files)
    assert late.packs() == [] and late.packs() != []
    found = read_attempt(_LateAttempt(attempt.path, files))
    assert found.problems == () and len(found.traces) == NUM_RANKS


class _LateAttempt(Attempt):
    """An attempt whose folder was listed before it was packed."""

    def __init__(self, path: Path, files: dict[int, Path]) -> None:
        super().__init__(path)
        object.__setattr__(self, "files", files)
        object.__setattr__(self, "asked", [])

    def trace_files(self) -> dict[int, Path]:
        return self.files

    def packs(self) -> list[Path]:
        self.asked.append(1)
        return [] if len(self.asked) == 1 else super().packs()


def test_groups_that_ranks_have_alike_are_stored_once(attempt):
    pack(attempt)
    for path in attempt.packs():
        with Folder.open(path.parent) as folder:
            descriptor, found = open_pack(path.name, folder)
            os.close(descriptor)
        nodes = {rank // 2 for rank in found.numbers}
        assert found.chunks["groups"].num_rows == NUM_RANKS + 2 * sum(
            sum(rank // 2 == node for rank in found.numbers) for node in nodes
        )


def test_a_pack_is_not_taken_for_the_trace_of_a_rank(attempt):
    pack(attempt)
    with pytest.raises(TraceError, match="holds several ranks"):
        read_trace(attempt.packs()[0])
    with pytest.raises(TraceError, match="no trace file"):
        read_trace(attempt.trace_file(99))


def test_the_column_of_device_ranks_is_kept(attempt):
    pack(attempt)
    assert "enqueue_ns" in read_trace(attempt.trace_file(WITH_ENQUEUE)).tables["collectives"]
    assert "enqueue_ns" not in read_trace(attempt.trace_file(CLOSED)).tables["collectives"]
    with_device, without = (read_trace(attempt.trace_file(rank)).tables for rank in (WITH_DEVICE, WITH_ENQUEUE))
    assert (abs(with_device["steps"]["device_end_ns"] - with_device["steps"]["end_ns"] - 7_168) <= 128).all()
    assert {"device_begin_ns", "device_end_ns"} <= set(with_device["phases"]) and len(with_device["phases"]) == 0
    assert "device_end_ns" not in without["steps"] and "enqueue_ns" in without["collectives"]
