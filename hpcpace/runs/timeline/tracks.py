"""What a timeline holds, apart from any file format: processes with tracks of slices, and counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import printable

_MOST_NAME = 60

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
    return text if len(text) <= _MOST_NAME else f"{text[: _MOST_NAME - 3]}..."
