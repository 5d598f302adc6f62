"""`hpcpace hang RUN`: one screen on a run, also while it goes on, and one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cases import each_case
from click.testing import CliRunner, Result

from hpcpace.cli import cli
from hpcpace.core.errors import TraceError, UsageError
from hpcpace.core.rundir import Attempt
from hpcpace.trace.schema import Op

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "hang"))
from written_job import WrittenJob


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


def written(path: Path, *, hung: bool = True, missing: tuple[int, ...] = ()) -> Attempt:
    """Write a job of which rank 2 stays out of the all_reduce of step 20, if it hangs."""
    job = WrittenJob(num_ranks=4)
    job.all_steps(20)
    for rank in job.ranks:
        if hung and rank.rank != 2:
            rank.call(Op.ALL_REDUCE, 2.08, step=20)
    job.missing = missing
    return job.write(path)


@each_case("place", [".", "attempt-0", "attempt-0/trace"])
def test_a_run_that_hangs_is_named_by_its_folder_or_one_in_it(tmp_path: Path, place: str) -> None:
    written(tmp_path / "run")
    result = run("hang", tmp_path / "run" / place)
    lines = result.output.splitlines()
    assert result.exit_code == 1
    assert lines[0] == "Verdict    hang: all_reduce 20 of group world (step 20) waits for rank 2, which"
    assert "Why        ranks 0-1, 3 wait" in lines
    assert any(line.startswith("Read       traces of 4 of 4 ranks, attempt 0") for line in lines)
    assert max(map(len, lines)) <= 80


@each_case(
    ("hung", "missing", "code", "says"),
    [
        (False, (), 0, "no hang: no operation has been open for 5.00 s"),
        (False, (1,), 3, "no hang: no operation of the ranks with a trace has been open"),
        (True, (2,), 3, "rank 2 left no trace"),
    ],
)
def test_exit_codes_of_a_run(tmp_path: Path, hung: bool, missing: tuple[int, ...], code: int, says: str) -> None:
    written(tmp_path / "run", hung=hung, missing=missing)
    result = run("hang", tmp_path / "run")
    assert (result.exit_code, says in " ".join(result.output.split())) == (code, True)


def test_a_run_as_json(tmp_path: Path) -> None:
    written(tmp_path / "run")
    content = json.loads(run("hang", tmp_path / "run", "--json").output)
    assert (content["ranks"], content["missing"], content["problems"]) == ([0, 1, 2, 3], [], [])
    assert (content["hang"]["culprits"], content["hang"]["waiting"]) == ([2], [0, 1, 3])
    assert (content["source"], content["attempt"], content["limit_ns"]) == ("traces", 0, 5_000_000_000)


def test_the_limit_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "run")
    monkeypatch.setenv("HPCPACE_DIAGNOSIS_HANG_S", "90")
    result = run("hang", tmp_path / "run")
    assert (result.exit_code, "has been open for 90.0 s" in " ".join(result.output.split())) == (0, True)


def test_of_a_folder_of_runs_the_runs_are_named(tmp_path: Path) -> None:
    written(tmp_path / "a")
    result = run("hang", tmp_path)
    assert isinstance(result.exception, TraceError)
    assert "1 run in" in str(result.exception) and str(tmp_path / "a") in str(result.exception)


def test_options_of_dumps_are_refused_with_a_run(tmp_path: Path) -> None:
    written(tmp_path / "run")
    assert isinstance(run("hang", tmp_path / "run", "--ras", "ras.json").exception, UsageError)
