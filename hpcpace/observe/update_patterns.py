"""The updates that repeat with each step of a job: found in the sequence of its optimizers, and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

from hpcpace.core.records import dataclass
from hpcpace.core.text import plural

# display: classes of optimizers, or updates of a period, that a text names.
_MAX_NAMED = 4


By = Literal["key", "kind", "parameters"]


class Mark(NamedTuple):
    """The end of an optimizer's step, which may end a step of the job.

    Attributes:
        key: which optimizer.
        kind: the same for optimizers like it.
        parameters: the same for optimizers of the same parameters.
        name: its class.
        end_ns: when it ended.
        begins_update: whether a backward pass came before it.
        num_backward: backward passes so far.
        is_seen: whether parameters were seen to change.
    """

    key: Hashable
    kind: Hashable
    parameters: Hashable
    name: str
    end_ns: int
    begins_update: bool
    num_backward: int
    is_seen: bool = True


def identity_of(mark: Mark, by: By) -> Hashable:
    """Return one of the identities of a mark."""
    return mark.key if by == "key" else mark.kind if by == "kind" else mark.parameters


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The updates that repeat with each step.

    Attributes:
        updates: the optimizers of each update, in the order in which they step.
        names: their classes.
        by: what is in `updates`: `key`; `kind`, as where each model of many has its own optimizer; or `parameters`, as
            where two optimizers of one model take turns.
        is_regular: whether the sequence repeats; otherwise steps end with the commonest update. Without optimizers,
            whether the parameters can be seen to change.
        num_backward: backward passes for each update, rounded.
    """

    updates: tuple[tuple[Hashable, ...], ...]
    names: tuple[tuple[str, ...], ...] = ()
    by: By = "key"
    is_regular: bool = True
    num_backward: int = 1

    @cached_property
    def is_by_backward(self) -> bool:
        """Whether no optimizer steps."""
        return not self.updates

    @property
    def kind(self) -> str:
        """What ends a step: optimizer or backward."""
        return "backward" if self.is_by_backward else "optimizer"

    @cached_property
    def keys(self) -> tuple[Hashable, ...]:
        """The optimizers of a whole period."""
        return tuple(key for update in self.updates for key in update)

    @cached_property
    def classes(self) -> frozenset[str]:
        """The classes of all of its optimizers."""
        return frozenset(name for update in self.names for name in update)

    def others_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the classes that are not in the pattern; any may be, where there is no order."""
        return tuple(name for name in names if name not in self.classes) if self.is_regular else ()

    @property
    def evidence(self) -> str:
        """The pattern in words."""
        if self.is_by_backward and not self.is_regular:
            return "no torch optimizer steps and no parameters are seen; each backward pass ends a step"
        if self.is_by_backward:
            return "no torch optimizer steps; parameters or gradients change between a backward pass and the next batch"
        if not self.is_regular:
            return f"optimizers step in no regular order; each step of {_listed(self.names[0])} ends a step"
        if len(self.updates) > 1:
            return f"{self._turns}, in turn, each after its own backward pass"
        passes = "each backward pass" if self.num_backward == 1 else f"{self.num_backward} backward passes"
        return f"{_listed(self.names[0])}, {f'after {passes}' if self.num_backward else 'with no backward pass seen'}"

    @property
    def _turns(self) -> str:
        """The updates of a period, those of one optimizer in a row once: `Adam 5 times then SGD`."""
        runs = [(names, len([*run])) for (_, names), run in groupby(zip(self.updates, self.names, strict=True))]
        parts = [_listed(names) if count == 1 else f"{_listed(names)} {count} times" for names, count in runs]
        left = f" then {plural(len(parts) - _MAX_NAMED, 'other')}" if len(parts) > _MAX_NAMED else ""
        return f"{' then '.join(parts[:_MAX_NAMED])}{left}"

    def identity_of(self, mark: Mark) -> Hashable:
        """Return what of a mark is in `updates`."""
        return identity_of(mark, self.by)

    def may_advance(self, mark: Mark) -> bool:
        """Return whether a mark may be the next one: an outer optimizer has no backward pass of its own."""
        return self.by != "parameters" or mark.begins_update


@dataclass(frozen=True, kw_only=True)
class StepSource:
    """How steps are found.

    Attributes:
        kind: optimizer, backward, or unknown.
        evidence: what was seen, in words.
        num_steps: steps found so far.
        num_irregular: updates out of order.
        num_left: backward passes after the last step, if those are more than one step has.
        others: classes of optimizers that ended steps before, or instead.
    """

    kind: str
    evidence: str
    num_steps: int = 0
    num_irregular: int = 0
    num_left: int = 0
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{plural(self.num_steps, 'step')} by {self.kind}: {self.words}"

    @property
    def words(self) -> str:
        """What was seen, and what did not fit."""
        irregular = f"; {plural(self.num_irregular, 'update')} out of order" if self.num_irregular else ""
        others = f"; at other times {_listed(self.others)}" if self.others else ""
        left = f"; no step was seen to end in the last {self.num_left} backward passes" if self.num_left else ""
        return f"{self.evidence}{others}{irregular}{left}"


def _listed(names: tuple[str, ...]) -> str:
    """Return optimizers that step together, each class once: `2 x Adam and SGD`."""
    counts = Counter(names)
    parts = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    left = [plural(len(parts) - _MAX_NAMED, "other")] if len(parts) > _MAX_NAMED else []
    return " and ".join([*parts[:_MAX_NAMED], *left])


def common_updates(period: Sequence[tuple[Hashable, ...]]) -> Sequence[tuple[Hashable, ...]]:
    """Return the updates of a step: the shortest one, if all others are that and further optimizers after it.

    An outer optimizer, which averages what the inner ones of all ranks have done in some steps, ends no step.
    """
    least = min(period, key=len)
    is_part_of_all = all(
        update[: len(least)] == least and not set(least) & set(update[len(least) :]) for update in period
    )
    return [least] if is_part_of_all else period


def period_of(updates: Sequence[tuple[Hashable, ...]]) -> int:
    """Return the shortest length with which updates repeat at least once; 0 if they do not."""
    return next((length for length in range(1, len(updates) // 2 + 1) if repeats(updates, length)), 0)


def repeats(updates: Sequence[tuple[Hashable, ...]], length: int) -> bool:
    """Return whether updates repeat with a period, as far as they go."""
    return all(updates[i] == updates[i + length] for i in range(len(updates) - length))
