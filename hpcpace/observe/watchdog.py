"""Notices in a rank that a step lasts too long, and writes down what holds it up.

A thread looks every two seconds at figures that the rank keeps anyway: no message is sent, and the training thread
does nothing for it. What lasts shorter than the time between two looks needs no exact figure, as no limit is that low.
Only a step that lasts too long has its stacks read and a notice written. A second thread sleeps on a socket until
`hpcpace hang` asks on this host where the rank is now, which may be before any step has lasted too long.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import _exit  # bound before others replace it: a wrapper would end the session in this thread first
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import psutil

from hpcpace.core.environment import HostIdentity
from hpcpace.core.errors import EXIT_FAILED
from hpcpace.core.files import socket_aside
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S
from hpcpace.hang.notices import TIMEOUT_S, Notice, address, is_own_user, notice_text, write
from hpcpace.hang.views import Doing
from hpcpace.observe.alarm import FILES_TIMEOUT_S, Alarm
from hpcpace.observe.ends import EndEvent
from hpcpace.observe.hang_snapshot import excuse_of, thread_stacks
from hpcpace.observe.settings import HangConfig
from hpcpace.trace.schema import EventKind, Phase
from hpcpace.trace.tables import STOPPED_FOR_HANG
from hpcpace.world.deadline import in_time

if TYPE_CHECKING:
    from hpcpace.observe.recording import Recording

STOPPED: EndEvent = (EventKind.EXIT, EXIT_FAILED, STOPPED_FOR_HANG)
"""How a rank ends that `on_hang = stop` ends."""

_MAX_TICK_S = 2.0
_TICKS_OF_LEAST = 4
_STOP_TIMEOUT_S = 2.0
# All ranks find the verdict within this time; a launcher may end the others with the first that exits.
_GRACE_S = 4.0
# A rank that ends takes so long at most: its trace on its way to disk, and the time for the others.
_END_TIMEOUT_S = 60.0
_DOING = {Phase.DATA: Doing.LOADING, Phase.CHECKPOINT: Doing.SAVING, Phase.EVAL: Doing.EVALUATING}

# The first steps compile, warm caches up, and connect ranks.
_FIRST_STEPS = 5
_MAX_STEPS = 64
_MAX_PHASES = 16
_TIMES_USUAL_PHASE = 5
# What has no usual length yet, such as the first checkpoint, may last this many times `first_step_s`.
UNSEEN = 10
# A step whose operations go on may last this many times its limit.
_TIMES_MOVING = 10
# Looks this late were made by a process that was suspended meanwhile, or whose GIL was held.
_MIN_GAP_NS = 3 * NS_PER_S

_EXCUSES = {Phase.CHECKPOINT: "it saves a checkpoint", Phase.EVAL: "it evaluates"}


class Look(NamedTuple):
    """What one look at a rank shows.

    Attributes:
        step: number of the step that is running, also where it is provisional.
        num_moves: operations called and phases ended so far.
        under_way: the phase in which the rank is, and when it began; None in none.
        phases_before: codes of the phases that ended earlier.
        sees_phases: whether phases are observed; any step may be a checkpoint where they are not.
    """

    step: int
    num_moves: int
    under_way: tuple[Phase, int] | None = None
    phases_before: Collection[int] = ()
    sees_phases: bool = True


@dataclass(frozen=True, kw_only=True)
class Age:
    """How long a step has lasted that lasts too long; see `Notice` for the fields of the same names.

    Attributes:
        excuse: why that may be, as far as the rank itself can know; empty without a reason.
    """

    step: int
    step_age_ns: int
    limit_ns: int
    usual_step_ns: int
    is_first_step: bool
    excuse: str

    @property
    def may_end_job(self) -> bool:
        """Whether it has lasted so long that a job may be ended for it."""
        return self.step_age_ns > self.limit_ns * (UNSEEN if self.is_first_step else 2) and not self.excuse


class StepAge:
    """Follows the steps of one rank.

    Time in which the whole process did not run does not count. Where no step was found, the last operation or phase
    takes the place of the last step.

    Args:
        limits: the settings.
        tick_ns: time between two looks.
        now_ns: the time of the start.

    Attributes:
        has_slept: whether the process was suspended before the last look.
    """

    def __init__(self, limits: HangConfig, *, tick_ns: int, now_ns: int) -> None:
        self._least_ns = int(limits.least_s * NS_PER_S)
        self._first_ns = int(limits.first_step_s * NS_PER_S)
        self._factor = limits.factor
        self._tick_ns = tick_ns
        self._last_look_ns = self._begin_ns = self._moved_ns = self._phase_begin_ns = now_ns
        self._suspended_ns = 0
        self.has_slept = False
        self._step: int | None = None
        self._num_ended = self._num_moves = 0
        self._steps_ns: deque[int] = deque(maxlen=_MAX_STEPS)
        self._phase: tuple[Phase, int] | None = None
        self._phases_ns: dict[Phase, deque[int]] = {phase: deque(maxlen=_MAX_PHASES) for phase in _EXCUSES}

    def returned(self, now_ns: int) -> None:
        """Count no time as suspended that the watchdog itself has spent since the last look."""
        self._last_look_ns = now_ns

    def look(self, now_ns: int, seen: Look) -> Age | None:
        """Return the age of a step that lasts too long, None for others; each look counts for the next ones."""
        gap_ns = now_ns - self._last_look_ns - self._tick_ns
        self.has_slept = gap_ns > max(_MIN_GAP_NS, 2 * self._tick_ns)
        if self.has_slept:
            self._suspended_ns += gap_ns
        self._last_look_ns = now_ns
        awake_ns = now_ns - self._suspended_ns
        self._follow_step(awake_ns, seen)
        self._follow_phase(awake_ns, seen)
        age = self.at(now_ns, seen)
        return None if age.step_age_ns <= max(self._least_ns, age.limit_ns) else age

    def at(self, now_ns: int, seen: Look) -> Age:
        """Return the age of a step as of the last look, however long it has lasted; it changes nothing."""
        awake_ns = now_ns - self._suspended_ns
        age_ns = awake_ns - (self._begin_ns if self._num_ended else self._moved_ns)
        limit_ns = self.limit_ns if seen.sees_phases else max(self.limit_ns, UNSEEN * self._first_ns)
        return Age(
            step=seen.step,
            step_age_ns=0 if seen.step != self._step else age_ns,
            limit_ns=limit_ns,
            usual_step_ns=self.usual_step_ns,
            is_first_step=self._is_first_step,
            excuse=self._excuse(awake_ns, seen, is_moving=age_ns < _TIMES_MOVING * limit_ns),
        )

    @property
    def usual_step_ns(self) -> int:
        """The median of recent steps; 0 where none is known."""
        return int(median(self._steps_ns)) if self._steps_ns else 0

    @property
    def limit_ns(self) -> int:
        """How long the step that is running may last."""
        usual_ns = int(self._factor * self.usual_step_ns)
        return max(usual_ns, self._least_ns, self._first_ns if self._is_first_step else 0)

    @property
    def _is_first_step(self) -> bool:
        return self._num_ended < _FIRST_STEPS

    def _follow_step(self, awake_ns: int, seen: Look) -> None:
        if self._step is None:
            self._step = seen.step
        elif seen.step != self._step:
            num_steps = max(1, seen.step - self._step)
            if self._num_ended:  # the first steps of all take longer
                self._steps_ns.append((awake_ns - self._begin_ns) // num_steps)
            self._num_ended += num_steps
            self._step, self._begin_ns, self._moved_ns = seen.step, awake_ns, awake_ns
        if seen.num_moves != self._num_moves:
            self._num_moves, self._moved_ns = seen.num_moves, awake_ns

    def _follow_phase(self, awake_ns: int, seen: Look) -> None:
        phase = seen.under_way if seen.under_way is not None and seen.under_way[0] in _EXCUSES else None
        if phase != self._phase:
            if self._phase is not None:
                self._phases_ns[self._phase[0]].append(awake_ns - self._phase_begin_ns)
                # What is over counts no longer: the rest of the step has its own time.
                self._begin_ns += awake_ns - max(self._phase_begin_ns, self._begin_ns)
                self._moved_ns = awake_ns
            self._phase, self._phase_begin_ns = phase, awake_ns

    def _excuse(self, awake_ns: int, seen: Look, *, is_moving: bool) -> str:
        if self._phase is not None and awake_ns - self._phase_begin_ns < self._allowed_ns(self._phase[0], seen):
            return _EXCUSES[self._phase[0]]
        if self._num_ended and is_moving and awake_ns - self._moved_ns < self._least_ns:
            return "its operations go on"
        return ""

    def _allowed_ns(self, phase: Phase, seen: Look) -> int:
        """Return how long a phase may last; one that ended before the next look each time is as long as that."""
        if self._phases_ns[phase]:
            return _TIMES_USUAL_PHASE * int(median(self._phases_ns[phase]))
        return _TIMES_USUAL_PHASE * self._tick_ns if phase in seen.phases_before else UNSEEN * self._first_ns


class Watchdog:
    """Watches one rank, from `start` to `stop`.

    Args:
        rank: its number.
        identity: of its host.
        attempt: whose folder takes the notice.
        settings: the limits, and what to do beyond them.
        watched: the recording of the rank.
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
        watched: Recording,
        alarm: Alarm,
        warn: Callable[[str], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.stopping: Callable[[str], object] = lambda _: None
        self._rank, self._identity, self._attempt = rank, identity, attempt
        self._watched, self._alarm, self._warn, self._clock = watched, alarm, warn, clock
        self._tick_s = min(_MAX_TICK_S, settings.least_s / _TICKS_OF_LEAST)
        self._age = StepAge(settings, tick_ns=int(self._tick_s * NS_PER_S), now_ns=clock())
        self._training_thread = threading.get_ident()
        self._notice: Notice | None = None
        self._next_look_ns = 0
        self._is_excused = self._has_warned = self._is_ending = False
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hpcpace-watchdog", daemon=True)
        self._answers = Answers(attempt, rank, notice=self.notice_now, warn=warn)

    def start(self) -> None:
        """Begin to watch; call this in the thread that trains."""
        self._training_thread = threading.get_ident()
        self._age.returned(self._clock())
        self._thread.start()
        self._answers.start()

    def stop(self, *, by_error: bool = False) -> None:
        """End; a step that still lasts too long is marked as closed, one that ended as resumed. Nothing in a fork.

        Args:
            by_error: whether this rank fails. In a job that a verdict ends, that is what the ranks that have ended
                before it leave behind: it ends by the verdict as well.
        """
        if self._pid != os.getpid() or self._stopped.is_set():
            return
        self._stopped.set()
        self._answers.stop()
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

        def is_held() -> bool:
            now = self._watched.seen()
            return (now.step, now.num_moves) == (seen.step, seen.num_moves) and not self._stopped.is_set()

        verdict = self._alarm.consider(now_ns, notice, may_end_job=age.may_end_job, is_held=is_held)
        self._age.returned(self._clock())
        if verdict is not None:
            self._end_job(verdict)

    def notice_now(self) -> Notice:
        """Return what a notice would say now, however long the step has lasted; safe in any thread."""
        now_ns, seen = self._clock(), self._watched.seen()
        return self._new_notice(now_ns, self._age.at(now_ns, seen), seen, None)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._tick_s):
                self.look()
        except Exception as error:  # the boundary of this thread: the job does not depend on it
            self._warn(f"hangs are not noticed from here on: {type(error).__name__}: {error}")

    def _write_notice(self, now_ns: int, age: Age, seen: Look) -> Notice:
        earlier = self._notice
        notice = self._new_notice(now_ns, age, seen, earlier)
        self._notice, self._next_look_ns = notice, age.step_age_ns + age.limit_ns
        if earlier is None:
            self._alarm.raised(now_ns)
        self._write(notice)
        return notice

    def _new_notice(self, now_ns: int, age: Age, seen: Look, earlier: Notice | None) -> Notice:
        phase, since_ns = seen.under_way or (None, 0)
        stacks = thread_stacks(self._training_thread)
        own = next((stack.frames for stack in stacks if stack.is_training), ())
        earlier_stack: tuple[str, ...] = ()
        if earlier is not None:  # where the training thread was so long ago that it would have moved on since
            is_long_ago = 2 * (now_ns - earlier.time_ns) >= earlier.limit_ns
            earlier_stack = earlier.stack if is_long_ago else earlier.earlier_stack
        measured = vars(age) | vars(self._watched.operations(self._rank)) | {"excuse": age.excuse or excuse_of(own)}
        return Notice(
            rank=self._rank,
            host=self._identity.host,
            pid=self._pid,
            host_key=self._identity.host_key,
            time_ns=now_ns,
            unix_ns=time.time_ns(),
            first_time_ns=now_ns if earlier is None else earlier.first_time_ns,
            num_looks=1 if earlier is None else earlier.num_looks + 1,
            doing=Doing.COMPUTING if phase is None else _DOING.get(phase, Doing.COMPUTING),
            doing_since_ns=since_ns,
            stacks=stacks,
            earlier_stack=earlier_stack,
            **measured,
        )

    def _end_notice(self, how: str, now_ns: int) -> None:
        notice, self._notice = self._notice, None
        if notice is not None:
            self._write(replace(notice, unix_ns=time.time_ns(), ended=how, ended_ns=now_ns))

    def _write(self, notice: Notice) -> None:
        try:
            in_time(partial(write, self._attempt, notice), FILES_TIMEOUT_S, "its file system")
        except (OSError, TimeoutError) as error:
            if not self._has_warned:
                self._has_warned = True
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


