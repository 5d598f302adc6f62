"""In a folder that others write to, no link leads the writer to another file, and its files have the user's modes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rows import add_one_of_each

from hpcpace.trace.reader import read_trace
from hpcpace.trace.recorder import Recorder

_SECRET = b"a file of the user's"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(_SECRET)
    return path


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    previous = os.umask(request.param)
    yield request.param
    os.umask(previous)


def _record(start: Callable[..., Recorder]) -> Recorder:
    recorder = start()
    add_one_of_each(recorder)
    assert recorder.flush()
    return recorder


@pytest.mark.parametrize("name", ["rank-00000.journal-new", "rank-00000.h5-new"])
def test_a_link_with_a_temporary_name_of_earlier_versions_is_not_followed(start, path, secret, name):
    path.parent.mkdir()
    (path.parent / name).symlink_to(secret)
    _record(start).close()
    assert secret.read_bytes() == _SECRET
    assert len(read_trace(path).tables["steps"]) == 1


@pytest.mark.parametrize("suffix", [".journal", ".h5"])
@pytest.mark.parametrize("leads", ["to a file", "nowhere"])
def test_a_link_in_a_files_place_refuses_the_trace_with_one_warning(
    start, path, warnings, secret, tmp_path, suffix, leads
):
    path.parent.mkdir()
    path.with_suffix(suffix).symlink_to(secret if leads == "to a file" else tmp_path / "nowhere")
    _record(start)
    assert secret.read_bytes() == _SECRET and not (tmp_path / "nowhere").exists()
    assert len(warnings) == 1 and "already exists" in warnings[0]


@pytest.mark.parametrize("suffix", [".journal", ".h5"])
def test_a_link_in_the_place_of_a_removed_file_is_replaced(start, path, secret, suffix):
    recorder = _record(start)
    path.with_suffix(suffix).unlink()
    path.with_suffix(suffix).symlink_to(secret)
    add_one_of_each(recorder)
    recorder.flush()
    assert len(read_trace(path).tables["steps"]) == 2
    assert secret.read_bytes() == _SECRET


def test_files_and_folder_have_the_modes_that_the_umask_leaves(start, path, umask):
    _record(start)
    assert [item.stat().st_mode & 0o777 for item in (path, path.with_suffix(".journal"))] == [0o666 & ~umask] * 2
    assert path.parent.stat().st_mode & 0o777 == 0o777 & ~umask
