"""Keeping torch.compile away from hpcpace: Dynamo runs our frames as they are and never compiles or warns about them.

Dynamo looks at every Python frame that runs below a compiled function after a graph break, ours included: it would
compile the observer and warn of its recompilations, and a failure on one rank alone would shift every later match.
Torch marks its own code as not to be compiled, frame by frame, so that what a frame calls is still considered; the
same mark on ours changes nothing for the job. It is set in C, without loading Dynamo, which takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

_PACKAGE = "hpcpace."
# The models of `hpcpace train` are a job like any other.
_JOBS = "hpcpace.train."


def keep_uncompiled() -> None:
    """Mark all code of hpcpace that is loaded but its own workloads.

    Code that is loaded later is not reached by the frames of a job.
    """
    skip = _skip_of_torch()
    if skip is None:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE) and not name.startswith(_JOBS):
            for owned in list(vars(module).values()):
                for code in _codes(owned, name):
                    skip(code)


def _skip_of_torch() -> Callable[[CodeType], Any] | None:
    """Return the function that marks code, which is private to torch; None if this release has it elsewhere."""
    frames: Any = torch._C._dynamo.eval_frame
    try:
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        mark = frames.set_code_exec_strategy
    except AttributeError:
        return getattr(frames, "skip_code", None)
    return lambda code: mark(code, strategy)


def _codes(owned: Any, module: str) -> Iterator[CodeType]:
    """Yield the code of a function or of a class's methods, and of all functions inside them."""
    if isinstance(owned, FunctionType):
        # Decorated functions run a frame of contextlib or functools, and then ours.
        inner = getattr(owned, "__wrapped__", None)
        yield from _with_inner(owned.__code__)
        if inner is not None:
            yield from _codes(inner, module)
    elif isinstance(owned, type) and owned.__module__ == module:
        for attribute in list(vars(owned).values()):
            for part in ("fget", "__func__", "func"):
                attribute = getattr(attribute, part, attribute)
            yield from _codes(attribute, module)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
