from __future__ import annotations

import json
import os
from functools import partial

import h5py
import pytest

from experiments.synthetic_run import MS, SyntheticRun


@pytest.fixture
def report(hpcpace):
    """Run `hpcpace report` and return its exit code, stdout and stderr."""
    return partial(hpcpace, "report")


@pytest.fixture
def run(tmp_path):
    return SyntheticRun(pipeline=2, slow={2: 1.3}, noise=0.02).write(tmp_path / "run").path


def test_the_report_shows_the_excess_and_writes_the_summary(report, run):
    code, out, err = report(run)
    assert (code, err) == (1, "")
    assert out.count("%<") == 1
    assert "persistent straggler: rank 2" in out
    assert json.loads((run / "summary.json").read_text())["schema"] == "hpcpace-summary/2"


def test_a_healthy_run_has_exit_code_0(report, tmp_path):
    code, out, _ = report(SyntheticRun(num_ranks=8, num_steps=80, noise=0.01).write(tmp_path / "run").path)
    assert code == 0
    assert "Verdict    healthy" in out


def test_a_few_steps_cannot_tell_and_are_shown_nevertheless(report, run):
    code, out, _ = report(run, "--steps", "10:15")
    assert code == 3
    assert "cannot tell: 5 steps are too few" in out
    assert "Phases by rank" in out


def test_an_error_of_its_own_cannot_be_taken_for_a_finding(report, run, monkeypatch):
    def fail(*_, **__):
        raise IndexError("of 7")

    monkeypatch.setattr("hpcpace.diagnosis.analyze.analyze", fail)
    code, _, err = report(run)
    assert code == 4
    assert "a bug in hpcpace ended the report" in err and "IndexError: of 7; test_report.py" in err
    assert "Traceback" not in err


def test_thresholds_come_from_a_file(report, run, tmp_path):
    (tmp_path / "own.toml").write_text("[diagnosis]\nstraggler_share = 0.9\nimbalance_share = 0.9\n")
    assert "straggler: rank" not in report(run, "--config", tmp_path / "own.toml")[1]


def test_the_page_is_written_beside_the_summary(report, run):
    _, out, _ = report(run)
    assert f"written: {run}/summary.json {run}/report.html" in out.replace("\n", " ")
    assert "rank 2" in (run / "report.html").read_text()


def test_lines_fit_a_log_of_100_columns(report, run):
    _, out, _ = report(run)
    assert max(len(line) for line in out.splitlines() if not line.startswith(("hpcpace report", "written"))) <= 100
    assert "\x1b" not in out


def test_json_goes_to_stdout_and_is_what_the_file_holds(report, run):
    code, out, _ = report(run, "--json")
    assert code == 1
    assert json.loads(out) == json.loads((run / "summary.json").read_text())


def test_a_report_twice_is_the_same(report, run):
    assert report(run) == report(run)


def test_only_the_ranks_asked_for_are_shown(report, run):
    _, out, _ = report(run, "--ranks", "2-3")
    rows = [line.split()[0] for line in out.splitlines() if line[:1].isdigit()]
    assert set(rows) == {"2", "3"}


def test_all_attempts_stand_beside_each_other_whichever_is_shown(report, tmp_path):
    path = tmp_path / "run"
    SyntheticRun(num_steps=30, hosts=("n1", "n2"), slow={3: 1.3}, hangs=True).write(path)
    SyntheticRun(num_ranks=2, num_steps=30, hosts=("n1",)).write(path)
    _, out, _ = report(path)
    assert "run        synthetic, attempt 1 (2 in all)" in out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "0 4 2 28 2 to 29 45.0 ms 4 of 4 traces not closed, 3 inside an operation" in rows
    assert "1 2 1 28 2 to 29 36.0 ms all traces closed" in rows
    told = "attempt 1 compared with 0: 2 ranks instead of 4; mesh dp=2,pp=1,tp=1 instead of dp=4,pp=1,tp=1; "
    told += "without n2; median step 20.0 %"
    assert told in " ".join(out.split())
    assert "attempt 0 compared with 1: 4 ranks instead of 2" in " ".join(report(path, "--attempt", 0)[1].split())


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
        (["{run}/attempt-0/checkpoints"], 2, "no run directory"),
        (["{run}/.."], 2, "is a folder of runs"),
        (["{run}", "--attempt", "7"], 2, "no attempt 7"),
        (["{run}", "--ranks", "9"], 2, "names no rank"),
        (["{run}", "--ranks", "3-1"], 2, "is not a rank or a range"),
        (["{run}", "--ranks", "x"], 2, "is not a rank or a range"),
        (["{run}", "--steps", "5"], 2, "is not a range of steps"),
        (["{run}", "--steps", "5:5"], 2, "is an empty range"),
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


