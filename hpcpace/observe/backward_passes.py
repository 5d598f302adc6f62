"""Observation of backward passes: how long they take, and when this rank's own part of one is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from hpcpace.observe.module_calls import ModuleCalls
from hpcpace.observe.own_frames import leave_out_own_frame
from hpcpace.observe.replaced import Replacements
from hpcpace.pace.arrivals import Arrival
from hpcpace.pace.pacer import Pacer
from hpcpace.trace.schema import Phase

_ENGINE = "_engine_run_backward"


class BackwardPasses:
    """Wraps the functions of torch that compute gradients.

    Args:
        calls: is told that modules are inside a backward pass, where checkpointed ones run again, and who trains.
        add: takes a phase with its begin and end.
        has_open_collectives, take_last_ranks: see PhaseObserver.
        begins: called before a backward pass that is not part of another.
        ended: called after it, with its end.
        now: the clock.

    Attributes:
        pacer: see PhaseObserver.
        depth: backward passes that are running; one may call another.
    """

    def __init__(
        self,
        calls: ModuleCalls,
        add: Callable[[Phase, int, int], None],
        *,
        has_open_collectives: Callable[[], bool],
        take_last_ranks: Callable[[], tuple[int, ...]],
        begins: Callable[[], None],
        ended: Callable[[int], None],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.pacer: Pacer | None = None
        self.depth = 0
        self._calls, self._add, self._begins, self._ended = calls, add, begins, ended
        self._now = now
        self._has_open_collectives, self._take_last_ranks = has_open_collectives, take_last_ranks

    def install(self, cleanup: Replacements) -> None:
        """Begin to observe, until the stack closes.

        What both `torch.autograd.backward` and `grad` call is replaced: Dynamo knows those two by identity,
        and fails to compile a function that calls another in their place.
        """
        owner = torch.autograd
        if hasattr(owner, _ENGINE):
            cleanup.replace(owner, _ENGINE, self._timed)
        else:  # releases of torch before 2.2
            cleanup.replace(owner, "backward", self._timed)

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, now = torch.compiler.is_compiling, self._now

        def timed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return run(tensors, *args, **kwargs)
            local_end_ns: list[int] = []
            arrivals: list[Arrival | None] = []
            handle = None
            if kwargs.get("accumulate_grad", True):  # DDP does not see `torch.autograd.grad`
                if self.pacer is not None:
                    self._take_last_ranks()
                handle = self._at_local_end(tensors, local_end_ns, arrivals)
            is_inside = self._enter()
            begin_ns = now()
            try:
                return run(tensors, *args, **kwargs)
            except BaseException as error:
                leave_out_own_frame(error)
                raise
            finally:
                end_ns = now()
                if arrivals and self.pacer is not None:
                    self.pacer.leave(arrivals[0], self._take_last_ranks())
                self._add(Phase.BACKWARD, begin_ns, end_ns)
                if local_end_ns:
                    self._add(Phase.GRAD_SYNC, local_end_ns[0], end_ns)
                if handle is not None:
                    handle.remove()
                self._leave(is_inside, end_ns)

        return timed

    def _enter(self) -> bool:
        is_inside, self._calls.is_inside = self._calls.is_inside, True
        if not self.depth:
            self._calls.thread = threading.get_ident()
            self._begins()
        self.depth += 1
        return is_inside

    def _leave(self, is_inside: bool, end_ns: int) -> None:
        self._calls.is_inside = is_inside
        self.depth -= 1
        if not self.depth:
            self._ended(end_ns)

    def _at_local_end(self, tensors: Any, local_end_ns: list[int], arrivals: list[Arrival | None]) -> Any:
        """Note when this rank's own part of backward is over, if gradients are still in flight then.

        The autograd engine calls its final callbacks in the order in which they were queued. DDP queues the wait for
        its buckets when the last of them is ready; ours is queued at the start and so runs before that wait.
        """
        roots = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        root = next((t for t in roots if isinstance(t, torch.Tensor) and t.requires_grad), None)
        if root is None:
            return None

        def local_end() -> None:
            if self._has_open_collectives():
                local_end_ns.append(self._now())
            # Also where all gradients have come already: the rank that need not wait is the critical one.
            if self.pacer is not None:
                arrivals.append(self.pacer.arrive("backward"))

        def starts(_: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(local_end)

        return root.register_hook(starts)
