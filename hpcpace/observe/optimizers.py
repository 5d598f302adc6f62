"""Which optimizers are one to the steps of a job, although the script makes them or their `step` anew.

Rounds of federated training, folds and phases have optimizers of their own, and some loops make one per iteration. Each
continues what one before it did.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch.optim.optimizer import Optimizer

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
