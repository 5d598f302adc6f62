"""Varied runs have the same summary, to the last bit, however they are stored and measured.

That is: in one range of steps and in many, by one process and by many, with the compiled kernels and by numpy alone,
with a file per rank in any order and packed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from cases import chosen

from experiments.score.cells import CELLS
from experiments.score.generator import write_run
from hpcpace.core.errors import CannotTell
from hpcpace.core.rundir import Attempt
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.operation_figures import measure_operations
from hpcpace.metrics import kernels
from hpcpace.trace.attempt_reader import AttemptTraces, read_attempt
from hpcpace.trace.packing import PackPlan, pack_attempt

# Sixty runs of every kind but the largest, of a thousand ranks.
_LARGEST = ("large", "large-device")
_CASES = [(cell, seed) for seed in (101, 203, 305) for cell in CELLS if cell.name not in _LARGEST][:60]
_NUM_PROCESSES = (1, 2, 3, 7)
_NUM_RANGES = 6


def summary_of(run, found):
    try:
        summary = analyze_traces(run, run.attempt(0), found, Selection()).summary.to_json()
    except CannotTell as error:
        return str(error)
    del summary["tracing"]["size_bytes"], summary["tracing"]["files"]  # a pack has another size and name
    return json.dumps(summary, sort_keys=True)


@pytest.fixture
def numpy_alone(monkeypatch):
    """Call it to measure without kernels from then on."""

    def leave_out():
        monkeypatch.setattr(kernels, "_SOURCE", Path("nowhere", "kernels.cpp"))
        kernels.library.cache_clear()

    yield leave_out
    monkeypatch.undo()
    kernels.library.cache_clear()


@pytest.mark.compute
@pytest.mark.parametrize(("cell", "seed"), chosen(_CASES, 4), ids=lambda value: getattr(value, "name", value))
def test_summaries_are_equal_however_they_are_measured(tmp_path, monkeypatch, numpy_alone, cell, seed):
    run = write_run(cell.scenario(seed), tmp_path / "run")
    found = read_attempt(run.attempt(0), most_rows=0)
    expected = summary_of(run, found)
    num_processes = _NUM_PROCESSES[seed % len(_NUM_PROCESSES)]
    num_rows = sum(len(trace.tables["collectives"]) for trace in found.traces)
    monkeypatch.setattr("hpcpace.diagnosis.operation_figures._MIN_SHARED", 0)
    monkeypatch.setattr("hpcpace.diagnosis.operation_figures._MIN_ROWS", 1)
    monkeypatch.setattr("hpcpace.diagnosis.operation_figures.num_threads", lambda: num_processes)
    monkeypatch.setitem(measure_operations.__kwdefaults__, "max_rows", num_processes * num_rows // _NUM_RANGES)
    _shuffle_files(monkeypatch, seed)
    assert summary_of(run, read_attempt(run.attempt(0), most_rows=0)) == expected
    numpy_alone()
    in_memory = read_attempt(run.attempt(0), most_rows=10**9)
    assert summary_of(run, AttemptTraces(in_memory.traces, found.problems)) == expected
    pack_attempt(run.attempt(0), PackPlan(has_ended=True, most_ranks=3), begin_stage=lambda _: lambda done, total: None)
    assert run.attempt(0).packs()
    assert summary_of(run, read_attempt(run.attempt(0), most_rows=0)) == expected


def _shuffle_files(monkeypatch, seed):
    in_order = Attempt.trace_files

    def shuffled(attempt):
        files = list(in_order(attempt).items())
        random.Random(seed).shuffle(files)
        return dict(files)

    monkeypatch.setattr(Attempt, "trace_files", shuffled)
