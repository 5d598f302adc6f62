"""Waiting that ends: nothing that hpcpace does in somebody else's job may hold it up for longer than it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class Deadline:
    """A moment by which several things in a row have to be done."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._end_s = clock() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least a millisecond: libraries take 0 for their own default."""
        return max(self._end_s - self._clock(), 0.001)

    @property
    def is_over(self) -> bool:
        """Whether the moment has passed."""
        return self._clock() >= self._end_s

    def check(self) -> None:
        """Do nothing before the moment.

        Raises:
            TimeoutError: it has passed.
        """
        if self.is_over:
            raise TimeoutError(f"it took longer than {self.timeout_s:.3g} s")


def in_time(action: Callable[[], _Result], timeout_s: float, what: str) -> _Result:
    """Return what an action returns that may hang, as on a file system that does not answer.

    Args:
        action: runs in a thread of its own, which is left to itself when the time is over.
        timeout_s: how long it may take.
        what: of what the error says that it took too long.

    Raises:
        TimeoutError: it has not come to its end in time.
        Exception: whatever it raises.
    """
    done: list[_Result] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(action())
        except Exception as error:  # handed on below
            failed.append(error)

    thread = threading.Thread(target=run, name="hpcpace-in-time", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"{what} took longer than {timeout_s:.3g} s")
    return done[0]
