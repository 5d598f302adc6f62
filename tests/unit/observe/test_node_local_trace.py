"""A trace on node-local disk comes home whole, or stays where it is; nobody else's link leads it anywhere."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpace.observe.node_local import NodeLocalTrace

_CONTENT = {"rank-00003.h5": b"h" * 3_000_000, "rank-00003.journal": b"j" * 5_000}
_NAME = "run-attempt-0-17"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "trace"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def trace(tmp_path: Path, home: Path) -> NodeLocalTrace:
    return NodeLocalTrace(tmp_path / "local", _NAME, home / "rank-00003.h5")


@pytest.fixture
def written(trace: NodeLocalTrace) -> Iterator[NodeLocalTrace]:
    with trace.open_folder():
        for name, content in _CONTENT.items():
            (trace.path.parent / name).write_bytes(content)
        yield trace


def _files(folder: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in folder.iterdir()}


def _traces(folder: Path) -> dict[str, bytes]:
    """Return the files without the one that says where they belong."""
    return {name: content for name, content in _files(folder).items() if name != "home.json"}


def _join_copies() -> None:
    for thread in threading.enumerate():
        if thread.name == "hpcpace-in-time":
            thread.join()


def test_comes_home_with_its_journal_and_leaves_nothing_behind(written, home, tmp_path):
    written.bring_home(60.0)
    assert _files(home) == _CONTENT
    written.remove()
    assert list((tmp_path / "local").iterdir()) == []


def test_a_trace_that_was_never_written_is_none_to_bring(trace, home):
    trace.bring_home(60.0)
    trace.remove()
    assert _files(home) == {}


@pytest.mark.parametrize("free_bytes", [0, 2_500_000, 3_000_000, 3_004_999])
def test_neither_file_comes_where_both_do_not_fit(written, home, monkeypatch, free_bytes):
    write, left = os.pwrite, [free_bytes]

    def write_some(descriptor: int, content: bytes, offset: int) -> int:
        size = min(len(content), left[0])
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= size
        return write(descriptor, content[:size], offset)

    monkeypatch.setattr(os, "pwrite", write_some)
    with pytest.raises(OSError, match="No space left"):
        written.bring_home(60.0)
    assert _files(home) == {}
    assert _traces(written.path.parent) == _CONTENT


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_neither_file_comes_where_the_disk_is_found_full_only_at_the_end(written, home, monkeypatch, call):
    original, num_calls = getattr(os, call), []

    def fail_late(descriptor: int) -> None:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        original(descriptor)
        num_calls.extend([descriptor] if is_file else [])
        if is_file and len(num_calls) >= 2:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="quota"):
        patch.setattr(os, call, fail_late)
        written.bring_home(60.0)
    assert _files(home) == {}
    assert _traces(written.path.parent) == _CONTENT


def test_a_copy_that_hangs_is_given_up_and_comes_to_nothing_when_it_goes_on(written, home, monkeypatch):
    goes_on, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: goes_on.wait() and sync(descriptor))
    with pytest.raises(TimeoutError, match=r"longer than 0\.2 s"):
        written.bring_home(0.2)
    assert _traces(written.path.parent) == _CONTENT
    goes_on.set()
    _join_copies()
    assert _files(home) == {}


def test_links_in_the_run_are_replaced_and_not_followed(written, home, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    for name in _CONTENT:
        (home / name).symlink_to(secret)
    written.bring_home(60.0)
    assert secret.read_bytes() == b"secret"
    assert _files(home) == _CONTENT and not (home / "rank-00003.h5").is_symlink()


def test_a_link_in_the_place_of_a_file_is_not_copied(written, home, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    written.path.unlink()
    written.path.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        written.bring_home(60.0)
    assert _files(home) == {}


def test_what_is_put_in_the_folders_place_is_neither_copied_nor_removed(written, home):
    folder = written.path.parent
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    (folder / "rank-00003.h5").write_bytes(b"planted")
    written.bring_home(60.0)
    assert _files(home) == _CONTENT
    written.remove()
    assert _files(folder) == {"rank-00003.h5": b"planted"}


@pytest.mark.parametrize("plant", ["folder", "link"])
def test_a_folder_that_somebody_has_planted_is_refused(trace, tmp_path, plant):
    (tmp_path / "local").mkdir()
    (tmp_path / "elsewhere").mkdir()
    if plant == "folder":
        (tmp_path / "local" / _NAME).mkdir()
    else:
        (tmp_path / "local" / _NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="File exists"):
        trace.open_folder()
    assert _files(tmp_path / "elsewhere") == {}


def test_a_folder_that_is_exchanged_for_somebody_elses_is_refused(trace, tmp_path, monkeypatch):
    make = os.mkdir

    def exchange(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(name, mode, dir_fd=dir_fd)
        if name == _NAME:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    monkeypatch.setattr(os, "mkdir", exchange)
    with pytest.raises(PermissionError, match="somebody else"):
        trace.open_folder()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_folder_has_the_modes_that_the_umask_leaves(trace, umask):
    previous = os.umask(umask)
    try:
        trace.open_folder().close()
    finally:
        os.umask(previous)
    assert trace.path.parent.stat().st_mode & 0o7777 == 0o777 & ~umask


def test_the_journal_of_an_earlier_copy_goes_when_the_trace_is_closed(written, home):
    written.bring_home(60.0)
    written.path.with_suffix(".journal").unlink()
    written.bring_home(60.0)
    assert list(_files(home)) == ["rank-00003.h5"]


def test_a_folder_that_was_removed_is_made_again(written, tmp_path):
    shutil.rmtree(tmp_path / "local")
    written.open_folder().close()
    assert set(_files(written.path.parent)) == {"home.json"}


def test_a_trace_that_was_brought_home_is_not_made_again(written, tmp_path):
    written.bring_home(60.0)
    written.remove()
    with pytest.raises(OSError, match="was brought home"):
        written.open_folder()
    assert list((tmp_path / "local").iterdir()) == []


def test_a_disk_without_room_for_the_first_file_is_left_as_it_was(trace, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        trace.open_folder()
    assert list((tmp_path / "local").iterdir()) == []


def test_the_second_to_bring_a_trace_home_finds_nothing_to_do(written, home):
    written.come_home(5.0, is_last=True, warn=pytest.fail)
    written.come_home(5.0, is_last=True, warn=pytest.fail)
    assert _files(home) == _CONTENT
