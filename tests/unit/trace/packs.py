"""An attempt with ranks of all kinds to pack, and a comparison of all that is read of two attempts."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path

import numpy as np
from rows import header, random_rows

from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.trace.attempt_reader import AttemptTraces, read_attempt
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import DEVICE_TABLES, ExitKind, Op, round_times, row_dtypes
from hpcpace.trace.tables import RankTrace, Table
from hpcpace.trace.writer import TraceWriter

NUM_RANKS = 7
CLOSED, SHORT, KILLED, EMPTY, WITH_ENQUEUE, JOURNAL, WITH_DEVICE = range(NUM_RANKS)
_DEVICE_TABLES = {WITH_ENQUEUE: ("collectives",), WITH_DEVICE: DEVICE_TABLES}
SAMPLED = ("pacing", "network", "host", "connections", "flows")
_NUM_ROWS = {
    CLOSED: 20_000,
    SHORT: 300,
    KILLED: 9_000,
    EMPTY: 0,
    WITH_ENQUEUE: 12_000,
    JOURNAL: 500,
    WITH_DEVICE: 9_000,
}


def collectives(rank: int, num_rows: int, *, device_tables: Collection[str] = ()) -> np.ndarray:
    """Four operations a step in the order of their completion, which now and then is behind the next step."""
    rng = np.random.default_rng(rank)
    rows = np.zeros(num_rows, row_dtypes(device_tables)["collectives"])
    rows["step"], rows["seq"] = np.arange(num_rows) // 4, np.arange(num_rows)
    rows["op"], rows["peer"], rows["bytes"] = Op.ALL_REDUCE, -1, 1024 << rng.integers(0, 4, num_rows)
    rows["enter_ns"] = np.arange(num_rows) * 256_000 + 256 * rng.integers(0, 900, num_rows)
    rows["exit_ns"] = rows["enter_ns"] + 256 * rng.integers(1, 3_000, num_rows)
    if "collectives" in device_tables:
        rows["enqueue_ns"] = rows["enter_ns"] - 25_600
    return rows[np.argsort(rows["exit_ns"], kind="stable")]


def write_attempt(folder: Path, *, run_id: str = "run") -> Attempt:
    """Write the trace of each kind of rank, the killed ones with journals, and return their attempt."""
    attempt = RunDirectory(folder / run_id).new_attempt()
    for rank, num_rows in _NUM_ROWS.items():
        device_tables = _DEVICE_TABLES.get(rank, ())
        head = header(rank, world_size=NUM_RANKS, run_id=run_id, node=rank // 2, host=f"n{rank // 2}")
        writer = TraceWriter(attempt.trace_file(rank), head, device_tables=device_tables)
        dtypes = row_dtypes(device_tables)
        members = [(0, member, b"world", b"gloo") for member in range(NUM_RANKS)]
        members += [(1, member, b"node-%d" % (rank // 2), b"nccl") for member in (rank, rank ^ 1)]
        steps = np.zeros(num_rows // 4, dtypes["steps"])
        steps["step"], steps["begin_ns"] = np.arange(len(steps)), np.arange(len(steps)) * 1_024_000
        steps["end_ns"], steps["samples"] = steps["begin_ns"] + 1_000_000, 8
        if "steps" in device_tables:
            steps["device_begin_ns"], steps["device_end_ns"] = steps["begin_ns"] + 7_168, steps["end_ns"] + 7_168
        for name, rows in (
            ("groups", np.array(members, dtypes["groups"])),
            ("steps", steps),
            ("collectives", collectives(rank, num_rows, device_tables=device_tables)),
            *((name, random_rows(name, 40 + rank)) for name in SAMPLED if num_rows),
        ):
            round_times(name, rows)
            writer.add(name, rows)
        if rank in (KILLED, JOURNAL):
            open_rows = collectives(rank, num_rows + 2)[-2:]
            open_rows["exit_kind"], open_rows["seq"] = ExitKind.NEVER, num_rows + np.arange(2)
            writer.set_open(open_rows)
            writer.flush()
            writer.abandon()
        else:
            writer.close()
    return attempt


def assert_same_trace(found: RankTrace, expected: RankTrace) -> None:
    assert found.header == expected.header
    assert found.closed_cleanly == expected.closed_cleanly
    assert found.tables.keys() == expected.tables.keys()
    for name, table in expected.tables.items():
        assert_same_table(found.tables[name], table)
    assert_same_table(found.open_collectives, expected.open_collectives)


def assert_same_table(found: Table, expected: Table) -> None:
    assert len(found) == len(expected) and list(found) == list(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        assert np.array_equal(found[name], expected[name]), name


def assert_same_attempt(found: Attempt, expected: Attempt) -> None:
    """Compare everything that is read of two attempts: rank by rank, in memory, and as streams."""
    files = expected.trace_files()
    changed_ns = tuple(path.stat().st_mtime_ns for path in files.values())
    of_rank, of_attempt = _everything(expected, tuple(files.items()), changed_ns)
    for rank, other in of_rank.items():
        one = read_trace(found.trace_file(rank))
        assert one.problems == () == other.problems
        assert_same_trace(one, other)
    for most_rows, theirs in of_attempt.items():
        ours = read_attempt(found, most_rows=most_rows)
        assert ours.problems == theirs.problems
        assert len(ours.traces) == len(theirs.traces)
        for one, other in zip(ours.traces, theirs.traces, strict=True):
            assert_same_trace(one, other)


@functools.lru_cache(maxsize=2)
def _everything(
    attempt: Attempt, files: tuple[tuple[int, Path], ...], changed_ns: tuple[int, ...]
) -> tuple[dict[int, RankTrace], dict[int, AttemptTraces]]:
    """Read an attempt in each way, once for all tests that compare others with it."""
    of_rank = {rank: read_trace(path) for rank, path in files}
    return of_rank, {most_rows: read_attempt(attempt, most_rows=most_rows) for most_rows in (10**9, 0)}
