"""Detail switched in real jobs: ranks agree on the steps, their operations match, and the job computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.evidence import rank_operations, timed_traces
from hpcpace.metrics.matching import match
from hpcpace.metrics.operations import gather_operations
from hpcpace.observe.collectives.observer import find_layer
from hpcpace.trace.reader import RankTrace, read_trace
from hpcpace.trace.schema import EventKind, ExitKind, StepFlag

Run = Callable[..., CompletedProcess[str]]
PROGRAM = Path(__file__).with_name("switched_program.py")
LAYERS = [False] if find_layer() is None else [False, True]


def _traces(run: Path) -> list[RankTrace]:
    (attempt,) = open_run(run).attempts()
    traces = [read_trace(path) for path in attempt.trace_files().values()]
    assert all(trace.closed_cleanly and not trace.problems for trace in traces)
    return traces


def _assert_matched(traces: list[RankTrace]) -> None:
    """Every operation has a row on each member of its group, of the same step and size."""
    timed = timed_traces(traces)
    pairs = zip(timed.traces, timed.clocks, strict=True)
    operations = gather_operations(
        [rank_operations(trace, clock, trace.tables["collectives"]) for trace, clock in pairs]
    )
    matching = match(operations)
    assert len(operations) and matching.is_matched.all()
    for column in (operations.step, operations.size_bytes):
        assert np.array_equal(column, column[matching.first][matching.instance])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_ranks", "is_compiled"),
    only_nightly([(2, LAYERS[-1])], [(4, LAYERS[-1]), (2, LAYERS[0]), (1, LAYERS[0]), (4, LAYERS[0])]),
)
def test_the_steps_of_the_setting_are_recorded_and_match(
    mpiexec: Run, tmp_path: Path, num_ranks: int, is_compiled: bool
) -> None:
    settings = {"HPCPACE_TRACE_DETAIL_STEPS": "5:10,12:15", "HPCPACE_TRACE_COMPILED": str(is_compiled).lower()}
    losses = []
    for mode in ("session", "plain"):
        result = mpiexec(num_ranks, PROGRAM, tmp_path / "run", mode, **settings)
        assert result.returncode == 0, result.stderr
        assert "warning" not in result.stderr
        losses.append(json.loads(result.stdout))
    assert losses[0] == losses[1]
    traces = _traces(tmp_path / "run")
    assert len(traces) == num_ranks
    inside = [5, 6, 7, 8, 9, 12, 13, 14]
    for trace in traces:
        steps, collectives = trace.tables["steps"], trace.tables["collectives"]
        assert steps["step"][(steps["flags"] & StepFlag.PLAIN) == 0].tolist() == inside
        assert sorted(set(collectives["step"].tolist())) == inside
        assert sorted(set(trace.tables["phases"]["step"].tolist())) == inside
        # The one in flight at the end of each stretch was followed to its end.
        assert ExitKind.NEVER not in collectives["exit_kind"]
        per_step = np.unique(collectives["step"], return_counts=True)[1]
        assert len(set(per_step.tolist())) == 1
    _assert_matched(traces)


@pytest.mark.nightly
@pytest.mark.parametrize("is_compiled", only_nightly(LAYERS[-1:], LAYERS[:-1]))
def test_steps_that_are_found_are_switched_at_their_ends(mpiexec: Run, tmp_path: Path, is_compiled: bool) -> None:
    settings = {"HPCPACE_TRACE_DETAIL_STEPS": "20:25,30:33", "HPCPACE_TRACE_COMPILED": str(is_compiled).lower()}
    losses = []
    for mode, steps in (("found", settings), ("found", {})):
        result = mpiexec(2, PROGRAM, tmp_path / f"run-{len(losses)}", mode, **steps)
        assert result.returncode == 0, result.stderr
        losses.append(json.loads(result.stdout))
    assert losses[0] == losses[1]
    traces = _traces(tmp_path / "run-0")
    for trace in traces:
        inside = [*range(20, 25), *range(30, 33)]
        assert sorted(set(trace.tables["collectives"]["step"].tolist())) == inside
        assert sorted(set(trace.tables["phases"]["step"].tolist())) == inside
        assert trace.tables["steps"]["step"].tolist() == list(range(40))
    _assert_matched(traces)


@pytest.mark.parametrize("num_ranks", only_nightly([2], [1, 4]))
def test_ranks_follow_the_orders_in_the_run_from_the_same_step(mpiexec: Run, tmp_path: Path, num_ranks: int) -> None:
    result = mpiexec(num_ranks, PROGRAM, tmp_path / "run", "orders", HPCPACE_CLOCK_INTERVAL_S="0.1", timeout_s=100)
    assert result.returncode == 0, result.stderr
    # The order for a step that is over turns detail off.
    assert json.loads(result.stdout) == ["full", "steps", "collectives", "steps", "full"]
    assert result.stderr.count("warning") == 1 and "steps 0:1" in result.stderr
    traces = _traces(tmp_path / "run")
    _assert_matched(traces)
    found = []
    for trace in traces:
        events = trace.tables["events"]
        rows = events["kind"] == EventKind.SWITCH
        found.append(list(zip(events["step"][rows].tolist(), events["code"][rows].tolist(), strict=True)))
        assert [code for _, code in found[-1]] == [0, 1, 0, 2]
    assert all(switches == found[0] for switches in found)
    off, on, off_again, full = (step for step, _ in found[0])
    steps = traces[0].tables["steps"]
    is_plain = (steps["flags"] & StepFlag.PLAIN) != 0
    assert steps["step"][is_plain].tolist() == [*range(off, on), *range(off_again, full)]
    assert set(traces[0].tables["phases"]["step"].tolist()) == {*range(off), *range(full, full + 5)}


def test_ranks_with_different_settings_record_nothing_and_say_so(mpiexec: Run, tmp_path: Path) -> None:
    program = tmp_path / "differ.py"
    program.write_text(
        "import os, runpy, sys\nfrom mpi4py import MPI\n"
        "os.environ['HPCPACE_TRACE_DETAIL_STEPS'] = f'{MPI.COMM_WORLD.rank}:9'\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    result = mpiexec(2, program, PROGRAM, tmp_path / "run", "session")
    assert result.returncode == 0, result.stderr
    assert "nothing is recorded" in result.stderr and "trace.detail_steps" in result.stderr
