"""What the TCP connections of this process carry to other hosts, once a second, as rows of the trace.

Bounded, however many sockets a job opens: the connections with the most bytes have rows of their own, what the others
carry is added up, and of more than a few connections each has a row every few seconds only. Counters are cumulative, so
that nothing is lost by that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpcpace.core.text import NS_PER_S
from hpcpace.observe.tcp_sockets import Counters, Ends, Reading
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import OTHER_CONNECTIONS

_ROWS_PER_S, _READINGS_PER_S = 4, 16
_MOST_NUMBERS = 4096
"""Connections that get rows in a run: a program that opens new ones all the time must not fill the trace."""
_CUMULATIVE = slice(7)
_ADDED = ("sent_bytes", "acked_bytes", "received_bytes", "retransmitted_bytes", "busy_ns", "receiver_limited_ns",
          "sender_limited_ns", "marked_packets")  # fmt: skip
_UNKNOWN_RANK = -1
_ZERO = Counters()


@dataclass(slots=True)
class _Known:
    """A connection that is open.

    Attributes:
        number: under which it has rows, None if it has none.
        time_ns, counters: of the last reading.
        is_written: whether that reading has a row.
    """

    number: int | None
    time_ns: int
    counters: Counters
    ends: Ends | None = None
    is_written: bool = False

    @property
    def size_bytes(self) -> int:
        """What it has carried in both directions."""
        return self.counters.acked_bytes + self.counters.received_bytes


class FlowSampler:
    """Records connections and their flows.

    Args:
        recorder: takes the rows.
        read: yields a reading of each connection that is open.
        most: connections that have rows of their own at a time.
        clock: the host's clock.
    """

    def __init__(
        self,
        recorder: Recorder,
        read: Callable[[], Iterable[Reading]],
        *,
        most: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder, self._read, self._most, self._clock = recorder, read, most, clock
        self._known: dict[int, _Known] = {}
        self._num_listed = self._next_number = 0
        self._sum = _ZERO
        self._others = _Known(OTHER_CONNECTIONS, 0, _ZERO)
        self._sampled_ns: int | None = None
        self._due_ns = 0

    def sample(self, *, is_last: bool = False) -> None:
        """Record what has changed, if it is time to, or for the last time."""
        begin_ns = self._clock()
        if begin_ns < self._due_ns and not is_last:
            return
        if self._sampled_ns is None:
            self._others.time_ns = begin_ns
        readings = list(self._read())
        before, self._known = self._known, {}
        for reading in readings:
            self._known[reading.inode] = before.get(reading.inode) or self._new(reading)
        self._num_listed = sum(known.number is not None for known in self._known.values())
        self._list_new()
        for reading in readings:
            self._take(self._known[reading.inode], reading)
        num_written = sum(known.is_written for known in self._known.values())
        self._record(self._others, begin_ns, self._sum)
        self._sampled_ns = begin_ns
        interval_s = max(1, math.ceil(num_written / _ROWS_PER_S), math.ceil(len(self._known) / _READINGS_PER_S))
        # Half a second early is in time: the thread that calls does so about once a second.
        self._due_ns = begin_ns + interval_s * NS_PER_S - NS_PER_S // 2

    def _new(self, reading: Reading) -> _Known:
        """Return a connection that is seen for the first time; at the last sample all its counters were zero."""
        if self._sampled_ns is None:
            return _Known(None, reading.time_ns, reading.counters, reading.ends)
        return _Known(None, self._sampled_ns, _ZERO, reading.ends)

    def _list_new(self) -> None:
        """Give numbers to connections without: while there is room, and then in place of others with half the bytes."""
        unlisted = sorted((known for known in self._known.values() if known.number is None), key=_size, reverse=True)
        listed: list[_Known] = []
        if len(unlisted) > self._most - self._num_listed:
            listed = sorted((known for known in self._known.values() if known.number is not None), key=_size)
        for known in unlisted:
            if self._next_number >= _MOST_NUMBERS:
                return
            if self._num_listed >= self._most:
                if not listed or listed[0].size_bytes * 2 >= known.size_bytes:
                    return
                listed.pop(0).number = None
                self._num_listed -= 1
            self._list(known)

    def _list(self, known: _Known) -> None:
        assert known.ends is not None
        known.number, known.is_written = self._next_number, False
        self._next_number += 1
        self._num_listed += 1
        local, remote, interface = (text.encode() for text in known.ends)
        self._recorder.add_connection(known.number, _UNKNOWN_RANK, b"", local, remote, interface)

    def _take(self, known: _Known, reading: Reading) -> None:
        if known.number is None:
            self._sum = _with_growth(self._sum, known.counters, reading.counters)
            known.time_ns, known.counters = reading.time_ns, reading.counters
        else:
            self._record(known, reading.time_ns, reading.counters)

    def _record(self, known: _Known, time_ns: int, counters: Counters) -> None:
        """Write a row if anything was carried, behind one of when that had not begun."""
        is_changed = counters[_CUMULATIVE] != known.counters[_CUMULATIVE]
        if is_changed:
            if not known.is_written:
                self._recorder.add_flow(known.time_ns, known.number, *known.counters)
            self._recorder.add_flow(time_ns, known.number, *counters)
        known.time_ns, known.counters, known.is_written = time_ns, counters, is_changed


def _size(known: _Known) -> int:
    return known.size_bytes


def _with_growth(total: Counters, before: Counters, after: Counters) -> Counters:
    grown = {name: getattr(total, name) + max(getattr(after, name) - getattr(before, name), 0) for name in _ADDED}
    return total._replace(**grown)
