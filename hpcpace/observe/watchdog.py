"""Notices from inside a rank that a step lasts too long, and writes down what holds it up.

A thread looks every two seconds at figures that the rank keeps anyway: no message is sent, and the training thread
does nothing for it. Only a step that lasts too long has its stacks read and a notice written.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

# Bound before others replace it: a wrapper would end the session in this thread first, which may take long.
from os import _exit
from typing import Protocol

from hpcpace.config import HangConfig
from hpcpace.core.environment import HostIdentity
from hpcpace.core.errors import EXIT_FAILED
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S
from hpcpace.hang.notices import Notice, write
from hpcpace.hang.views import Doing
from hpcpace.observe.alarm import FILES_TIMEOUT_S, Alarm
from hpcpace.observe.ends import EndEvent
from hpcpace.observe.noticed_operations import Operations
from hpcpace.observe.siblings import wake_siblings
from hpcpace.observe.stacks import excuse_of, thread_stacks
from hpcpace.observe.step_age import Age, Seen, StepAge
from hpcpace.trace.schema import EventKind, Phase
from hpcpace.trace.tables import STOPPED_FOR_HANG
from hpcpace.world.deadline import in_time

STOPPED: EndEvent = (EventKind.EXIT, EXIT_FAILED, STOPPED_FOR_HANG)
"""How a rank ends that `on_hang = stop` ends."""

_LONGEST_TICK_S = 2.0
_TICKS_OF_LEAST = 4
_STOP_TIMEOUT_S = 2.0
# All ranks find the verdict within this time; a launcher may end the others with the first that exits.
_GRACE_S = 4.0
# A rank that ends takes so long at most: its trace on its way to disk, and the time for the others.
_END_TIMEOUT_S = 60.0
_DOING = {Phase.DATA: Doing.LOADING, Phase.CHECKPOINT: Doing.SAVING, Phase.EVAL: Doing.EVALUATING}


class Watched(Protocol):
    """What is watched: the recording of one rank."""

    def seen(self) -> Seen:
        """Return what shows whether the rank moves."""

    def operations(self, rank: int) -> Operations:
        """Return its operations."""

    def rescue(self, end: EndEvent) -> None:
        """Bring its trace to disk."""


class Watchdog:
    """Watches one rank, from `start` to `stop`.

    Args:
        rank: its number.
        identity: of its host.
        attempt: whose folder takes the notice.
        settings: the limits, and what to do beyond them.
        watched: what is watched.
        alarm: speaks for all ranks.
        warn: takes a warning.
        clock: the time, ns of CLOCK_MONOTONIC.

    Attributes:
        stopping: called with the verdict just before this ends the process.
    """

    def __init__(
        self,
        *,
        rank: int,
        identity: HostIdentity,
        attempt: Attempt,
        settings: HangConfig,
        watched: Watched,
        alarm: Alarm,
        warn: Callable[[str], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.stopping: Callable[[str], None] = lambda _: None
        self._rank, self._identity, self._attempt = rank, identity, attempt
        self._watched, self._alarm, self._warn, self._clock = watched, alarm, warn, clock
        self._tick_s = min(_LONGEST_TICK_S, settings.least_s / _TICKS_OF_LEAST)
        self._age = StepAge(settings, tick_ns=int(self._tick_s * NS_PER_S), now_ns=clock())
        self._training_thread = threading.get_ident()
        self._notice: Notice | None = None
        self._next_look_ns = 0
        self._is_excused = self._is_told = self._is_ending = False
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hpcpace-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch; call this in the thread that trains."""
        self._training_thread = threading.get_ident()
        self._age.returned(self._clock())
        self._thread.start()

    def stop(self, *, by_error: bool = False) -> None:
        """End; a step that still lasts too long is marked as closed, one that ended as resumed. Nothing in a fork.

        Args:
            by_error: whether this rank fails. In a job that a verdict ends, that is what the ranks that have ended
                before it leave behind: it ends by the verdict as well.
        """
        if self._pid != os.getpid() or self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)
            if self._is_ending:
                self._thread.join(_END_TIMEOUT_S)
        step = self._watched.seen().step
        if by_error and (verdict := self._alarm.missed(step)) is not None:
            self._end_job(verdict)
        notice = self._notice
        if notice is not None and not self._thread.is_alive():
            self._end_notice("closed" if step == notice.step else "resumed", self._clock())

    def look(self) -> None:
        """Look once."""
        now_ns = self._clock()
        seen = self._watched.seen()
        age = self._age.look(now_ns, seen)
        if self._age.has_slept and (verdict := self._alarm.missed(seen.step)) is not None:
            self._end_job(verdict)
        notice = self._notice
        if notice is not None and (age is None or age.step != notice.step):
            self._end_notice("resumed", now_ns)
            notice = None
        if age is None:
            return
        if notice is None or age.step_age_ns >= self._next_look_ns or bool(age.excuse) != self._is_excused:
            self._is_excused = bool(age.excuse)
            notice = self._write_notice(now_ns, age, seen)
        is_held = partial(self._is_held, seen)
        verdict = self._alarm.consider(now_ns, notice, may_end_job=age.may_end_job, is_held=is_held)
        self._age.returned(self._clock())
        if verdict is not None:
            self._end_job(verdict)

    def _is_held(self, before: Seen) -> bool:
        now = self._watched.seen()
        return (now.step, now.num_moves) == (before.step, before.num_moves) and not self._stopped.is_set()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._tick_s):
                self.look()
        except Exception as error:  # the boundary of this thread: the job does not depend on it
            self._warn(f"hangs are not noticed from here on: {type(error).__name__}: {error}")

    def _write_notice(self, now_ns: int, age: Age, seen: Seen) -> Notice:
        earlier = self._notice
        notice = self._new_notice(now_ns, age, seen, earlier)
        self._notice, self._next_look_ns = notice, age.step_age_ns + age.limit_ns
        if earlier is None:
            self._alarm.raised(now_ns)
        self._write(notice)
        return notice

    def _new_notice(self, now_ns: int, age: Age, seen: Seen, earlier: Notice | None) -> Notice:
        phase, since_ns = seen.under_way or (None, 0)
        stacks = thread_stacks(self._training_thread)
        own = next((stack.frames for stack in stacks if stack.is_training), ())
        operations = self._watched.operations(self._rank)
        return Notice(
            rank=self._rank,
            host=self._identity.host,
            pid=self._pid,
            host_key=self._identity.host_key,
            time_ns=now_ns,
            unix_ns=time.time_ns(),
            first_time_ns=now_ns if earlier is None else earlier.first_time_ns,
            num_looks=1 if earlier is None else earlier.num_looks + 1,
            step=age.step,
            step_age_ns=age.step_age_ns,
            limit_ns=age.limit_ns,
            usual_step_ns=age.usual_step_ns,
            is_first_step=age.is_first_step,
            doing=_DOING.get(phase, Doing.COMPUTING) if phase is not None else Doing.COMPUTING,
            doing_since_ns=since_ns,
            excuse=age.excuse or excuse_of(own),
            groups=operations.groups,
            calls=operations.calls,
            entered=operations.entered,
            is_complete=operations.is_complete,
            stacks=stacks,
            earlier_stack=_earlier_stack(earlier, now_ns),
        )

    def _end_notice(self, how: str, now_ns: int) -> None:
        notice, self._notice = self._notice, None
        if notice is not None:
            self._write(replace(notice, unix_ns=time.time_ns(), ended=how, ended_ns=now_ns))

    def _write(self, notice: Notice) -> None:
        try:
            in_time(partial(write, self._attempt, notice), FILES_TIMEOUT_S, "its file system")
        except (OSError, TimeoutError) as error:
            if not self._is_told:
                self._is_told = True
                reason = getattr(error, "strerror", None) or str(error)
                self._warn(f"step {notice.step} lasts long, but what holds it up cannot be written: {reason}")

    def _end_job(self, verdict: str) -> None:
        """End this rank: its trace first, then what reports on the job, then the process."""
        self._is_ending = True
        try:
            for step in (partial(self._watched.rescue, STOPPED), partial(self.stopping, verdict), wake_siblings):
                try:
                    step()
                except Exception as error:  # the others do not depend on it, and have their time all the same
                    self._warn(f"while a hang ends this rank: {error or type(error).__name__}")
            time.sleep(_GRACE_S)
        finally:
            _exit(EXIT_FAILED)


def _earlier_stack(earlier: Notice | None, now_ns: int) -> tuple[str, ...]:
    """Return where the training thread was, at a look so long ago that it would have moved on since."""
    if earlier is None:
        return ()
    is_long_ago = 2 * (now_ns - earlier.time_ns) >= earlier.limit_ns
    return earlier.stack if is_long_ago else earlier.earlier_stack
