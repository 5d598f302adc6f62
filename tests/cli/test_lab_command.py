"""`hpcpace lab` as far as it goes without root and without a lab: help, wrong usage, and what to do about it."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
from functools import partial
from pathlib import Path

import click
import pytest

from hpcpace.cli import lab as lab_command
from hpcpace.core.errors import UsageError
from hpcpace.core.rundir import write_json
from hpcpace.lab import lab as lab_module
from hpcpace.lab import plan as files_module
from hpcpace.lab.fabric import NAME_VARIABLE, Anchor
from hpcpace.lab.plan import LabFiles, TruthLog, write_config
from hpcpace.lab.settings import LabConfig

_COMMANDS = ["up", "status", "run", "shell", "down", "truth"]
_FAULTS = {
    "slow-host": ["n1"],
    "slow-link": ["n1", "--rate", "1mbit"],
    "flap-link": ["n1"],
    "loss": ["n1"],
    "latency": ["n1"],
    "reorder": ["n1"],
    "traffic": ["n1", "n2"],
    "neighbour": ["n1"],
    "pause-host": ["n1"],
    "clock": ["n1"],
    "kill-host": ["n1"],
    "kill-rank": ["1", "0"],
    "fill-disk": ["n1"],
    "mtu": ["n1", "--size", "9000"],
    "list": [],
    "undo": ["f1"],
}
_WITHIN_A_LAB = [
    ["status"],
    ["status", "--json"],
    ["run", "--", "hostname"],
    ["run", "--on", "n1", "--", "hostname"],
    ["shell"],
    *(["fault", kind, *arguments] for kind, arguments in _FAULTS.items()),
]


@pytest.fixture(autouse=True)
def base(monkeypatch, tmp_path) -> Path:
    """Keep labs in a folder of the test's own, as root."""
    folder = tmp_path / "labs"
    monkeypatch.setattr(files_module, "BASE", folder)
    monkeypatch.setattr(lab_module, "BASE", folder)
    monkeypatch.setattr(lab_module, "check_requirements", lambda: None)
    if os.geteuid():  # whose a folder is cannot be pretended; tests/unit/lab/test_shared_folders.py is about that
        for module in (files_module, lab_module):
            monkeypatch.setattr(module, "check_base", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv(NAME_VARIABLE, raising=False)
    monkeypatch.delenv("HPCPACE_LAB_EMULATION", raising=False)
    return folder


@pytest.fixture
def lab(hpcpace):
    """Run `hpcpace lab` and return its exit code, stdout and stderr."""
    return partial(hpcpace, "lab")


@pytest.fixture
def half_made(base):
    """Return the files of a lab whose first process is the given one."""

    def make(name: str, *, pid: int, started: int | None = None, is_ready: bool = True) -> LabFiles:
        files = LabFiles(base / name)
        files.folder.mkdir(parents=True)
        write_config(files, LabConfig(name=name))
        started = start_ticks(pid) if started is None else started
        write_json(files.anchor_json, dataclasses.asdict(Anchor(pid=pid, started=started, pid_namespace="pid:[1]")))
        if is_ready:
            write_json(files.ready_json, {"boot_s": 1.0})
        return files

    return make


def start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.parametrize("group", [[], ["fault"]], ids=["lab", "fault"])
def test_help_lists_every_command(lab, group):
    code, out, _ = lab(*group, "--help")
    assert code == 0
    commands = out.partition("Commands:")[2].partition("Examples:")[0]
    listed = [line.split()[0] for line in commands.splitlines() if line.strip()]
    assert sorted(listed) == sorted(_FAULTS if group else [*_COMMANDS, "fault"])


@pytest.mark.parametrize("path", [*([c] for c in _COMMANDS), *(["fault", kind] for kind in _FAULTS)], ids=" ".join)
def test_every_command_has_help(lab, path):
    code, out, _ = lab(*path, "-h")
    assert code == 0
    assert out.startswith(f"Usage: hpcpace lab {' '.join(path)}")


def test_every_setting_has_an_option():
    options = {p.name for p in lab_command.up.params if isinstance(p, click.Option)}
    assert options == {field.name for field in dataclasses.fields(LabConfig)} | {"config_file"}


@pytest.mark.parametrize("arguments", [*_WITHIN_A_LAB, ["down"]], ids=" ".join)
def test_another_user_than_root_is_told_to_use_sudo(lab, monkeypatch, arguments):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lab(*arguments) == (2, "", "hpcpace: the lab needs root; this is user 1000: start it with sudo\n")


def test_another_user_than_root_cannot_boot_one(lab, monkeypatch):
    def refuse() -> None:
        raise UsageError("the lab needs root: start it with sudo")

    monkeypatch.setattr(lab_module, "check_requirements", refuse)
    assert lab("up") == (2, "", "hpcpace: the lab needs root: start it with sudo\n")


@pytest.mark.parametrize("arguments", [*_WITHIN_A_LAB, ["truth"]], ids=" ".join)
def test_without_a_lab_every_command_says_how_to_get_one(lab, arguments):
    code, _, err = lab(*arguments)
    assert (code, err) == (2, "hpcpace: no lab 'lab' is up (labs here: none): `hpcpace lab up` boots one\n")


def test_a_lab_of_another_name_is_named(lab, half_made):
    half_made("one", pid=os.getpid())
    code, _, err = lab("status", "--name", "two")
    assert (code, err) == (
        2,
        "hpcpace: no lab 'two' is up (labs here: one): `hpcpace lab up --name two` boots one\n",
    )


def test_the_environment_names_the_lab(lab, monkeypatch):
    monkeypatch.setenv(NAME_VARIABLE, "two")
    assert "no lab 'two' is up" in lab("status")[2]
    assert "no lab 'three' is up" in lab("status", "--name", "three")[2]


def test_a_lab_that_did_not_come_up_is_removed_or_booted_anew(lab, half_made):
    half_made("one", pid=os.getpid(), is_ready=False)
    code, _, err = lab("status", "--name", "one")
    assert code == 2
    assert err == (
        "hpcpace: lab 'one' is still coming up, or is incomplete: `hpcpace lab up --name one` boots it again, "
        "`hpcpace lab down --name one` removes it\n"
    )
    assert "(labs here: none)" in lab("status", "--name", "two")[2]


@pytest.mark.parametrize("arguments", [["status"], ["truth"], ["fault", "list"]], ids=" ".join)
def test_a_lab_that_has_died_is_removed_or_booted_anew(lab, half_made, arguments):
    half_made("one", pid=os.getpid(), started=1)
    code, _, err = lab(*arguments, "--name", "one")
    assert code == 2
    assert err == (
        f"hpcpace: lab 'one' has died (process {os.getpid()} is gone): `hpcpace lab down --name one` removes what is "
        "left of it, `hpcpace lab up --name one` boots it again\n"
    )


def test_a_lab_that_is_up_is_not_booted_again(lab, half_made):
    files = half_made("one", pid=os.getpid())
    code, _, err = lab("up", "--name", "one")
    assert code == 2
    assert err == (
        "hpcpace: lab 'one' is up already: `hpcpace lab down --name one` ends it, `hpcpace lab up --name OTHER` boots "
        "another one\n"
    )
    assert files.ready_json.exists()


@pytest.mark.parametrize("command", ["up", "down"])
def test_two_commands_do_not_change_a_lab_at_the_same_time(lab, half_made, command):
    files = half_made("one", pid=os.getpid())
    with files.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = lab(command, "--name", "one")
    assert (code, err) == (2, "hpcpace: another command is bringing lab 'one' up or down: wait for it to finish\n")
    assert files.folder.exists()


def test_down_ends_the_lab_and_removes_every_file_of_it(lab, half_made, base):
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            half_made("one", pid=process.pid)
            assert lab("down", "--name", "one") == (0, "lab one is down\n", "")
            assert process.wait() == -9
        finally:
            process.kill()
    assert not base.exists()


def test_down_leaves_a_process_alone_that_has_got_the_number_of_a_dead_lab(lab, half_made, base):
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            half_made("one", pid=process.pid, started=1)
            assert lab("down", "--name", "one")[0] == 0
            assert process.poll() is None
        finally:
            process.kill()
    assert not base.exists()


def test_down_leaves_other_labs_alone(lab, half_made):
    other = half_made("other", pid=os.getpid())
    half_made("one", pid=os.getpid(), started=1)
    assert lab("down", "--name", "one")[0] == 0
    assert other.ready_json.exists()


def test_down_without_a_lab_is_fine(lab, base):
    assert lab("down") == (0, "no lab lab was up, and there was nothing to remove\n", "")
    assert not base.exists()


def test_down_keeps_the_log_of_truth(lab, half_made, tmp_path):
    files = half_made("one", pid=os.getpid(), started=1)
    TruthLog(files.truth).write("fault-begin", fault_id="f1")
    text = files.truth.read_text()
    assert lab("down", "--name", "one", "--truth", tmp_path / "kept.jsonl")[0] == 0
    assert (tmp_path / "kept.jsonl").read_text() == text


def test_down_leaves_the_lab_alone_where_the_log_of_truth_cannot_be_kept(lab, half_made, tmp_path):
    files = half_made("one", pid=os.getpid(), started=1)
    TruthLog(files.truth).write("fault-begin", fault_id="f1")
    place = tmp_path / "missing" / "kept.jsonl"
    code, _, err = lab("down", "--name", "one", "--truth", place)
    assert (code, err) == (2, f"hpcpace: cannot copy the log of truth to {place}: No such file or directory\n")
    assert files.truth.exists()


def test_truth_prints_the_log_as_it_is(lab, half_made):
    files = half_made("one", pid=os.getpid())
    TruthLog(files.truth).write("fault-begin", fault_id="f1")
    assert lab("truth", "--name", "one") == (0, files.truth.read_text(), "")


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["up", "--hosts", "2", "--leaves", "3"], "lab.leaves is 3"),
        (["up", "--link", "fast"], "lab.link: 'fast' is not a rate"),
        (["up", "--tmp-size", "all"], "lab.tmp_size: 'all' is not a size"),
        (["up", "--name", "Not this"], "lab.name is 'Not this'"),
        (["up", "--config", "/no/such/file"], "/no/such/file"),
        (["up", "--share", "/tmp/no/such/folder"], "lab.share: no such folder: /tmp/no/such/folder"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(lab, base, arguments, seen):
    code, out, err = lab(*arguments)
    assert (code, out) == (2, "")
    assert seen in err
    assert err.count("\n") == 1
    assert not base.exists()


def test_an_unknown_key_is_refused_with_the_list_of_keys(lab, tmp_path):
    (tmp_path / "lab.toml").write_text("[lab]\nnodes = 2\n")
    code, _, err = lab("up", "--config", tmp_path / "lab.toml")
    assert code == 2
    assert "unknown key 'nodes' in [lab]: the keys are name, hosts, leaves, " in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["boot"],
        ["up", "--hosts", "four"],
        ["up", "--nodes", "4"],
        ["run"],
        ["status", "--xml"],
        ["down", "--truth", "/"],
        ["fault"],
        ["fault", "explode", "n1"],
        ["fault", "slow-link", "n1"],
        ["fault", "mtu", "n1"],
        ["fault", "mtu", "n1", "--size", "67"],
        ["fault", "traffic", "n1"],
        ["fault", "traffic", "n1", "n2", "--streams", "0"],
        ["fault", "fill-disk", "n1", "--left", "-1"],
        ["fault", "kill-rank", "one", "0"],
        ["fault", "kill-rank", "1", "0", "--duration", "5"],
        ["fault", "pause-host", "n1", "--duration", "0"],
        ["fault", "pause-host", "n1", "--start", "-1"],
        ["fault", "undo"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(lab, arguments):
    code, out, err = lab(*arguments)
    assert (code, out) == (2, "")
    assert err


@pytest.mark.parametrize("name", ["../lock", "", ".", "a/b", "UPPER"])
@pytest.mark.parametrize("verb", ["up", "status", "down", "truth"])
def test_a_name_that_leads_elsewhere_is_refused_and_nothing_is_removed(lab, tmp_path, monkeypatch, verb, name):
    monkeypatch.setattr(files_module, "BASE", tmp_path / "labs")
    monkeypatch.setattr(lab_module, "BASE", tmp_path / "labs")
    monkeypatch.setattr(lab_module, "check_requirements", lambda: None)
    (tmp_path / "labs").mkdir()
    (tmp_path / "lock").mkdir()
    code, _, err = lab(verb, "--name", name)
    assert (code, err) == (2, f"hpcpace: lab.name is {name!r}: use up to 20 of a-z, 0-9 and '-', a letter first\n")
    assert (tmp_path / "lock").is_dir() and (tmp_path / "labs").is_dir()
