"""What root writes for a lab: its secret is nobody else's at any moment, and no planted link leads root elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcpace.core.errors import UsageError
from hpcpace.lab import boot, faults
from hpcpace.lab import lab as lab_module
from hpcpace.lab import plan as files_module
from hpcpace.lab.fault_kinds import FILLER, FillDisk, InsideLab, PauseHost
from hpcpace.lab.faults import FaultRecord, start_fault
from hpcpace.lab.lab import bring_down
from hpcpace.lab.plan import LabFiles, writable_to_owner_only, write_config


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where labs are kept."""
    base = tmp_path / "hpcpace-lab"
    base.mkdir(mode=0o755)
    for module in (files_module, lab_module):
        monkeypatch.setattr(module, "BASE", base)
    return base


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that a planted link points at."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    return victim


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_munge_key_is_never_readable_by_others(
    lab: InsideLab, no_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, modes, opened = lab.files.folder.parent / "new", [], os.open
    folder.mkdir()
    files = LabFiles(folder)

    def noting(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = opened(path, flags, mode, dir_fd=dir_fd)
        if "munge.key" in os.fspath(path):
            modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a mode that is changed was another one before")

    monkeypatch.setattr(os, "open", noting)
    monkeypatch.setattr(os, "chmod", never)
    monkeypatch.setattr(os, "fchmod", never)
    boot.write_files(lab.plan, files)
    assert modes == [0o400]
    assert mode_of(files.munge_key) == 0o400
    assert len(files.munge_key.read_bytes()) == 128


def test_a_link_in_place_of_the_munge_key_is_not_followed(lab: InsideLab, victim: Path) -> None:
    files = LabFiles(lab.files.folder.parent / "new")
    files.folder.mkdir()
    files.munge_key.symlink_to(victim)
    boot.write_files(lab.plan, files)
    assert victim.read_text() == "precious"
    assert mode_of(files.munge_key) == 0o400


def test_others_cannot_write_to_what_a_boot_writes(lab: InsideLab, no_umask: None) -> None:
    files = LabFiles(lab.files.folder.parent / "new")
    with writable_to_owner_only():
        files.folder.mkdir()
        write_config(files, lab.plan.config)
        boot.write_files(lab.plan, files)
    made = [files.folder, *files.folder.rglob("*")]
    assert len(made) > 10
    assert [path for path in made if mode_of(path) & 0o022] == []
    assert os.umask(0) == 0


def test_others_cannot_write_to_the_record_of_a_fault(
    lab: InsideLab, no_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_spawn_holder", lambda *_: None)
    monkeypatch.setattr(faults, "_wait_while", lambda *_, **__: FaultRecord)
    start_fault(lab, PauseHost(host="n1"))
    made = list(lab.files.faults_dir.iterdir())
    assert len(made) == 2
    assert [path for path in made if mode_of(path) & 0o022] == []


@pytest.mark.parametrize("planted", ["nothing", "link", "hard link", "file"])
def test_a_full_disk_fills_no_file_that_was_planted_on_the_host(
    planted: str, lab: InsideLab, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    filler = tmp / FILLER
    if planted == "link":
        filler.symlink_to(victim)
    elif planted == "hard link":
        filler.hardlink_to(victim)
    elif planted == "file":
        filler.write_text("x")
        filler.chmod(0o666)
    fault = FillDisk(host="n1", left_bytes=0)
    monkeypatch.setattr(FillDisk, "_tmp", lambda *_: tmp)
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    fault.switch(lab, True)
    assert victim.read_text() == "precious"
    assert (stat.S_ISREG(filler.lstat().st_mode), mode_of(filler), filler.stat().st_size) == (True, 0o600, 3 * 4096)
    fault.switch(lab, False)
    assert list(tmp.iterdir()) == []


def test_labs_are_kept_where_only_root_writes(base: Path) -> None:
    assert LabFiles.of("docs").folder == base / "docs"
    base.rmdir()
    assert LabFiles.of("docs").folder == base / "docs"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_refuses_a_folder_of_labs_that_others_can_write_to(mode: int, base: Path) -> None:
    base.chmod(mode)
    with pytest.raises(UsageError, match=f"{base} belongs to user .* with mode {mode:o}, so users other than"):
        LabFiles.of("docs")


def test_refuses_a_folder_of_labs_that_somebody_else_made(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = SimpleNamespace(st_mode=stat.S_IFDIR | 0o755, st_uid=os.geteuid() + 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lambda _: foreign)
        with pytest.raises(UsageError, match=f"belongs to user {foreign.st_uid} with mode 755"):
            LabFiles.of("docs")


def test_refuses_a_link_to_a_folder_of_labs(base: Path, tmp_path: Path) -> None:
    base.rename(tmp_path / "elsewhere")
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is not a folder: remove it"):
        LabFiles.of("docs")
    with pytest.raises(UsageError, match="is not a folder: remove it"):
        bring_down("docs")


def test_a_link_in_place_of_the_lock_is_not_followed(base: Path, victim: Path) -> None:
    (base / "docs.lock").symlink_to(victim)
    with pytest.raises(OSError, match=r"docs\.lock"):
        bring_down("docs")
    assert victim.read_text() == "precious"


@pytest.fixture
def log(base: Path) -> Path:
    """The log of truth of a lab that has died."""
    (base / "docs").mkdir()
    log = LabFiles.of("docs").truth
    log.write_text("truth")
    return log


@pytest.mark.parametrize("planted", ["link", "FIFO", "folder"])
def test_the_log_of_truth_is_kept_in_a_file_and_nowhere_else(
    planted: str, log: Path, victim: Path, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    if planted == "link":
        place.symlink_to(victim)
    elif planted == "FIFO":
        os.mkfifo(place)
    else:
        place.mkdir()
    before = place.lstat()
    with pytest.raises(UsageError, match="cannot copy the log of truth"):
        bring_down("docs", truth=place)
    assert (victim.read_text(), place.lstat().st_ino, log.read_text()) == ("precious", before.st_ino, "truth")


def test_the_log_of_truth_replaces_an_older_one(log: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("older")
    assert bring_down("docs", truth=tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "truth"
