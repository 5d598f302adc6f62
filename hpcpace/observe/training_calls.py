"""Observation of what a script calls to train: passes by their outermost calls, optimizers, loaders of batches.

`torch.nn.Module.__call__` is replaced once. Hooks would not do: global ones run for every module inside and make
`torch.compile` warn, those of a model are compiled with it. Inside a module, another one costs one test more; inside a
backward pass, where checkpointed modules run again, and in other threads nothing is observed.

A script may make its optimizers or their `step` anew: rounds of federated training, folds and phases have optimizers of
their own, and some loops make one per iteration. Each continues what one before it did, and is one with it here.

Samples are a guess: the first dimension of the batches. Batches of a DataLoader count where they are used, in the step
in which a module gets as many: loaders may fetch ahead. Those of an evaluation do not count. In jobs without a
DataLoader, the first input of the module counts, once for each backward pass. Where several ranks share a batch, as in
tensor and pipeline parallelism, nothing is guessed: credited on each of them, it would count several times.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

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

        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._follows(this_thread()):
                return run(*args, **kwargs)
            local_end_ns: list[int] = []
            arrivals: list[Arrival] = []
            handle = None
            if kwargs.get("accumulate_grad", True):  # DDP does not see `torch.autograd.grad`
                if self.pacer is not None:
                    self.take_last_ranks()
                handle = self._at_local_end((*args, *kwargs.values()), local_end_ns, arrivals)
            is_inside, self.calls.is_inside = self.calls.is_inside, True
            if not self.depth:
                self.begins()
            self.depth += 1
            begin_ns = now()
            try:
                return run(*args, **kwargs)
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

    def _at_local_end(self, arguments: Iterable[Any], local_end_ns: list[int], arrivals: list[Arrival]) -> Any:
        """Note when this rank's own part of backward is over, if gradients are still in flight then.

        Every engine takes what the gradients are of as its first tensor or sequence of them; that of RPC takes the
        number of a context before it.

        The autograd engine calls its final callbacks in the order in which they were queued. DDP queues the wait for
        its buckets when the last of them is ready; ours is queued at the start and so runs before that wait.
        """
        roots = next((found for found in arguments if isinstance(found, (torch.Tensor, list, tuple))), ())
        for root in [roots] if isinstance(roots, torch.Tensor) else roots:
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


MAX_FREE = 1_024
"""memory: optimizers that no longer exist and that nobody has continued; the oldest are forgotten."""
_MAX_NAME = 40
"""display: letters of the name of an optimizer's class."""
_MAX_OWNERS = 128
"""memory: optimizers, and classes of them, whose `step` is looked after."""
_STEP = "step"


class OptimizerKey(NamedTuple):
    """What an optimizer is to the steps of a job.

    Attributes:
        number: the same for optimizers that continue each other.
        kind: the same for optimizers of one class whose parameters have the same shapes.
        parameters: the same for optimizers of the same parameters.
    """

    number: Hashable
    kind: Hashable
    parameters: Hashable


