"""Marks in the streams of a device, and when the device passed them by the host's clock.

A mark is a CUDA event. It is read later, once the device has passed it, without waiting for the device. Anchors tie the
device's clock to that of the host; only they wait for the device, between steps. There are a limited number of events,
which are used again.

Marks of phases and steps are known by the host's time at which they were made: the observers take it from
`DeviceMarks.now` and go on with that number. The recorder asks for the device's time of it when it writes a row, so
that rows can be renumbered, kept and dropped without a thought to events.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from hpcpace.core.text import NS_PER_S

MAX_EVENTS = 8192
"""Events in use at a time. A host can be ahead of its device by some thousand pieces of work."""
RESERVED_EVENTS = 4096
"""Events that only operations get, because a missing operation is worse than a missing mark of a phase."""
# How fast the device's clock is shows in two anchors: the longer between them, the better. So the first counts for a
# second, and each for four times as long as the one before it, up to half a minute.
_FIRST_INTERVAL_NS, _INTERVAL_GROWTH, _MAX_INTERVAL_NS = 1 * NS_PER_S, 4, 30 * NS_PER_S
# Marks are not read before that shows, but for those of a first step that takes long.
_PATIENCE_NS = 2 * NS_PER_S
_NUM_TRIES = 3
# Clocks are wrong by less than this; an anchor that says more was disturbed.
_MAX_RATE_ERROR = 1e-3


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> None:
        """Mark the current point of the current stream."""

    def query(self) -> bool:
        """Return whether the device has passed the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds between two passed marks."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""


class _Anchor(NamedTuple):
    event: Event
    host_ns: int
    device: int


