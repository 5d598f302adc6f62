"""`hpcpace timeline`, and `hpcpace report --timeline`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import each_case

from experiments.synthetic_run import SyntheticRun
from hpcpace.cli.report import fitted

pytest.importorskip("perfetto")


def test_the_file_is_written_into_the_run_and_the_output_says_what_it_shows(hpcpace, tmp_path: Path) -> None:
    SyntheticRun(num_ranks=2, slow={1: 1.5}).write(tmp_path / "run")
    code, out, err = hpcpace("timeline", tmp_path / "run", "--steps", "10:12")
    assert (code, err) == (0, "")
    assert (tmp_path / "run" / "timeline.pftrace").stat().st_size > 1000
    assert "steps 10 to 11 of 2 ranks: " in out and "https://ui.perfetto.dev" in out


@each_case("columns", [80, 300, 40])
def test_sentences_fit_into_the_terminal_and_are_one_line_in_a_log(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    sentence = (
        "steps 13 to 17, around step 15, the slowest, of 4 ranks: 251 slices, 30 arrows from late ranks to those that"
    )
    monkeypatch.setenv("COLUMNS", str(columns))
    assert fitted(sentence) == sentence
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    lines = fitted(sentence).splitlines()
    assert " ".join(line.strip() for line in lines) == sentence
    assert max(map(len, lines)) <= min(max(columns, 80), 100)


def test_a_file_that_lacks_ranks_is_a_warning(hpcpace, tmp_path: Path) -> None:
    SyntheticRun(num_ranks=3, missing=(2,)).write(tmp_path / "run")
    code, _, err = hpcpace("timeline", tmp_path / "run", "-o", tmp_path / "x.pftrace")
    assert code == 1 and "rank 2 left no trace" in err and (tmp_path / "x.pftrace").exists()


def test_of_a_job_that_hangs_the_steps_with_what_never_completed_are_named(hpcpace, tmp_path: Path) -> None:
    SyntheticRun(num_ranks=2, num_steps=20, hangs=True).write(tmp_path / "run")
    code, out, _ = hpcpace("timeline", tmp_path / "run")
    assert code == 0 and "operations of step 20 that never completed (--steps 18: shows them)" in out
    for steps in ("18:", "3:5"):
        assert "never completed" not in hpcpace("timeline", tmp_path / "run", "--steps", steps)[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "3"], "not a range of steps"),
        (["--steps", "9:3"], "empty range"),
        (["--steps", "100:110"], "which has 40 steps, 0 to 39"),
        (["--ranks", "a"], "not a rank"),
        (["-o", "/nonexistent/x.pftrace"], "cannot write /nonexistent/x.pftrace"),
        (["--memory", "much"], "much"),
        (["--attempt", "3"], "no attempt 3"),
    ],
)
def test_mistakes_are_refused(hpcpace, tmp_path: Path, options: list[str], said: str) -> None:
    SyntheticRun(num_ranks=2).write(tmp_path / "run")
    code, _, err = hpcpace("timeline", tmp_path / "run", *options)
    assert code == 2 and said in err


def test_ranks_that_the_run_does_not_have_are_a_warning(hpcpace, tmp_path: Path) -> None:
    SyntheticRun(num_ranks=2).write(tmp_path / "run")
    code, out, err = hpcpace("timeline", tmp_path / "run", "--ranks", "0,7-9")
    assert code == 1 and "of 1 rank: " in out
    assert "the run has no ranks 7-9 of --ranks: its ranks are 0 to 1" in err


def test_a_path_that_is_no_run_is_refused(hpcpace, tmp_path: Path) -> None:
    code, _, err = hpcpace("timeline", tmp_path / "nothing")
    assert code == 2 and "no run directory" in err


def test_the_page_links_the_timeline_of_the_report(hpcpace, tmp_path: Path) -> None:
    SyntheticRun(num_ranks=2, slow={1: 1.5}).write(tmp_path / "run")
    _, out, _ = hpcpace("report", tmp_path / "run", "--timeline")
    assert "timeline.pftrace" in out and (tmp_path / "run" / "timeline.pftrace").exists()
    assert '<a href="timeline.pftrace" download>' in (tmp_path / "run" / "report.html").read_text()


def test_without_it_the_page_shows_the_command(hpcpace, tmp_path: Path) -> None:
    SyntheticRun(num_ranks=2, slow={1: 1.5}).write(tmp_path / "run")
    hpcpace("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"<code>hpcpace timeline {tmp_path / 'run'} --steps " in page and "timeline.pftrace" not in page
