"""Traces on node-local disk whose ranks were killed: who brings them home, and how they are found.

At its end every rank of a node looks for traces of its own run that nobody writes any more. Where no rank has lived on,
`hpcpace collect` does the same.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.files import Folder
from hpcpace.core.rundir import NUM_OURS_OF_TRACES, rank_of
from hpcpace.observe.node_local import NodeLocalTrace
from hpcpace.world.deadline import Deadline

PREFIX = "hpcpace-"
"""Beginning of the names of traces' folders on node-local disk."""

_NAME = re.compile(rf"{PREFIX}.+-attempt-[0-9]+-rank-[0-9]+-[0-9]+", re.DOTALL)

_Place = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True, kw_only=True)
class LeftTrace:
    """A trace that was found on node-local disk.

    Attributes:
        path: where it was found.
        destination: where it belongs.
        problem: why it is still there; empty if it was brought home.
    """

    path: Path
    destination: Path
    problem: str


def bring_left_traces_home(
    trace_dir: Path,
    homes: Iterable[Path],
    *,
    timeout_s: float,
    own_name: str = "",
    passed_over: Counter[str] | None = None,
) -> list[LeftTrace]:
    """Bring all traces home that belong into some folders and that nobody writes any more.

    Args:
        trace_dir: the folder on node-local disk.
        homes: folders of traces in a run.
        timeout_s: how long it may take, all together.
        own_name: folder of this process's own trace, which is left alone.
        passed_over: takes why others were left alone, and how many for each reason.

    Raises:
        OSError: the folder cannot be read.
    """
    deadline, found = Deadline(timeout_s), []
    passed_over = Counter() if passed_over is None else passed_over
    places = {place for home in homes if (place := _place(home))}
    with Folder.open(trace_dir) as folder:
        for name in folder.names():
            if not _NAME.fullmatch(name) or name == own_name:
                continue
            try:
                found.append(_bring_home(folder, name, places, deadline))
            except _PassedOver as reason:
                passed_over[str(reason)] += 1
    return found


class _PassedOver(Exception):
    """A folder is left alone; says why."""


def _bring_home(folder: Folder, name: str, places: Set[_Place], deadline: Deadline) -> LeftTrace:
    """Return the trace of a name, brought home if that works.

    Raises:
        _PassedOver: it was not left, or does not belong into one of the folders.
    """
    try:
        trace = NodeLocalTrace.left_behind(folder, name)
    except FileNotFoundError:
        raise _PassedOver("it does not say where it belongs") from None
    except OSError as error:  # somebody else's, or none
        raise _PassedOver(error.strerror or str(error)) from None
    if trace is None:
        raise _PassedOver("a process still writes it")
    try:
        if rank_of(trace.destination.name) is None or _place(trace.destination.parent) not in places:
            raise _PassedOver("it belongs to another run")
        trace.bring_home(deadline.left_s)
        trace.remove()
        problem = ""
    except OSError as error:
        problem = error.strerror or str(error)
    finally:
        trace.release()
    return LeftTrace(path=trace.path, destination=trace.destination, problem=problem)


def _place(folder: Path) -> _Place | None:
    """Return what identifies a folder of traces, whatever leads to it; None where there is none."""
    try:
        with Folder.open(folder, num_ours=NUM_OURS_OF_TRACES) as opened:
            found = os.fstat(opened.descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
