"""A new attempt in a run that somebody else may write: what is exchanged meanwhile leads nowhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.config import Config
from hpcpace.core.environment import host_identity, rank_info
from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder
from hpcpace.core.rundir import RunDirectory, default_run_path, is_recorded, open_run
from hpcpace.observe.guest import Warner
from hpcpace.observe.joined import JoinedRank, SessionSettings
from hpcpace.observe.recording import Recording
from hpcpace.observe.settings import TraceConfig
from hpcpace.world.deadline import Deadline
from hpcpace.world.messages import NoMessages


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


def test_an_attempt_has_a_folder_for_traces(tmp_path):
    attempt = RunDirectory(tmp_path / "run").new_attempt()
    assert attempt.number == 0 and attempt.trace_dir.is_dir()
    assert RunDirectory(tmp_path / "run").new_attempt().number == 1


def test_an_attempt_that_is_exchanged_while_it_is_made_is_not_written_to(tmp_path, elsewhere, monkeypatch):
    make = os.mkdir

    def make_and_exchange(name, *given, **named):
        make(name, *given, **named)
        if str(name).endswith("attempt-0"):
            (tmp_path / "run" / "attempt-0").rename(tmp_path / "run" / "moved")
            (tmp_path / "run" / "attempt-0").symlink_to(elsewhere)

    monkeypatch.setattr(os, "mkdir", make_and_exchange)
    with pytest.raises(OSError, match="attempt-0"):
        RunDirectory(tmp_path / "run").new_attempt()
    assert list(elsewhere.iterdir()) == []


def test_a_run_whose_attempt_is_gone_by_now_says_so(tmp_path):
    RunDirectory(tmp_path).new_attempt()
    run = open_run(tmp_path)
    (tmp_path / "attempt-0").rename(tmp_path / "moved")
    with pytest.raises(TraceError, match="holds no attempt-N folder"):
        run.last_attempt()


@pytest.mark.parametrize("name", ["attempt-0", "attempt-0/trace"])
def test_a_recording_follows_no_link_in_its_run(tmp_path, elsewhere, name, monkeypatch):
    attempt = RunDirectory(tmp_path / "run").new_attempt()
    (tmp_path / "run" / name).rename(tmp_path / "moved")
    (tmp_path / "run" / name).symlink_to(elsewhere)
    warnings: list[str] = []
    joined = JoinedRank(
        settings=SessionSettings(), config=Config(TraceConfig(snapshot=False)), messages=NoMessages(),
        identity=host_identity(), host_keys=["a"], world=rank_info({}), deadline=Deadline(30),
    )  # fmt: skip
    warner = Warner({})
    monkeypatch.setattr(warner, "warn", warnings.append)
    recording = Recording(joined, attempt, warner)
    recording.recorder.add_step(0, 0, 1, 1, 0)
    recording.recorder.start()
    recording.recorder.close()
    assert list(elsewhere.iterdir()) == []
    assert any("symbolic link" in warning for warning in warnings)


@each_case(
    ("path", "expected"),
    [
        ("run/attempt-0/trace/rank-00000.h5", True),
        ("run/attempt-12/snapshot/n1.json", True),
        ("run/attempt-0/probe.json", True),
        ("run/attempt-0/sizes.csv", False),
        ("run/report.html", False),
        ("attempt-0", False),
    ],
)
def test_what_an_attempt_has_recorded_is_known_by_its_place(path: str, expected: bool) -> None:
    assert is_recorded(Path(path)) is expected


@each_case("job_id", ["../../etc", "a/b", "x" * 100, "7\n8", ""])
def test_what_is_no_id_of_a_job_names_no_folder(tmp_path: Path, job_id: str) -> None:
    path = default_run_path("train", {"SLURM_JOB_ID": job_id}, base=tmp_path)
    assert path.parent == tmp_path and re.fullmatch(r"\d{8}-\d{6}-train", path.name)


@each_case(
    "make",
    [lambda path: path.touch(), os.mkfifo, lambda path: path.symlink_to("/etc"), lambda path: path.symlink_to(path)],
    ids=["file", "pipe", "link", "loop"],
)
def test_what_has_the_name_of_an_attempt_and_is_none_is_passed_by(
    tmp_path: Path, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "attempt-0")
    new_folder, asked = Folder.new_folder, list[str]()

    def noted(folder: Folder, name: str, *, mode: int = 0o777) -> Folder:
        asked.append(name)
        assert len(asked) < 5  # it tried for ever
        return new_folder(folder, name, mode=mode)

    monkeypatch.setattr(Folder, "new_folder", noted)
    assert RunDirectory(tmp_path).new_attempt().number == 1
