"""Start, end and waits of operations on the GPU, from CUDA events that are read later.

An operation starts where the caller's stream was when it was issued, and ends where its work's future is complete on
the device. What the caller's stream does between a mark before a wait and one after it is held up by the operation.

FSDP2 calls blocking collectives on streams of its own. That these hold their stream costs nothing; what costs is that
the computing stream waits for an event that was recorded behind them. Those waits are found by following events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from hpcpace.observe.device.clock import DeviceClock, Event
from hpcpace.trace.schema import ExitKind

Row = tuple[int, ...]
_STEP, _ENTER, _BLOCKED = 0, 6, 8
# Operations of several communicators end in another order than they were issued. Asking for a few is enough.
_MAX_ASKED = 8
# Steps after which operations that were issued as one and never waited for are recorded as never completed.
_FORGET_AFTER_STEPS = 10
_RESOLVE_EVERY_NS = 100_000_000


class DeviceOperation:
    """An operation on a device between its issue and its row, or several that were issued as one.

    Args:
        row: its row as far as the host knows it, without `enqueue_ns`.
        begin: the caller's stream before it was issued.

    Attributes:
        parts: row and begin of each.
        end: where the device has completed it; None if only a wait can tell.
        waits: marks before and after each wait for it.
        is_blocking: whether its caller waits at once, so that it holds the caller's stream from its issue on.
        work: what a wait may be called on, kept so that torch hands out the same object.
        address: of its result, for waits that name a tensor; 0 for none.
        is_aside: whether its caller waits on a stream of a framework, where nothing is computed.
        is_awaited: whether the stream that computes has waited for it all the same.
        is_recorded: whether its row is written.
    """

    __slots__ = ("address", "end", "is_aside", "is_awaited", "is_blocking", "is_recorded", "parts", "waits", "work")

    def __init__(self, row: Row, begin: Event, *, is_blocking: bool = False) -> None:
        self.parts = [(row, begin)]
        self.is_blocking = is_blocking
        self.end: Event | None = None
        self.waits: list[tuple[Event, Event]] = []
        self.work: Any = None
        self.address = 0
        self.is_aside = self.is_awaited = self.is_recorded = False

    @property
    def step(self) -> int:
        """The step in which it was issued."""
        return self.parts[0][0][_STEP]

    @property
    def events(self) -> list[Event]:
        """All its events, each once."""
        found = [begin for _, begin in self.parts] + [mark for wait in self.waits for mark in wait]
        return list({id(event): event for event in [*found, *([] if self.end is None else [self.end])]}.values())

    @property
    def is_over(self) -> bool:
        """Whether the device has completed it and passed all waits for it."""
        if self.end is None:
            return bool(self.waits) and self.waits[-1][1].query()
        return self.end.query() and all(after.query() for _, after in self.waits)


class DeviceTimes:
    """Follows operations on one device, in the threads that train.

    Not measured on a GPU yet.

    Args:
        device: makes and maps marks.
        add: takes the row of an operation, with `enqueue_ns`.

    Attributes:
        num_captured: operations that were captured in CUDA graphs, whose replays nobody sees.
        num_refused: operations that were not recorded because all events were in use, or the device had failed.
        issued_aside: takes blocking operations on streams where nothing is computed, with the stream's number.
    """

    def __init__(self, device: DeviceClock, add: Callable[..., None]) -> None:
        self.num_captured = self.num_refused = 0
        self.issued_aside: Callable[[int, DeviceOperation], None] = lambda stream, operation: None
        self._device, self._add = device, add
        self._pending: list[DeviceOperation] = []
        self._lock, self._resolving = threading.Lock(), threading.Lock()
        self._by_work: dict[int, DeviceOperation] = {}
        self._by_address: dict[int, DeviceOperation] = {}
        self._coalesced: DeviceOperation | None = None
        self._is_coalescing = False
        self._resolve_ns = 0

    def cannot_follow(self) -> bool:
        """Return whether an operation that is about to be issued cannot be followed, and count it."""
        if self._device.is_usable:
            return False
        if self._device.has_failed:
            self.num_refused += 1
        else:
            self.num_captured += 1
        return True

    def begin(self) -> Event | None:
        """Return a mark where the caller's stream is before an operation; None, which is counted, without an event."""
        event = self._device.mark(is_reserved=True)
        if event is None or self._device.now() >= self._resolve_ns:
            self.resolve()
        if event is None:
            event = self._device.mark(is_reserved=True)
            self.num_refused += event is None
        return event

    def follow(self, row: Row, begin: Event, work: Any, *, is_blocking: bool = False, address: int = 0) -> None:
        """Note when the device completes `work`; its row is recorded by a later `resolve`.

        The future of an NCCL work counts as complete once it is enqueued: its callback runs at once, on a stream that
        waits for the operation, which is where the end belongs. Of a blocking call newer releases of torch return no
        work: the operation ran on the caller's stream. Operations after `start_coalescing` are issued by
        `end_coalescing`, and only a wait for the work of that shows their end.

        Args:
            row: see DeviceOperation.
            begin: from `begin`.
            work: what the operator returned; None for none.
            is_blocking: whether the caller waits at once.
            address: of the result.
        """
        if self._coalesced is not None:
            self._coalesced.parts.append((row, begin))
            return
        operation = DeviceOperation(row, begin, is_blocking=is_blocking)
        stream = self._device.side_stream() if is_blocking or work is None else None
        if stream is not None:
            operation.is_aside = True
            self.issued_aside(stream, operation)
        with self._lock:
            self._pending.append(operation)
        if self._is_coalescing:
            self._coalesced = operation
        elif work is None:
            self._end_here(operation)
        else:
            self._end_with(operation, work)
            self._await(operation, work)
            if address and not is_blocking:
                operation.address = address
                self._by_address[address] = operation

    def start_coalescing(self) -> None:
        """Note that operations from here on are issued together by `end_coalescing`."""
        self._coalesced, self._is_coalescing = None, True

    def end_coalescing(self, work: Any) -> None:
        """Note that the operations since `start_coalescing` were issued.

        Args:
            work: of all of them; None if the caller's stream has waited already.
        """
        operation, self._coalesced, self._is_coalescing = self._coalesced, None, False
        if operation is None:
            return
        if work is None:
            self._end_here(operation)
        else:
            self._await(operation, work)

    def computes_on(self, stream: int) -> bool:
        """Return whether a stream has marks of phases, and is the current one, where marks are made."""
        return stream in self._device.computing_streams and self._device.is_current(stream)

    def waits_for(self, work: Any) -> DeviceOperation | None:
        """Return the operation that a wait for `work` waits for."""
        return self._by_work.get(id(work))

    def waits_for_address(self, address: int) -> DeviceOperation | None:
        """Return the operation that a wait for the tensor at an address waits for."""
        return self._by_address.get(address)

    def blocked(self, operation: DeviceOperation, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `wait`, which makes the current stream wait for an operation, between two marks."""
        if operation.is_aside and not operation.is_awaited:  # on its own stream, which it holds anyway
            self._forget(operation)
            return wait(*args, **kwargs)
        is_held_since_its_call = operation.is_blocking and not operation.is_aside
        before = operation.parts[0][1] if is_held_since_its_call else self._mark()
        result = wait(*args, **kwargs)
        after = None if before is None else self._mark()
        if before is not None and after is not None:
            operation.waits.append((before, after))
        self._forget(operation)
        return result

    @property
    def has_pending(self) -> bool:
        """Whether an operation is not known to be complete."""
        return bool(self._pending)

    def resolve(self, step: int = 0) -> None:
        """Record the operations that the device has completed.

        Args:
            step: the step that has ended; operations that nobody has waited for in many steps are given up.
        """
        if not self._device.can_map or not self._resolving.acquire(blocking=False):
            return
        self._resolve_ns = self._device.now() + _RESOLVE_EVERY_NS
        try:
            self._resolve(step)
        except Exception as error:  # the boundary to the device of somebody else's job
            self._device.fail(error)
        finally:
            self._resolving.release()

    def _resolve(self, step: int) -> None:
        over, num_asked = set(), 0
        for operation in list(self._pending):
            if operation.is_over:
                self._record(operation)
            elif operation.end is None and not operation.waits and step - operation.step >= _FORGET_AFTER_STEPS:
                for row in self._open_rows(operation):
                    self._add(*row)
                self._drop(operation)
            else:
                num_asked += 1
                if num_asked == _MAX_ASKED:
                    break
                continue
            over.add(id(operation))
        with self._lock:
            self._pending = [operation for operation in self._pending if id(operation) not in over]

    def open_rows(self) -> list[Row]:
        """Return the rows of operations that the device has not completed, with the host's time of their issue."""
        return [row for operation in list(self._pending) for row in self._open_rows(operation)]

    def _mark(self) -> Event | None:
        return self._device.mark(is_reserved=True)

    def _end_with(self, operation: DeviceOperation, work: Any) -> None:
        def enqueued(_: Any) -> None:
            operation.end = self._mark()

        try:
            future = work.get_future()
        except RuntimeError:  # not every work has one; then a wait shows its end
            return
        future.then(enqueued)

    def _end_here(self, operation: DeviceOperation) -> None:
        operation.end = self._mark()
        if operation.end is not None and not operation.is_aside:
            operation.waits.append((operation.parts[0][1], operation.end))

    def _await(self, operation: DeviceOperation, work: Any) -> None:
        operation.work = work
        self._by_work[id(work)] = operation

    def _forget(self, operation: DeviceOperation) -> None:
        """Let go of the work and of the result, which keep memory of the device."""
        if operation.work is not None:
            self._by_work.pop(id(operation.work), None)
            operation.work = None
        if self._by_address.get(operation.address) is operation:
            del self._by_address[operation.address]

    def _drop(self, operation: DeviceOperation) -> None:
        self._forget(operation)
        operation.is_recorded = True
        self._device.release(*operation.events)

    def _record(self, operation: DeviceOperation) -> None:
        times = {id(event): self._device.host_ns(event) for event in operation.events}
        blocked_ns = sum(max(times[id(after)] - times[id(before)], 0) for before, after in operation.waits)
        kind = ExitKind.WAIT if operation.end is None else ExitKind.COMPLETION
        end = operation.waits[0][1] if operation.end is None else operation.end
        if 0 in times.values():  # of a device that is not in use any more
            self.num_refused += len(operation.parts)
            self._drop(operation)
            return
        for index, (row, begin) in enumerate(operation.parts):
            enter_ns = times[id(begin)]
            # Operations that were issued as one hold a stream once: the last of them has that time.
            held_ns = blocked_ns if index == len(operation.parts) - 1 else 0
            self._add(*row[:_ENTER], enter_ns, max(times[id(end)], enter_ns), held_ns, kind, row[_ENTER])
        self._drop(operation)

    @staticmethod
    def _open_rows(operation: DeviceOperation) -> list[Row]:
        return [
            (*row[:_ENTER], row[_ENTER], 0, row[_BLOCKED], ExitKind.NEVER, row[_ENTER]) for row, _ in operation.parts
        ]


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
