"""Observation of phases without code changes, from data and forward to checkpoints and gc.

Rows nest: grad_sync and gc are inside the phase in which they happen, and the reader gives the time to the innermost.
What is seen here of backward passes and optimizers also shows where steps end, see steps.py.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpcpace.core.compat import loader_iterator
from hpcpace.observe.guest import Replacements, leave_out_own_frames
from hpcpace.observe.steps import StepFinder
from hpcpace.observe.training_calls import (
    BackwardPasses,
    BatchSizes,
    ModuleCalls,
    OptimizerKey,
    Optimizers,
    ParameterProbe,
    ReplacedSteps,
    has_parameters,
    has_scalar,
    name_of,
)
from hpcpace.trace.recorder import PhaseEnded, Recorder
from hpcpace.trace.schema import OTHER_WITHOUT_GRADIENTS, Phase, StepFlag

_SAVING = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    # Also where a script has imported `save` by name before: it calls this one.
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),
    ("torch.distributed.checkpoint.state_dict_saver", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
    ("safetensors.torch", "save_file"),
)
# Iterators over batches: the method that returns the next one.
_LOADING = (("nvidia.dali.plugin.base_iterator", "_DaliBaseIterator.__next__"),)
# Optimizers of parameters that several processes of torch's RPC hold: those in the processes are no Optimizer.
_STEPPING = (("torch.distributed.optim.optimizer", "DistributedOptimizer.step"),)
# What is observed of libraries as soon as the job has loaded them.
_PLACES = (
    *((*place, Phase.CHECKPOINT) for place in _SAVING),
    *((*place, Phase.DATA) for place in _LOADING),
    *((*place, Phase.OPTIMIZER) for place in _STEPPING),
)

_SHORTEST_GC_NS = 50_000
# Without gradients, a module in training mode is not evaluated but part of training: a rollout of reinforcement
# learning, sampling, a momentum encoder. One in evaluation mode may be evaluated, or play a rollout as well.
_FORWARD, _SAMPLING, _MAYBE_EVAL = range(3)
# What happens in so many steps one after the other is no evaluation: a rollout, too, or a teacher.
_STEPS_OF_A_HABIT = 3
_LOSSES = "torch.nn.modules.loss"
# memory: loaders that are remembered between two updates; an evaluation has few.
_MAX_LOADERS = 16


class PhaseObserver:
    """Records phases with torch's hooks where they exist, and with wrapped functions elsewhere.

    Args:
        recorder: takes the rows.
        has_open_collectives: whether communication is in flight; the end of backward counts as gradient
            synchronisation only then.
        steps: takes what may end a step; None if the job says itself where steps end.
        take_last_ranks: returns the global ranks of the group of the last collective since the last call.
        warn: takes a warning.
        now: the clock; on ranks with a device it marks the device as well.
        ended: takes each phase with its begin and end.

    Attributes:
        samples: the samples of the step that is running, as far as they can be guessed.
        steps: as the argument.
        backward: observes backward passes; its `pacer` is called where the caller waits for gradients.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        has_open_collectives: Callable[[], bool],
        steps: StepFinder | None = None,
        take_last_ranks: Callable[[], tuple[int, ...]] = tuple,
        warn: Callable[[str], None] | None = None,
        now: Callable[[], int] = time.monotonic_ns,
        ended: PhaseEnded | None = None,
    ) -> None:
        self.samples = BatchSizes()
        self._recorder, self._warn, self._now, self._ended = recorder, warn, now, ended
        self.steps = steps
        self._cleanup = Replacements()
        self._calls = ModuleCalls(self._call_begins, self._call_ends, now=now)
        self.backward = BackwardPasses(
            self._calls,
            self._add,
            has_open_collectives=has_open_collectives,
            take_last_ranks=take_last_ranks,
            begins=self._backward_begins,
            ended=self._backward_ended,
            now=now,
        )
        self._is_installed = False
        self._missing: list[tuple[str, str, Phase]] = []
        self._num_modules = self._thread = 0
        self._watched: list[Any] = []
        self._probe = ParameterProbe()
        self._microbatch = -1
        self._known, self._replaced = Optimizers(), ReplacedSteps(self._whole_step)
        self._optimizers: list[tuple[int, int]] = []  # a stack: ZeroRedundancyOptimizer steps one inside its own step
        self._stepped_inside: dict[OptimizerKey, str] = {}
        self._eval_loop: tuple[int, int] | None = None
        self._shows_eval = False
        self._loaders: deque[weakref.ref[Any]] = deque(maxlen=_MAX_LOADERS)  # iterators read since the last training
        self._evaluates_since_ns = self._num_evaluated = 0
        self._under_way: tuple[Phase, int] | None = None
        self._begin_ns = self._gc_begin_ns = 0
        self._is_degraded = False
        self._num_rows = [0] * len(Phase)
        self._flags = self._last_flags = StepFlag.NONE
        self._without_gradients, self._num_in_a_row = False, 0

    def install(self) -> None:
        """Start to record, for the first time or again."""
        self._optimizers.clear()
        self._stepped_inside.clear()
        self._calls.is_inside = False
        self._cleanup.replace(loader_iterator(), "__next__", self._timed_fetch)
        self.backward.install(self._cleanup)
        self._cleanup.replace(torch.amp.GradScaler, "step", self._scaled_step)
        self._begin_ns = self._now()
        self._calls.install()
        self._cleanup.callback(self._calls.uninstall)
        self._is_installed, self._missing = True, [*_PLACES]
        self._num_modules, self._thread = 0, threading.get_ident()
        self._look_for_libraries()
        for model in self._watched:
            self._watch(model)
        if self.steps is not None:
            self.steps.count_idle = self._known.count_idle
            self.steps.has_changed = self._probe.has_changed
        for handle in (
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ):
            self._cleanup.callback(handle.remove)
        self._cleanup.callback(self._replaced.restore)
        gc.callbacks.append(self._collected)
        self._cleanup.callback(gc.callbacks.remove, self._collected)

    def uninstall(self) -> None:
        """Remove every hook and wrapper."""
        self._end_eval_loop()
        self._is_installed, self._missing = False, []
        self._cleanup.close()

    def watch(self, model: Any) -> None:
        """Record the microbatches of a pipeline stage; modules are seen without this."""
        self._watched.append(model)
        if self._is_installed:
            self._watch(model)

    def _watch(self, model: Any) -> None:
        if hasattr(model, "forward_one_chunk"):
            self._cleanup.replace(model, "forward_one_chunk", self._timed_chunk)
            self._cleanup.replace(model, "backward_one_chunk", self._numbered_chunk)

    def end_step(self) -> StepFlag:
        """End what belongs to the step that is running, and return its marks.

        A step with evaluation or a checkpoint is a special one, unless the step before had the same.
        """
        self._end_eval_loop()
        self._look_for_libraries()
        self._num_in_a_row = self._num_in_a_row + 1 if self._without_gradients else 0
        self._without_gradients = False
        flags, self._flags = self._flags, StepFlag.NONE
        special = flags & ~self._last_flags if flags else flags  # operations of flags take long
        self._last_flags = flags
        return special

    @property
    def source(self) -> str:
        """How phases were seen, in words."""
        counts = ", ".join(f"{phase.name.lower()} {self._num_rows[phase]}" for phase in self.seen)
        habit = f", {OTHER_WITHOUT_GRADIENTS}" if self._num_rows[Phase.OTHER] else ""
        calls = f"forward and eval are outermost module calls with and without gradients{habit}"
        return f"{calls}; intervals: {counts or 'none'}"

    @property
    def seen(self) -> tuple[Phase, ...]:
        """The phases of which there is a row."""
        return tuple(phase for phase in Phase if self._num_rows[phase])

    @property
    def num_ended(self) -> int:
        """How many phases and calls of evaluated modules have ended, garbage collection left out.

        That goes on where training does not, in other threads.
        """
        return sum(self._num_rows) - self._num_rows[Phase.GC] + self._num_evaluated

    @property
    def under_way(self) -> tuple[Phase, int] | None:
        """The evaluation, checkpoint or wait for data in which the rank is, and when it began; safe in any thread."""
        since_ns = self._evaluates_since_ns
        return (Phase.EVAL, since_ns) if since_ns else self._under_way

    def _call_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if self.steps is not None:
            self.steps.rows_wait()
        if not torch.is_grad_enabled():
            self._evaluates_since_ns = self._evaluates_since_ns or time.monotonic_ns()
            return self._kind_without_gradients(module)
        self._end_eval_loop()
        if self.steps is not None:
            self._work_begins()
            try:
                if self.steps.follows_updates:
                    self._probe.forward_begins(module)
                self.samples.forwarded(module, args, kwargs)
            except Exception as error:  # the boundary to somebody else's module
                self._degrade(error)
        return _FORWARD

    def _kind_without_gradients(self, module: Any) -> int:
        is_open = self._eval_loop is not None
        if not has_parameters(module):  # without parameters, its mode means nothing
            self._shows_eval |= is_open and type(module).__module__ == _LOSSES
            return _MAYBE_EVAL if is_open else _SAMPLING
        return _SAMPLING if module.training else _MAYBE_EVAL

    def _call_ends(self, kind: int, begin_ns: int, result: Any) -> None:
        if kind == _FORWARD:
            self._add(Phase.FORWARD, begin_ns)
            return
        self.samples.evaluated()
        self._num_evaluated += 1
        if kind == _SAMPLING:
            self._end_eval_loop()
            self._add(Phase.OTHER, begin_ns)
            return
        self._without_gradients = True
        self._shows_eval = self._shows_eval or has_scalar(result)
        # An evaluation goes on between its calls: with loading, losses and averages.
        self._eval_loop = (begin_ns if self._eval_loop is None else self._eval_loop[0], self._now())

    def _end_eval_loop(self) -> None:
        self._evaluates_since_ns = 0
        if self._eval_loop is not None:
            (begin_ns, end_ns), self._eval_loop = self._eval_loop, None
            is_eval = self._shows_evaluation() and not self._is_habit
            if is_eval:
                self._flags |= StepFlag.EVAL
            self._add(Phase.EVAL if is_eval else Phase.OTHER, begin_ns, end_ns)
        self._shows_eval = False
        self._loaders.clear()

    def _shows_evaluation(self) -> bool:
        """Return whether there was a loss, or the whole of a loader was read: a rollout has neither.

        The loader of prompts, or of a student whose teacher this was, goes on after it.
        """
        return self._shows_eval or any(loader() is None for loader in self._loaders)

    @property
    def _is_habit(self) -> bool:
        return self._num_in_a_row >= _STEPS_OF_A_HABIT

    def _work_begins(self) -> None:
        if self.steps is not None and self.steps.follows_updates and not self._optimizers:
            self.steps.work_begins(self._now())

    def _degrade(self, error: Exception) -> None:
        self.samples = BatchSizes()
        if not self._is_degraded and self._warn is not None:
            self._warn(f"samples cannot be guessed: {error or type(error).__name__}; training continues")
        self._is_degraded = True

    def _add(self, phase: Phase, begin_ns: int, end_ns: int = 0) -> None:
        recorder, end_ns = self._recorder, end_ns or self._now()
        self._num_rows[phase] += 1
        recorder.add_phase(recorder.step, phase, begin_ns, end_ns, self._microbatch)
        if self._ended is not None:
            self._ended(phase, begin_ns, end_ns)

    def _look_for_libraries(self) -> None:
        """Observe the functions of libraries that were loaded since the last call."""
        if self._missing and len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            self._missing = [place for place in self._missing if not self._observe(*place)]

    def _observe(self, module_name: str, path: str, phase: Phase) -> bool:
        owner: Any = sys.modules.get(module_name)
        if owner is None:
            return False
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        if callable(getattr(owner, name, None)):
            wrap = self._whole_step if phase == Phase.OPTIMIZER else partial(self._timed, phase)
            self._cleanup.replace(owner, name, wrap)
        return True

    def _timed(self, phase: Phase, call: Callable[..., Any]) -> Callable[..., Any]:
        """Record only in the thread that trains: what is saved in the background takes no time from a step."""
        this_thread = threading.get_ident

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_ns, outer, is_seen = 0, self._under_way, this_thread() == self._thread
            if is_seen:
                self._end_eval_loop()
                if phase == Phase.CHECKPOINT:
                    self._flags |= StepFlag.CHECKPOINT
                begin_ns = self._now()
                self._under_way = phase, begin_ns
            is_hidden = phase == Phase.DATA and self._calls.hide()
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise
            finally:
                if is_hidden:
                    self._calls.is_inside = False
                if is_seen:
                    self._under_way = outer
                    self._add(phase, begin_ns)

        return timed

    def _timed_fetch(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        this_thread = threading.get_ident

        def timed(loader: Any) -> Any:
            if torch.compiler.is_compiling():
                return fetch(loader)
            # What another thread reads ahead takes no time from a step.
            begin_ns, outer, is_seen = 0, self._under_way, this_thread() == self._calls.thread
            if is_seen:
                self._work_begins()
                begin_ns = self._now()
                self._under_way = Phase.DATA, begin_ns
            is_hidden = self._calls.hide()
            try:
                batch = fetch(loader)
            except BaseException as error:
                # Its iterator may be kept for the next time.
                self._shows_eval |= isinstance(error, StopIteration) and self._eval_loop is not None
                leave_out_own_frames(error)
                raise
            finally:
                if is_hidden:
                    self._calls.is_inside = False
                if is_seen:
                    self._under_way = outer
                    self._add(Phase.DATA, begin_ns)
            self._loaders.append(weakref.ref(loader))
            if self.steps is not None:
                self.samples.fetched(batch, loader, is_ahead=not is_seen)
            return batch

        return timed

    def _backward_begins(self) -> None:
        self._look_for_libraries()  # before the first step of their optimizers
        self._work_begins()

    def _backward_ended(self, end_ns: int) -> None:
        self._replaced.look()
        if self.steps is None:
            return
        self.steps.rows_wait()
        self.samples.backward_ended()
        if self.steps.follows_updates:
            self._probe.backward_ended()
        self.steps.backward_ended(end_ns)
        if self._stepped_inside and not self._optimizers:
            keys, names = [*self._stepped_inside], set(self._stepped_inside.values())
            self._stepped_inside.clear()
            key = OptimizerKey(*map(frozenset, zip(*keys, strict=True)))
            self._tell_steps(key, f"{len(keys)} of {' and '.join(sorted(names))} inside backward", end_ns)

    def _timed_chunk(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(chunk: int, *args: Any, **kwargs: Any) -> Any:
            begin_ns = self._now()
            self._microbatch = chunk
            self._calls.is_inside = True  # the stage's own module is this very phase
            try:
                return forward(chunk, *args, **kwargs)
            finally:
                self._calls.is_inside = False
                self._add(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL, begin_ns)
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

    def _scaled_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `GradScaler.step`, which leaves the optimizer's step out where gradients have overflowed."""

        def scaled(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._optimizer_begins(optimizer)
            try:
                return step(scaler, optimizer, *args, **kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise
            finally:
                self._optimizer_ends(optimizer)

        return scaled

    def _whole_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step of an optimizer that torch's hooks do not see."""

        def stepping(_: None, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return step(optimizer, *args, **kwargs)

        scaled = self._scaled_step(stepping)

        def whole(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_installed:
                return step(optimizer, *args, **kwargs)
            return scaled(None, optimizer, *args, **kwargs)

        return whole

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() in self.backward.others:
            return
        self._end_eval_loop()
        self._optimizers.append((id(optimizer), self._now()))

    def _optimizer_ends(self, optimizer: Any, *_: Any) -> None:
        identity = id(optimizer)
        if torch.compiler.is_compiling() or threading.get_ident() in self.backward.others:
            return
        optimizers = self._optimizers
        if (not optimizers or optimizers[-1][0] != identity) and all(identity != begun for begun, _ in optimizers):
            if optimizers or self._known.have_stepped:
                return
            self._optimizers.append((identity, self._begin_ns))  # recording began inside this step
        # A step that raised has not ended, and so is still above this one.
        while (begun := self._optimizers.pop())[0] != identity:
            pass
        end_ns = self._now()
        self._add(Phase.OPTIMIZER, begun[1], end_ns)
        key = self._known.key_of(optimizer)
        self._replaced.follow(optimizer)
        if self.steps is None or self._optimizers:
            return
        if self.backward.depth:
            self._stepped_inside[key] = name_of(optimizer)
        else:
            self._tell_steps(key, name_of(optimizer), end_ns)

    def _tell_steps(self, key: OptimizerKey, name: str, end_ns: int) -> None:
        if self.steps is not None:
            self.samples.optimizer_ended()
            self.steps.optimizer_ended(key.number, name, end_ns, kind=key.kind, parameters=key.parameters)

    def _collected(self, moment: str, _: dict[str, int]) -> None:
        # Python collects its youngest generation many times a step, in microseconds: only what can be felt is kept.
        # It may come at any moment, also where the device must not be touched.
        now_ns = time.monotonic_ns()
        if moment == "start":
            self._gc_begin_ns = now_ns
        elif now_ns - self._gc_begin_ns >= _SHORTEST_GC_NS:
            self._add(Phase.GC, self._gc_begin_ns, now_ns)
