"""A rank that waits in its forward pass is told from one that computes there, by its processor time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.analyze import examine
from hpcpace.diagnosis.summary import Mode
from hpcpace.trace.attempt_reader import read_attempt

FOLDER = Path(__file__).parent
Run = Callable[..., CompletedProcess[str]]


OFF_CORE = "by waiting that uses no core"


@pytest.mark.parametrize(
    ("way", "cause"),
    only_nightly([("lock", OFF_CORE)], [("spin", "by computation"), ("sleep", OFF_CORE), ("read", OFF_CORE)]),
)
def test_the_cause_of_a_late_rank_is_waiting_or_computation(
    torchrun: Run, tmp_path: Path, way: str, cause: str
) -> None:
    traced = ("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", "--")
    result = torchrun(2, *traced, FOLDER / "waiting_program.py", way)
    assert result.returncode == 0, result.stderr
    (attempt,) = open_run(tmp_path / "run").attempts()
    verdict = examine(read_attempt(attempt).traces)
    assert (verdict.mode, [culprit.id for culprit in verdict.culprits[:1]]) == (Mode.STRAGGLER, ["1"])
    assert cause in verdict.headline
    assert any("without using its core" in sentence for sentence in verdict.why) == (cause == OFF_CORE)
