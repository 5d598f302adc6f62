"""Which process is the first one of a lab, also where the kernel has given its number to another one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpace.core.rundir import write_json
from hpcpace.lab import fabric
from hpcpace.lab.fabric import Anchor, host_command, lab_command
from hpcpace.lab.lab import read_anchor


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is ended."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def anchor_of(pid: int) -> Anchor:
    started = int(Path(f"/proc/{pid}/stat").read_text().split()[21])
    return Anchor(pid=pid, started=started, pid_namespace=os.readlink("/proc/self/ns/pid"))


def test_a_process_that_runs_is_alive(process):
    assert anchor_of(process.pid).is_alive


def test_a_process_that_has_ended_is_not_alive(process):
    anchor = anchor_of(process.pid)
    process.kill()
    process.wait()
    assert not anchor.is_alive


def test_a_process_that_nobody_waited_for_is_not_alive(process):
    anchor = anchor_of(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not anchor.is_alive


def test_another_process_of_the_same_number_is_not_the_anchor(process):
    anchor = anchor_of(process.pid)
    assert not dataclasses.replace(anchor, started=anchor.started - 1).is_alive


def test_another_process_of_the_same_number_is_not_killed(process):
    anchor = anchor_of(process.pid)
    dataclasses.replace(anchor, started=anchor.started - 1).kill()
    assert process.poll() is None


def test_kills_its_process_and_no_second_time(process):
    anchor = anchor_of(process.pid)
    anchor.kill()
    assert process.wait() == -9
    anchor.kill()


def test_knows_whether_the_caller_is_in_the_lab():
    anchor = anchor_of(os.getpid())
    assert anchor.is_here
    assert not dataclasses.replace(anchor, pid_namespace="pid:[1]").is_here


def test_is_read_back_as_it_was_written(files):
    anchor = anchor_of(os.getpid())
    write_json(files.anchor_json, dataclasses.asdict(anchor))
    assert read_anchor(files) == anchor


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"pid": 1}'])
def test_a_record_that_is_missing_or_damaged_is_none(files, text):
    if text is not None:
        files.anchor_json.write_text(text)
    assert read_anchor(files) is None


def test_words_of_a_command_arrive_in_the_lab_as_they_are(tmp_path):
    anchor = anchor_of(os.getpid())
    words = lab_command(anchor, ["printf", "%s|", "a b", "$HOME", "'"], folder=tmp_path)
    assert words[:3] == ["nsenter", "--target", str(os.getpid())]
    shell = words[words.index("--") + 1 :]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "a b|$HOME|'|"


def test_a_command_runs_in_the_folder_that_it_was_given(tmp_path):
    words = lab_command(anchor_of(os.getpid()), ["pwd"], folder=tmp_path)
    shell = words[words.index("--") + 1 :]
    done = subprocess.run(shell, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == str(tmp_path.resolve())


def test_a_command_of_a_host_joins_its_control_groups_before_its_namespaces(tmp_path):
    words = host_command(7, ["true"], folder=tmp_path, cgroups=[tmp_path / "cpu", tmp_path / "freezer"])
    script = words[words.index("-ec") + 1]
    assert script == f'echo 0 >{tmp_path}/cpu/cgroup.procs; echo 0 >{tmp_path}/freezer/cgroup.procs; exec "$@"'
    assert {"--net", "--time", "--uts", "--mount", "--pid", "--ipc"} <= set(words)


def test_a_process_that_loses_its_words_while_it_is_looked_at_is_no_error(monkeypatch):
    class Ending:
        pid = 17

        def __init__(self):
            self.words = [[sys.executable, "token"], []]

        def cmdline(self):
            return self.words.pop(0)

    monkeypatch.setattr(fabric.psutil, "process_iter", lambda: iter([Ending()]))
    monkeypatch.setattr(fabric.os, "readlink", lambda path: "pid:[1]")
    found = fabric._first_process("token")
    assert found is not None
    assert found.pid == 17
