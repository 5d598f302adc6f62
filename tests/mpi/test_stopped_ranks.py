"""A rank that a signal stops for two seconds is said to have been stopped, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.analyze import examine
from hpcpace.diagnosis.summary import Mode
from hpcpace.trace.attempt_reader import read_attempt

Run = Callable[..., CompletedProcess[str]]


def test_a_rank_that_a_signal_stops_is_named_with_the_length(torchrun: Run, tmp_path: Path) -> None:
    traced = ("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", "--")
    result = torchrun(2, *traced, Path(__file__).parent / "stopped_program.py")
    assert result.returncode == 0, result.stderr
    (attempt,) = open_run(tmp_path / "run").attempts()
    verdict = examine(read_attempt(attempt).traces)
    # Other jobs on the cores of this machine may cost more.
    (stopped,) = [finding for finding in verdict.findings if finding.mode == Mode.STOPPED]
    assert (stopped.variety, [culprit.id for culprit in stopped.culprits]) == ("rank", ["1"])
    assert 1.9e9 < stopped.numbers["length_ns"] < 3.1e9
    assert abs(stopped.numbers["step"] - 80) <= 1
