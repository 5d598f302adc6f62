"""Observation of forward and evaluation without code changes: the outermost calls of modules.

`torch.nn.Module.__call__` is replaced once. Hooks would not do: global ones run for every module inside and make
`torch.compile` warn, those of a model are compiled with it. Inside a module, another one costs one test more; inside a
backward pass, where checkpointed modules run again, and in other threads nothing is observed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from hpcpace.observe.own_frames import leave_out_own_frame

_DYNAMO = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")
_CALL = "__call__"
_REMEMBERED = "unpatched_nn_module_call"


class ModuleCalls:
    """Reports the outermost calls of modules in the thread that trains.

    Args:
        begins: called before a call, with the module and its arguments; returns what `ends` gets.
        ends: called after it with the result of `begins` and when the call began.
        now: the clock.

    Attributes:
        is_inside: whether a module or a backward pass is running; then nothing is reported.
        thread: the thread that trains: the one that made this, until another one runs a backward pass.
    """

    __slots__ = ("_begins", "_ends", "_now", "_observed", "_original", "is_inside", "thread")

    def __init__(
        self,
        begins: Callable[[Any, Any, Any], int],
        ends: Callable[[int, int], None],
        *,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.is_inside = False
        self.thread = threading.get_ident()
        self._now = now
        self._begins, self._ends = begins, ends
        self._original: Any = None
        self._observed: Any = None

    def install(self) -> None:
        """Begin to report."""
        self._original = torch.nn.Module.__call__
        self._observed = self._call(self._original)
        setattr(torch.nn.Module, _CALL, self._observed)
        _tell_dynamo(self._original, self._observed)

    def uninstall(self) -> None:
        """Leave modules as they were, unless somebody else has replaced the call since."""
        if self._original is not None and torch.nn.Module.__call__ is self._observed:
            setattr(torch.nn.Module, _CALL, self._original)
            _tell_dynamo(self._observed, self._original)
        self.is_inside = True  # whoever has kept our function goes on without it

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        this_thread = threading.get_ident
        is_compiling, clock = torch.compiler.is_compiling, self._now
        begins, ends, calls = self._begins, self._ends, self

        # torch.profiler knows the frames of this function by its code, and takes their `self` for the module.
        @wraps(original)
        def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_outermost = False
            kind = begin_ns = 0
            try:
                if not (calls.is_inside or is_compiling() or this_thread() != calls.thread):
                    calls.is_inside = is_outermost = True
                    kind = begins(self, args, kwargs)
                    begin_ns = clock()
                return original(self, *args, **kwargs)
            except BaseException as error:
                leave_out_own_frame(error)
                raise
            finally:
                if is_outermost:
                    calls.is_inside = False
                    ends(kind, begin_ns)

        return observed


def _tell_dynamo(old: Any, new: Any) -> None:
    """Replace what Dynamo remembers as the call of modules whose frames it may skip; it may be loaded later as well."""
    for name in _DYNAMO:
        module = sys.modules.get(name)
        if module is not None and getattr(module, _REMEMBERED, None) is old:
            setattr(module, _REMEMBERED, new)
