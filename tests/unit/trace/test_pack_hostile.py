"""A damaged or hostile pack ends in a clear message: what of it is damaged is left out and named, the rest is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import chosen
from packs import CLOSED, JOURNAL, NUM_RANKS, assert_same_attempt, write_attempt

from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt
from hpcpace.trace.attempt_reader import AttemptTraces, read_attempt
from hpcpace.trace.packing import PackPlan, pack_attempt
from hpcpace.trace.reader import read_trace

Attack = Callable[[h5py.File, Path], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    return write_attempt(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def packed(original: Attempt, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    folder = tmp_path_factory.mktemp("packed") / "run"
    shutil.copytree(original.path.parent, folder)
    attempt = Attempt(folder / "attempt-0")
    pack_attempt(attempt, PackPlan(has_ended=True), begin_stage=lambda name: lambda done, total: None)
    return attempt


@pytest.fixture
def attempt(packed: Attempt, tmp_path: Path) -> Iterator[Attempt]:
    """Ranks 0 to 3 are in the first pack."""
    shutil.copytree(packed.path.parent, tmp_path / "run")
    yield Attempt(tmp_path / "run" / "attempt-0")


def _read(attempt: Attempt) -> AttemptTraces:
    """Read everything in both ways, as a report does."""
    found = read_attempt(attempt, most_rows=0)
    for trace in found.traces:
        try:
            for rows in trace.tables["collectives"].stream.collectives():
                assert len(rows) <= 20_000
        except (AttributeError, TraceError):
            pass
    return read_attempt(attempt)


def _set(column: str, index: int, value: int) -> Attack:
    def attack(file: h5py.File, _: Path) -> None:
        file[column][index] = value

    attack.__name__ = f"{column.replace('/', '_')}_{value}"
    return attack


def external_link(file: h5py.File, secret: Path) -> None:
    del file["steps"]
    file["steps"] = h5py.ExternalLink(str(secret), "/steps")


def soft_link(file: h5py.File, _: Path) -> None:
    del file["blocks/num_rows"]
    file["blocks/num_rows"] = h5py.SoftLink("/blocks/last_step")


def external_storage(file: h5py.File, secret: Path) -> None:
    del file["headers/text"]
    file["headers"].create_dataset("text", shape=(50,), dtype="u1", external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def virtual_layout(file: h5py.File, secret: Path) -> None:
    del file["steps/begin_ns"]
    layout = h5py.VirtualLayout(shape=(50,), dtype="<i8")
    layout[:] = h5py.VirtualSource(str(secret), "steps/begin_ns", shape=(50,))
    file["steps"].create_virtual_dataset("begin_ns", layout)


def huge_column(file: h5py.File, _: Path) -> None:
    for column in file["steps"].values():
        column.resize((1 << 40,))


def no_ranks(file: h5py.File, _: Path) -> None:
    for column in file["ranks"].values():
        column.resize((0,))


def missing_table(file: h5py.File, _: Path) -> None:
    del file["phases"]


def missing_column(file: h5py.File, _: Path) -> None:
    del file["collectives/seq"]


def missing_index(file: h5py.File, _: Path) -> None:
    del file["ranks"]


def missing_groups(file: h5py.File, _: Path) -> None:
    del file["memberships"]


def other_format(file: h5py.File, _: Path) -> None:
    file.attrs["format"] = "another"


def other_version(file: h5py.File, _: Path) -> None:
    file.attrs["format_version"] = "2.0"


def texts_for_numbers(file: h5py.File, _: Path) -> None:
    del file["ranks/rank"]
    file["ranks"]["rank"] = np.array([b"0", b"1", b"2", b"3"])


def header_that_is_no_json(file: h5py.File, _: Path) -> None:
    file["headers/text"][:4] = 255


def header_of_deep_lists(file: h5py.File, _: Path) -> None:
    num_bytes = int(file["ranks/header_bytes"][0])
    file["headers/text"][:num_bytes] = ord("[")


def twice_the_same_rank(file: h5py.File, _: Path) -> None:
    file["ranks/rank"][1] = 0


ATTACKS = [
    *(
        _set(column, 1, value)
        for column in (
            "ranks/num_steps",
            "ranks/num_collectives",
            "ranks/num_memberships",
            "ranks/num_open_collectives",
        )
        for value in (-1, 3, (1 << 62))
    ),
    *(_set("ranks/header_bytes", 0, value) for value in (-5, 1, 1 << 30)),
    *(_set("ranks/rank", 1, value) for value in (-1, 5000, 1 << 30)),
    *(_set("blocks/num_rows", 0, value) for value in (-1, 0, 1 << 30)),
    _set("blocks/last_step", 0, -(1 << 31)),
    *(_set("group_parts/num_rows", 0, value) for value in (-1, 0, 1 << 30)),
    *(_set("memberships/part", 0, value) for value in (-1, 1 << 30)),
    _set("ranks/closed", 0, 77),
    external_link, soft_link, external_storage, virtual_layout, huge_column, no_ranks, missing_table, missing_column,
    missing_index, missing_groups, other_format, other_version, texts_for_numbers, header_that_is_no_json,
    header_of_deep_lists, twice_the_same_rank,
]  # fmt: skip


@pytest.mark.parametrize("attack", chosen(ATTACKS, 9), ids=lambda attack: attack.__name__)
def test_a_hostile_pack_is_named_and_the_others_are_read(attempt, tmp_path, attack):
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["steps/begin_ns"] = np.arange(50)
    first, *_ = attempt.packs()
    with h5py.File(first, "r+") as file:
        attack(file, secret)
    found = _read(attempt)
    ranks = {trace.header.rank for trace in found.traces}
    assert {4, 5} <= ranks and ranks <= set(range(NUM_RANKS))
    if attack.__name__ not in ("ranks_closed_77", "blocks_last_step_-2147483648"):
        assert [problem for problem in found.problems if first.name in problem]
    for rank in range(4):  # one at a time, as a dump reads them
        try:
            assert read_trace(attempt.trace_file(rank)).header.rank == rank
        except TraceError as error:
            assert "pack" in str(error) or "no trace file" in str(error)


def test_a_pack_cut_off_anywhere_is_named_and_the_others_are_read(attempt, original):
    first, *_ = attempt.packs()
    content = first.read_bytes()
    for size in (0, 1, 8, 100, 2_000, 40_000, *np.linspace(50_000, len(content) - 1, 5).astype(int).tolist()):
        first.write_bytes(content[:size])
        found = _read(attempt)
        assert {trace.header.rank for trace in found.traces} >= {4, 5}
        # A damaged block of operations is found when it is read, and named by the file of its rank.
        problems = [*found.problems, *read_attempt(attempt).problems]
        if not [problem for problem in problems if first.name in problem or "block" in problem]:
            # The last bytes of the file are room that HDF5 keeps.
            assert size > len(content) - 100
            assert_same_attempt(attempt, original)


@pytest.mark.parametrize("seed", chosen(range(40), 5))
def test_damage_of_any_kind_gives_traces_or_names_the_pack(attempt, original, seed):
    first, *_ = attempt.packs()
    random = np.random.default_rng(seed)
    content = bytearray(first.read_bytes())
    # Half of the damage goes where the structure is.
    end = len(content) if seed % 2 else 60_000
    for place in random.integers(0, end, 3).tolist():
        num_bytes = int(random.integers(1, 200))
        content[place : place + num_bytes] = random.bytes(len(content[place : place + num_bytes]))
    first.write_bytes(content)
    found = _read(attempt)
    assert {4, 5} <= {trace.header.rank for trace in found.traces}


def _zero_first_chunk(pack, column):
    with h5py.File(pack) as file:
        place = file[column].id.get_chunk_info(0)
    content = bytearray(pack.read_bytes())
    content[place.byte_offset : place.byte_offset + 40] = bytes(40)
    pack.write_bytes(content)


def test_a_damaged_chunk_costs_only_its_rows(attempt, original):
    first, *_ = attempt.packs()
    _zero_first_chunk(first, "steps/begin_ns")
    found = read_attempt(attempt)
    (problem,) = found.problems
    assert first.name in problem and "table steps of ranks 0-2 is damaged and left out" in problem
    own = read_trace(original.trace_file(CLOSED))
    assert len(found.traces[CLOSED].tables["steps"]) == 0
    assert np.array_equal(found.traces[CLOSED].tables["collectives"]["seq"], own.tables["collectives"]["seq"])


def test_a_damaged_block_costs_only_its_rows(attempt):
    first, *_ = attempt.packs()
    _zero_first_chunk(first, "collectives/enter_ns")
    found = read_attempt(attempt)
    assert [problem for problem in found.problems if "table collectives is damaged" in problem]
    assert len(found.traces) == NUM_RANKS
    assert len(found.traces[JOURNAL].tables["collectives"]) == 500


def test_a_whole_file_is_read_where_the_pack_is_damaged(original, tmp_path):
    shutil.copytree(original.path.parent, tmp_path / "run")
    attempt = Attempt(tmp_path / "run" / "attempt-0")
    plan = PackPlan(has_ended=True, keep=True)
    pack_attempt(attempt, plan, begin_stage=lambda name: lambda done, total: None)
    with h5py.File(attempt.packs()[0], "r+") as file:
        del file["steps/begin_ns"]
    found = read_attempt(attempt)
    assert [len(trace.tables["steps"]) for trace in found.traces[:2]] == [5000, 75]
    # And packing again leaves these files alone.
    result = pack_attempt(attempt, PackPlan(has_ended=True), begin_stage=lambda name: lambda done, total: None)
    assert [sentence for sentence in result.kept if "the files of its ranks stay" in sentence]
    assert attempt.trace_file(CLOSED).exists()


def test_a_rank_in_two_packs_is_read_once(attempt, original):
    first, *_ = attempt.packs()
    shutil.copy(first, first.with_name("pack-99999-00000000.h5"))
    found = read_attempt(attempt)
    assert [trace.header.rank for trace in found.traces] == list(range(NUM_RANKS))
    (problem,) = found.problems
    assert "ranks 0-3 is in another pack, too" in problem


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_no_file_is_not_opened(attempt, original, make):
    make(attempt.trace_dir / "pack-99999-00000000.h5")
    found = read_attempt(attempt)
    (problem,) = found.problems
    assert "pack-99999-00000000.h5" in problem and len(found.traces) == NUM_RANKS


def test_ranks_beyond_the_memory_are_named(attempt):
    problems = read_attempt(attempt, memory_bytes=150_000, most_rows=0).problems
    assert [problem for problem in problems if "--memory allows more" in problem]


def test_sound_packs_are_what_the_tests_begin_with(packed, original):
    assert_same_attempt(packed, original)


def test_a_trace_that_inflates_to_hundreds_of_times_its_size_is_not_packed(tmp_path: Path) -> None:
    attempt = write_attempt(tmp_path)
    with h5py.File(attempt.trace_file(CLOSED), "r+") as file:
        table = file["collectives"]
        for name in list(table):
            dtype = table[name].dtype
            del table[name]
            table.create_dataset(name, (8_192_000,), dtype, chunks=(819_200,), maxshape=(None,), compression=9)
            table[name][...] = 0
    outcome = pack_attempt(attempt, PackPlan(has_ended=True), begin_stage=lambda name: lambda done, total: None)
    (problem,) = [problem for problem in outcome.kept if "times its own size" in problem]
    assert "has 8192000 collectives" in problem and attempt.trace_file(CLOSED).is_file()
