"""How a process that works through large arrays one after the other keeps its memory."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_KEEPS_BYTES = (1 << 31) - 1
_AHEAD_BYTES = 64 << 20
_OWN_MAPPING_BYTES = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Let arrays that are freed make room for the next ones, in this process and those that it forks.

    Else glibc gives their memory back to the kernel, which clears it when it is asked for again. Other C libraries stay
    as they are.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in (
            (_TRIM_THRESHOLD, _KEEPS_BYTES),
            (_TOP_PAD, _AHEAD_BYTES),
            (_MMAP_THRESHOLD, _OWN_MAPPING_BYTES),
        ):
            mallopt(name, value)
