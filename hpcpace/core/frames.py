"""Places in a program as `FILE:LINE in FUNCTION`: those of the job's own code, apart from those of libraries."""

from __future__ import annotations

from collections.abc import Sequence

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3")


def own_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame of the job's own code, or of all if none is; empty without frames.

    Args:
        frames: the innermost last.
    """
    own = [frame for frame in frames if not is_of_library(frame)]
    return (own or frames or [""])[-1]


def is_of_library(frame: str) -> bool:
    """Return whether a frame is of Python, of an installed package, or of code without a file."""
    return frame.startswith("<") or any(part in frame for part in _LIBRARIES)


def short_frame(frame: str) -> str:
    """Return a frame without the folder of its file."""
    place, found, function = frame.partition(" in ")
    return place.rpartition("/")[2] + found + function
