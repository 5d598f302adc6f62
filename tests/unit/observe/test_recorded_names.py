"""Names that a program chooses are recorded without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from hpcpace.core.rundir import default_run_path, json_text
from hpcpace.observe.collectives.operations import record_group
from hpcpace.observe.ends import end_by
from hpcpace.observe.launch.last_line import last_line

TOKEN = "hf_" + "aB3dE6gH9jK2" * 3
PASSWORD = "correct-horse-7"


class _Recorder:
    def __init__(self) -> None:
        self.names: list[bytes] = []

    def add_group(self, group_id: int, rank: int, name: bytes, backend: bytes) -> None:
        self.names.append(name)


class _Group:
    group_name = f"uploads {TOKEN}"

    def size(self) -> int:
        return 2


def test_of_a_process_group() -> None:
    recorder: Any = _Recorder()
    record_group(recorder, 0, _Group())
    assert recorder.names == [b"uploads [redacted]"] * 2


def test_of_an_exception() -> None:
    error = type(f"Refused_{TOKEN}", (ValueError,), {})()
    assert end_by(error) is not None
    assert TOKEN.encode() not in end_by(error)[2]  # type: ignore[index]


def test_of_a_folder_that_is_named_after_the_script() -> None:
    path = default_run_path(TOKEN, {"SLURM_JOB_ID": "17"})
    assert str(path) == "runs/17-[redacted]"


def test_of_a_file_of_the_run_by_variables_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPLOAD_PASSWORD", PASSWORD)
    assert PASSWORD not in json_text({"thread": f"upload as {PASSWORD}", PASSWORD: 1})


def test_in_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPLOAD_PASSWORD", PASSWORD)
    notes = [{"kind": "failed", "why": f"no settings in {PASSWORD}"}]
    assert last_line(notes, f"{TOKEN} is no rank", "/") == (
        "hpcpace: warning: nothing was recorded: no settings in [redacted]; [redacted] is no rank"
    )