HOSTS = ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    ("hosts", "errors_ns", "sentence"),
    [
        (HOSTS, {2: 5 * MS}, "the clock of n3 is wrong by at least 3.00 ms against n1, n2 and n4 (behind); times"),
        (HOSTS, {2: -5 * MS}, "the clock of n3 is wrong by at least 3.00 ms against n1, n2 and n4 (ahead); times"),
        (
            HOSTS,
            {1: 5 * MS, 2: 5 * MS, 3: 5 * MS},
            "the clock of n1 is wrong by at least 3.00 ms against n2, n3 and n4",
        ),
        (("n1", "n2"), {2: 5 * MS, 3: 5 * MS}, "the clocks of n1 and n2 contradict each other by at least 3.00 ms"),
        (HOSTS, {2: 5 * MS, 3: 5 * MS}, "the clocks of n1, n2, n3 and n4 contradict each other"),
    ],
)
def test_a_wrong_clock_is_named_and_a_warning(report, tmp_path, hosts, errors_ns, sentence):
    run = SyntheticRun(hosts=hosts, noise=0.1, clock_error_ns=errors_ns).write(tmp_path / "run").path
    code, out, _ = report(run)
    assert code == 1
    assert sentence in " ".join(out.split())
    assert max(len(line) for line in out.splitlines() if not line.startswith(("hpcpace report", "written"))) <= 100


def test_two_wrong_clocks_are_named_together(report, tmp_path):
    errors_ns = {1: 5 * MS, 4: -5 * MS}
    run = SyntheticRun(num_ranks=5, hosts=(*HOSTS, "n5"), noise=0.1, clock_error_ns=errors_ns).write(tmp_path / "run")
    _, out, _ = report(run.path)
    assert "the clocks of n2 and n5 are wrong by at least 3.00 ms" in out
    suspects = json.loads(run.summary_json.read_text())["clocks"]["suspects"]
    assert [(suspect["node"], suspect["host"], suspect["against"]) for suspect in suspects] == [
        (1, "n2", ["n1", "n3", "n4"]),
        (4, "n5", ["n1", "n3", "n4"]),
    ]


def test_a_clean_run_of_several_hosts_is_no_warning(report, tmp_path):
    run = SyntheticRun(num_ranks=8, hosts=HOSTS, noise=0.01).write(tmp_path / "run").path
    code, out, _ = report(run)
    assert code == 0
    assert "warning" not in out
    assert "Missing or cut off" not in out


def test_a_killed_rank_is_named_with_its_host_and_what_it_lost(report, tmp_path):
    run = SyntheticRun(num_ranks=8, hosts=HOSTS, lost_steps={5: 9}).write(tmp_path / "run")
    code, out, _ = report(run.path)
    text = " ".join(out.split())
    assert code == 1
    assert "not closed: the trace of rank 5 on n3 (killed, crashed, or still running)" in text
    assert "rank 5 on n3: last step recorded 30, 900 ms before the last trace ends; lost at least 9 operations" in text
    (cut,) = json.loads(run.summary_json.read_text())["cut_off"]["ranks"]
    assert (cut["rank"], cut["host"], cut["num_lost_operations"], cut["num_lost_steps"]) == (5, "n3", 9, 8)


def test_of_many_killed_ranks_the_three_that_lost_most_are_printed(report, tmp_path):
    lost_steps = {rank: rank for rank in range(24)}
    run = SyntheticRun(num_ranks=24, hosts=HOSTS, lost_steps=lost_steps).write(tmp_path / "run")
    _, out, _ = report(run.path, "--include-warmup")
    assert [f"rank {rank} on" in out for rank in range(24)] == [False] * 21 + [True] * 3
    assert "and 20 more (ranks 1-20); all 23: --verbose or summary.json" in out
    assert len(json.loads(run.summary_json.read_text())["cut_off"]["ranks"]) == 24


def test_a_rank_killed_before_its_first_step_is_told_and_the_others_have_their_figures(report, tmp_path):
    run = SyntheticRun(hosts=("n1", "n2"), lost_steps={3: 40}).write(tmp_path / "run")
    code, out, _ = report(run.path)
    text = " ".join(out.split())
    assert code == 1
    assert "rank 3 on n2: no step recorded" in text
    assert "lost at least 40 operations" in text
    assert "rank 3 shares none of its 0 steps with the other ranks" in text
    summary = json.loads(run.summary_json.read_text())
    assert (summary["world"]["ranks"], [row["rank"] for row in summary["ranks"]]) == ([0, 1, 2, 3], [0, 1, 2])


def test_errors_that_quote_a_file_cannot_steer_the_terminal(report, tmp_path):
    code, _, err = report(tmp_path / "\x1b[2Jrun")
    assert code == 2
    assert "\x1b" not in err
    assert "\\x1b[2Jrun" in err


def test_a_run_that_cannot_be_written_is_reported_with_a_warning(report, run):
    (run / "summary.json").mkdir()
    code, out, err = report(run)
    assert code == 1
    assert "Phases by rank" in out
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


def test_somebody_elses_run_is_read_by_an_old_hdf5_with_a_warning(report, run, monkeypatch):
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    monkeypatch.setattr(h5py.version, "hdf5_version_tuple", (1, 14, 6))
    assert "belongs to another user" in report(run)[2]
