from __future__ import annotations

import json
import os
import sys

import pytest
from synthetic_run import SyntheticRun

from hpcpace.cli import main


@pytest.fixture
def report(monkeypatch, capsys):
    """Run `hpcpace report` and return its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpcpace", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def run(tmp_path):
    return SyntheticRun(pipeline=2, slow={2: 1.3}, noise=0.02).write(tmp_path / "run").path


def test_the_report_shows_the_excess_and_writes_the_summary(report, run):
    code, out, err = report(run)
    assert (code, err) == (0, "")
    assert out.count("%<") == 1
    assert json.loads((run / "summary.json").read_text())["schema"] == "hpcpace-summary/1"


def test_lines_fit_a_log_of_100_columns(report, run):
    _, out, _ = report(run)
    assert max(len(line) for line in out.splitlines() if not line.startswith(("hpcpace report", "written"))) <= 100
    assert "\x1b" not in out


def test_json_goes_to_stdout_and_is_what_the_file_holds(report, run):
    code, out, _ = report(run, "--json")
    assert code == 0
    assert json.loads(out) == json.loads((run / "summary.json").read_text())


def test_a_report_twice_is_the_same(report, run):
    assert report(run) == report(run)


def test_only_the_ranks_asked_for_are_shown(report, run):
    _, out, _ = report(run, "--ranks", "2-3")
    rows = [line.split()[0] for line in out.splitlines() if line[:1].isdigit()]
    assert set(rows) == {"2", "3"}


def test_a_further_attempt_is_the_one_that_is_shown(report, run):
    SyntheticRun(num_ranks=2).write(run)
    assert "2 ranks" in report(run)[1]
    assert "4 ranks" in report(run, "--attempt", 0)[1]


@pytest.mark.parametrize(
    ("options", "steps"),
    [([], "38 used (2 to 39)"), (["--include-warmup"], "40 used"), (["--steps", "10:20"], "10 used (10 to 19)")],
)
def test_the_steps_that_are_used_are_said(report, run, options, steps):
    assert steps in report(run, *options)[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "no run directory"),
        (["{run}/attempt-0"], 2, "no attempt-N folder"),
        (["{run}", "--attempt", "7"], 2, "no attempt 7"),
        (["{run}", "--ranks", "9"], 2, "names no rank"),
        (["{run}", "--ranks", "3-1"], 2, "no rank or range"),
        (["{run}", "--ranks", "x"], 2, "no rank or range"),
        (["{run}", "--steps", "5"], 2, "no range of steps"),
        (["{run}", "--steps", "5:5"], 2, "is empty"),
        (["{run}", "--steps", "900:"], 3, "none of the 40 common steps"),
    ],
)
def test_bad_input_is_said_and_has_its_exit_code(report, run, arguments, code, message):
    found, _, err = report(*(argument.format(run=run) for argument in arguments))
    assert found == code
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("content", [b"", b"not hdf5 at all", b"\x89HDF\r\n\x1a\n" + bytes(4000)])
def test_a_damaged_file_is_left_out_and_said(report, run, content):
    (run / "attempt-0/trace/rank-00001.h5").write_bytes(content)
    code, out, _ = report(run)
    assert code == 1
    assert "1 of 4 ranks have no readable trace: 1" in out
    assert "rank-00001.h5" in out.replace("\n", "").replace("  ", "")


def test_nothing_readable_at_all_is_bad_input(report, run):
    for path in (run / "attempt-0/trace").iterdir():
        path.write_bytes(b"")
    code, _, err = report(run)
    assert code == 2
    assert "no trace can be read" in err


def test_an_attempt_without_traces_is_bad_input(report, tmp_path):
    (tmp_path / "run/attempt-0").mkdir(parents=True)
    assert report(tmp_path / "run")[0] == 2


def test_a_killed_run_is_reported_with_its_hang(report, tmp_path):
    run = SyntheticRun(hangs=True, missing=(3,)).write(tmp_path / "run").path
    code, out, _ = report(run)
    assert code == 1
    assert "never completed: ranks 1-2 inside" in out
    assert "not closed: the trace of ranks 0-2" in out


def test_a_run_that_cannot_be_written_is_reported_with_a_warning(report, run):
    (run / "summary.json").mkdir()
    code, out, err = report(run)
    assert code == 0
    assert "Where the step went" in out
    assert "cannot write" in err
    assert not [name for name in os.listdir(run) if name.startswith(".summary")]


def test_names_from_files_cannot_steer_the_terminal(report, tmp_path):
    run = SyntheticRun(hosts=("n\x1b[31m0",)).write(tmp_path / "run").path
    _, out, _ = report(run)
    assert "\x1b" not in out
    assert "n\\x1b[31m0" in out


def test_many_ranks_are_shown_as_roles_and_extremes(report, tmp_path):
    run = SyntheticRun(num_ranks=24, num_steps=22, slow={7: 1.5}, noise=0.02).write(tmp_path / "run").path
    _, out, _ = report(run)
    assert "8 of 24 ranks shown" in out
    assert out.count("%<") == 1
