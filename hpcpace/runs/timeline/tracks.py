"""Processes with tracks of slices, arrows and counters, and their file for Perfetto.

The file is a sequence of protobuf messages `Trace` (perfetto/protos/perfetto/trace/trace.proto), whose concatenation
is one trace, so that only some packets are in memory at a time. Perfetto's own trace builder makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import UsageError
from hpcpace.core.text import printable

_MAX_NAME = 60

Argument = tuple[str, int | float | str]


class Slice(NamedTuple):
    """Something that lasts.

    Attributes:
        begin_ns, end_ns: on the common clock; without an end, it had none.
        name: what it is.
        arguments: what is known of it.
        from_here: numbers of arrows that leave it.
        to_here: numbers of arrows that end at it.
    """

    begin_ns: int
    end_ns: int | None
    name: str
    arguments: tuple[Argument, ...] = ()
    from_here: tuple[int, ...] = ()
    to_here: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Track:
    """Slices of one kind of a process; those that overlap without being nested are drawn in rows of their own."""

    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A number over time.

    Attributes:
        unit: of its values.
        time_ns: on the common clock, ascending, int64, (num_values,).
        values: from each time on, float64, (num_values,).
    """

    name: str
    unit: str
    time_ns: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Process:
    """A rank, or a host with its interfaces.

    Attributes:
        name: as it is shown, with the number after it.
        number: unique among the processes, above 0; None for a group of tracks that is no process.
        outer: the track below which the others are shown in their order; without it, Perfetto orders those of a process
            by name.
    """

    name: str
    number: int | None
    outer: Track | None = None
    tracks: Sequence[Track] = ()
    counters: Sequence[Counter] = field(default=())


def nested_rows(slices: Iterable[Slice]) -> Iterator[list[tuple[int, Slice, bool]]]:
    """Yield the rows that slices are drawn in, each as marks in order of time: time, slice, whether it begins there.

    In a row every slice ends before the one around it. A slice goes into the first row that can take it.
    """
    rows: list[list[tuple[int, Slice, bool]]] = []
    opened: list[list[Slice]] = []
    for one in sorted(slices, key=lambda one: (one.begin_ns, -_end(one))):
        for marks, stack in zip(rows, opened, strict=True):
            while stack and _end(stack[-1]) <= one.begin_ns:
                last = stack.pop()
                marks.append((_end(last), last, False))
            if not stack or _end(one) <= _end(stack[-1]):
                break
        else:
            marks, stack = [], []
            rows.append(marks)
            opened.append(stack)
        marks.append((one.begin_ns, one, True))
        stack.append(one)
    for marks, stack in zip(rows, opened, strict=True):
        marks += [(_end(one), one, False) for one in reversed(stack) if one.end_ns is not None]
        yield marks


def _end(one: Slice) -> int:
    return one.end_ns if one.end_ns is not None else 1 << 62


def shown_name(name: str) -> str:
    """Return a name that comes from a file as it can be shown."""
    text = printable(name)
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 3]}..."


_PACKETS_AT_ONCE = 4096
_SEQUENCE = 1
_VALUES = {str: "string_value", float: "double_value", int: "int_value"}  # of a DebugAnnotation
_STATE_CLEARED, _NEEDS_STATE = 1, 2  # TracePacket.SequenceFlags


@dataclass
class Written:
    """What a file holds: its bytes, slices and arrows."""

    num_bytes: int = 0
    num_slices: int = 0
    num_arrows: int = 0


def write_processes(
    processes: Iterable[Process], write: Callable[[bytes, int], None], *, progress: Callable[[int], None]
) -> Written:
    """Write processes to a file, one after the other.

    Args:
        processes: what the file shows.
        write: writes bytes at an offset, which is that of the end of what was written before.
        progress: called with the number of processes written, after each.

    Raises:
        UsageError: the package perfetto is not installed.
    """
    writer = _Writer(_builder_module(), write)
    for number, process in enumerate(processes, start=1):
        writer.add_process(process)
        progress(number)
    writer.flush()
    return writer.written


def check_perfetto() -> None:
    """Raise what `write_processes` does where the package perfetto is not installed."""
    _builder_module()


def _builder_module() -> ModuleType:
    try:
        # Loads in 0.15 s, which only this command pays.
        from perfetto.trace_builder import proto_builder
    except ImportError as error:
        raise UsageError(
            f"a timeline is written with the package perfetto, which cannot be loaded ({error}): "
            "pip install 'hpcpace[timeline]'"
        ) from None
    return proto_builder  # type: ignore[no-any-return]


