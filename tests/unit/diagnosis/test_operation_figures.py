"""Figures of operations do not depend on the ranges of steps that they are measured in, nor on how many processes."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from cases import only_nightly

from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.evidence import evidence_of, timed_traces
from hpcpace.diagnosis.incomplete import problems_of
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.operation_figures import MAX_ROWS, measure_operations
from hpcpace.metrics.common_clock import rank_clocks
from hpcpace.metrics.communication import join_kinds, totals_by_kind
from hpcpace.metrics.steps import common_steps
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import ExitKind, Op, Phase, TraceHeader, row_dtypes
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


def summary_of(run: RunDirectory):
    attempt = run.attempt(0)
    return analyze_traces(run, attempt, read_attempt(attempt, most_rows=0), Selection()).summary.to_json()


def measured_in(run: RunDirectory, *, max_rows: int = MAX_ROWS, progress=None, use_steps: bool = True):
    """Return the figures of the operations of a run, measured in ranges of about so many rows."""
    timed = timed_traces(read_attempt(run.attempt(0), most_rows=0).traces)
    panel = common_steps([trace.tables["steps"] for trace in timed.traces])
    panel = panel if use_steps else panel.select(slice(0))
    return panel, measure_operations(timed, panel, panel, max_rows=max_rows, progress=progress)


def with_cores(monkeypatch, num_cores):
    for module in ("core.pool", "diagnosis.operation_figures"):
        monkeypatch.setattr(f"hpcpace.{module}.num_threads", lambda: num_cores)
    monkeypatch.setattr("hpcpace.diagnosis.operation_figures._MIN_SHARED", 0)


@pytest.mark.parametrize(
    ("max_rows", "num_cores"), only_nightly([(10_000, 2), (5_000, 3)], [(10_000, 1), (5_000, 7), (10**6, 2)])
)
def test_figures_do_not_depend_on_ranges_and_processes(run, monkeypatch, max_rows, num_cores):
    expected = summary_of(run)
    with_cores(monkeypatch, num_cores)
    monkeypatch.setattr("hpcpace.diagnosis.operation_figures._MIN_ROWS", 100)
    monkeypatch.setitem(measure_operations.__kwdefaults__, "max_rows", max_rows)
    assert summary_of(run) == expected


def test_parts_add_up_to_steps_in_ranges(run):
    panel, figures = measured_in(run, max_rows=10_000)
    assert (figures.panels.parts_ns.sum(axis=2) == panel.end_ns - panel.begin_ns).all()


@pytest.mark.parametrize("num_cores", [1, 2])
def test_progress_counts_every_range(run, monkeypatch, num_cores):
    with_cores(monkeypatch, num_cores)
    told = []
    measured_in(run, max_rows=10_000, progress=lambda *counts: told.append(counts))
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 2
    if num_cores == 1:
        assert told == [(number, len(told)) for number in range(1, len(told) + 1)]


def test_a_range_that_cannot_be_measured_ends_all(run, monkeypatch):
    with_cores(monkeypatch, 2)
    monkeypatch.setattr("hpcpace.diagnosis.operation_figures.rank_totals", lambda *of: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured_in(run, max_rows=10_000)


def test_rows_of_a_damaged_chunk_are_left_out_and_said_so(run):
    path = run.attempt(0).trace_files()[0]
    with h5py.File(path, "r") as file:
        place = file["collectives/enter_ns"].id.get_chunk_info(0)
    with open(path, "r+b") as file:
        file.seek(place.byte_offset + 100)
        file.write(bytes(50))
    _, figures = measured_in(run, use_steps=False)
    (problem,) = [problem for stream in figures.streams for problem in problems_of(stream)]
    assert "rank-00000.h5" in problem


def test_a_table_on_disk_reads_as_one_in_memory(run):
    stored, whole = (
        read_attempt(run.attempt(0), most_rows=most).traces[0].tables["collectives"] for most in (1, 10**9)
    )
    assert len(stored) == len(whole) and list(stored) == list(whole)
    assert all((stored[name] == whole[name]).all() for name in whole)
    assert stored.select(slice(5, 9))["seq"].tolist() == whole["seq"][5:9].tolist()


def test_kinds_have_exact_sums_and_close_quantiles(run):
    traces = read_attempt(run.attempt(0)).traces
    evidence = evidence_of(traces, *rank_clocks(traces))
    done, matching, waits = evidence.operations, evidence.matching, evidence.waits
    found = join_kinds(totals_by_kind(done, matching, waits, np.ones(len(done), np.bool_)))
    assert len(found) == 4
    for kind in found:
        rows = (done.op == Op[kind.op.upper()]) & (done.group_size == kind.group_size)
        matched = rows & matching.is_matched
        duration_ns = (done.exit_ns - done.enter_ns)[rows]
        largest_ns = np.full(len(matching.num_rows), -1)
        np.maximum.at(largest_ns, matching.instance[matched], waits.transfer_ns[matched])
        assert (kind.num_rows, kind.size_bytes) == (rows.sum(), done.size_bytes[rows].sum())
        assert kind.num_unmatched == rows.sum() - matched.sum()
        assert kind.ranks_unmatched == tuple(np.unique(done.rank[rows & ~matching.is_matched]))
        assert kind.mean_wait_ns == pytest.approx(waits.wait_ns[matched].mean())
        assert kind.mean_transfer_ns == pytest.approx(largest_ns[largest_ns >= 0].mean())
        median_ns, p95_ns = np.percentile(duration_ns, (50, 95))
        assert kind.median_ns == pytest.approx(median_ns, rel=1e-3)
        assert kind.p95_ns == pytest.approx(p95_ns, rel=1e-3)
