"""Look at a run once per interval, and ask whether it hangs, in threads of their own.

A slow file system, or a search that reads all traces, holds up neither keys nor view.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpcpace.core.errors import HpcpaceError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.watch.run_tail import LiveAttempt, RunTail
from hpcpace.watch.state import HangState, JobState, job_state

_PAUSE_S = 10.0
# A search may take this part of a core.
_MIN_PAUSES = 20


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

    def ask(self, followed: LiveAttempt, *, wait_s: float = 0.0) -> HangState | None:
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
        self._next_s = end_s + max(_PAUSE_S, _MIN_PAUSES * (end_s - begin_s))
        if attempt == self._attempt:
            self._found, self._found_at_s = found, end_s

    def _lasts_too_long(self, followed: LiveAttempt) -> bool:
        from hpcpace.hang.from_traces import hang_limit_ns  # slow to load, and not needed before the first look

        usual_ns = followed.history.usual_ns if followed.history is not None else None
        limit_ns = hang_limit_ns(usual_ns, hang_s=self._hang_s)
        ages_ns = [one.step_age_ns for rank, one in followed.ranks.items() if rank in followed.journals]
        return any(age_ns is not None and age_ns >= limit_ns for age_ns in ages_ns)


def find_hang_state(attempt: Attempt, hang_s: float) -> HangState | None:
    """Return the hang that the records of an attempt show.

    Raises:
        HpcpaceError: they cannot be read.
    """
    from hpcpace.hang.activity import with_activity
    from hpcpace.hang.from_traces import hang_now, read_records
    from hpcpace.hang.verdict import describe
    from hpcpace.hang.views import FoundHang

    job = read_records(attempt).view()
    hang = hang_now(job, hang_s=hang_s)
    if hang is None:
        return None
    found = with_activity(FoundHang(hang=hang, job=job), attempt)
    words = describe(hang, found.job)
    return HangState(
        kind=str(hang.kind.value),
        ranks=hang.culprits or hang.could_be,
        is_sure=bool(hang.culprits),
        headline=words.headline,
        why=words.why,
        advice=words.advice,
        found_s=0.0,
    )


# Of one core: looks end there, and the next one goes on with the ranks that are left.
_MAX_CPU_SHARE = 0.12
_SECOND_LOOK_S = 2.5  # flushes come once a second
DETAILED_RANKS = 64
"""Ranks that are looked at in detail at a time; with more, they take turns."""


@dataclass(frozen=True)
class SeenState:
    """A state, and when it was seen, by the clock of the looks."""

    state: JobState
    at_s: float


class Watcher:
    """Looks at a run until it is closed.

    Args:
        path: of the run.
        number: follow this attempt alone; None: always the newest.
        interval_s: seconds between two looks.
        hang_s: seconds that an operation must last for a hang.
    """

    def __init__(
        self,
        path: Path,
        *,
        number: int | None = None,
        interval_s: float,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tail = RunTail(path, number=number, clock=clock)
        self._search = HangSearch(hang_s=hang_s, clock=clock)
        self.interval_s, self._clock = interval_s, clock
        self._seen: SeenState | None = None
        self._changed = threading.Condition()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcpace-watch", daemon=True)
        self._error: BaseException | None = None

    def look(self, *, wait_s: float = 0.0, pause: Callable[[float], None] = time.sleep) -> JobState:
        """Look at all ranks in this thread; once more after a pause if ranks seem silent, as by a clock that is off.

        Args:
            wait_s: seconds to wait for the verdict on a step that lasts too long.
            pause: waits some seconds.
        """
        state = self._look(wait_s)
        if state.silent:
            pause(_SECOND_LOOK_S)
            state = self._look(wait_s)
        return state

    def _look(self, wait_s: float, most_s: float = math.inf) -> JobState:
        self._tail.look(most_s=most_s, most_cpu_s=_MAX_CPU_SHARE * most_s, num_detailed=DETAILED_RANKS)
        followed = self._tail.followed
        hang = self._search.ask(followed, wait_s=wait_s) if followed is not None else None
        return job_state(self._tail, hang=hang)

    @property
    def age_s(self) -> float:
        """Seconds since the state was seen; 0 before the first."""
        return self._clock() - self._seen.at_s if self._seen is not None else 0.0

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End; a look that hangs in a file system is left to itself."""
        self._is_closed.set()
        self._thread.join(timeout=0.5)

    def seen(self, *, after_s: float = -1.0, timeout_s: float | None = None) -> SeenState | None:
        """Return what was seen last; None if nothing was seen after a time, not even until the timeout.

        Raises:
            BaseException: what ended the looks.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._is_after(after_s), timeout=timeout_s)
            if self._error is not None:
                raise self._error
            return self._seen if self._is_after(after_s) else None

    def _is_after(self, after_s: float) -> bool:
        return self._seen is not None and self._seen.at_s > after_s

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                begin_s = self._clock()
                state = self._look(0.0, self.interval_s)
                with self._changed:
                    self._seen = SeenState(state, self._clock())
                    self._changed.notify_all()
                self._is_closed.wait(max(self.interval_s - (self._clock() - begin_s), 0.01))
        except BaseException as error:  # the boundary of this thread: it is raised where the state is asked for
            with self._changed:
                self._error = error
                self._changed.notify_all()
