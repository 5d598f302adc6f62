"""Work on many ranks by as many threads or processes as there are cores.

Threads are the rule: zlib and numpy give up Python's lock while they work.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import NotEnoughMemory

# A small run is read and measured without them, sooner than they are loaded.
if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

_Item = TypeVar("_Item")
_Part = TypeVar("_Part")
_Whole = TypeVar("_Whole")
_Result = TypeVar("_Result")
_ITEMS_AT_ONCE = 8
_WATCH_S = 0.2
_PARENT_S = 0.5
_NO_THREAD = "can't start new thread"
_NO_PROCESS = (errno.ENOMEM, errno.EAGAIN)
_forked: Callable[[Any], Any] | None = None
_is_alone: ContextVar[bool] = ContextVar("_is_alone", default=False)


class Team(Protocol):
    """Processes, perhaps on many machines, that do the same work together: `hpcpace.world.team.Team`."""

    @property
    def rank(self) -> int:
        """The number of this process; the first one is 0."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def agree(self, work: Callable[[], _Part], sign: Callable[[_Part], object]) -> _Part:
        """Do the same work in every process, and return this one's result."""

    def together(
        self,
        work: Callable[[Callable[[], None]], _Part],
        finish: Callable[[Sequence[_Part]], tuple[_Whole, _Whole]],
        watch: Callable[[int], None],
    ) -> _Whole:
        """Do each process's part of some work, and return what the parts are together."""


def num_threads() -> int:
    """Return the number of cores that this process may use; 1 in a process that shares work, or `in_one_thread`."""
    return len(os.sched_getaffinity(0)) if _forked is None and not _is_alone.get() else 1


@contextmanager
def in_one_thread(is_small: bool = True) -> Iterator[None]:
    """Do all work inside without threads and processes, which take longer to start than to do it, if it is small."""
    token = _is_alone.set(is_small or _is_alone.get())
    try:
        yield
    finally:
        _is_alone.reset(token)


def map_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yield the result for each item, in order; what one call raises is raised in its place.

    Raises:
        NotEnoughMemory: a thread cannot be started.
    """
    if num_threads() == 1:
        yield from map(function, items)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads()) as pool:
        try:
            yield from pool.map(function, items)
        except RuntimeError as error:
            if str(error) != _NO_THREAD:
                raise
            raise NotEnoughMemory("no memory for one more thread") from error


def run_threads(function: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Call a function for each item, as `map_threads` does, and wait until all calls have returned."""
    for _ in map_threads(function, items):
        pass


def run_both(first: Callable[[], _Item], second: Callable[[], _Result]) -> tuple[_Item, _Result]:
    """Call two functions at the same time in threads, as `map_threads` does, and return their results."""
    functions: tuple[Callable[[], Any], ...] = (first, second)
    of_first, of_second = map_threads(lambda function: function(), functions)
    return of_first, of_second


def map_processes(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Yield the result for each item, in order, from processes: for work in which threads would wait for each other.

    They are forked, so that they have `function` and all that it refers to as it is now; items and results are pickled.

    Raises:
        NotEnoughMemory: a process was killed.
    """
    if num_threads() == 1 or len(items) == 1:
        yield from map(function, items)
        return
    chunk_size = max(min(len(items) // num_threads(), _ITEMS_AT_ONCE), 1)
    with _processes(num_threads(), function) as pool:
        yield from pool.map(_call, items, chunksize=chunk_size)


def watch_processes(
    function: Callable[[_Item], _Result], items: Sequence[_Item], watch: Callable[[], None]
) -> list[_Result]:
    """Return the result for each of few items, in order, as of `map_processes`; this process meanwhile keeps watching.

    Args:
        function: what the processes do.
        items: each becomes one task.
        watch: called several times a second, and when all is done.

    Raises:
        NotEnoughMemory: a process was killed.
    """
    if num_threads() == 1 or len(items) == 1:
        return list(map(function, items))
    from concurrent.futures import FIRST_EXCEPTION, wait

    with _processes(num_threads(), function) as pool:
        tasks = [pool.submit(_call, item) for item in items]
        while wait(tasks, _WATCH_S, FIRST_EXCEPTION).not_done and not any(_has_failed(task) for task in tasks):
            watch()
        results = [task.result() for task in tasks]
    watch()
    return results


def _has_failed(task: Future[Any]) -> bool:
    return task.done() and task.exception() is not None


@contextmanager
def in_background(function: Callable[[], _Result]) -> Iterator[Callable[[], _Result]]:
    """Call a function in a forked process, and yield what waits for its result and returns it.

    With one core, the function is called only when the result is asked for.

    Raises:
        NotEnoughMemory: the process was killed.
    """
    if num_threads() == 1:
        yield function
        return
    with _processes(1, lambda _: function()) as pool:
        yield pool.submit(_call, None).result


def shared_zeros(shape: int | tuple[int, ...]) -> NDArray[np.float64]:
    """Return zeros, float64, in which a parent sees what the processes of `map_processes` write.

    Raises:
        NotEnoughMemory: there is no room for them.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    size_bytes = math.prod(shape) * np.dtype(np.float64).itemsize
    try:
        memory = mmap.mmap(-1, max(size_bytes, 1))
    except OSError as error:
        raise NotEnoughMemory(f"no memory for {size_bytes >> 20} MiB of figures that processes share") from error
    return np.frombuffer(memory, np.float64, math.prod(shape)).reshape(shape)


@contextmanager
def _processes(num_processes: int, function: Callable[[Any], Any]) -> Iterator[ProcessPoolExecutor]:
    """Yield forked processes that call a function.

    Raises:
        NotEnoughMemory: one of them was killed, or cannot be started.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Forked, because processes of `spawn` and `forkserver` import everything anew: 1 s of processor time each, which
    # forked ones do not need (measured with two processes: 2.0 s against 0.01 s), and more than to read some hundred
    # files. They could not take closures and `shared_zeros`, either. Python 3.12 warns of a fork beside threads; the
    # threads of `map_threads` have ended by now, and that of a progress bar holds no lock that `function` takes.
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(num_processes, fork, _keep, (function, os.getpid())) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise NotEnoughMemory(
            f"one of {num_processes} processes that shared the work ended without a result, as one does that the "
            "kernel kills when memory runs out"
        ) from error
    except OSError as error:
        if error.errno not in _NO_PROCESS:
            raise
        raise NotEnoughMemory(f"no memory for {num_processes} more processes") from error


def _keep(function: Callable[[Any], Any], parent: int) -> None:
    global _forked
    _forked = function
    with suppress(RuntimeError):  # no memory for a thread
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def end_with(parent: int) -> None:
    """End this process when its parent has gone: killed, it cannot say that there is no more work."""
    with suppress(OSError):  # it has gone already, or the kernel is older than Linux 5.3
        descriptor = os.pidfd_open(parent)
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        if os.getppid() == parent:
            waiting.poll()
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    os._exit(1)


def _call(item: Any) -> Any:
    assert _forked is not None
    return _forked(item)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_KEEPS_BYTES = (1 << 31) - 1
_AHEAD_BYTES = 64 << 20
_OWN_MAPPING_BYTES = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Let arrays that are freed make room for the next ones, in this process and those that it forks.

    Else glibc gives their memory back to the kernel, which clears it when it is asked for again. Other C libraries stay
    as they are.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in (
            (_TRIM_THRESHOLD, _KEEPS_BYTES),
            (_TOP_PAD, _AHEAD_BYTES),
            (_MMAP_THRESHOLD, _OWN_MAPPING_BYTES),
        ):
            mallopt(name, value)
