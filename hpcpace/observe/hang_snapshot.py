"""What a notice of a hang shows of a rank: its operations, and where its threads are.

Of threads it has files, functions and lines, and no values of any variable.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hpcpace.core.records import dataclass
from hpcpace.hang.notices import NoticedCall, NoticedCount, NoticedGroup, ThreadStack
from hpcpace.trace.schema import TABLES, Op

_COLUMNS = TABLES["collectives"].dtype.names or ()
_OURS = str(Path(__file__).parent)
_OWN_THREADS = "hpcpace-"
_MAX_FRAMES = 1000
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_export/", "/triton/compiler/")
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/debugpy/", "/pydevd", "/IPython/terminal/")


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What a rank has called and not finished, and how much it has called; see `Notice`."""

    groups: tuple[NoticedGroup, ...] = ()
    calls: tuple[NoticedCall, ...] = ()
    entered: tuple[NoticedCount, ...] = ()
    is_complete: bool = False


def operations(
    rank: int,
    *,
    groups: Mapping[int, tuple[str, tuple[int, ...]]],
    rows: Iterable[Sequence[Any]],
    entered: Iterable[tuple[int, int, int, int]],
    is_complete: bool,
) -> Operations:
    """Return the operations of one rank.

    Args:
        rank: its number.
        groups: name and ranks of each group by its number.
        rows: open operations, as rows of `collectives`.
        entered: as `CollectiveObserver.entered` returns it.
        is_complete: whether every operation was observed.
    """
    return Operations(
        groups=tuple(NoticedGroup(name=name, members=members) for name, members in groups.values()),
        calls=tuple(
            _call(dict(zip(_COLUMNS, row, strict=False)), groups) for row in sorted(rows, key=lambda row: row[6])
        ),
        entered=tuple(
            _count(rank, groups[group][0], op, peer, number)
            for group, op, peer, number in entered
            # Receives from any rank are counted again once their sender is known.
            if group in groups and (op < 0 or peer >= 0)
        ),
        is_complete=is_complete,
    )


def _call(row: Mapping[str, Any], groups: Mapping[int, tuple[str, tuple[int, ...]]]) -> NoticedCall:
    name, _ = groups.get(row["group"], (f"group {row['group']}", ()))
    return NoticedCall(
        group=name,
        op=Op(row["op"]).name.lower(),
        seq=int(row["seq"]),
        size_bytes=int(row["bytes"]),
        peer=int(row["peer"]),
        entered_ns=int(row["enter_ns"]),
        step=int(row["step"]),
    )


def _count(rank: int, group: str, op: int, peer: int, number: int) -> NoticedCount:
    source, destination = (-1, -1) if op < 0 else (rank, peer) if op == Op.SEND else (peer, rank)
    return NoticedCount(group=group, source=source, destination=destination, num_entered=number)


def thread_stacks(training_thread: int) -> tuple[ThreadStack, ...]:
    """Return the stacks of all threads but those of hpcpace, the one that trains first.

    Args:
        training_thread: `threading.get_ident()` of it.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        ThreadStack(name=names.get(ident, f"thread {ident}"), is_training=ident == training_thread, frames=_frames(top))
        for ident, top in sys._current_frames().items()
        if not names.get(ident, "").startswith(_OWN_THREADS)
    ]
    return tuple(sorted(stacks, key=lambda stack: not stack.is_training))


def training_stack(training_thread: int) -> tuple[str, ...]:
    """Return the frames of the thread that trains, the innermost last; empty where it has ended."""
    top = sys._current_frames().get(training_thread)
    return () if top is None else _frames(top)


def excuse_of(frames: tuple[str, ...]) -> str:
    """Return why a thread with such a stack may take long; empty without a reason."""
    if any(part in frame for frame in frames for part in _DEBUGGERS):
        return "it is in a debugger"
    if any(part in frame for frame in frames for part in _COMPILERS):
        return "it compiles"
    return ""


def _frames(top: FrameType) -> tuple[str, ...]:
    """Return the frames below and including `top`, the innermost last, without those that observe the job."""
    frames: list[str] = []
    frame: FrameType | None = top
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            frames.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return tuple(reversed(frames))
