"""Steps of the clocks of a lab's host, as a virtual machine's that was stopped or moved, or as NTP's.

The kernel cannot do that: all hosts have one CLOCK_REALTIME, and the offsets of a time namespace are fixed. So the
processes of a lab run with a preloaded library, host_clock.cpp, which adds what a file in their host's /dev/shm says.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import StrEnum
from pathlib import Path

from hpcpace.core.compat import load_compiled
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.lab.plan import LabFiles

STEPS_FILE = "hpcpace-lab-clock"
"""In /dev/shm of each host: three int64, of `Steps` in host_clock.cpp."""
STEPS_BYTES = 24
_MONOTONIC, _FLOOR, _REALTIME = range(3)
_READ_AND_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_PRELOAD = "LD_PRELOAD"


class Clock(StrEnum):
    """The clocks of a host that can be stepped; CLOCK_BOOTTIME goes with the first."""

    MONOTONIC = "monotonic"
    REALTIME = "realtime"


def install_library(files: LabFiles) -> None:
    """Put the library into a lab's folder, if it was compiled; each process that starts in the lab then loads it."""
    library = load_compiled(Path(__file__).with_name("host_clock.cpp"))
    if library is not None:
        with Folder.open(files.clock_library.parent) as folder:
            folder.write(files.clock_library.name, Path(library._name).read_bytes(), mode=0o755)


def preloading(files: LabFiles, environ: dict[str, str]) -> dict[str, str]:
    """Return the variable that preloads the library, next to what it has already; nothing without a library."""
    if not files.clock_library.exists():
        return {}
    return {_PRELOAD: " ".join(dict.fromkeys([str(files.clock_library), *environ.get(_PRELOAD, "").split()]))}


def step_clock(pid: int, clock: Clock, step_ns: int, *, offset_ns: int) -> None:
    """Let a clock of a host be off by a step from now on, instead of by the one before.

    Args:
        pid: first process of the host, as the caller sees it.
        clock: which one; CLOCK_MONOTONIC stands still for a step back, because it never goes back.
        step_ns: how far it is ahead.
        offset_ns: how far the CLOCK_MONOTONIC of the host's time namespace is ahead of the caller's.
    """
    with (
        Folder.open(Path(f"/proc/{pid}/root/dev/shm")) as folder,
        closing_descriptor(os.open(STEPS_FILE, _READ_AND_WRITE, dir_fd=folder.descriptor)) as file,
        mmap.mmap(file, STEPS_BYTES) as mapped,
        memoryview(mapped) as raw,
        raw.cast("q") as steps,  # so that each is stored at once
    ):
        if clock is Clock.REALTIME:
            steps[_REALTIME] = step_ns
            return
        steps[_FLOOR] = max(time.monotonic_ns() + offset_ns + steps[_MONOTONIC], steps[_FLOOR])
        steps[_MONOTONIC] = step_ns