class Optimizers:
    """Numbers the optimizers of a job.

    One takes over the number of an optimizer that no longer exists: of the one that updated the same parameters, or
    else of one of the same kind, or else, where none is left, of the one that ended last. Two that exist at the same
    time have two numbers: an inner and an outer one may update the same parameters, and two models of an ensemble have
    the same shapes.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any] | None, OptimizerKey]] = {}
        self._gone: deque[tuple[int, OptimizerKey]] = deque()
        self._by_parameters: dict[Hashable, OptimizerKey] = {}
        self._by_kind: dict[Hashable, dict[Hashable, OptimizerKey]] = {}
        self._free: dict[Hashable, OptimizerKey] = {}
        self._num_numbers = 0
        self._stepped: set[int] = set()
        self._existing: set[int] | None = None

    @property
    def num_known(self) -> int:
        """How many optimizers are remembered."""
        return len(self._known) + len(self._gone) + len(self._free)

    @property
    def have_stepped(self) -> bool:
        """Whether any optimizer has stepped."""
        return bool(self._stepped)

    def key_of(self, optimizer: Any) -> OptimizerKey:
        """Return what an optimizer is to the steps, and note that it steps."""
        identity = id(optimizer)
        while self._gone:
            self._forget(*self._gone.popleft())
        self._stepped.add(identity)
        reference, key = self._known.get(identity, (None, None))
        if key is not None and (reference is None or reference() is optimizer):
            return key
        parameters, kind = _content(optimizer)
        number = self._number_of(parameters, kind)
        key = OptimizerKey(number, kind, (number,) if parameters is None else parameters)
        try:
            # It may end at any moment, also in the middle of what happens here.
            gone = partial(_note, self._gone, (identity, key))
            self._known[identity] = weakref.ref(optimizer, gone), key
        except TypeError:  # a class with slots: it counts as one that exists for ever
            self._known[identity] = None, key
        return key

    def count_idle(self) -> int:
        """Return how many optimizers exist that have not stepped so far."""
        if self._existing is None:
            # By their class alone: asking objects for theirs runs code of the job.
            self._existing = {
                id(found)
                for found in gc.get_objects()
                if Optimizer in type(found).__mro__ and getattr(type(found).step, "hooked", False)
            }
        return len(self._existing - self._stepped)

    def _number_of(self, parameters: Hashable, kind: Hashable) -> Hashable:
        free = self._by_parameters.get(parameters) or next(iter(self._by_kind.get(kind, {}).values()), None)
        if free is None and not self._known and self._free:
            free = next(reversed(self._free.values()))
        if free is None:
            self._num_numbers += 1
            return self._num_numbers
        self._take(free)
        return free.number

    def _forget(self, identity: int, free: OptimizerKey) -> None:
        """Let another optimizer take the place of one that is gone."""
        self._known.pop(identity, None)
        self._free[free.number] = free
        self._by_kind.setdefault(free.kind, {})[free.number] = free
        self._by_parameters[free.parameters] = free
        if len(self._free) > MAX_FREE:
            self._take(next(iter(self._free.values())))

    def _take(self, free: OptimizerKey) -> None:
        self._free.pop(free.number, None)
        if self._by_parameters.get(free.parameters) is free:
            del self._by_parameters[free.parameters]
        of_kind = self._by_kind.get(free.kind, {})
        of_kind.pop(free.number, None)
        if not of_kind:
            self._by_kind.pop(free.kind, None)


class ReplacedSteps:
    """Observes what a script puts in the place of `step`, in a class of optimizers or in one of them, while it trains.

    Torch puts its hooks around the `step` that a class has when an optimizer of it is made: a function that comes later
    need not call them.

    Args:
        observe: returns what takes the place of such a function; both take the optimizer first.
    """

    def __init__(self, observe: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._observe = observe
        self._owners: dict[int, _Owner] = {}

    def follow(self, optimizer: Any) -> None:
        """Look after an optimizer that torch's hooks have seen, and its class."""
        known = self._owners.get(id(optimizer))
        if known is not None and known.reference() is optimizer:
            return
        kind = type(optimizer)
        owner = next((owner for owner in kind.__mro__ if _STEP in vars(owner)), kind)
        if id(owner) not in self._owners and not getattr(vars(owner).get(_STEP), "hooked", False):
            return
        for each in (owner, optimizer):
            known = self._owners.get(id(each))
            is_known = known is not None and known.reference() is each
            if not is_known and len(self._owners) < _MAX_OWNERS:
                with suppress(TypeError):  # a class with slots
                    self._owners[id(each)] = _Owner(each)

    def look(self) -> None:
        """Observe what has been put in the place of a `step` since the last call."""
        for known in tuple(self._owners.values()):
            owner = known.reference()
            if owner is None:
                self._owners.pop(known.identity)
            elif (step := vars(owner).get(_STEP)) is not known.seen:
                made = self._observed(owner, step)
                known.seen, known.theirs = (step, None) if made is None else (made, step)
                if made is not None:
                    setattr(owner, _STEP, made)

    def restore(self) -> None:
        """Put the script's functions back, where nobody has put another one on top since."""
        for known in self._owners.values():
            owner = known.reference()
            if owner is None or known.theirs is None:
                continue
            if vars(owner).get(_STEP) is known.seen:
                setattr(owner, _STEP, known.theirs)
            known.seen = known.theirs = None  # observed again, should somebody look

    def _observed(self, owner: Any, step: Any) -> Callable[..., Any] | None:
        """Return what takes the place of a function; None where the hooks see it, or nobody knows what it is."""
        if isinstance(owner, type):
            return wraps(step)(self._observe(step)) if callable(step) else None
        # A scheduler of torch calls what it has found there, and looks for its own mark.
        if not isinstance(step, FunctionType | MethodType) or hasattr(step, "_wrapped_by_lr_sched"):
            return None
        if isinstance(step, MethodType) and step.__self__ is owner:
            function = step.__func__
            is_usual = function is getattr(type(owner), _STEP, None)
            return None if is_usual else MethodType(wraps(function)(self._observe(function)), owner)
        observed = self._observe(lambda _, *args, **kwargs: step(*args, **kwargs))
        reference = weakref.ref(owner)

        @wraps(step)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            optimizer = reference()
            return step(*args, **kwargs) if optimizer is None else observed(optimizer, *args, **kwargs)

        return stepping


