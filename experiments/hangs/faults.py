"""What makes a rank hold up the others: each fault strikes once, on one rank, at one place of one step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.hangs.programs import Groups

HOLD = "hold"
"""Name of the file in which a rank that ends names the process that keeps its connections open."""


class SwallowedError(Exception):
    """Raised in a step, and swallowed by the loop around it."""


class SkippedError(Exception):
    """Leaves out the rest of a step."""


def _keep_connections(folder: Path) -> None:
    """Leave the connections of this process open when it ends, as those of a host that goes down stay open.

    Without that, gloo's peers would fail at once; NCCL's, and those of a dead host, do not.
    """
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            time.sleep(60)
    (folder / f"{HOLD}-{child}").touch()


def endless(folder: Path, groups: Groups) -> None:
    """Compute without end."""
    product = torch.eye(8)
    while True:
        product = product @ product
        time.sleep(0.01)


def stuck(folder: Path, groups: Groups) -> None:
    """Wait for something that never comes, such as the next batch or a disk."""
    threading.Event().wait()


def stop(folder: Path, groups: Groups) -> None:
    """Be stopped, as by a debugger or a host that suspends."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_inside(folder: Path, groups: Groups) -> None:
    """Be stopped a moment later, when inside an operation."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def late(folder: Path, groups: Groups) -> None:
    """Come late, so that others stand in an operation for a moment."""
    time.sleep(1.0)


def exit_with_code(folder: Path, groups: Groups) -> None:
    """Exit."""
    _keep_connections(folder)
    sys.exit(7)


def raise_error(folder: Path, groups: Groups) -> None:
    """Die of an exception."""
    _keep_connections(folder)
    raise ValueError("a bad sample")


def kill(folder: Path, groups: Groups) -> None:
    """Die without a word, with connections that stay open, as of a host that goes down."""
    _keep_connections(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def swallow(folder: Path, groups: Groups) -> None:
    """Raise something that the loop swallows, so that the rest of the step is left out."""
    raise SwallowedError("a bad sample")


def skip(folder: Path, groups: Groups) -> None:
    """Leave out the rest of the step."""
    raise SkippedError


def other_operation(folder: Path, groups: Groups) -> None:
    """Call another operation in the place of the usual one."""
    dist.all_gather([torch.zeros(10) for _ in range(groups.size)], torch.ones(10))


def other_order(folder: Path, groups: Groups) -> None:
    """Call the operation of the second group before that of the first."""
    dist.all_reduce(torch.ones(10), group=groups.twin)


FAULTS: Mapping[str, Callable[[Path, Groups], None]] = {
    fault.__name__: fault
    for fault in (
        endless, stuck, stop, stop_inside, late, exit_with_code, raise_error, kill, swallow, skip, other_operation,
        other_order,
    )
}  # fmt: skip
