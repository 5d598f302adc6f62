"""Work on many ranks by as many threads or processes as there are cores.

Threads are the rule: zlib and numpy give up Python's lock while they work.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_ITEMS_AT_ONCE = 8
_WATCH_S = 0.2
_forked: Callable[[Any], Any] | None = None


def num_threads() -> int:
    """Return the number of cores that this process may use; 1 in a process that shares work with others."""
    return len(os.sched_getaffinity(0)) if _forked is None else 1


def map_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yield the result for each item, in order; what one call raises is raised in its place."""
    if num_threads() == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(num_threads()) as pool:
        yield from pool.map(function, items)


def run_threads(function: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Call a function for each item, as `map_threads` does, and wait until all calls have returned."""
    for _ in map_threads(function, items):
        pass


def map_processes(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Yield the result for each item, in order, from processes: for work in which threads would wait for each other.

    They are forked, so that they have `function` and all that it refers to as it is now; items and results are pickled.
    """
    if num_threads() == 1 or len(items) == 1:
        yield from map(function, items)
        return
    # Forked, because to import numpy and h5py anew takes each process longer than some hundred files.
    fork = multiprocessing.get_context("fork")
    chunk_size = max(min(len(items) // num_threads(), _ITEMS_AT_ONCE), 1)
    with ProcessPoolExecutor(num_threads(), fork, _keep, (function,)) as pool:
        yield from pool.map(_call, items, chunksize=chunk_size)


def watch_processes(
    function: Callable[[_Item], _Result], items: Sequence[_Item], watch: Callable[[], None]
) -> list[_Result]:
    """Return the result for each of few items, in order, as of `map_processes`; this process meanwhile keeps watching.

    Args:
        function: what the processes do.
        items: each is a task of its own.
        watch: called several times a second, and when all is done.
    """
    if num_threads() == 1 or len(items) == 1:
        return list(map(function, items))
    with ProcessPoolExecutor(num_threads(), multiprocessing.get_context("fork"), _keep, (function,)) as pool:
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
    """
    if num_threads() == 1:
        yield function
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _keep, (lambda _: function(),)) as pool:
        yield pool.submit(_call, None).result


def shared_zeros(*shape: int) -> NDArray[np.float64]:
    """Return zeros, float64, in which a parent sees what the processes of `map_processes` write."""
    size_bytes = math.prod(shape) * np.dtype(np.float64).itemsize
    return np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.float64, math.prod(shape)).reshape(shape)


def _keep(function: Callable[[Any], Any]) -> None:
    global _forked
    _forked = function


def _call(item: Any) -> Any:
    assert _forked is not None
    return _forked(item)
