"""A report says the same of a run before and after its traces were packed, bit for bit but for the size on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.operation_figures import measure_operations
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.packing import PackPlan, pack_attempt

_SMALL = {"num_ranks": 16, "ranks_per_node": 2, "num_steps": 40}


def _summary(run: RunDirectory, most_rows: int) -> dict[str, Any]:
    attempt = run.attempts()[-1]
    found = read_attempt(attempt, most_rows=most_rows, tables=TABLES_USED)
    summary: dict[str, Any] = analyze_traces(run, attempt, found, Selection()).summary.to_json()
    assert summary["tracing"].pop("size_bytes") > 0 and summary["tracing"].pop("files")
    return summary


_CASES = {
    "slow rank": {"fault": "slow_rank", "size": 0.3},
    "contention in a pipeline": {"fault": "contention", "size": 0.3, "num_stages": 4},
    "hang": {"fault": "hang", "size": 0.3},
    "clocks": {"clock_interval_s": 1.0},
}


@each_case(
    ("values", "most_rows"),
    [(values, (10**9, 0)[number % 2]) for number, values in enumerate(_CASES.values())],
    ids=lambda value: str(value),
)
def test_a_packed_run_has_the_summary_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], most_rows: int
) -> None:
    monkeypatch.setitem(measure_operations.__kwdefaults__, "max_rows", 2_000)
    monkeypatch.setattr("hpcpace.trace.pack_writer.BLOCK_ROWS", 1_000)
    run = write_run(Scenario(seed=7, **{**_SMALL, **values}), tmp_path / "run")
    before = _summary(run, most_rows)
    plan = PackPlan(has_ended=True, most_ranks=len(run.attempts()[-1].trace_files()) * 2 // 3)
    result = pack_attempt(run.attempts()[-1], plan, begin_stage=lambda name: lambda done, total: None)
    assert result.kept == [] and len(result.packs) == 2 and not run.attempts()[-1].trace_files()
    assert _summary(run, most_rows) == before