def wake_siblings() -> None:
    """Let ranks on this host that a signal has stopped go on, so that their launcher can end them.

    A launcher that ends its ranks by SIGTERM waits for one that is stopped for ever. Only processes with the parent and
    the command line of this one are ranks; others may have been stopped for good reasons.
    """
    with suppress(psutil.Error):
        own = psutil.Process()
        parent, command = own.parent(), own.cmdline()
        for sibling in parent.children() if parent is not None else ():
            with suppress(psutil.Error):
                if sibling.status() == psutil.STATUS_STOPPED and sibling.cmdline() == command:
                    sibling.resume()


_MAX_WAITING = 4


class Answers:
    """Answers processes of this user on this host, from `start` to `stop`.

    Args:
        attempt: in which the rank records.
        rank: its number.
        notice: returns what it says of itself, in any thread.
        warn: takes a warning that nobody is answered.
    """

    def __init__(
        self, attempt: Attempt, rank: int, *, notice: Callable[[], Notice], warn: Callable[[str], None]
    ) -> None:
        self._attempt, self._rank, self._notice, self._warn = attempt, rank, notice, warn
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Begin to listen."""
        listener = socket_aside(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(address(self._attempt, self._rank))
            listener.listen(_MAX_WAITING)
        except OSError as error:
            listener.close()
            self._warn(f"`hpcpace hang` cannot ask this rank for its stack: {error.strerror or error}")
            return
        self._listener = listener
        threading.Thread(target=self._run, args=[listener], name="hpcpace-answers", daemon=True).start()

    def stop(self) -> None:
        """End; who asks from here on is refused."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
                listener.close()

    def _run(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError:  # it was closed
                return
            with connection, suppress(OSError):
                connection.settimeout(TIMEOUT_S)
                if is_own_user(connection):
                    connection.sendall(self._text())

    def _text(self) -> bytes:
        try:
            return notice_text(self._notice()).encode()
        except Exception as error:  # the boundary of this thread: the job does not depend on it
            self._warn(f"`hpcpace hang` is not answered: {type(error).__name__}: {error}")
            return b""
