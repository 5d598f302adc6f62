"""Where the threads of this process are: names of files and functions, and lines; no values of any variable."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

from hpcpace.hang.notices import ThreadStack

_OURS = str(Path(__file__).parent)
_OWN_THREADS = "hpcpace-"
_MOST_FRAMES = 1000

_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_export/", "/triton/compiler/")
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/debugpy/", "/pydevd", "/IPython/terminal/")


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
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            frames.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return tuple(reversed(frames))
