"""Traces on node-local disk whose ranks were killed: who brings them home, and how they are found.

At its end every rank of a node looks for traces of its own run that nobody writes any more. Where no rank has lived on,
`hpcpace collect` does the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcpace.files import Folder
from hpcpace.observe.node_local import NodeLocalTrace
from hpcpace.rundir import rank_of
from hpcpace.world.deadline import Deadline

PREFIX = "hpcpace-"
"""Beginning of the names of traces' folders on node-local disk."""


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
    trace_dir: Path, homes: Iterable[Path], *, timeout_s: float, own_name: str = ""
) -> list[LeftTrace]:
    """Bring all traces home that belong into some folders and that nobody writes any more.

    Args:
        trace_dir: the folder on node-local disk.
        homes: folders of traces in a run.
        timeout_s: how long it may take, all together.
        own_name: folder of this process's own trace, which is left alone.

    Raises:
        OSError: the folder cannot be read.
    """
    deadline, found = Deadline(timeout_s), []
    homes = [home for home in homes if home.is_dir()]
    with Folder.open(trace_dir) as folder:
        for name in folder.names():
            if name.startswith(PREFIX) and name != own_name:
                found += _bring_home(folder, name, homes, deadline)
    return found


def _bring_home(folder: Folder, name: str, homes: list[Path], deadline: Deadline) -> list[LeftTrace]:
    """Return the trace of a name if it was left and belongs into one of the folders, else nothing."""
    try:
        trace = NodeLocalTrace.left_behind(folder, name)
    except OSError:  # somebody else's, or none
        return []
    if trace is None:
        return []
    try:
        if rank_of(trace.destination.name) is None or not _is_one_of(trace.destination.parent, homes):
            return []
        trace.bring_home(deadline.left_s)
        trace.remove()
        problem = ""
    except OSError as error:
        problem = error.strerror or str(error)
    finally:
        trace.release()
    return [LeftTrace(path=trace.path, destination=trace.destination, problem=problem)]


def _is_one_of(folder: Path, homes: list[Path]) -> bool:
    try:
        return any(os.path.samefile(folder, home) for home in homes)
    except OSError:
        return False
