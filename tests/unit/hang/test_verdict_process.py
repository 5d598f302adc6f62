"""The verdict that a rank asks a process of its own for, so that nothing it waits on can hold the rank up."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.hang.verdict import ask_verdict
from hpcpace.rundir import Attempt, RunDirectory


def test_an_attempt_without_traces_has_no_verdict_and_a_reason(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "run").new_attempt()
    with pytest.raises(RuntimeError, match=r"the records cannot be read: .*TraceError"):
        ask_verdict(attempt, 60)


def test_a_process_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not be read within 0\.01 s"):
        ask_verdict(Attempt(tmp_path / "attempt-0"), 0.01)
