"""`hpcpace list`, and which run `hpcpace report` takes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from experiments.synthetic_run import MS, Ending, SyntheticRun
from hpcpace.diagnosis.run_state import run_row
from hpcpace.trace.schema import EventKind

LONG_AGO_S = 1_700_000_000


def _write(path: Path, **settings: object) -> Path:
    return SyntheticRun(**{"num_ranks": 2, "num_steps": 40, **settings}).write(path).path


def _age(run: Path) -> None:
    """Let all files of a run be old, as those of a killed job."""
    for path in run.rglob("*"):
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))


def _record(run: Path, created_s: int, **more: object) -> None:
    record = {"created_unix_ns": created_s * 10**9, "ranks": [{"rank": 0, "host": "n1"}, {"rank": 1, "host": "n1"}]}
    (run / "attempt-0" / "run.json").write_text(json.dumps(record | more))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A working folder with runs of known states in `runs`."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "runs"
    _record(_write(base / "old"), 1000)
    _record(_write(base / "topic" / "new"), 2000)
    return Path("runs")


def _states(rows: str) -> dict[str, str]:
    return {Path(row["path"]).name: row["state"] for row in json.loads(rows)}


def test_lists_the_newest_run_first_in_80_columns(hpcpace, runs):
    code, out, err = hpcpace("list")
    assert (code, err) == (0, "")
    assert out.index("topic/new") < out.index("old")
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("not reported") == 2


def test_shows_the_verdict_and_the_speed_of_a_report(hpcpace, runs):
    hpcpace("report", runs / "old")
    summary = json.loads((runs / "old" / "summary.json").read_text())
    row = json.loads(hpcpace("list", "--json")[1])[1]
    assert (row["verdict"], row["speed"]) == (summary["verdict"]["mode"], summary["throughput"]["samples_per_s"])


def test_the_speed_of_a_few_steps_among_many_without_detail_is_not_shown(hpcpace, runs):
    hpcpace("report", runs / "old")
    path = runs / "old" / "summary.json"
    summary = json.loads(path.read_text())
    summary["steps"] |= {"num_used": 1, "num_plain": 50}
    path.write_text(json.dumps(summary))
    row = json.loads(hpcpace("list", "--json")[1])[1]
    assert (row["verdict"], row["speed"]) == (summary["verdict"]["mode"], None)


def test_tells_running_finished_hung_and_failed_from_each_other(hpcpace, tmp_path):
    _write(tmp_path / "running", endings=(Ending(rank=1, after_ns=MS),))
    _write(tmp_path / "finished")
    _write(tmp_path / "hung", num_steps=120, hangs=True)
    _age(_write(tmp_path / "killed", endings=(Ending(rank=1, after_ns=MS),)))
    _write(tmp_path / "raised", endings=(Ending(rank=0, after_ns=MS, kind=EventKind.EXCEPTION, text=b"ValueError"),))
    states = _states(hpcpace("list", tmp_path, "--json")[1])
    assert states["running"] == "running"
    assert states["finished"] == "finished"
    assert states["hung"] == "hung"
    assert states["killed"] == states["raised"] == "failed"


def test_a_packed_run_has_the_state_that_it_had(hpcpace, tmp_path):
    expected = {"finished": "finished", "killed": "failed", "raised": "failed"}
    _write(tmp_path / "finished")
    _write(tmp_path / "killed", endings=(Ending(rank=1, after_ns=MS),))
    _write(tmp_path / "raised", endings=(Ending(rank=0, after_ns=MS, kind=EventKind.EXCEPTION, text=b"ValueError"),))
    for name in expected:
        _record(tmp_path / name, 5)
        _age(tmp_path / name)
    assert _states(hpcpace("list", tmp_path, "--json")[1]) == expected
    for name in expected:
        assert hpcpace("pack", tmp_path / name, "--ended")[0] == 0
        assert not list((tmp_path / name).rglob("rank-*"))
    assert _states(hpcpace("list", tmp_path, "--json")[1]) == expected


def test_a_workload_that_left_no_result_has_failed(tmp_path):
    run = _write(tmp_path / "run")
    _record(run, 5, parallelism={}, resumed=None, config={"train": {"steps": 150}})
    assert run_row(run).state == "failed"


def test_a_running_workload_says_how_many_of_its_steps_are_done(hpcpace, tmp_path):
    run = _write(tmp_path / "run", endings=(Ending(rank=1, after_ns=MS),))
    _record(run, 5, parallelism={}, resumed=None, config={"train": {"steps": 150}})
    assert "step 40 of 150" in " ".join(hpcpace("list", tmp_path)[1].split())
    assert "state      running, step 40 of 150: verdict and figures may change" in hpcpace("report", run)[1]
    assert "running, step 40 of 150" in (run / "report.html").read_text()


def test_a_run_that_has_ended_does_not_run(hpcpace, runs):
    assert "State" not in hpcpace("report", runs / "old")[1]


def test_a_report_from_before_the_end_of_an_attempt_does_not_count(hpcpace, tmp_path):
    run = _write(tmp_path / "run", endings=(Ending(rank=1, after_ns=MS),))
    hpcpace("report", run)
    assert run_row(run).verdict != "not reported"
    for journal in run.rglob("*.journal"):
        journal.unlink()
    assert run_row(run).verdict == "not reported"


@pytest.mark.parametrize("content", ["", "{{", "[]", "null", '{"ranks": 7}', "[" * 100_000, '{"config": []}'])
def test_a_damaged_record_hides_no_run(hpcpace, runs, content):
    (runs / "old" / "attempt-0" / "run.json").write_text(content)
    (runs / "old" / "summary.json").write_text(content)
    (runs / "old" / "attempt-0" / "result.json").write_text(content)
    code, out, _ = hpcpace("list")
    assert code == 0
    assert "topic/new" in out and "old" in out


def test_pipes_and_links_in_runs_are_not_followed(hpcpace, runs):
    os.mkfifo(runs / "old" / "summary.json")
    (runs / "link").symlink_to("/")
    (runs / "loop").symlink_to("..")
    rows = json.loads(hpcpace("list", "--json")[1])
    assert [Path(row["path"]).name for row in rows] == ["new", "old"]
    assert "no regular file" in rows[1]["problems"][0]


def test_names_of_folders_cannot_steer_the_terminal(hpcpace, tmp_path):
    _write(tmp_path / "a\x1b[2Jb")
    assert "\x1b" not in hpcpace("list", tmp_path)[1]


def test_a_folder_without_runs_is_said_to_have_none(hpcpace, tmp_path):
    assert hpcpace("list", tmp_path)[:2] == (0, f"no runs in {tmp_path}\n")


def test_a_folder_that_does_not_exist_is_bad_input(hpcpace, tmp_path):
    code, _, err = hpcpace("list", tmp_path / "none")
    assert code == 2
    assert "cannot list runs" in err


def test_a_report_without_a_run_takes_the_newest(hpcpace, runs):
    code, out, _ = hpcpace("report")
    assert code in (0, 1, 3)
    assert "hpcpace report runs/topic/new" in out


def test_a_report_without_a_run_says_where_it_looked(hpcpace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = hpcpace("report")
    assert code == 2
    assert "no run in runs" in err


def test_a_report_on_a_folder_of_runs_lists_them(hpcpace, runs):
    code, out, err = hpcpace("report", runs)
    assert code == 2
    assert "topic/new" in out and "old" in out
    assert "runs is a folder of runs: name one of them" in err


@pytest.mark.parametrize("below", ["attempt-0", "attempt-0/trace", "attempt-0/trace/rank-00000.h5", "report.html"])
def test_a_part_of_a_run_means_the_run(hpcpace, runs, below):
    assert "hpcpace report runs/old" in hpcpace("report", runs / "old" / below)[1]


def test_an_attempt_means_itself_and_not_the_last_one(hpcpace, runs):
    shutil.copytree(runs / "old" / "attempt-0", runs / "old" / "attempt-1")
    assert "attempt 0 (2 in all)" in hpcpace("report", runs / "old" / "attempt-0")[1]
    assert "attempt 1 (2 in all)" in hpcpace("report", runs / "old")[1]
    code, _, err = hpcpace("report", runs / "old" / "attempt-0", "--attempt", 1)
    assert code == 2
    assert "give one of them" in err


def test_an_error_names_the_runs_that_are_there(hpcpace, runs):
    code, _, err = hpcpace("report", runs / "odl")
    assert code == 2
    assert "2 runs in runs: runs/old and runs/topic/new" in err
