"""Waits with an end: nothing that hpcpace does in somebody else's job may delay it for longer than promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

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
    done: list[_Result] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(action())
        except Exception as error:  # handed on below
            failed.append(error)

    thread = threading.Thread(target=run, name="hpcpace-in-time", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python is ending, and takes no thread any more
        return action()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"{what} took longer than {timeout_s:.3g} s")
    return done[0]
