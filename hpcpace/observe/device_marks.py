"""Marks of phases and steps on a device: each is known by the host's time at which it was made.

The observers take the time from `DeviceMarks.now` instead of the host's clock and go on with that number. The recorder
asks for the device's time of it when it writes a row, so rows can be renumbered, kept and dropped without a thought to
events.
"""

from __future__ import annotations

import threading
from collections import deque

from hpcpace.observe.device_clock import DeviceClock, Event

# The host must find the marks of rows that are still in memory.
_MOST_REMEMBERED = 1 << 16
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
            self._remember(now_ns)
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

    def _remember(self, host_ns: int) -> None:
        if len(self._order) >= _MOST_REMEMBERED:
            self._times.pop(self._order.popleft(), None)
        self._order.append(host_ns)
        self._times[host_ns] = None