@dataclass
class _Writer:
    """Turns marks into packets; names are written once and numbered from then on."""

    module: ModuleType
    write: Callable[[bytes, int], None]
    written: Written = field(default_factory=Written)
    _names: dict[str, int] = field(default_factory=dict)
    _keys: dict[str, int] = field(default_factory=dict)
    _num_tracks: int = 0
    _num_waiting: int = 0
    _builder: Any = None

    def add_process(self, process: Process) -> None:
        """Add a process with all that it has."""
        descriptor = self._descriptor(None)
        parent = int(descriptor.uuid)
        descriptor.name = process.name  # tracks without a parent are in the order of names, those without one first
        if process.number is None:
            descriptor.child_ordering = descriptor.EXPLICIT
        else:
            descriptor.process.pid = process.number
            descriptor.process.process_name = process.name
            descriptor.process.legacy_sort_index = process.number
        if process.outer is not None:
            parent = self._add_track(process.outer, parent, 0)
        for order, track in enumerate(process.tracks):
            self._add_track(track, parent, order)
        for order, counter in enumerate(process.counters, start=len(process.tracks)):
            self._add_counter(counter, parent, order)

    def _add_track(self, track: Track, parent: int, order: int) -> int:
        """Add a track and return its number; below it, others are in their order."""
        first = 0
        for row in nested_rows(track.slices):
            # Rows of one name are drawn as one track of several lines.
            descriptor = self._descriptor(parent)
            descriptor.name, descriptor.sibling_order_rank = track.name, order
            descriptor.child_ordering = descriptor.EXPLICIT
            uuid = int(descriptor.uuid)
            first = first or uuid
            for time_ns, one, is_begin in row:
                self._add_mark(uuid, time_ns, one if is_begin else None)
        return first or parent

    def _add_mark(self, uuid: int, time_ns: int, begun: Slice | None) -> None:
        packet = self._packet()
        packet.timestamp = max(time_ns, 0)
        event = packet.track_event
        event.track_uuid = uuid
        if begun is None:
            event.type = event.TYPE_SLICE_END
            return
        event.type = event.TYPE_SLICE_BEGIN
        event.name_iid = self._number(packet, self._names, begun.name, packet.interned_data.event_names)
        event.flow_ids.extend(begun.from_here)
        event.terminating_flow_ids.extend(begun.to_here)
        keys = packet.interned_data.debug_annotation_names
        for key, value in begun.arguments:
            annotation = event.debug_annotations.add()
            annotation.name_iid = self._number(packet, self._keys, key, keys)
            setattr(annotation, _VALUES[type(value)], value)
        self.written.num_slices += 1
        self.written.num_arrows += len(begun.to_here)

    def _add_counter(self, counter: Counter, parent: int, order: int) -> None:
        descriptor = self._descriptor(parent)
        descriptor.name, descriptor.sibling_order_rank = f"{counter.name} ({counter.unit})", order
        descriptor.counter.unit_name = counter.unit
        uuid = int(descriptor.uuid)
        for time_ns, value in zip(counter.time_ns.tolist(), counter.values.tolist(), strict=True):
            packet = self._packet()
            packet.timestamp = max(time_ns, 0)
            event = packet.track_event
            event.track_uuid, event.type, event.double_counter_value = uuid, event.TYPE_COUNTER, value

    def _descriptor(self, parent: int | None) -> Any:
        self._num_tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid = self._num_tracks
        if parent is not None:
            descriptor.parent_uuid = parent
        return descriptor

    def _packet(self) -> Any:
        """Return a new packet; the one before it is complete."""
        if self._num_waiting >= _PACKETS_AT_ONCE:
            self.flush()
        is_first = self._builder is None and not self.written.num_bytes
        if self._builder is None:
            self._builder = self.module.TraceProtoBuilder()
        self._num_waiting += 1
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = _STATE_CLEARED | _NEEDS_STATE if is_first else _NEEDS_STATE
        return packet

    def _number(self, packet: Any, known: dict[str, int], name: str, table: Any) -> int:
        """Return the number of a name, which its first packet brings along."""
        number = known.get(name)
        if number is None:
            number = known[name] = len(known) + 1
            entry = table.add()
            entry.iid, entry.name = number, name
        return number

    def flush(self) -> None:
        """Write what is waiting."""
        if self._builder is not None:
            content = self._builder.serialize()
            self.write(content, self.written.num_bytes)
            self.written.num_bytes += len(content)
        self._builder, self._num_waiting = None, 0
