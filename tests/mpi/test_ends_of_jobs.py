"""How ranks end is in their traces and heads the report: exceptions, exit codes, kills, operations that time out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.analyze import examine
from hpcpace.observe.collectives.observer import find_layer
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import ExitKind, Op

FOLDER = Path(__file__).parent
Run = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize(
    ("way", "told"),
    only_nightly(
        [
            (
                "raise",
                "rank 1 raised ValueError in step 6 at ends_program.py:30: no batch from /data, password=[redacted]",
            ),
            ("kill", "rank 1 ended without a word in step 6"),
            ("stay", "all_reduce"),
        ],
        [("exit", "rank 1 exited with code 3 in step 6")],
    ),
)
def test_the_rank_that_ended_a_job_is_named_with_its_step(torchrun: Run, tmp_path: Path, way: str, told: str) -> None:
    result = torchrun(3, FOLDER / "ends_program.py", way, tmp_path / "run")
    assert result.returncode == 1
    (attempt,) = open_run(tmp_path / "run").attempts()
    verdict = examine(read_attempt(attempt).traces)
    # Where machines are slow, a timeout of 2 s lasts as long as a hang.
    assert told in verdict.headline
    assert [culprit.id for culprit in verdict.culprits[:1]] == ["1"]
    assert "in step 6" in verdict.headline
    for path in attempt.trace_files().values():
        assert b"secret" not in path.read_bytes()


@pytest.mark.parametrize("start_method", only_nightly(["spawn"], ["fork"]))
def test_a_rank_that_a_script_started_and_that_raised_is_named_with_its_exception(
    python: Run, tmp_path: Path, start_method: str
) -> None:
    trace = ("-m", "hpcpace", "trace", "--run-dir", tmp_path / "run", "--")
    result = python(*trace, FOLDER / "launched_script.py", "spawn_fails", start_method)
    assert result.returncode == 1
    assert (
        'raise ValueError("no batch from /data, password=a-secret-7")' in result.stderr
        and "hpcpace/" not in result.stderr
    )
    (attempt,) = open_run(tmp_path / "run").attempts()
    verdict = examine(read_attempt(attempt).traces)
    told = "rank 1 raised ValueError in step 4 at launched_script.py:54: no batch from /data, password=[redacted]"
    assert verdict.headline.startswith(told)
    for path in attempt.trace_files().values():
        assert b"secret" not in path.read_bytes()


@pytest.mark.parametrize("is_compiled", [False] if find_layer() is None else [False, True])
def test_an_operation_that_fails_is_recorded_as_failed(mpiexec: Run, tmp_path: Path, is_compiled: bool) -> None:
    result = mpiexec(2, FOLDER / "failed_program.py", tmp_path / "run", HPCPACE_TRACE_COMPILED=str(is_compiled).lower())
    assert result.returncode == 0, result.stderr
    assert "hpcpace: warning" not in result.stderr
    (attempt,) = open_run(tmp_path / "run").attempts()
    first, second = (read_trace(path).tables["collectives"] for path in attempt.trace_files().values())
    failed = first.select(first["exit_kind"] == ExitKind.FAILED)
    assert failed["op"].tolist() == [Op.ALL_REDUCE] * 4 + [Op.RECV, Op.ALL_GATHER]
    waited_ns = (failed["exit_ns"] - failed["enter_ns"]).tolist()
    assert min(waited_ns[:5]) > 900_000_000 > waited_ns[5] > 0
    completed = first.select(first["exit_kind"] != ExitKind.FAILED)
    assert completed["seq"].tolist() == second["seq"].tolist() == [0]
