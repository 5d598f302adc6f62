"""`hpcpace task-prolog`: the lines for Slurm's TaskProlog, which has them in the environment of each task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcpace.observe.launch.launch import find_launch

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


_HUGE = "x" * 1_000_000
_BYTES = "\udcff\udc80"


@pytest.mark.parametrize("value", ["[" * 100_000, _HUGE, _BYTES, '{"run_dir": 5}', "a\nexport LD_PRELOAD=x"])
@pytest.mark.parametrize(
    "name",
    [
        *("HPCPACE_LAUNCH", "SLURM_JOB_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_USER", "SLURM_JOB_NODELIST"),
        *("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_ACCOUNT", "TORCHELASTIC_RUN_ID"),
        *("PYTHONPATH", "HPCPACE_SITE_FILE", "HPCPACE_OPT_OUT", "HPCPACE_TRACE_ENABLED", "HPCPACE_TRACE_TRACE_DIR"),
        *("HPCPACE_TRACE_MAX_ROWS", "HPCPACE_PROBE", "XDG_CONFIG_HOME", "HOME", "SLURM_JOB_PARTITION"),
    ],
)
def test_never_fails_whatever_a_variable_holds(hpcpace, monkeypatch, name, value):
    if value == _BYTES and name in ("PYTHONPATH", "HPCPACE_SITE_FILE"):  # what is captured here must be text: see below
        value = ""
    monkeypatch.setenv(name, value)
    begin = time.process_time()
    code, shown, error = hpcpace("task-prolog")
    assert time.process_time() - begin < 3
    assert (code, error) == (0, "")
    _check_lines(shown)


@pytest.mark.parametrize("record", ["[" * 100_000, "{}", '{"run_dir": 5}', '{"a_later_version": true}', _HUGE])
def test_a_launch_that_cannot_be_read_is_left_alone(hpcpace, monkeypatch, record):
    monkeypatch.setenv("HPCPACE_LAUNCH", record)
    assert hpcpace("task-prolog") == (0, "", "")


def _check_lines(shown):
    lines = shown.splitlines()
    names = [line.partition("=")[0] for line in lines if not line.startswith("print ")]
    assert set(names) <= {"export HPCPACE_LAUNCH", "export PYTHONPATH", "export HPCPACE_SITE_FILE"}
    warnings = [line for line in lines if line.startswith("print ")]
    assert len(warnings) <= 1 and (not warnings or not names)
    assert all(len(line) < 3000 and line.isprintable() for line in warnings)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("$(reboot)", "--reboot-"),
        ("a'b\"c`d", "a-b-c-d"),
        ("../../etc", "-..-etc"),
        ("\x1b]0;mine\x07", "--0-mine-"),
        ("a\nb\rc", "a-b-c"),
        (_BYTES, "--"),
        ("...", "job"),
        ("ä ö", "ä ö"),
        ("x" * 1000, "x" * 100),
    ],
)
def test_the_name_of_a_job_becomes_a_plain_name_of_a_folder(hpcpace, task, monkeypatch, name, folder):
    monkeypatch.setenv("SLURM_JOB_NAME", name)
    _, shown, _ = hpcpace("task-prolog")
    assert json.loads(_exported(shown)["HPCPACE_LAUNCH"])["run_dir"] == f"{task}/runs/7.0-{folder}"


def test_a_search_path_that_is_no_text_is_handed_on_as_it_is(task):
    environ = {**os.environb, b"PYTHONPATH": b"/\xff:/\xc3", b"LC_ALL": b"C.UTF-8"}
    program = [sys.executable, "-P", "-m", "hpcpace", "task-prolog"]
    ended = subprocess.run(program, env=environ, capture_output=True, check=True)
    assert ended.stderr == b"" and b":/\xff:/\xc3\n" in ended.stdout


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"a = " + b"[" * 100_000),
        lambda path: path.write_text("[trace]\nmax_rows = 0x" + "f" * 100_000),
        lambda path: path.write_text("[[rollout]]\n" * 50_000),
        lambda path: path.write_text("[trace]\ndetail = '\N{GREEK SMALL LETTER ALPHA}'"),
        lambda path: path.write_bytes(b"\xff"),
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["deep", "number", "rules", "letters", "no text", "pipe", "folder", "loop", "device"],
)
def test_never_fails_whatever_the_sites_file_is(hpcpace, task, make):
    (task / "site.toml").unlink()
    make(task / "site.toml")
    code, shown, error = hpcpace("task-prolog")
    assert (code, error) == (0, "")
    assert shown.startswith("print hpcpace: warning: nothing is recorded: ")
    _check_lines(shown)


def test_never_fails_where_the_folder_of_the_job_is_gone(hpcpace, task, monkeypatch):
    (task / "gone").mkdir()
    monkeypatch.chdir(task / "gone")
    (task / "gone").rmdir()
    code, shown, _ = hpcpace("task-prolog")
    assert code == 0 and shown.startswith("print ")


@pytest.mark.parametrize("error", [RecursionError, MemoryError, ZeroDivisionError, KeyError])
def test_never_fails_by_an_error_of_its_own(hpcpace, monkeypatch, error):
    def fails(**_: object) -> None:
        raise error

    monkeypatch.setattr("hpcpace.cli.trace.load_config", fails)
    code, shown, _ = hpcpace("task-prolog")
    assert code == 0 and shown == f"print hpcpace: warning: nothing is recorded: {error.__name__}\n"


def test_never_fails_by_a_wrong_option(hpcpace):
    code, shown, error = hpcpace("task-prolog", "--run-dirs", "x")
    assert (code, error) == (0, "") and "No such option" in shown and shown.startswith("print ")


def test_never_fails_where_nobody_listens(task):
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-P", "-m", "hpcpace", "task-prolog"]
    with os.fdopen(writer) as stdout:
        ended = subprocess.run(program, stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
