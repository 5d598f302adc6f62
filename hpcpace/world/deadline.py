"""Waits with an end: nothing that hpcpace does in somebody else's job may delay it for longer than promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class Deadline:
    """A point in time by which several things in a row must be done."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._end_s = clock() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least a millisecond, as libraries take 0 for their own default."""
        return max(self._end_s - self._clock(), 0.001)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._clock() >= self._end_s

    def check(self) -> None:
        """Do nothing before the deadline.

        Raises:
            TimeoutError: it has passed.
        """
        if self.is_over:
            raise TimeoutError(f"it took longer than {self.timeout_s:.3g} s")


def in_time(action: Callable[[], _Result], timeout_s: float, what: str) -> _Result:
    """Return the result of an action that may hang, such as on a file system that does not answer.

    Args:
        action: runs in a separate thread, which is abandoned at the timeout.
        timeout_s: how long it may take.
        what: names the action in the error.

    Raises:
        TimeoutError: it did not finish in time.
        Exception: any error of the action.
    """
    try:
        started = Started(action, what)
    except RuntimeError:  # Python is ending, and takes no thread any more
        return action()
    return started.result(timeout_s)


class Started(Generic[_Result]):
    """An action in a separate thread, which is abandoned if nobody takes its result.

    Args:
        action: what runs.
        what: names it in the error.

    Raises:
        RuntimeError: Python is ending, and takes no thread any more.
    """

    def __init__(self, action: Callable[[], _Result], what: str) -> None:
        self._action, self._what = action, what
        self._done: list[_Result] = []
        self._failed: list[Exception] = []
        self._thread = threading.Thread(target=self._run, name="hpcpace-in-time", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> _Result:
        """Return the result; see `in_time`."""
        self._thread.join(timeout_s)
        if self._failed:
            raise self._failed[0]
        if not self._done:
            raise TimeoutError(f"{self._what} took longer than {timeout_s:.3g} s")
        return self._done[0]

    def _run(self) -> None:
        try:
            self._done.append(self._action())
        except Exception as error:  # handed on to who takes the result
            self._failed.append(error)
