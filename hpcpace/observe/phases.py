"""Observation of phases without code changes: data, forward, backward, grad_sync, optimizer, gc.

Rows nest: grad_sync and gc are inside the phase in which they happen, and the reader gives the time to the innermost.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpcpace.pace.arrivals import Arrival
from hpcpace.pace.pacer import Pacer
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import Phase

_SHORTEST_GC_NS = 50_000


class PhaseObserver:
    """Records phases with torch's hooks where they exist, and with wrapped functions elsewhere.

    Args:
        recorder: takes the rows.
        has_open_collectives: whether communication is in flight; the end of backward counts as gradient
            synchronisation only then.
        on_optimizer_step: called after each step of an optimizer.
        take_last_ranks: returns the global ranks of the group of the last collective since the last call.

    Attributes:
        pacer: is called where the caller waits for gradients, and may delay it; None if the job is not paced.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        has_open_collectives: Callable[[], bool],
        on_optimizer_step: Callable[[], None] | None = None,
        take_last_ranks: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self.pacer: Pacer | None = None
        self._take_last_ranks = take_last_ranks
        self._recorder = recorder
        self._has_open_collectives = has_open_collectives
        self._on_optimizer_step = on_optimizer_step
        self._cleanup = ExitStack()
        self._microbatch = -1
        self._optimizer_begins_ns: list[int] = []  # a stack: ZeroRedundancyOptimizer steps an optimizer inside its own
        self._gc_begin_ns = 0

    def install(self) -> None:
        """Start to record data, backward, grad_sync, optimizer and gc."""
        loader = torch.utils.data.dataloader._BaseDataLoaderIter
        self._replace(loader, "__next__", partial(self._timed, Phase.DATA))
        self._replace(torch.autograd, "backward", self._timed_backward)
        for handle in (
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ):
            self._cleanup.callback(handle.remove)
        gc.callbacks.append(self._collected)
        self._cleanup.callback(gc.callbacks.remove, self._collected)

    def uninstall(self) -> None:
        """Remove every hook and wrapper."""
        self._cleanup.close()

    def watch(self, model: Any) -> None:
        """Record the forward phases of a module, or those of a pipeline stage with their microbatches."""
        if hasattr(model, "forward_one_chunk"):
            self._replace(model, "forward_one_chunk", self._timed_chunk)
            self._replace(model, "backward_one_chunk", self._numbered_chunk)
            return
        begin_ns: list[int] = []  # a stack, because a module may call itself

        def begins(*_: Any) -> None:
            begin_ns.append(time.monotonic_ns())

        def ends(*_: Any) -> None:
            self._add(Phase.FORWARD, begin_ns.pop())

        for handle in (
            model.register_forward_pre_hook(begins, prepend=True),
            model.register_forward_hook(ends, always_call=True),
        ):
            self._cleanup.callback(handle.remove)

    def _add(self, phase: Phase, begin_ns: int, end_ns: int = 0) -> None:
        recorder = self._recorder
        recorder.add_phase(recorder.step, phase, begin_ns, end_ns or time.monotonic_ns(), self._microbatch)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        is_own = name in vars(owner)
        setattr(owner, name, wraps(original)(wrap(original)))
        # A wrapper on an object hides its class's method: it is deleted, so that the object holds no trace of us.
        if is_own:
            self._cleanup.callback(setattr, owner, name, original)
        else:
            self._cleanup.callback(delattr, owner, name)

    def _timed(self, phase: Phase, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_ns = time.monotonic_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._add(phase, begin_ns)

        return timed

    def _timed_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            local_end_ns: list[int] = []
            arrivals: list[Arrival | None] = []
            if self.pacer is not None:
                self._take_last_ranks()
            handle = self._at_local_end(tensors, local_end_ns, arrivals)
            begin_ns = time.monotonic_ns()
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                end_ns = time.monotonic_ns()
                if arrivals and self.pacer is not None:
                    self.pacer.leave(arrivals[0], self._take_last_ranks())
                self._add(Phase.BACKWARD, begin_ns, end_ns)
                if local_end_ns:
                    self._add(Phase.GRAD_SYNC, local_end_ns[0], end_ns)
                if handle is not None:
                    handle.remove()

        return timed

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
                local_end_ns.append(time.monotonic_ns())
            # Also where all gradients have come already: the rank that need not wait is the critical one.
            if self.pacer is not None:
                arrivals.append(self.pacer.arrive("backward"))

        def starts(_: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(local_end)

        return root.register_hook(starts)

    def _timed_chunk(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(chunk: int, *args: Any, **kwargs: Any) -> Any:
            begin_ns = time.monotonic_ns()
            self._microbatch = chunk
            try:
                return forward(chunk, *args, **kwargs)
            finally:
                self._add(Phase.FORWARD, begin_ns)
                self._microbatch = -1

        return timed

    def _numbered_chunk(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def numbered(chunk: int, *args: Any, **kwargs: Any) -> Any:
            self._microbatch = chunk
            try:
                return backward(chunk, *args, **kwargs)
            finally:
                self._microbatch = -1

        return numbered

    def _optimizer_begins(self, *_: Any) -> None:
        self._optimizer_begins_ns.append(time.monotonic_ns())

    def _optimizer_ends(self, *_: Any) -> None:
        self._add(Phase.OPTIMIZER, self._optimizer_begins_ns.pop())
        if self._on_optimizer_step is not None and not self._optimizer_begins_ns:
            self._on_optimizer_step()

    def _collected(self, moment: str, _: dict[str, int]) -> None:
        # Python collects its youngest generation many times a step, in microseconds: only what can be felt is kept.
        now_ns = time.monotonic_ns()
        if moment == "start":
            self._gc_begin_ns = now_ns
        elif now_ns - self._gc_begin_ns >= _SHORTEST_GC_NS:
            self._add(Phase.GC, self._gc_begin_ns, now_ns)
