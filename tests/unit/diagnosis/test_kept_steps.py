"""A report on traces of which only the last steps were kept: it says so, and claims no loss of what was dropped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Op, TraceHeader, row_dtypes
from hpcpace.trace.writer import TraceWriter

KEPT, NUM_STEPS, PER_STEP, STEP_NS = 400, 1400, 24, 10_000_000
DTYPES = row_dtypes()


def _write_rank(run: RunDirectory, rank: int) -> None:
    """Write a rank; rank 1 has more operations of its own, and so drops its rows at other places."""
    header = TraceHeader(
        run_id="run", attempt=0, rank=rank, world_size=2, local_rank=rank, local_size=2, node=0, host="n", host_key="n"
    )
    writer = TraceWriter(run.attempt(0).trace_file(rank), header, keep_last=KEPT)
    groups = [(0, 0, b"world", b"gloo"), (0, 1, b"world", b"gloo"), (1, rank, b"own", b"gloo")]
    writer.add("groups", np.array(groups, DTYPES["groups"]))
    for step in range(NUM_STEPS):
        begin_ns = step * STEP_NS
        writer.add("steps", np.array([(step, begin_ns, begin_ns + STEP_NS, 1, 0)], DTYPES["steps"]))
        rows = [
            (step, 0, step * PER_STEP + i, Op.ALL_REDUCE, 8, -1, begin_ns + i * 4096, begin_ns + i * 4096 + 2048, 0, 1)
            for i in range(PER_STEP)
        ]
        rows += [
            (step, 1, step * 5 + i, Op.ALL_REDUCE, 8, -1, begin_ns + i * 4096, begin_ns + i * 4096 + 2048, 0, 1)
            for i in range(5 * rank)
        ]
        writer.add("collectives", np.array(rows, DTYPES["collectives"]))
        if step % 100 == 99:
            writer.add("account", np.array([(begin_ns + STEP_NS, 100, 0, 0)], DTYPES["account"]))
            writer.flush()
    if rank:
        writer.close()
    else:
        writer.abandon()  # as one that was killed


def test_what_was_dropped_is_not_lost(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    attempt = run.new_attempt()
    for rank in range(2):
        _write_rank(run, rank)
    found = read_attempt(attempt)
    assert found.problems == ()
    first_steps = [trace.first_step for trace in found.traces]
    assert min(first_steps) > 0
    summary = analyze_traces(run, attempt, found, Selection()).summary
    assert summary.steps.kept_from == summary.steps.first == max(first_steps)
    assert summary.steps.num_used == NUM_STEPS - max(first_steps)
    assert [(rank.rank, rank.num_lost_operations) for rank in summary.cut_off.ranks] == [(0, 0)]
