"""The hang in the report: one set of rules for `hpcpace hang` and for the verdict, with the stacks of the culprits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from test_notices import NOTICE
from written_job import WrittenJob, ns

from hpcpace.core.config import Config
from hpcpace.core.errors import CannotTell
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.diagnosis.analyze import analyze
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.plot_data import PlotData
from hpcpace.diagnosis.summary import Summary
from hpcpace.hang.notices import Notice, ThreadStack, write
from hpcpace.hang.views import Doing
from hpcpace.report.run_report import page
from hpcpace.trace.schema import EventKind, Op

EVIL = "/home/x/<script>alert(1)</script>.py:3 in load"


def hung_attempt(path: Path, *, missing: tuple[int, ...] = ()) -> Attempt:
    """Write a job of which rank 2 stays out of the all_reduce of step 40, from second 4 to 60."""
    job = WrittenJob(num_ranks=4)
    job.all_steps(40)
    for rank in job.ranks:
        if rank.rank != 2:
            rank.call(Op.ALL_REDUCE, 4.08, step=40)
    job.missing = missing
    return job.write(path)


def summary_of(attempt: Attempt) -> Summary:
    run = RunDirectory(attempt.path.parent)
    found = analyze(run, attempt, Selection(), Config(), begin_stage=lambda name: lambda done, of: None)
    assert found is not None
    return found.summary


def notice(**changed: object) -> Notice:
    """Return what rank 2 wrote from second 20 on."""
    known = {
        "rank": 2,
        "host_key": "key-n0",
        "first_time_ns": ns(20),
        "time_ns": ns(50),
        "doing": Doing.LOADING,
        "doing_since_ns": ns(4.2),
        "stacks": (ThreadStack(name="MainThread", is_training=True, frames=("train.py:1 in main", EVIL)),),
    }
    return replace(NOTICE, **{**known, **changed})


def test_the_report_names_the_rank_its_kind_and_who_waits(tmp_path: Path) -> None:
    summary = summary_of(hung_attempt(tmp_path / "run"))
    first = summary.verdict.findings[0]
    assert (first.mode, [one.id for one in first.culprits]) == ("hang", ["2"])
    assert summary.verdict.headline.startswith(
        "hang: all_reduce 40 of group world (step 40) waits for rank 2, which is"
    )
    hang = summary.hang
    assert hang is not None
    assert (hang.kind, hang.culprits, hang.waiting) == ("a rank is stuck in its own work", (2,), (0, 1, 3))
    assert (hang.op, hang.group, hang.seq, hang.step, hang.stacks) == ("all_reduce", "world", 40, 40, ())
    assert hang.age_ns == pytest.approx(55.92e9, abs=1e6)
    assert summary.verdict.findings[0].numbers["age_ns"] == hang.age_ns


def test_of_a_job_that_hangs_in_its_first_step_the_error_says_who_holds_it_up(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=4)
    for rank in job.ranks:
        rank.seen_s = 200.0
        if rank.rank != 2:
            rank.call(Op.ALL_REDUCE, 0.08, step=0)
    told = r"; hang: all_reduce 0 of group world \(step 0\) waits for rank 2, which"
    with pytest.raises(CannotTell, match=told):
        summary_of(job.write(tmp_path / "run"))


def test_a_first_checkpoint_of_which_the_rank_wrote_may_take_longer(tmp_path: Path) -> None:
    attempt = hung_attempt(tmp_path / "run")
    write(attempt, notice(doing=Doing.SAVING))
    assert summary_of(attempt).hang is None


@each_case("changed", [{"ended": "resumed", "ended_ns": ns(21)}, {"host_key": "another"}, {"first_time_ns": ns(90)}])
def test_a_notice_of_another_host_or_of_another_time_counts_for_nothing(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    attempt = hung_attempt(tmp_path / "run")
    write(attempt, notice(**changed))
    hang = summary_of(attempt).hang
    assert hang is not None and (hang.culprits, hang.stacks) == ((2,), ())


@each_case("text", ["", "{}", '{"schema": 1}', "[]", '{"schema": 1, "rank": 2, "step_age_ns": -5}'])
def test_notices_that_cannot_be_used_change_nothing(tmp_path: Path, text: str) -> None:
    attempt = hung_attempt(tmp_path / "run")
    attempt.hang_dir.mkdir()
    attempt.hang_file(2).write_text(text)
    attempt.hang_file(99_999).write_text(text)
    hang = summary_of(attempt).hang
    assert hang is not None and (hang.culprits, hang.stacks) == ((2,), ())


def test_stacks_are_shown_escaped(tmp_path: Path) -> None:
    attempt = hung_attempt(tmp_path / "run")
    write(attempt, notice())
    summary = summary_of(attempt)
    assert summary.hang is not None and summary.hang.stacks[0].frames[-1] == EVIL
    (stack,) = re.findall("<details open>.*?</details>", page(summary, summary.verdict, PlotData()), re.DOTALL)
    assert "<script>" not in stack and "&lt;script&gt;" in stack
    assert "loading data" in summary.verdict.headline
    assert any("load" in line for line in summary.verdict.why)


def test_the_page_gives_no_share_of_the_time_to_a_rank_that_holds_up_a_job(tmp_path: Path) -> None:
    summary = summary_of(hung_attempt(tmp_path / "run"))
    head = page(summary, summary.verdict, PlotData()).partition("<nav")[0]
    assert "waits for rank 2" in head and "more than others" not in head


def test_with_the_culprits_record_missing_nobody_innocent_is_named(tmp_path: Path) -> None:
    summary = summary_of(hung_attempt(tmp_path / "run", missing=(2,)))
    first = summary.verdict.findings[0]
    assert (first.mode, first.culprits) == ("hang", ())
    assert summary.hang is not None and summary.hang.kind == "cannot tell"


def test_a_rank_that_raised_is_told_before_the_hang_that_it_left_behind(tmp_path: Path) -> None:
    job = WrittenJob(num_ranks=4)
    job.all_steps(40)
    for rank in job.ranks:
        if rank.rank != 2:
            rank.call(Op.ALL_REDUCE, 4.08, step=40)
    job.ranks[2].ends(4.1, EventKind.EXCEPTION, 0, b"ValueError", step=40)
    summary = summary_of(job.write(tmp_path / "run"))
    assert [finding.mode for finding in summary.verdict.findings][:2] == ["ended early", "hang"]
    assert summary.hang is not None and summary.hang.kind == "a rank has ended or its host is gone"