class DeviceClock:
    """Makes marks on the device of this rank, and maps them to the host's clock.

    Not measured on a GPU yet.

    Args:
        new_event: makes a timing event, on GPUs `lambda: torch.cuda.Event(enable_timing=True)`.
        current_device: returns the number of the device in use; None while no event may be recorded, because none is in
            use or a graph is being captured.
        current_stream: returns a number for the current stream of a device.
        clock: host clock in nanoseconds.
        warn: takes a warning.

    Attributes:
        num_refused: marks that could not be made because all events were in use.
        has_failed: whether the device has failed; the job, which goes on without marks, gets its own error.
        num_captures: CUDA graphs that are being captured, on any stream.
        computing_streams: the streams that have marks of phases or steps.
    """

    def __init__(
        self,
        new_event: Callable[[], Event],
        *,
        current_device: Callable[[], int | None] = lambda: 0,
        current_stream: Callable[[int], int] = lambda device: 0,
        clock: Callable[[], int] = time.monotonic_ns,
        warn: Callable[[str], None] = lambda _: None,
        most_events: int = MAX_EVENTS,
    ) -> None:
        self.num_refused = self.num_captures = 0
        self.has_failed = False
        self._warn = warn
        self.now = clock
        self._new_event = new_event
        self.computing_streams: set[int] = set()
        self._current_device, self._current_stream = current_device, current_stream
        self._free: list[Event] = []
        self._num_unmade = most_events
        self._num_reserved = min(RESERVED_EVENTS, most_events // 2)
        self._anchor: _Anchor | None = None
        self._rate = 1.0
        self._is_rated = False
        self._interval_ns = _FIRST_INTERVAL_NS

    @property
    def is_usable(self) -> bool:
        """Whether marks can be made now."""
        return self._device() is not None

    def fail(self, error: Exception) -> None:
        """Make no marks any more. The boundary between hpcpace and the job: a broken device is not ours to report."""
        if not self.has_failed:
            self.has_failed = True
            self._warn(f"times on the device end here: {error or type(error).__name__}; training continues")

    def mark(self, *, is_reserved: bool = False) -> Event | None:
        """Return an event at the current point of the current stream; None if none can be recorded now.

        Args:
            is_reserved: whether it may be one of those that are kept for operations.
        """
        device = self._device()
        if device is None:
            return None
        try:
            if self._anchor is None:
                self.anchor()
            if self._anchor is None or device != self._anchor.device:
                return None  # times of another device cannot be compared with the anchor's
            event = self._take(is_reserved=is_reserved)
            if event is not None:
                event.record()
            if not is_reserved:
                self.computing_streams.add(self._current_stream(device))
        except Exception as error:
            self.fail(error)
            return None
        return event

    def side_stream(self) -> int | None:
        """Return the number of the current stream if it has no marks of phases, though others have; None otherwise."""
        device = self._device() if self.computing_streams else None
        stream = None if device is None else self._current_stream(device)
        return None if stream in self.computing_streams else stream

    def is_current(self, stream: int) -> bool:
        """Return whether a stream is the current one."""
        device = self._device()
        return device is not None and self._current_stream(device) == stream

    def release(self, *events: Event) -> None:
        """Take back events that are not read any more."""
        self._free.extend(events)

    @property
    def can_map(self) -> bool:
        """Whether marks can be read now, and mapped well."""
        if self._anchor is None or not self.is_usable:
            return False
        return self._is_rated or self.now() - self._anchor.host_ns >= _PATIENCE_NS

    @property
    def is_due(self) -> bool:
        """Whether the device's clock is to be tied to the host's again, between two steps."""
        if self._anchor is None or not self.is_usable:
            return False
        return self.now() - self._anchor.host_ns >= self._interval_ns or self.has_moved

    @property
    def is_settling(self) -> bool:
        """Whether anchors are to be closer to each other than half a minute, because there have been few."""
        return self._anchor is not None and self._interval_ns < _MAX_INTERVAL_NS

    @property
    def has_moved(self) -> bool:
        """Whether another device is in use than that of the last anchor."""
        return self._anchor is not None and self._device() not in (None, self._anchor.device)

    def anchor(self, resolve: Callable[[], None] = lambda: None) -> None:
        """Tie device time to host time again; waits for the device, so call it between steps only.

        CUDA returns elapsed times as float32 milliseconds: 30 s after an anchor their grain is 2 us.

        Args:
            resolve: reads all marks so far; they are between the former anchor and this one, and mapped by both.
        """
        device = self._device()
        if device is None:
            return
        try:
            found, former = self._measured(device), self._anchor
        except Exception as error:
            self.fail(error)
            return
        self._is_rated = former is not None and former.device == device
        if former is not None and self._is_rated:
            passed_ns = found.host_ns - former.host_ns
            elapsed_ns = former.event.elapsed_time(found.event) * 1e6
            rate, measured = self._rate, passed_ns / elapsed_ns if elapsed_ns > 0 else 0.0
            if abs(measured - 1) < _MAX_RATE_ERROR:
                self._rate = measured
            resolve()
            if passed_ns < _FIRST_INTERVAL_NS:  # too short to say what comes
                self._rate, self._is_rated = rate, False
            elif passed_ns >= self._interval_ns:
                self._interval_ns = min(_INTERVAL_GROWTH * self._interval_ns, _MAX_INTERVAL_NS)
        self._anchor = found

    def host_ns(self, event: Event) -> int:
        """Return when the device passed a mark, by the host's clock; 0 if the mark is of another device."""
        assert self._anchor is not None
        try:
            return self._anchor.host_ns + round(self._anchor.event.elapsed_time(event) * 1e6 * self._rate)
        except (RuntimeError, ValueError):  # what torch raises for events of two devices
            return 0

    def _device(self) -> int | None:
        if self.has_failed or self.num_captures:
            return None
        try:
            return self._current_device()
        except Exception as error:
            self.fail(error)
            return None

    def _take(self, *, is_reserved: bool) -> Event | None:
        """Return a free event, None if all that may be used are in use."""
        if len(self._free) + self._num_unmade <= (0 if is_reserved else self._num_reserved):
            self.num_refused += 1
            return None
        if self._free:
            return self._free.pop()
        self._num_unmade -= 1
        return self._new_event()

    def _measured(self, device: int) -> _Anchor:
        """Return a new anchor: an event of an idle device between two readings of the host's clock."""
        tries = []
        for _ in range(1 + _NUM_TRIES):
            event = self._new_event()
            begin_ns = self.now()
            event.record()
            event.synchronize()
            end_ns = self.now()
            tries.append((end_ns - begin_ns, _Anchor(event, (begin_ns + end_ns) // 2, device)))
        return min(tries[1:], key=lambda tried: tried[0])[1]  # the first one waited for what the device had to do


# The host must find the marks of rows that are still in memory.
_MAX_REMEMBERED = 1 << 16
# Reading a mark takes some microseconds; one that waits a little longer costs nothing.
_RESOLVE_EVERY_NS = 100_000_000


class DeviceMarks:
    """Marks made and read in the threads that train; any thread may ask for times.

    Args:
        device: makes and maps marks.

    Attributes:
        num_known: marks with a known time on the device.
        num_unknown: marks that could not be made.
    """

    def __init__(self, device: DeviceClock) -> None:
        self.num_known = self.num_unknown = 0
        self._device = device
        self._clock = device.now
        self._last_ns = self._resolve_ns = 0
        self._pending: deque[tuple[int, Event]] = deque()
        # By the mark's time on the host, that on the device, or None if the device had not passed it when last asked.
        self._times: dict[int, int | None] = {}
        self._order: deque[int] = deque()
        self._resolving = threading.Lock()

    def now(self) -> int:
        """Return the host's time, unlike any other that was returned, and mark the current stream."""
        now_ns = self._clock()
        if now_ns <= self._last_ns:
            now_ns = self._last_ns + 1
        self._last_ns = now_ns
        event = self._device.mark()
        if event is None:
            self.num_unknown += 1
        else:
            if len(self._order) >= _MAX_REMEMBERED:
                self._times.pop(self._order.popleft(), None)
            self._order.append(now_ns)
            self._times[now_ns] = None
            self._pending.append((now_ns, event))
        if now_ns >= self._resolve_ns and event is not None:
            self.resolve()
        return now_ns

    def resolve(self) -> None:
        """Read the marks that the device has passed, oldest first, without waiting for it.

        In the threads that train only: a query in another one would break the capture of a graph.
        """
        if not self._device.can_map or not self._resolving.acquire(blocking=False):
            return
        try:
            self._resolve_ns = self._clock() + _RESOLVE_EVERY_NS
            while self._pending and self._pending[0][1].query():
                host_ns, event = self._pending.popleft()
                device_ns = self._device.host_ns(event)
                self.num_known += device_ns != 0
                if host_ns in self._times:
                    self._times[host_ns] = device_ns
                self._device.release(event)
        except Exception as error:
            self._device.fail(error)
        finally:
            self._resolving.release()

    def device_ns(self, host_ns: int) -> int | None:
        """Return the device's time of a mark; 0 without one, None if the device had not passed it when last asked."""
        return self._times.get(host_ns, 0)
