"""Jobs whose ranks wait for each other by messages of their own: no exchange of ours holds them up or shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.trace.reader import read_trace

Run = Callable[..., CompletedProcess[str]]
PROGRAM = Path(__file__).with_name("pipeline_program.py")


@pytest.mark.parametrize("num_ranks", only_nightly([4], [2]))
def test_no_rank_of_a_pipeline_waits_for_a_comparison_of_clocks(torchrun: Run, tmp_path: Path, num_ranks: int) -> None:
    options = ("--run-dir", tmp_path / "run", "--", PROGRAM, "pipeline", f"seed {num_ranks}")
    result = torchrun(num_ranks, "-m", "hpcpace", "trace", *options, HPCPACE_CLOCK_INTERVAL_S="0.1")
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr
    # The first comparison came before these were counted.
    told = sorted(line for line in result.stdout.splitlines() if line.startswith("rank"))
    assert told == [f"rank {rank} compared in hpcpace-clock" for rank in range(num_ranks)]
    traces = [read_trace(path) for path in open_run(tmp_path / "run").attempt(0).trace_files().values()]
    counts = {len(trace.tables["clock"]) for trace in traces}
    assert len(counts) == 1 and counts.pop() >= 3
    assert {len(trace.tables["steps"]) for trace in traces} == {12}


@pytest.mark.parametrize("kind", only_nightly(["pipeline"], ["interleaved"]))
def test_no_rank_of_a_pipeline_waits_for_pacing(torchrun: Run, tmp_path: Path, kind: str) -> None:
    """Rank 0 ends its steps before it has sent what rank 1 waits for: an exchange that waits there never ends."""
    options = ("--run-dir", tmp_path / "run", "--pace", "published-window", "--", PROGRAM, kind, "seed 0")
    settings = {"HPCPACE_PACE_FIND_STEPS": "2", "HPCPACE_PACE_WINDOW_STEPS": "2", "HPCPACE_PACE_TIMEOUT_S": "3600"}
    result = torchrun(2, "-m", "hpcpace", "trace", *options, **settings)
    assert result.returncode == 0, result.stderr
    assert "hpcpace: pacing off: " in result.stderr


def test_a_rank_that_leaves_does_not_wait_for_one_that_waits_for_it(torchrun: Run, tmp_path: Path) -> None:
    """Where nothing says that ranks leave together, an hour for each comparison of clocks is none at the end."""
    options = ("--run-dir", tmp_path / "run", "--", PROGRAM, "leaving", tmp_path / "has left")
    result = torchrun(2, "-m", "hpcpace", "trace", *options, HPCPACE_CLOCK_TIMEOUT_S="3600")
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr
    traces = [read_trace(path) for path in open_run(tmp_path / "run").attempt(0).trace_files().values()]
    assert {len(trace.tables["steps"]) for trace in traces} == {12}


@pytest.mark.parametrize("compiled", only_nightly(["true"], ["false"]))
def test_a_wait_that_fails_has_the_traceback_of_the_script(torchrun: Run, tmp_path: Path, compiled: str) -> None:
    options = ("--run-dir", tmp_path / "run", "--", PROGRAM, "failing")
    result = torchrun(2, "-m", "hpcpace", "trace", *options, HPCPACE_TRACE_COMPILED=compiled)
    assert "RuntimeError" in result.stdout and ".wait()" in result.stdout
    assert "hpcpace" not in result.stdout.replace(str(PROGRAM), "")
