"""A session takes any kind of path, and takes every part of itself out of the job at its end, whatever one raises."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import each_case

import hpcpace
from hpcpace.observe.clock_thread import ClockThread
from hpcpace.observe.collectives.observer import CollectiveObserver, CompiledObserver
from hpcpace.observe.phases import PhaseObserver
from hpcpace.observe.recording import CounterThread
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.recorder import Recorder


class _Bytes:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@each_case("kind", [Path, str, _Bytes])
def test_any_kind_of_path_names_the_run_and_the_settings(
    tmp_path: Path, kind: Callable[[Path], str | os.PathLike[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[trace]\ncounters = false\n")
    with hpcpace.session(run_dir=kind(tmp_path / "run"), config_file=kind(settings)) as session:
        assert session.is_recording
        session.step()
    assert session.run is not None and session.run.path == tmp_path / "run"
    assert len(read_attempt(session.run.attempt(0)).traces) == 1
    assert "warning" not in capsys.readouterr().err


def test_what_is_no_path_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with hpcpace.session(run_dir=5) as session:
        session.step()
    assert "nothing is recorded" in capsys.readouterr().err


@each_case(
    ("owner", "name"),
    [
        (PhaseObserver, "uninstall"),
        (CollectiveObserver, "uninstall"),
        (CompiledObserver, "uninstall"),
        (CounterThread, "stop"),
        (Recorder, "close"),
        (ClockThread, "close"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_part_ends_whatever_another_one_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owner: type, name: str
) -> None:
    end = getattr(owner, name)
    called = []

    def ends_badly(*args: object, **options: object) -> None:
        end(*args, **options)
        called.append(name)
        raise ZeroDivisionError("a bug")

    before = dist.Work.wait, torch.autograd.backward, signal.getsignal(signal.SIGTERM)
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        assert dist.Work.wait is not before[0]
        session.step()
        monkeypatch.setattr(owner, name, ends_badly)
    assert (dist.Work.wait, torch.autograd.backward, signal.getsignal(signal.SIGTERM)) == before
    if called:  # of the two layers, one observes
        assert "the trace may lack its end: a bug" in capsys.readouterr().err
    assert session.run is not None
    (trace,) = read_attempt(session.run.attempt(0)).traces
    assert trace.closed_cleanly and len(trace.tables["steps"]) == 1


@each_case(
    "make",
    [
        lambda path: path.touch(),
        os.mkfifo,
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to("/dev/null"),
    ],
    ids=["file", "pipe", "loop", "dangling link", "device"],
)
def test_a_run_directory_that_is_no_folder_is_one_warning(
    tmp_path: Path, make: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "run")
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        session.step()
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing is recorded: cannot make the run directory" in line and "choose another run directory" in line


def test_traces_do_not_follow_a_link_that_is_put_into_the_run_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    with hpcpace.session(run_dir=tmp_path / "run") as session:
        traces = tmp_path / "run" / "attempt-0" / "trace"
        shutil.rmtree(traces)
        traces.symlink_to(tmp_path / "elsewhere")
        session.step()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert "symbolic link" in capsys.readouterr().err
