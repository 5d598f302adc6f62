"""Observation of forward, evaluation and backward passes, by the outermost calls.

`torch.nn.Module.__call__` is replaced once. Hooks would not do: global ones run for every module inside and make
`torch.compile` warn, those of a model are compiled with it. Inside a module, another one costs one test more; inside a
backward pass, where checkpointed modules run again, and in other threads nothing is observed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import field
from functools import wraps
from typing import Any

import torch

from hpcpace.core.compat import is_in_backward, queue_final_callback, tell_dynamo
from hpcpace.core.records import dataclass
from hpcpace.observe.guest import Replacements, leave_out_own_frames
from hpcpace.observe.pacing import Arrival, Pacer
from hpcpace.trace.schema import Phase

_CALL = "__call__"


class ModuleCalls:
    """Reports the outermost calls of modules in the thread that trains.

    Args:
        begins: called before a call, with the module and its arguments; returns what `ends` gets.
        ends: called after it with the result of `begins`, when the call began, and what it returned.
        now: the clock.

    Attributes:
        is_inside: whether a module or a backward pass is running; then nothing is reported.
        thread: the thread that trains: the one that made this, until BackwardPasses follows another one.
    """

    __slots__ = ("_begins", "_ends", "_now", "_observed", "_original", "is_inside", "thread")

    def __init__(
        self,
        begins: Callable[[Any, Any, Any], int],
        ends: Callable[[int, int, Any], None],
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
        tell_dynamo(self._original, self._observed)

    def uninstall(self) -> None:
        """Leave modules as they were, unless somebody else has replaced the call since."""
        if self._original is not None and torch.nn.Module.__call__ is self._observed:
            setattr(torch.nn.Module, _CALL, self._original)
            tell_dynamo(self._observed, self._original)
        self.is_inside = True  # whoever has kept our function goes on without it

    def hide(self) -> bool:
        """Report no further call of the thread that trains: a transform of a loader is data even if it is a module.

        Returns:
            Whether that changed anything; then `is_inside` must be set back to False.
        """
        if self.is_inside or threading.get_ident() != self.thread:
            return False
        self.is_inside = True
        return True

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        this_thread = threading.get_ident
        is_compiling, clock = torch.compiler.is_compiling, self._now
        begins, ends, calls = self._begins, self._ends, self

        # torch.profiler knows the frames of this function by its code, and takes their `self` for the module.
        @wraps(original)
        def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_outermost = False
            kind = begin_ns = 0
            result = None
            try:
                if not (calls.is_inside or is_compiling() or this_thread() != calls.thread):
                    calls.is_inside = is_outermost = True
                    kind = begins(self, args, kwargs)
                    begin_ns = clock()
                result = original(self, *args, **kwargs)
                return result
            except BaseException as error:
                leave_out_own_frames(error)
                raise
            finally:
                if is_outermost:
                    calls.is_inside = False
                    ends(kind, begin_ns, result)

        return observed


_ENGINE = "_engine_run_backward"
# So many backward passes of another thread, and none of the one that is followed: it has taken the training over.
_MANY_OF_ANOTHER = 16


@dataclass(eq=False)
class BackwardPasses:
    """Wraps the functions of torch that compute gradients.

    Threads that train at the same time, each a model of its own, would make a mix of steps: one of them is followed.

    Attributes:
        calls: learns that modules are inside a backward pass, where checkpointed ones run again, and who trains.
        add: takes a phase with its begin and end.
        has_open_collectives, take_last_ranks: see PhaseObserver.
        begins: called before a backward pass that is not part of another.
        ended: called after it, with its end.
        now: the clock.
        pacer: called where the caller waits for gradients, and may delay it; None if the job is not paced.
        depth: backward passes that are running; one may call another.
        others: threads that train beside the one that is followed.
    """

    calls: ModuleCalls
    add: Callable[[Phase, int, int], None]
    has_open_collectives: Callable[[], bool]
    take_last_ranks: Callable[[], tuple[int, ...]]
    begins: Callable[[], None]
    ended: Callable[[int], None]
    now: Callable[[], int]
    pacer: Pacer | None = None
    depth: int = 0
    others: set[int] = field(default_factory=set)
    _has_trained: bool = False
    _num_of_others: int = 0

    def install(self, cleanup: Replacements) -> None:
        """Begin to observe, until the stack closes.

        What both `torch.autograd.backward` and `grad` call is replaced: Dynamo knows those two by identity,
        and fails to compile a function that calls another in their place.
        """
        # Releases of torch before 2.2 lack it.
        cleanup.replace(torch.autograd, _ENGINE if hasattr(torch.autograd, _ENGINE) else "backward", self._timed)
        # Gradients over torch's RPC have an engine of their own; builds of torch may lack RPC.
        over_rpc = sys.modules.get("torch.distributed.autograd")
        if hasattr(over_rpc, "backward"):
            cleanup.replace(over_rpc, "backward", self._timed)

    def _follows(self, thread: int) -> bool:
        """Return whether a backward pass of a thread is one of the training that is followed, or of nobody's so far."""
        if thread == self.calls.thread:
            self._has_trained, self._num_of_others = True, 0
            return True
        if is_in_backward():
            return True
        self._num_of_others += 1
        # Each thread that lives has a frame. For its last few steps another one is not followed.
        is_beside = thread in self.others or self.calls.thread in sys._current_frames()
        if self._has_trained and is_beside and self._num_of_others < _MANY_OF_ANOTHER:
            self.others.add(thread)
            return False
        if not self.depth:
            self.calls.thread, self._has_trained, self._num_of_others = thread, True, 0
            self.others.discard(thread)
        return True

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, now, this_thread = torch.compiler.is_compiling, self.now, threading.get_ident

        def timed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._follows(this_thread()):
                return run(tensors, *args, **kwargs)
            local_end_ns: list[int] = []
            arrivals: list[Arrival] = []
            handle = None
            if kwargs.get("accumulate_grad", True):  # DDP does not see `torch.autograd.grad`
                if self.pacer is not None:
                    self.take_last_ranks()
                handle = self._at_local_end(tensors, local_end_ns, arrivals)
            is_inside, self.calls.is_inside = self.calls.is_inside, True
            if not self.depth:
                self.begins()
            self.depth += 1
            begin_ns = now()
            try:
                return run(tensors, *args, **kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise
            finally:
                end_ns = now()
                if arrivals and self.pacer is not None:
                    self.pacer.leave(arrivals[0], self.take_last_ranks())
                self.add(Phase.BACKWARD, begin_ns, end_ns)
                if local_end_ns:
                    self.add(Phase.GRAD_SYNC, local_end_ns[0], end_ns)
                if handle is not None:
                    handle.remove()
                self.calls.is_inside = is_inside
                self.depth -= 1
                if not self.depth:
                    self.ended(end_ns)

        return timed

    def _at_local_end(self, tensors: Any, local_end_ns: list[int], arrivals: list[Arrival]) -> Any:
        """Note when this rank's own part of backward is over, if gradients are still in flight then.

        The autograd engine calls its final callbacks in the order in which they were queued. DDP queues the wait for
        its buckets when the last of them is ready; ours is queued at the start and so runs before that wait.
        """
        for root in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if isinstance(root, torch.Tensor) and root.requires_grad:
                break
        else:
            return None

        def local_end() -> None:
            if self.has_open_collectives():
                local_end_ns.append(self.now())
            # Also where all gradients have come already: the rank that need not wait is the critical one.
            if self.pacer is not None:
                arrivals.append(self.pacer.arrive("backward"))

        def starts(_: torch.Tensor) -> None:
            queue_final_callback(local_end)

        return root.register_hook(starts)
