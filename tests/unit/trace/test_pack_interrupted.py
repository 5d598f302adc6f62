"""Whatever interrupts packing, every rank is read as before, and the next call finishes it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cases import chosen, only_nightly
from fake_disk import FakeDisk
from packs import NUM_RANKS, assert_same_attempt, write_attempt

from hpcpace.core.errors import TraceError
from hpcpace.core.rundir import Attempt
from hpcpace.trace.packing import PackPlan, PackResult, pack_attempt

_CHANGING = ("pwrite", "posix_fallocate", "fsync", "fchmod", "rename", "unlink")
"""The calls by which packing changes anything, but for those inside HDF5."""


def pack(attempt: Attempt) -> PackResult:
    plan = PackPlan(has_ended=True, most_ranks=2)
    return pack_attempt(attempt, plan, begin_stage=lambda name: lambda done, total: None)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    return write_attempt(tmp_path_factory.mktemp("written"))


@pytest.fixture
def attempt(original: Attempt, tmp_path: Path) -> Iterator[Attempt]:
    shutil.copytree(original.path.parent, tmp_path / "run")
    yield Attempt(tmp_path / "run" / "attempt-0")


class _Counter:
    """Calls something instead of the n-th call of any function that changes files."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, then: Callable[[], None]) -> None:
        self._left, self._then = number, then
        for name in _CHANGING:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            self._left -= 1
            if self._left == 0:
                self._then()
            return function(*args, **options)

        return call


def _killed_at(attempt: Attempt, number: int) -> bool:
    """Pack in a process that is killed at some call; return whether it was."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hpcpace.core.pool.num_threads", lambda: 1)
            _Counter(patch, number, lambda: os._exit(9))
            try:
                pack(attempt)
            finally:
                os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 9


def _finish(attempt: Attempt, original: Attempt) -> None:
    assert pack(attempt).kept == []
    assert attempt.trace_files() == {} and {name[:5] for name in os.listdir(attempt.trace_dir)} == {"pack-"}
    assert_same_attempt(attempt, original)


# Every call of the first pack and of its ranks' files, and some later ones.
@pytest.mark.parametrize("number", chosen([*range(1, 10), 11, 13, 17, 23, 29, *range(31, 40)], 2))
def test_a_kill_at_any_call_loses_nothing(attempt, original, number):
    was_killed = _killed_at(attempt, number)
    assert_same_attempt(attempt, original)
    _finish(attempt, original)
    assert was_killed or number > 20


@pytest.mark.parametrize("number", chosen([1, 2, 3, 5, 8, 13, 21], 1))
def test_an_error_at_any_call_loses_nothing_and_leaves_no_temporary_file(attempt, original, monkeypatch, number):
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        _Counter(patch, number, fail)
        try:
            pack(attempt)
        except TraceError as error:
            assert "every rank can be read as before" in str(error)
    assert not [name for name in os.listdir(attempt.trace_dir) if name.startswith(".")]
    assert_same_attempt(attempt, original)
    _finish(attempt, original)


@pytest.mark.parametrize("room_bytes", only_nightly([20_000], [0, 60_000, 150_000]))
def test_a_full_disk_is_an_error_and_loses_nothing(attempt, original, monkeypatch, room_bytes):
    before = sorted(os.listdir(attempt.trace_dir))
    with monkeypatch.context() as patch:
        disk = FakeDisk(attempt.trace_dir, 0, patch)
        disk.size_bytes = disk.used_bytes + room_bytes
        with pytest.raises(TraceError, match=r"No space left on device.*every rank can be read as before"):
            pack(attempt)
    assert sorted(os.listdir(attempt.trace_dir)) == before
    _finish(attempt, original)


def test_two_programs_do_not_pack_the_same_folder(attempt):
    descriptor = os.open(attempt.trace_dir, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(TraceError, match="another hpcpace pack is at work"):
            pack(attempt)
    finally:
        os.close(descriptor)
    assert pack(attempt).num_ranks == NUM_RANKS


def test_two_programs_without_locks_lose_nothing(attempt, original, monkeypatch):
    """A file system may have no locks: the second one meets files that go away, and packs of the first one."""
    from hpcpace.trace import packing

    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    check, is_inside = packing.check_pack, []

    def check_and_pack(*args: object) -> None:
        check(*args)
        if not is_inside:
            is_inside.append(1)
            pack(attempt)

    monkeypatch.setattr(packing, "check_pack", check_and_pack)
    with pytest.raises(TraceError, match=r"changed|wrote to its trace|cannot be packed"):
        pack(attempt)
    assert attempt.trace_files() == {}
    assert_same_attempt(attempt, original)


def test_what_a_killed_call_left_is_removed(attempt, original):
    left = attempt.trace_dir / ".pack-00000-0123abcd.h5.0123456789abcdef"
    left.write_bytes(b"half")
    other = attempt.trace_dir / ".pack-of-somebody"
    other.write_bytes(b"")
    pack(attempt)
    assert not left.exists() and other.exists()


def _start(attempt: Attempt, prepare: Callable[[], None] = lambda: None) -> int:
    """Pack in another process; return its number. It ends with 0, or with 2 and a message in `said`."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            pack(attempt)
        except TraceError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            (attempt.path.parent / "said").write_text(str(error))
            os._exit(2)
        except BaseException:
            os._exit(70)
        os._exit(0)
    return child


def _code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("part", only_nightly([4], [0, 1, 2, 3, 5, 6, 7]))
def test_a_kill_at_any_time_loses_nothing(attempt, original, part):
    """Threads and HDF5 are at work, too, when a scheduler kills the program."""
    child = _start(attempt)
    time.sleep(0.02 + 0.06 * part)
    os.kill(child, signal.SIGKILL)
    assert _code(child) in (0, -signal.SIGKILL)
    assert_same_attempt(attempt, original)
    _finish(attempt, original)


@pytest.mark.parametrize("limit_bytes", only_nightly([20_000], [5_000, 80_000]))
def test_a_limit_on_the_size_of_files_is_an_error_and_loses_nothing(attempt, original, limit_bytes):
    before = sorted(os.listdir(attempt.trace_dir))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

    code = _code(_start(attempt, limit))
    assert (code, sorted(os.listdir(attempt.trace_dir))) == (2, before)
    assert "File too large" in (attempt.path.parent / "said").read_text()
    assert_same_attempt(attempt, original)
    _finish(attempt, original)


def test_two_programs_at_once_lose_nothing(attempt, original):
    children = [_start(attempt) for _ in range(3)]
    codes = [_code(child) for child in children]
    assert set(codes) <= {0, 2} and 0 in codes
    if 2 in codes:
        assert "another hpcpace pack is at work" in (attempt.path.parent / "said").read_text()
    assert_same_attempt(attempt, original)
    _finish(attempt, original)
