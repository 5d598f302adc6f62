"""Traces of killed ranks come home by another process of their user; living, foreign and strange ones stay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcpace.observe.node_local import LeftTrace, NodeLocalTrace, bring_left_traces_home

_WRITER = """
import signal, sys
from pathlib import Path
from hpcpace.observe.node_local import NodeLocalTrace
trace = NodeLocalTrace(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
with trace.open_folder() as folder:
    Path(folder.path, trace.destination.name).write_bytes(b"h" * 3_000_000)
    Path(folder.path, trace.destination.with_suffix(".journal").name).write_bytes(b"j")
print("written", flush=True)
signal.pause()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "attempt-0" / "trace"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def start(tmp_path: Path, home: Path) -> Iterator[Start]:
    """Start a process that writes a trace on a local disk, until it is killed."""
    processes = []

    def start_writer(rank: int, to: Path = home) -> subprocess.Popen[str]:
        arguments = [str(tmp_path / "local"), f"hpcpace-run-attempt-0-rank-{rank}-17", str(to / f"rank-{rank:05d}.h5")]
        process = subprocess.Popen([sys.executable, "-c", _WRITER, *arguments], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        return process

    yield start_writer
    for process in processes:
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _collect(tmp_path: Path, home: Path, **options: str) -> list[LeftTrace]:
    return bring_left_traces_home(tmp_path / "local", [home], timeout_s=60, **options)


def test_the_trace_of_a_killed_process_comes_home_and_that_of_a_living_one_stays(start, tmp_path, home):
    killed, living = start(1), start(2)
    _kill(killed)
    (found,) = _collect(tmp_path, home)
    assert (found.destination, found.problem) == (home / "rank-00001.h5", "")
    assert sorted(path.name for path in home.iterdir()) == ["rank-00001.h5", "rank-00001.journal"]
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["hpcpace-run-attempt-0-rank-2-17"]
    _kill(living)
    assert len(_collect(tmp_path, home)) == 1 and _collect(tmp_path, home) == []


def test_the_trace_of_another_run_stays(start, tmp_path, home):
    other = tmp_path / "other"
    other.mkdir()
    _kill(start(1, to=other))
    assert _collect(tmp_path, home) == []
    assert len(list((tmp_path / "local").iterdir())) == 1


def test_ones_own_trace_stays(start, tmp_path, home):
    _kill(start(1))
    assert _collect(tmp_path, home, own_name="hpcpace-run-attempt-0-rank-1-17") == []


def test_a_trace_that_cannot_be_copied_stays_and_says_why(start, tmp_path, home, monkeypatch):
    _kill(start(1))
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    (found,) = _collect(tmp_path, home)
    assert found.problem == "No space left on device" and list(home.iterdir()) == []
    monkeypatch.undo()
    (found,) = _collect(tmp_path, home)
    assert found.problem == ""


def _claim(folder: Path, content: str) -> None:
    (folder / "home.json").write_text(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, home: _claim(folder, "[" * 60_000),
        lambda folder, home: _claim(folder, '{"destination":' * 4_000),
        lambda folder, home: _claim(folder, '{"destination": 5}'),
        lambda folder, home: _claim(folder, json.dumps({"destination": f"{home}/\0/rank-00001.h5"})),
        lambda folder, home: _claim(folder, json.dumps({"destination": "x" * 50_000 + "/rank-00001.h5"})),
        lambda folder, home: folder.chmod(0o777),
        lambda folder, home: folder.chmod(0o775),
        lambda folder, home: _claim(folder, "no json"),
        lambda folder, home: _claim(folder, "[]"),
        lambda folder, home: _claim(folder, "x" * 100_000),
        lambda folder, home: _claim(folder, json.dumps({"destination": str(home / "authorized_keys")})),
        lambda folder, home: _claim(folder, json.dumps({"destination": str(home / "../rank-00001.h5")})),
        lambda folder, home: (folder / "home.json").unlink(),
        lambda folder, home: ((folder / "home.json").unlink(), (folder / "home.json").symlink_to("/etc/passwd")),
        lambda folder, home: ((folder / "home.json").unlink(), os.mkfifo(folder / "home.json")),
        lambda folder, home: (folder.rename(home.parent / "moved"), folder.symlink_to(home.parent / "moved")),
    ],
    ids=[
        "deep",
        "deep object",
        "number",
        "null",
        "long path",
        "open",
        "open to the group",
        "no json",
        "a list",
        "long",
        "other name",
        "other folder",
        "no claim",
        "a link",
        "a pipe",
        "a linked folder",
    ],
)
def test_what_is_no_trace_of_ours_is_left_alone(start, tmp_path, home, spoil):
    _kill(start(1))
    spoil(tmp_path / "local" / "hpcpace-run-attempt-0-rank-1-17", home)
    assert _collect(tmp_path, home) == []
    assert list(home.iterdir()) == []


def test_what_belongs_to_somebody_else_is_left_alone(start, tmp_path, home, monkeypatch):
    _kill(start(1))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert _collect(tmp_path, home) == []


def test_a_link_in_the_place_of_the_trace_is_not_copied(start, tmp_path, home):
    _kill(start(1))
    file = tmp_path / "local" / "hpcpace-run-attempt-0-rank-1-17" / "rank-00001.h5"
    file.unlink()
    file.symlink_to("/etc/passwd")
    (found,) = _collect(tmp_path, home)
    assert "symbolic link" in found.problem and list(home.iterdir()) == []


def test_nothing_is_brought_into_a_folder_that_a_link_in_the_run_leads_to(start, tmp_path, home):
    _kill(start(1))
    home.rename(tmp_path / "elsewhere")
    home.symlink_to(tmp_path / "elsewhere")
    assert _collect(tmp_path, home) == []
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_that_is_exchanged_for_a_link_while_traces_come_home_gets_nothing(start, tmp_path, home, monkeypatch):
    _kill(start(1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bring = NodeLocalTrace.bring_home

    def exchanged(trace: NodeLocalTrace, timeout_s: float) -> None:
        home.rename(tmp_path / "moved")
        home.symlink_to(elsewhere)
        bring(trace, timeout_s)

    monkeypatch.setattr(NodeLocalTrace, "bring_home", exchanged)
    (found,) = _collect(tmp_path, home)
    assert "symbolic link" in found.problem and list(elsewhere.iterdir()) == []


def test_only_the_user_can_write_to_the_folder_of_a_trace(tmp_path, home):
    before = os.umask(0)
    try:
        trace = NodeLocalTrace(tmp_path / "local", "hpcpace-run-attempt-0-rank-1-17", home / "rank-00001.h5")
        trace.open_folder().close()
    finally:
        os.umask(before)
    assert (tmp_path / "local" / "hpcpace-run-attempt-0-rank-1-17").stat().st_mode & 0o022 == 0
    trace.remove()
