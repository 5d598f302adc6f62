"""Jobs in which a rank goes wrong: what the others write, say, and do where they are to end a hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from cases import only_nightly

from hpcpace.core.rundir import Attempt, open_run
from hpcpace.hang.notices import Notice, read_notices
from hpcpace.hang.views import Doing
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import EventKind

Run = Callable[..., CompletedProcess[str]]
Ended = Callable[[str], tuple[CompletedProcess[str], Path]]
PROGRAM = Path(__file__).with_name("watched_program.py")
# Steps that a busy machine slows down make the limits of ranks differ.
LIMITS = {"HPCPACE_HANG_FACTOR": "4", "HPCPACE_HANG_LEAST_S": "2", "HPCPACE_HANG_FIRST_STEP_S": "20"}
FAULTY_STEP = 8


def _run(mpiexec: Run, folder: Path, fault: str, *options: str, **variables: Any) -> CompletedProcess[str]:
    command = ("-m", "hpcpace", "trace", "--run-dir", folder / "run", *options, PROGRAM, fault)
    return mpiexec(2, *command, HANG_PROGRAM_MEETING=str(folder / "meeting"), **{**LIMITS, **variables})


@pytest.fixture
def traced(mpiexec: Run, tmp_path: Path) -> Run:
    """Run the program with a fault on two ranks under `hpcpace trace`."""
    return partial(_run, mpiexec, tmp_path)


@pytest.fixture(scope="module")
def ended(mpiexec: Run, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return what a job that was ended because of a fault wrote, and its folder; it runs once for all tests."""

    @cache
    def run(fault: str) -> tuple[CompletedProcess[str], Path]:
        folder = tmp_path_factory.mktemp(fault)
        return _run(mpiexec, folder, fault, "--on-hang", "stop"), folder

    return run


def _attempt(tmp_path: Path) -> Attempt:
    return open_run(tmp_path / "run").last_attempt()


def _notices(tmp_path: Path) -> dict[int, Notice]:
    return read_notices(_attempt(tmp_path))


def _verdicts(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "the job ends here: hpcpace hang" in line]


@pytest.mark.parametrize(
    ("fault", "function", "doing"),
    only_nightly([("data", "load_for_ever", Doing.LOADING)], [("compute", "compute_for_ever", Doing.COMPUTING)]),
)
def test_a_rank_that_is_stuck_in_its_own_work_is_named_with_its_stack_and_ended(
    ended: Ended, fault: str, function: str, doing: Doing
) -> None:
    result, folder = ended(fault)
    assert result.returncode == 4, result.stderr
    told = _verdicts(result.stderr)
    assert told and "waits for rank 1" in told[-1], result.stderr
    notices = _notices(folder)
    assert sorted(notices) == [0, 1]
    assert notices[1].doing == doing
    assert notices[1].stack[-1].endswith(f" in {function}")
    assert notices[1].calls == ()
    assert [call.op for call in notices[0].calls] == ["barrier"]
    assert {notice.step for notice in notices.values()} == {FAULTY_STEP}
    assert [notice.has_moved for notice in notices.values()] == [False, False]


@pytest.mark.parametrize("fault", only_nightly(["data"], ["compute"]))
def test_ranks_that_a_hang_ends_have_brought_their_traces_to_disk(ended: Ended, fault: str) -> None:
    result, folder = ended(fault)
    assert result.returncode == 4, result.stderr
    for path in _attempt(folder).trace_files().values():
        tables = read_trace(path).tables
        assert len(tables["steps"]) == FAULTY_STEP
        assert tables["events"]["kind"].tolist()[-1] == EventKind.EXIT
        assert tables["events"]["code"].tolist()[-1] == 4


@pytest.mark.nightly
def test_a_rank_that_skips_a_barrier_is_told_from_those_that_wait_in_it(traced: Run, tmp_path: Path) -> None:
    result = traced("barrier", "--on-hang", "stop")
    assert result.returncode == 4, result.stderr
    assert "called different operations" in _verdicts(result.stderr)[-1]
    notices = _notices(tmp_path)
    assert [call.op for call in notices[0].calls] == ["barrier"]
    assert "barrier" not in [call.op for call in notices[1].calls]


def test_a_rank_that_a_signal_has_stopped_is_named_and_woken_to_end(traced: Run, tmp_path: Path) -> None:
    result = traced("stop", "--on-hang", "stop")
    assert result.returncode == 4, result.stderr
    assert "waits for rank 1" in _verdicts(result.stderr)[-1]
    assert [rank for rank, notice in _notices(tmp_path).items() if notice.step == FAULTY_STEP] == [0]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", only_nightly(["slow"], ["pause"]))  # by its own work, or by SIGSTOP until SIGCONT
def test_a_job_that_goes_on_after_all_is_reported_once_and_loses_nothing(
    traced: Run, mpiexec: Run, tmp_path: Path, fault: str
) -> None:
    plain = mpiexec(2, PROGRAM, "none", HANG_PROGRAM_MEETING=str(tmp_path / "plain"))
    result = traced(fault, HPCPACE_HANG_LEAST_S="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == plain.stdout
    assert len(re.findall(r"waits for rank 1.*step 8 has lasted", result.stderr)) == 1, result.stderr
    assert "hpcpace: recorded 2 ranks, 20 steps" in result.stderr
    assert {notice.ended for notice in _notices(tmp_path).values()} == {"resumed"}


@pytest.mark.nightly
def test_nothing_is_watched_where_that_is_switched_off(traced: Run, tmp_path: Path) -> None:
    result = traced("slow", "--on-hang", "off", HPCPACE_HANG_LEAST_S="1")
    assert result.returncode == 0, result.stderr
    assert not _attempt(tmp_path).hang_dir.exists()
    assert "has lasted" not in result.stderr


@pytest.mark.nightly
def test_a_rank_that_does_not_come_to_the_process_group_is_missed(traced: Run, tmp_path: Path) -> None:
    result = traced("late", HPCPACE_HANG_FIRST_STEP_S="1", HPCPACE_HANG_LEAST_S="20")
    assert result.returncode == 0, result.stderr
    told = [line for line in result.stderr.splitlines() if "init_process_group has lasted" in line]
    assert len(told) == 1, result.stderr
    assert "rank 0 of 2 waits for it, but not rank 1; rank 0 is in " in told[0]
    notice = read_notices(Attempt(tmp_path / "run"))[0]
    assert notice.doing == Doing.STARTING
    assert any("in init_process_group" in frame for frame in notice.stack)
