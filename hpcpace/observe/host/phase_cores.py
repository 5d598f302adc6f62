"""What the thread that trains had of its core in each phase: how long it ran, and how long it waited for a core.

The kernel counts both for each thread, and reading them takes a microsecond and a half at each begin and end of a
phase. So that is done in some steps, ten a second at most: figures are shares of the time in each phase.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hpcpace.core.files import close_own, set_aside
from hpcpace.trace.schema import PHASES_ON_CORES, Phase

_INTERVAL_NS = 100_000_000  # speed: between the begins of steps in which it is read
# Steps that alternate would be read with one parity alone at equal distances.
_GOLDEN_RATIO = 0.6180339887498949
_MAX_LINE = 64  # three numbers of at most 20 digits
_MAX_EVENTS = 4096  # memory: of a step; one with more is not read
UNKNOWN_PHASES = (0,) * (3 + 3 * len(PHASES_ON_CORES))
"""The nice value and the columns of all phases where nothing is known."""


class _Reading(NamedTuple):
    time_ns: int
    cpu_ns: int
    wait_ns: int

    def since(self, other: _Reading) -> tuple[int, int, int]:
        return self.time_ns - other.time_ns, self.cpu_ns - other.cpu_ns, self.wait_ns - other.wait_ns


class PhaseCores:
    """Adds up what phases had of their core; the time in none of `PHASES_ON_CORES` counts as none of them.

    The thread that begins a step is read. Where the kernel counts no waits, or a file cannot be read, nothing is.

    Args:
        proc: where procfs is mounted.
    """

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._descriptor, self._thread, self._native = -1, 0, 0
        self._is_reading = self._is_broken = False
        self._next_ns = self._num_read = 0
        self._readings: dict[int, _Reading] = {}
        self._ended: list[tuple[int, int, Phase]] = []
        self._begun: _Reading | None = None
        self._totals: dict[Phase, list[int]] = {phase: [0, 0, 0] for phase in PHASES_ON_CORES}
        self._columns = UNKNOWN_PHASES[1:]

    @property
    def columns(self) -> tuple[int, ...]:
        """How many steps were read, their time, and of it length, running and waiting for each of `PHASES_ON_CORES`."""
        return self._columns

    @property
    def nice(self) -> int:
        """The nice value of the thread that trains; 0 where it is not known; safe in any thread."""
        try:
            return os.getpriority(os.PRIO_PROCESS, self._native)
        except OSError:
            return 0

    def now(self) -> int:
        """Return the time of the host's clock, at which a phase may begin or end."""
        now_ns = time.monotonic_ns()
        if self._is_reading and threading.get_ident() == self._thread:
            self._read(now_ns)
        return now_ns

    def ended(self, phase: Phase, begin_ns: int, end_ns: int) -> None:
        """Note that a phase has ended, with times that `now` returned; others are left out."""
        if self._is_reading and threading.get_ident() == self._thread:
            self._ended.append((begin_ns, -end_ns, phase))
            if len(self._ended) > _MAX_EVENTS:
                self._forget()

    def begin_step(self) -> None:
        """Begin to read in the step that begins, if one is due."""
        now_ns = time.monotonic_ns()
        if self._is_broken or now_ns < self._next_ns or not self._follow():
            return
        self._num_read += 1
        # Half to one and a half intervals.
        self._next_ns = now_ns + int(_INTERVAL_NS * (0.5 + self._num_read * _GOLDEN_RATIO % 1))
        self._is_reading = True
        self._begun = self._read(now_ns)

    def end_step(self) -> None:
        """Add the step that ends, if it was read."""
        if not self._is_reading:
            return
        if threading.get_ident() == self._thread and self._begun is not None:
            end = self._read(time.monotonic_ns())
            if end is not None:
                self._add_step(self._begun, end)
        self._forget()

    def close(self) -> None:
        """Read nothing from here on."""
        self._is_broken = True
        self._forget()
        if self._descriptor >= 0:
            close_own(self._descriptor)
            self._descriptor = -1

    def _forget(self) -> None:
        self._is_reading, self._begun = False, None
        self._readings.clear()
        self._ended.clear()

    def _follow(self) -> bool:
        """Open the file of this thread, unless that is open; return whether it is."""
        thread = threading.get_ident()
        if thread == self._thread and self._descriptor >= 0:
            return True
        self._native = threading.get_native_id()
        self._thread = thread
        if self._descriptor >= 0:
            close_own(self._descriptor)
        try:
            path = self._proc / "thread-self" / "schedstat"
            self._descriptor = set_aside(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self._descriptor, self._is_broken = -1, True
            return False
        # A kernel that does not count has zeros there, also of how often the thread ran.
        self._is_broken = os.pread(self._descriptor, _MAX_LINE, 0).split()[2:] in ([], [b"0"])
        return not self._is_broken

    def _read(self, now_ns: int) -> _Reading | None:
        """Return what the thread had until now; None, and no more from then on, where that cannot be read."""
        try:
            # Running, waiting, and how often it ran (Documentation/scheduler/sched-stats.rst). The first number is as
            # old as the last tick, so the thread's clock has what it ran.
            waited = int(os.pread(self._descriptor, _MAX_LINE, 0).split()[1])
        except (OSError, ValueError, IndexError):
            self._is_broken = True
            self._forget()
            return None
        reading = self._readings[now_ns] = _Reading(now_ns, time.thread_time_ns(), waited)
        return reading

    def _add_step(self, begin: _Reading, end: _Reading) -> None:
        """Add each phase of a step without those inside it, and the time in none of them as Phase.OTHER."""
        own: dict[Phase, list[int]] = {}
        _add(own.setdefault(Phase.OTHER, [0, 0, 0]), end.since(begin), 1)
        around: list[tuple[int, Phase]] = []
        for begin_ns, minus_end_ns, phase in sorted(self._ended):
            first, last = self._readings.get(begin_ns), self._readings.get(-minus_end_ns)
            if first is None or last is None:
                continue
            while around and around[-1][0] < last.time_ns:
                around.pop()
            had = last.since(first)
            _add(own.setdefault(phase, [0, 0, 0]), had, 1)
            _add(own[around[-1][1] if around else Phase.OTHER], had, -1)
            around.append((last.time_ns, phase))
        for phase, total in self._totals.items():
            _add(total, own.get(phase, (0, 0, 0)), 1)
        parts = (max(value, 0) for total in self._totals.values() for value in total)
        num_read, read_ns = self._columns[:2]
        self._columns = (num_read + 1, read_ns + end.time_ns - begin.time_ns, *parts)


def _add(total: list[int], values: Sequence[int], factor: int) -> None:
    for index, value in enumerate(values):
        total[index] += factor * value
