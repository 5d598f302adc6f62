"""Which optimizers are one to the steps of a job, although the script makes them or their `step` anew.

Rounds of federated training, folds and phases have optimizers of their own, and some loops make one per iteration. Each
continues what one before it did.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial, wraps
from typing import Any, NamedTuple

from torch.optim.optimizer import Optimizer

MAX_FREE = 1_024
"""memory: optimizers that no longer exist and that nobody has continued; the oldest are forgotten."""
_MAX_NAME = 40
"""display: letters of the name of an optimizer's class."""
_MAX_CLASSES = 64
"""memory: classes of optimizers whose `step` is looked after."""
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
    """Observes what a script puts in the place of `step` in a class of optimizers while it trains.

    Torch puts its hooks around the `step` that a class has when an optimizer of it is made: a function that comes later
    need not call them.

    Args:
        observe: returns what takes the place of such a function.
    """

    def __init__(self, observe: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._observe = observe
        self._classes: set[type] = set()
        self._seen: dict[type, Any] = {}  # by the class that has it: the `step` that is observed
        self._theirs: dict[type, Any] = {}

    def follow(self, optimizer: Any) -> None:
        """Look after the class of an optimizer that torch's hooks have seen."""
        kind = type(optimizer)
        if kind in self._classes or len(self._classes) >= _MAX_CLASSES:
            return
        self._classes.add(kind)
        owner = next((owner for owner in kind.__mro__ if _STEP in vars(owner)), kind)
        step = vars(owner).get(_STEP)
        if owner not in self._seen and getattr(step, "hooked", False):
            self._seen[owner] = step

    def look(self) -> None:
        """Observe what has been put in the place of a `step` since the last call."""
        for owner, seen in self._seen.items():
            step = vars(owner).get(_STEP)
            if step is not seen and callable(step):
                self._theirs[owner] = step
                self._seen[owner] = made = wraps(step)(self._observe(step))
                setattr(owner, _STEP, made)

    def restore(self) -> None:
        """Put the script's functions back, where nobody has put another one on top since."""
        for owner, step in self._theirs.items():
            if vars(owner).get(_STEP) is self._seen[owner]:
                setattr(owner, _STEP, step)
            self._seen[owner] = None  # observed again, should somebody look
        self._theirs.clear()


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
