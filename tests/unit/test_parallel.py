"""Processes that share work: one that is killed is an error, and none outlives the process that started it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpcpace.core import pool
from hpcpace.core.errors import NotEnoughMemory
from hpcpace.core.pool import in_background, map_processes, map_threads, shared_zeros, watch_processes


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "num_threads", lambda: 2 if pool._forked is None else 1)


def _mapped(function: Callable[[int], int], items: Sequence[int]) -> list[int]:
    return list(map_processes(function, items))


def _watched(function: Callable[[int], int], items: Sequence[int]) -> list[int]:
    return watch_processes(function, items, lambda: None)


def _waited_for(function: Callable[[int], int], items: Sequence[int]) -> list[int]:
    with in_background(lambda: function(1)) as result:
        return [result()]


ALL = pytest.mark.parametrize("call", [_mapped, _watched, _waited_for])


@ALL
def test_a_process_that_is_killed_is_an_error(call: Callable[..., list[int]]) -> None:
    def killed(item: int) -> int:
        if item == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(NotEnoughMemory, match="ended without a result, as one does that the kernel kills"):
        call(killed, range(4))


@ALL
def test_memory_that_runs_out_in_a_process_is_told(call: Callable[..., list[int]]) -> None:
    def too_large(item: int) -> int:
        raise MemoryError(f"item {item}")

    with pytest.raises(MemoryError, match="item"):
        call(too_large, range(4))


def test_no_room_for_another_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    with pytest.raises(NotEnoughMemory, match="no memory for 2 more processes"):
        _mapped(int, range(4))


def test_no_room_for_another_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(NotEnoughMemory, match="one more thread"):
        list(map_threads(int, range(4)))


def test_no_room_for_what_processes_share_is_an_error() -> None:
    with pytest.raises(NotEnoughMemory, match=r"no memory for \d+ MiB of figures"):
        shared_zeros(1 << 55)


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    def wait(item: int) -> int:
        (tmp_path / f"{item}").write_text(f"{os.getpid()}")
        time.sleep(60)
        return item

    child = os.fork()
    if child == 0:
        try:
            list(map_processes(wait, range(2)))
        finally:
            os._exit(70)
    files = [tmp_path / "0", tmp_path / "1"]
    _until(lambda: all(path.exists() and path.read_text() for path in files))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _until(lambda: not any(_is_alive(int(path.read_text())) for path in files))


def _until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