class _Owner:
    """Who has a `step`: a class, or one optimizer.

    Args:
        owner: it; with a function of its own if that is there already.

    Attributes:
        identity, reference: its number, and itself as long as it exists.
        seen: the function that is known of it, ours if there is one.
        theirs: the function of the script in whose place ours is.
    """

    def __init__(self, owner: Any) -> None:
        self.identity, self.reference = id(owner), weakref.ref(owner)
        self.seen, self.theirs = vars(owner).get(_STEP), None


def _note(gone: deque[tuple[int, OptimizerKey]], which: tuple[int, OptimizerKey], _: object) -> None:
    gone.append(which)


def name_of(optimizer: Any) -> str:
    """Return the name of an optimizer's class, of bounded length."""
    return type(optimizer).__name__[:_MAX_NAME]


def _content(optimizer: Any) -> tuple[Hashable, Hashable]:
    """Return the identity of an optimizer's parameters, None if unknown, and its kind."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    try:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shapes = hash(tuple(tuple(parameter.shape) for parameter in parameters))
    except Exception:  # the boundary to somebody else's class
        return None, name
    # Hashes: a large model has thousands of parameters.
    return hash(frozenset(map(id, parameters))), (name, shapes)


_SAMPLED = 64
_MAX_MODULES = 64
# More batches than a step has loaders or microbatches.
_MAX_FETCHED = 1_024
_PART_OF_DTENSOR = "_local_tensor"


class ParameterProbe:
    """Looks at the last parameter of the module that ran last, of those that have one; else it knows nothing."""

    def __init__(self) -> None:
        self._parameter: Any = None
        self._seen: Any = None
        self._last_of: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}

    def forward_begins(self, module: torch.nn.Module) -> None:
        """Note the module that will be trained."""
        known = self._known(id(module))
        if known is not None:
            self._parameter = known
            return
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                # What torch.func puts in its place lasts for one call.
                if parameter.requires_grad and isinstance(parameter, torch.nn.Parameter):
                    self._parameter = parameter
                    self._last_of[id(module)] = (weakref.ref(owner), name)
        if len(self._last_of) > _MAX_MODULES:
            self._last_of.clear()

    def _known(self, key: int) -> Any:
        """Return what was found before: to walk through a large model takes milliseconds."""
        found = self._last_of.get(key)
        parameter = None if found is None else getattr(found[0](), found[1], None)
        return parameter if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad else None

    def backward_ended(self) -> None:
        """Note parameters and gradients."""
        self._seen = self._state()

    def has_changed(self) -> bool | None:
        """Return whether they are others now; None if that cannot be known."""
        state = self._state()
        return None if state is None else bool(state != self._seen)

    def _state(self) -> Any:
        parameter = self._parameter
        if parameter is None:
            return None
        gradient = parameter.grad
        try:
            state = [parameter._version, id(gradient)]
            if gradient is not None:
                state.append(gradient._version)
            with torch.no_grad():
                state += [tensor.detach().flatten()[-_SAMPLED:].sum().item() for tensor in _own((parameter, gradient))]
        except RuntimeError:  # tensors of inference mode have no version, and fake ones no values
            return None
        return state


def _own(tensors: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """Yield what this rank can read by itself of tensors: through `.data` they change without a new version.

    The values of a DTensor are spread over ranks, which would all have to read them; its own part is here. On a device,
    reading would wait for it.
    """
    for tensor in tensors:
        part: Any = getattr(tensor, _PART_OF_DTENSOR, tensor)
        if type(part) in (torch.Tensor, torch.nn.Parameter) and part.device.type == "cpu":
            yield part


_DEPTH = 3
_MAX_EVALUATED = 1024
"""memory: batches that a step may see without gradients before it trains on them; an evaluation has any number."""
_PIPELINES = ("torch.distributed.pipelining", "deepspeed.runtime.pipe", "colossalai.pipeline")
"""Packages whose engines hand parts of one batch through several ranks: the first stage loads it, or the last too."""


class BatchSizes:
    """Counts the samples of the step that is running.

    Attributes:
        source: what is counted, in words; empty as long as nothing is.
    """

    def __init__(self) -> None:
        self.source = ""
        self._has_loader = False
        self._fetched: list[_Fetched] = []
        self._evaluated: deque[_Fetched] = deque(maxlen=_MAX_EVALUATED)
        self._trained_from: weakref.ref[Any] | None = None  # the iterator of the batch that was used last
        self._num_used = 0
        self._num_forwarded = self._pending = self._most = 0
        self._counts_once: dict[int, bool] = {}
        self._is_shared = False

    def fetched(self, batch: Any, loader: Any, *, is_ahead: bool = False) -> None:
        """Note a batch that a loader's iterator has returned, to the thread that trains or to one that reads ahead."""
        size = first_dimension(batch)
        if size:
            self._has_loader = True
            self._fetched.append(_Fetched(size, weakref.ref(loader), is_ahead))
            if (
                len(self._fetched) > _MAX_FETCHED
            ):  # no module gets them; they count at the end of the step, which may be far
                half = _MAX_FETCHED // 2
                self._num_used += sum(batch.size for batch in self._fetched[:half])
                del self._fetched[:half]

    def forwarded(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the input of a module that is about to be trained."""
        # Also of a module on the meta device: its backward pass has no use for a batch that was fetched.
        counts_once = self._counts_once.get(id(module))
        if counts_once is None:
            counts_once = self._counts_once[id(module)] = _has_batch_alone(module)
        batch = _first_tensor((args, kwargs), _DEPTH + 1)
        if batch is not None and batch.is_meta:
            return  # measures the model's operations, as Fabric's measure_flops does, and computes nothing
        size = 0 if batch is None else batch.shape[0]
        self._use_fetched(size)
        self._is_shared = self._is_shared or not counts_once
        if not self._pending and not self._has_loader:
            self._pending = size

    def evaluated(self) -> None:
        """Set the batches aside that were fetched for an evaluation; a teacher may see those that a student gets."""
        self._evaluated.extend(batch for batch in self._fetched if batch.loader != self._trained_from)
        self._fetched = [batch for batch in self._fetched if batch.loader == self._trained_from]

    def backward_ended(self) -> None:
        """Count the input that gradients were computed for: where no module gets a batch, the oldest one."""
        if self._fetched and not self._counts_once:
            self._num_used += self._fetched.pop(0).size
        self._num_forwarded += self._pending
        self._pending = 0

    def optimizer_ended(self) -> None:
        """Begin another model's update, which may see the same samples again."""
        self._most = max(self._most, self._num_forwarded)
        self._num_forwarded = 0

    def take(self) -> int:
        """Return the samples since the last call; 0 where ranks share them."""
        self.optimizer_ended()
        # What no module has got, as in a step with several loaders, counts as well, but not the batch fetched ahead.
        if self._fetched:
            ahead = [batch for batch in self._fetched if batch.is_ahead]
            alive = [batch for batch in self._fetched if batch.loader() is not None and not batch.is_ahead]
            self._num_used += sum(batch.size for batch in alive[:-1])
            self._fetched = [*ahead, *alive[-1:]]
        self._evaluated.clear()
        num_samples = self._num_used if self._has_loader else self._most
        self._num_used = self._most = 0
        if self._is_shared:
            self.source = "not guessed: ranks share batches"
            return 0
        if num_samples:
            what = "the batches of DataLoaders" if self._has_loader else "the first input of the outermost module"
            self.source = f"a guess: the first dimension of {what}"
        return num_samples

    def _use_fetched(self, size: int) -> None:
        """Count the batch that a module gets; all that were fetched, if it gets another number of samples."""
        if not self._fetched:
            self._fetched = self._evaluated_before(size)
        fitting = [batch for batch in self._fetched if batch.size == size]
        # One that was fetched by itself, as for a look at its shape, comes second to the loop's own.
        used = next((batch for batch in fitting if batch.loader() is not None), fitting[0] if fitting else None)
        self._num_used += sum(batch.size for batch in self._fetched) if used is None else used.size
        if used is None:
            self._fetched.clear()
        else:
            self._fetched.remove(used)
            self._trained_from = used.loader

    def _evaluated_before(self, size: int) -> list[_Fetched]:
        """Return the batch set aside that a module gets now; models may see all of a step's without gradients first."""
        last = self._trained_from if self._num_used else self._evaluated[-1].loader if self._evaluated else None
        alive = [batch for batch in self._evaluated if batch.loader == last and batch.loader() is not None]
        found = next((batch for batch in alive if batch.size == size), None)
        if found is None:
            self._evaluated.clear()
            return alive[-1:]
        self._evaluated.remove(found)
        return [found]


@dataclasses.dataclass(eq=False, slots=True)
class _Fetched:
    size: int
    loader: weakref.ref[Any]
    is_ahead: bool = False


def first_dimension(value: Any, depth: int = _DEPTH) -> int:
    """Return the length of the first tensor in a batch along its first dimension, 0 without one."""
    tensor = _first_tensor(value, depth)
    return 0 if tensor is None else tensor.shape[0]


def _first_tensor(value: Any, depth: int = _DEPTH) -> torch.Tensor | None:
    """Return the first tensor in a batch that has something along its first dimension."""
    if isinstance(value, torch.Tensor):
        return value if value.ndim and value.shape[0] else None
    if not depth or value is None:
        return None
    # In the order of their cost: abstract classes take longer than all others.
    is_sequence = isinstance(value, (tuple, list))
    if is_sequence or isinstance(value, (dict, Mapping)):
        for part in value if is_sequence else value.values():
            tensor = _first_tensor(part, depth - 1)
            if tensor is not None:
                return tensor
    return None


def has_parameters(module: Any) -> bool:
    """Return whether a module has parameters; torch's RemoteModule cannot name those that it has elsewhere."""
    try:
        return next(module.parameters(), None) is not None
    except Exception:  # the boundary to somebody else's module
        return True


def has_scalar(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether what a module returns has a single number in it, as a loss is."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    if not depth or value is None:
        return False
    is_sequence = isinstance(value, (tuple, list))
    parts = value if is_sequence else value.values() if isinstance(value, (dict, Mapping)) else ()
    return any(has_scalar(part, depth - 1) for part in parts)


def _has_batch_alone(module: Any) -> bool:
    """Return whether each rank gives a module batches of its own, as far as its class shows."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    if _is_called_by(_PIPELINES):
        return False
    group = getattr(module, "process_group", None)
    if isinstance(group, dist.ProcessGroup):  # DDP and FSDP
        return group.size() == dist.get_world_size()
    mesh = next((p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")), None)
    if mesh is None:
        return True
    is_fully_sharded = any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    return is_fully_sharded and mesh.ndim == 1 and mesh.size() == dist.get_world_size()


def _is_called_by(packages: tuple[str, ...]) -> bool:
    """Return whether a function of one of several packages is among the callers."""
    loaded = tuple(package for package in packages if package in sys.modules)
    frame = sys._getframe() if loaded else None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(loaded):
            return True
        frame = frame.f_back
    return False
