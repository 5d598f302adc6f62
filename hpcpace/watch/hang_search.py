"""Asks, in a thread of its own, whether a run hangs: that reads all traces, and must hold up neither looks nor keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hpcpace.core.errors import HpcpaceError
from hpcpace.core.rundir import Attempt
from hpcpace.watch.follower import Followed
from hpcpace.watch.state import HangState

_PAUSE_S = 10.0
# A search may take this part of a core.
_LEAST_PAUSES = 20


class HangSearch:
    """Finds what holds an attempt up, again and again while steps last too long.

    Args:
        hang_s: seconds that an operation must last.
        find: returns the hang that the records of an attempt show; None if there is none.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        *,
        hang_s: float,
        find: Callable[[Attempt, float], HangState | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hang_s, self._find, self._clock = hang_s, find or find_hang_state, clock
        self._thread: threading.Thread | None = None
        self._found: HangState | None = None
        self._found_at_s = self._next_s = 0.0
        self._attempt: Attempt | None = None
        self._steps: list[int] = []

    def ask(self, followed: Followed, *, wait_s: float = 0.0) -> HangState | None:
        """Return what was found last if no step has ended since; begin to search if a step lasts too long.

        Args:
            followed: the attempt.
            wait_s: seconds to wait for a search that this call begins.
        """
        steps = [one.steps[-1].step if one.steps else -1 for _, one in sorted(followed.ranks.items())]
        if followed.attempt != self._attempt or steps != self._steps:
            self._found = None
        if not self._lasts_too_long(followed):
            return None
        now_s = self._clock()
        is_idle = self._thread is None or not self._thread.is_alive()
        if is_idle and (now_s >= self._next_s or followed.attempt != self._attempt or steps != self._steps):
            self._attempt, self._steps = followed.attempt, steps
            self._thread = threading.Thread(target=self._search, args=(followed.attempt,), daemon=True)
            self._thread.start()
            if wait_s:
                self._thread.join(wait_s)
        found = self._found
        return None if found is None else replace(found, found_s=self._clock() - self._found_at_s)

    def _search(self, attempt: Attempt) -> None:
        begin_s = self._clock()
        found = None
        with suppress(
            HpcpaceError, OSError, MemoryError
        ):  # files that change while they are read: the next one may work
            found = self._find(attempt, self._hang_s)
        end_s = self._clock()
        self._next_s = end_s + max(_PAUSE_S, _LEAST_PAUSES * (end_s - begin_s))
        if attempt == self._attempt:
            self._found, self._found_at_s = found, end_s

    def _lasts_too_long(self, followed: Followed) -> bool:
        from hpcpace.hang.search import FIRST_STEP_S, USUAL_STEPS
        from hpcpace.watch.figures import hang_limit_ns

        limit_ns = hang_limit_ns(followed, hang_s=self._hang_s, num_usual=USUAL_STEPS, first_s=FIRST_STEP_S)
        ages_ns = [one.step_age_ns for rank, one in followed.ranks.items() if rank in followed.journals]
        return any(age_ns is not None and age_ns >= limit_ns for age_ns in ages_ns)


def find_hang_state(attempt: Attempt, hang_s: float) -> HangState | None:
    """Return the hang that the records of an attempt show.

    Raises:
        HpcpaceError: they cannot be read.
    """
    from hpcpace.hang.from_traces import read_records
    from hpcpace.hang.search import hang_now
    from hpcpace.hang.words import describe

    job = read_records(attempt).view()
    hang = hang_now(job, hang_s=hang_s)
    if hang is None:
        return None
    words = describe(hang, job)
    return HangState(
        kind=str(hang.kind.value),
        ranks=hang.culprits or hang.could_be,
        is_sure=bool(hang.culprits),
        headline=words.headline,
        why=words.why,
        advice=words.advice,
        found_s=0.0,
    )
