"""Whatever is done to packs, what is read is what the ranks' files held, and what is lost is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import chosen
from packs import NUM_RANKS, assert_same_trace, write_attempt

from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.packing import PackPlan, pack_attempt
from hpcpace.trace.reader import read_trace
from hpcpace.trace.tables import Table

FIRST, BETWEEN, LAST = "pack-00000-00000000.h5", "pack-00001-ffffffff.h5", "pack-99999-00000000.h5"
"""Names of packs that come before, between and behind those of the run."""


def _pack(attempt: Attempt, most_ranks: int = 4, *, keep: bool = False) -> None:
    plan = PackPlan(has_ended=True, most_ranks=most_ranks, keep=keep)
    pack_attempt(attempt, plan, begin_stage=lambda name: lambda done, total: None)


def _copy(attempt: Attempt, folder: Path) -> Attempt:
    shutil.copytree(attempt.path.parent, folder / "run")
    return Attempt(folder / "run" / "attempt-0")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    return write_attempt(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def finely_packed(original: Attempt, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    """Packs of small chunks: many places at which some ranks are hurt and others are not."""
    attempt = _copy(original, tmp_path_factory.mktemp("packed"))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("pack_index", "pack_writer"):
            patch.setattr(f"hpcpace.trace.{module}.PACK_CHUNK_ROWS", 500)
        _pack(attempt)
    return attempt


@pytest.fixture
def attempt(finely_packed: Attempt, tmp_path: Path) -> Iterator[Attempt]:
    yield _copy(finely_packed, tmp_path)


def _flip(content: bytearray, random: np.random.Generator) -> None:
    for bit in random.integers(len(content) * 8, size=int(random.integers(1, 20))).tolist():
        content[bit // 8] ^= 1 << bit % 8


def _zero(content: bytearray, random: np.random.Generator) -> None:
    begin = int(random.integers(len(content))) // 512 * 512
    content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))


def _cut(content: bytearray, random: np.random.Generator) -> None:
    del content[int(random.integers(len(content))) :]


def _move(content: bytearray, random: np.random.Generator) -> None:
    one, other = (int(place) // 4096 * 4096 for place in random.integers(len(content) - 4096, size=2))
    content[one : one + 4096], content[other : other + 4096] = content[other : other + 4096], content[one : one + 4096]


@pytest.mark.parametrize("seed", chosen(range(10), 2))
@pytest.mark.parametrize("change", [_flip, _zero, _cut, _move], ids=lambda change: change.__name__[1:])
def test_no_damaged_row_passes_for_a_sound_one(
    attempt: Attempt, original: Attempt, change: Callable[[bytearray, np.random.Generator], None], seed: int
) -> None:
    first, *_ = attempt.packs()
    content = bytearray(first.read_bytes())
    change(content, np.random.default_rng(seed))
    first.write_bytes(content)
    found = read_attempt(attempt)
    read = {trace.header.rank: trace for trace in found.traces}
    assert {4, 5} <= read.keys()
    for sound in read_attempt(original).traces:
        rank = sound.header.rank
        is_named = [problem for problem in found.problems if first.name in problem or sound.path.name in problem]
        if rank in (4, 5, 6) or not is_named:
            assert_same_trace(read[rank], sound)
        for name, table in read[rank].tables.items() if rank in read else ():
            assert _rows(table) <= _rows(sound.tables[name])


def _rows(table: Table) -> set[tuple[object, ...]]:
    return set(zip(*(table[name].tolist() for name in table), strict=True))


def _foreign(folder: Path) -> Path:
    """Return a pack of another run with ranks 0 and 1."""
    other = write_attempt(folder, run_id="other")
    for rank in range(2, NUM_RANKS):
        other.trace_file(rank).unlink()
        other.trace_file(rank).with_suffix(".journal").unlink(missing_ok=True)
    _pack(other)
    (path,) = other.packs()
    return path


@pytest.mark.parametrize("name", [FIRST, BETWEEN, LAST])
def test_a_pack_of_another_run_hides_no_rank(attempt: Attempt, original: Attempt, tmp_path: Path, name: str) -> None:
    shutil.copyfile(_foreign(tmp_path), attempt.trace_dir / name)
    found = read_attempt(attempt)
    (problem,) = found.problems
    assert name in problem and "ranks 0-1 is in another pack, too; left out here" in problem
    for trace, path in zip(found.traces, original.trace_files().values(), strict=True):
        assert_same_trace(trace, read_trace(path))


def test_a_pack_of_another_run_with_ranks_that_nobody_else_has_is_named(attempt: Attempt, tmp_path: Path) -> None:
    attempt.packs()[0].unlink()
    shutil.copyfile(_foreign(tmp_path), attempt.trace_dir / FIRST)
    found = read_attempt(attempt)
    assert [trace.header.rank for trace in found.traces] == [4, 5, 6]
    problem, missing = found.problems
    assert problem.startswith(f"{attempt.trace_dir / FIRST} with ranks 0-1 is of run 'other', attempt 0, not of")
    assert "4 of 7 ranks have no readable trace" in missing


def test_a_pack_of_another_run_beside_the_files_of_the_ranks_is_named(original: Attempt, tmp_path: Path) -> None:
    attempt = _copy(original, tmp_path)
    attempt.trace_dir.joinpath(FIRST).write_bytes(_foreign(tmp_path / "foreign").read_bytes())
    with h5py.File(attempt.trace_dir / FIRST, "r+", libver=("v110", "v110")) as file:
        file["ranks/trace_bytes"][:] = 5
    found = read_attempt(attempt)
    assert found.problems == (
        f"{attempt.trace_dir / FIRST} has other contents than the files of ranks 0-1, which are read",
    )
    assert len(found.traces) == NUM_RANKS


@pytest.mark.parametrize("name", [FIRST, LAST])
def test_of_two_packs_the_whole_one_is_read(attempt: Attempt, original: Attempt, name: str) -> None:
    first, *_ = attempt.packs()
    shutil.copyfile(first, first.with_name(name))
    with h5py.File(first, "r+", libver=("v110", "v110")) as file:
        del file["steps/begin_ns"]
    found = read_attempt(attempt)
    assert [problem for problem in found.problems if first.name in problem and "steps" in problem]
    for trace, path in zip(found.traces, original.trace_files().values(), strict=True):
        assert_same_trace(trace, read_trace(path))
    for rank, path in original.trace_files().items():  # one at a time, as a dump reads them
        assert_same_trace(read_trace(attempt.trace_file(rank)), read_trace(path))


def test_a_rank_is_read_alone_whatever_other_packs_there_are(attempt: Attempt, original: Attempt) -> None:
    first, *_ = attempt.packs()
    first.write_bytes(b"broken")
    assert_same_trace(read_trace(attempt.trace_file(4)), read_trace(original.trace_file(4)))
    with pytest.raises(TraceError, match=first.name):
        read_trace(attempt.trace_file(0))
