"""A run whose operations stay on disk has the figures of one that is in memory."""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.evidence import gather_evidence
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.streamed_operations import is_on_disk, stream_operations
from hpcpace.metrics.operations.communication import kinds
from hpcpace.metrics.operations.totals_by_kind import join_kinds, totals_by_kind
from hpcpace.metrics.steps import common_steps
from hpcpace.rundir import RunDirectory
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.encoding import row_dtypes
from hpcpace.trace.schema import ExitKind, Op, Phase, TraceHeader
from hpcpace.trace.writer import TraceWriter

_RANKS, _STEPS, _OPS = 4, 1500, 8
_STEP_NS = 2_560_000


def write(folder: Path, rank: int, *, close: bool = True, num_rows: int = _STEPS * _OPS) -> None:
    rng, dtypes = np.random.default_rng(rank), row_dtypes()
    rows = np.zeros(_STEPS * _OPS, dtypes["collectives"])
    rows["step"], place = np.divmod(np.arange(len(rows)), _OPS)
    rows["group"], rows["seq"] = place % 2, (np.arange(len(rows)) // _OPS) * (_OPS // 2) + place // 2
    rows["op"], rows["peer"], rows["bytes"] = Op.ALL_REDUCE, -1, 1024 << (place // 4)
    is_message = place == _OPS - 2
    rows["op"][is_message] = Op.SEND if rank % 2 == 0 else Op.RECV
    rows["peer"][is_message], rows["seq"][is_message] = rank ^ 1, np.arange(_STEPS)
    rows["enter_ns"] = rows["step"] * _STEP_NS + 256 * (1000 * place + rng.integers(0, 200, len(rows)))
    rows["exit_ns"] = rows["step"] * _STEP_NS + 256 * (1000 * place + rng.integers(190, 400, len(rows)))
    rows["exit_ns"] = np.maximum(rows["exit_ns"], rows["enter_ns"])
    rows["blocked_ns"] = rows["exit_ns"] - rows["enter_ns"]
    rows = rows[:num_rows]
    if not close:
        rows["exit_kind"][-1] = ExitKind.NEVER
    steps = np.zeros(_STEPS, dtypes["steps"])
    steps["step"], steps["samples"] = np.arange(_STEPS), 8
    steps["begin_ns"], steps["end_ns"] = steps["step"] * _STEP_NS, (steps["step"] + 1) * _STEP_NS
    phases = np.zeros(_STEPS, dtypes["phases"])
    phases["step"], phases["phase"], phases["microbatch"] = np.arange(_STEPS), Phase.FORWARD, -1
    phases["begin_ns"], phases["end_ns"] = steps["begin_ns"] + 5000, steps["end_ns"] - 5000
    header = TraceHeader(
        run_id="f", attempt=0, rank=rank, world_size=_RANKS, local_rank=rank % 2, local_size=2, node=rank // 2,
        host=f"n{rank // 2}", host_key="h",
    )  # fmt: skip
    writer = TraceWriter(folder / f"rank-{rank:05d}.h5", header)
    half = [(1, member, b"half", b"gloo") for member in range(_RANKS) if member // 2 == rank // 2]
    world = [(0, member, b"world", b"gloo") for member in range(_RANKS)]
    clock = np.zeros(2, dtypes["clock"])
    clock["local_ns"], clock["halfwidth_ns"], clock["count"] = (0, _STEPS * _STEP_NS), 500 * (rank > 0), 9
    for name, values in (
        ("groups", np.array(world + half, dtypes["groups"])),
        ("clock", clock),
        ("steps", steps[: -(-num_rows // _OPS)]),
        ("phases", phases),
        ("collectives", rows),
    ):
        writer.add(name, values)
    writer.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    attempt = directory.new_attempt()
    for rank in range(_RANKS):
        # One rank ends early, inside an operation.
        write(attempt.trace_dir, rank, close=rank != 2, num_rows=_STEPS * _OPS - (403 if rank == 2 else 0))
    return directory


def summary_of(run: RunDirectory, most_rows: int):
    attempt = run.attempt(0)
    found = read_attempt(attempt, most_rows=most_rows)
    assert is_on_disk(found.traces) == (most_rows < 1000)
    return analyze_traces(run, attempt, found, Selection()).summary.to_json()


def assert_alike(found, expected, name=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_alike(found[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), name
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{name}[{index}]")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-9), name
    else:
        assert found == expected, name


def test_figures_are_those_of_the_run_in_memory(run, monkeypatch):
    # Neither takes the steps apart: that needs all operations at once.
    monkeypatch.setattr("hpcpace.diagnosis.step_structure.MOST_OPERATIONS", 0)
    monkeypatch.setitem(stream_operations.__kwdefaults__, "max_rows", 10_000)
    assert_alike(summary_of(run, 100), summary_of(run, 10**9))


def test_parts_add_up_to_steps_in_ranges(run):
    traces = read_attempt(run.attempt(0), most_rows=100).traces
    panel = common_steps([trace.tables["steps"] for trace in traces])
    figures, kept = stream_operations(traces, panel, max_rows=10_000)
    assert (figures.parts_ns.sum(axis=2) == panel.end_ns - panel.begin_ns).all()
    assert not any(len(trace.tables["collectives"]) for trace in kept)


@pytest.mark.parametrize("num_cores", [1, 2])
def test_progress_counts_every_range(run, monkeypatch, num_cores):
    monkeypatch.setattr("hpcpace.diagnosis.streamed_operations.num_threads", lambda: num_cores)
    monkeypatch.setattr("hpcpace.parallel.num_threads", lambda: num_cores)
    traces, told = read_attempt(run.attempt(0), most_rows=100).traces, []
    panel = common_steps([trace.tables["steps"] for trace in traces])
    stream_operations(traces, panel, max_rows=10_000, progress=lambda *counts: told.append(counts))
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 2
    if num_cores == 1:
        assert told == [(number, len(told)) for number in range(1, len(told) + 1)]


def test_a_range_that_cannot_be_measured_ends_all(run, monkeypatch):
    monkeypatch.setattr("hpcpace.diagnosis.streamed_operations.num_threads", lambda: 2)
    monkeypatch.setattr("hpcpace.parallel.num_threads", lambda: 2)
    monkeypatch.setattr("hpcpace.diagnosis.streamed_operations.has_messages", lambda evidence: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stream_operations(read_attempt(run.attempt(0), most_rows=100).traces, None, max_rows=10_000)


def test_rows_of_a_damaged_chunk_are_left_out_and_said_so(run):
    path = run.attempt(0).trace_files()[0]
    with h5py.File(path, "r") as file:
        place = file["collectives/enter_ns"].id.get_chunk_info(0)
    with open(path, "r+b") as file:
        file.seek(place.byte_offset + 100)
        file.write(bytes(50))
    figures, _ = stream_operations(read_attempt(run.attempt(0), most_rows=100).traces, None)
    assert len(figures.problems) == 1 and "rank-00000.h5" in figures.problems[0]


def test_a_table_on_disk_reads_as_one_in_memory(run):
    stored, whole = (
        read_attempt(run.attempt(0), most_rows=most).traces[0].tables["collectives"] for most in (1, 10**9)
    )
    assert len(stored) == len(whole) and list(stored) == list(whole)
    assert all((stored[name] == whole[name]).all() for name in whole)
    assert stored.select(slice(5, 9))["seq"].tolist() == whole["seq"][5:9].tolist()


def test_kinds_of_one_part_have_exact_sums_and_close_quantiles(run):
    evidence = gather_evidence(read_attempt(run.attempt(0)).traces)
    columns = evidence.operations, evidence.matching, evidence.waits, np.ones(len(evidence.operations), np.bool_)
    for found, expected in zip(join_kinds(totals_by_kind(*columns)), kinds(*columns), strict=True):
        assert_alike(vars(found), vars(expected))
