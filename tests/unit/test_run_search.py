"""Runs in a folder: all of them, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import PassedOver, find_runs, open_named_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        (tmp_path / "runs" / f"run-{number}" / "attempt-0").mkdir(parents=True)
    return tmp_path / "runs"


def test_a_folder_of_more_runs_than_can_be_looked_at_is_refused(folder: Path) -> None:
    assert len(list(find_runs(folder, most_entries=6))) == 6
    with pytest.raises(TraceError, match="has too many runs, folders and other files to find all"):
        list(find_runs(folder, most_entries=5))


def test_an_error_that_cannot_name_all_runs_names_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.core.rundir._MAX_ENTRIES_TO_NAME", 5)
    with pytest.raises(TraceError) as found:
        open_named_run(folder)
    assert "run-0" not in str(found.value)


def test_links_and_deep_folders_are_counted(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "b" / "c" / "run" / "attempt-0").mkdir(parents=True)
    (folder / "a" / "b" / "c" / "notes.txt").touch()
    (tmp_path / "elsewhere").mkdir()
    (folder / "elsewhere").symlink_to(tmp_path / "elsewhere")
    (folder / "latest").symlink_to("run-5")
    (folder / "gone").symlink_to("nowhere")
    found = PassedOver()
    assert len(list(find_runs(folder, passed_over=found))) == 6
    assert found == PassedOver(num_links=1, num_deep=1)
