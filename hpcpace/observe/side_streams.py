"""Operations that a framework issues on streams of its own, and for which the computing stream waits by an event.

FSDP2 calls blocking collectives on streams of its own. That these hold their stream costs nothing; what costs is that
the computing stream waits for an event that was recorded behind them. Those waits are found by following events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from hpcpace.observe.device_times import DeviceOperation, DeviceTimes


class SideStreams:
    """Follows which operations are behind which event.

    Args:
        times: follows the operations themselves.
        stream_id: returns a number for a stream, that of `DeviceClock.current_stream`.
    """

    def __init__(self, times: DeviceTimes, stream_id: Callable[[Any], int]) -> None:
        self._times, self._stream_id = times, stream_id
        self._behind: dict[int, list[DeviceOperation]] = {}
        self._events: WeakKeyDictionary[Any, list[DeviceOperation]] = WeakKeyDictionary()
        times.issued_aside = self._issued

    def recorded(self, stream: Any, event: Any) -> None:
        """Note that an event was recorded on a stream."""
        if self._behind and (operations := self._open(self._behind.get(self._stream_id(stream), ()))):
            self._events[event] = operations

    def wait(self, stream: Any, event: Any, wait: Callable[..., Any]) -> Any:
        """Call `wait`, which makes a stream wait for an event, between two marks if operations are behind it."""
        operations = self._open(self._events.pop(event, ())) if self._events else []
        if not operations:
            return wait(stream, event)
        stream_id = self._stream_id(stream)
        if not self._times.computes_on(stream_id):
            self._behind.setdefault(stream_id, []).extend(operations)
            return wait(stream, event)
        for operation in operations:
            operation.is_awaited = True
        return self._times.blocked(operations[-1], wait, stream, event)

    def _issued(self, stream_id: int, operation: DeviceOperation) -> None:
        self._behind[stream_id] = [*self._open(self._behind.get(stream_id, ())), operation]

    @staticmethod
    def _open(operations: Any) -> list[DeviceOperation]:
        return [operation for operation in operations if not (operation.is_awaited or operation.is_recorded)]
