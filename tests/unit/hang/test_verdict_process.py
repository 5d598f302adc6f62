"""The verdict that a rank asks a process of its own for, so that nothing it waits on can hold the rank up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from written_job import WrittenJob

from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.hang.verdict import ask_verdict, main
from hpcpace.trace.schema import Op


def test_an_attempt_without_traces_has_no_verdict_and_a_reason(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path / "run").new_attempt()
    with pytest.raises(RuntimeError, match=r"the records cannot be read: .*TraceError"):
        ask_verdict(attempt, 60)


def test_a_process_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not be read within 0\.01 s"):
        ask_verdict(Attempt(tmp_path / "attempt-0"), 0.01)


def test_a_verdict_rests_on_files_of_the_jobs_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = WrittenJob()
    job.all_steps(20)
    for rank in job.ranks[1:]:
        rank.call(Op.ALL_REDUCE, 2.0, step=20)
    attempt = job.write(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["verdict", str(attempt.path)])
    main()
    assert "waits for rank 0" in capsys.readouterr().out
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(TraceError, match=f"a file of user {own}"):
        main()
