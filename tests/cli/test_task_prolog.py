"""`hpcpace task-prolog`: the lines for Slurm's TaskProlog, which has them in the environment of each task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpace.observe.launch import find_launch

SITE = "[trace]\nenabled = false\n[[rollout]]\npartitions = ['gpu']\ntrace.enabled = true\n"


@pytest.fixture(autouse=True)
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be a task of a job on the partition gpu, at a site that traces that partition."""
    (tmp_path / "site.toml").write_text(SITE)
    for name in ("XDG_CONFIG_HOME", "HPCPACE_LAUNCH", "HPCPACE_TRACE_ENABLED", "HPCPACE_OPT_OUT", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    facts = {"SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "a/b c"}
    for name, value in {"HPCPACE_SITE_FILE": str(tmp_path / "site.toml"), "HOME": str(tmp_path), **facts}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _exported(shown: str) -> dict[str, str]:
    lines = [line.removeprefix("export ").partition("=") for line in shown.splitlines()]
    return {name: value for name, _, value in lines}


def test_exports_what_makes_a_task_record(hpcpace, task):
    code, shown, error = hpcpace("task-prolog")
    assert (code, error) == (0, "") and all(line.startswith("export ") for line in shown.splitlines())
    launch = find_launch(_exported(shown))
    assert launch is not None and not launch.is_requested
    assert _exported(shown)["HPCPACE_SITE_FILE"] == str(task / "site.toml")
    assert (launch.run_dir, launch.teller, launch.name) == (f"{task}/runs/7.0-a-b c", "", "a-b c")


def test_a_run_may_be_elsewhere_and_the_search_path_of_the_job_stays(hpcpace, task, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    _, shown, _ = hpcpace("task-prolog", "--run-dir", task / "all runs")
    exported = _exported(shown)
    assert json.loads(exported["HPCPACE_LAUNCH"])["run_dir"] == f"{task}/all runs/7.0-a-b c"
    assert exported["PYTHONPATH"].endswith(":/mine")


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_JOB_PARTITION": "cpu"}, {"HPCPACE_OPT_OUT": "1"}, {"HPCPACE_TRACE_ENABLED": "off"}],
    ids=["another partition", "opt-out", "a setting"],
)
def test_says_nothing_where_the_job_is_not_to_be_traced(hpcpace, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hpcpace("task-prolog") == (0, "", "")


def test_says_nothing_where_the_user_traces_the_job_already(hpcpace, monkeypatch):
    _, shown, _ = hpcpace("task-prolog")
    launch = find_launch(_exported(shown))
    monkeypatch.setenv("HPCPACE_LAUNCH", json.dumps({**vars(launch), "is_requested": True}))
    assert hpcpace("task-prolog") == (0, "", "")


def test_each_step_of_a_batch_script_that_is_traced_itself_is_a_run(hpcpace, task, monkeypatch):
    monkeypatch.delenv("SLURM_STEP_ID")
    _, of_script, _ = hpcpace("task-prolog")
    for name, value in _exported(of_script).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    _, of_step, _ = hpcpace("task-prolog")
    first, second = (find_launch(_exported(shown)) for shown in (of_script, of_step))
    assert (first.run_dir, second.run_dir) == (f"{task}/runs/7-a-b c", f"{task}/runs/7.1-a-b c")
    assert not second.had_python_path
    assert _exported(of_step)["PYTHONPATH"] == _exported(of_script)["PYTHONPATH"]


@pytest.mark.parametrize(("rank", "num_lines"), [("0", 1), ("1", 0)])
def test_a_wrong_rule_never_fails_a_task_and_one_task_says_it(hpcpace, task, monkeypatch, rank, num_lines):
    (task / "site.toml").write_text("[[rollout]]\nshare = 2\ntrace.enabled = true\n")
    monkeypatch.setenv("SLURM_PROCID", rank)
    code, shown, error = hpcpace("task-prolog")
    assert (code, error, len(shown.splitlines())) == (0, "", num_lines)
    assert not num_lines or shown.startswith("print hpcpace: warning: nothing is recorded: rule 1 of ")
