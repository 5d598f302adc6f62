"""How the steps of a run were found: what the user asked for, the repeating pattern that was seen, and its wording."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace

from hpcpace.core.errors import UsageError
from hpcpace.core.text import plural

_FORM = re.compile(r"(auto)|(optimizer|backward)(?::([1-9][0-9]{0,5}))?")


@dataclass(frozen=True)
class StepFrom:
    """What ends a step.

    Attributes:
        kind: auto, optimizer or backward.
        count: how many of them end a step.
    """

    kind: str = "auto"
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> StepFrom:
        """Return what a text like `auto`, `backward` or `optimizer:2` means.

        Raises:
            UsageError: it means nothing.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(f"step_from is {text!r}: use auto, optimizer, backward, optimizer:N or backward:N")
        return cls(match[1] or match[2], int(match[3] or 1))

    @property
    def is_auto(self) -> bool:
        """Whether the job shows what ends a step."""
        return self.kind == "auto"

    @property
    def evidence(self) -> str:
        """The choice in words."""
        one, several = (
            ("backward pass", "backward passes") if self.kind == "backward" else ("optimizer step", "optimizer steps")
        )
        return f"every {one}, as asked for" if self.count == 1 else f"every {self.count} {several}, as asked for"


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The updates that repeat with each step.

    Attributes:
        updates: the optimizers of each update, in the order in which they step.
        names: their classes.
        is_regular: whether the sequence repeats; otherwise steps end with the commonest update. Without optimizers,
            whether the parameters can be seen to change.
        num_backward: backward passes for each update, rounded.
    """

    updates: tuple[tuple[Hashable, ...], ...]
    names: tuple[tuple[str, ...], ...] = ()
    is_regular: bool = True
    num_backward: int = 1

    @property
    def is_by_backward(self) -> bool:
        """Whether no optimizer steps."""
        return not self.updates

    @property
    def kind(self) -> str:
        """What ends a step: optimizer or backward."""
        return "backward" if self.is_by_backward else "optimizer"

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The optimizers of a whole period."""
        return tuple(key for update in self.updates for key in update)

    def knows(self, key: Hashable) -> bool:
        """Return whether an optimizer is part of the pattern."""
        return key in self.keys

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
            parts = " then ".join(_listed(update) for update in self.names)
            return f"{parts}, in turn, each after its own backward pass"
        return f"{_listed(self.names[0])}{self._accumulated()}"

    def _accumulated(self) -> str:
        if not self.num_backward:
            return ", with no backward pass seen"
        return f", after {self.num_backward} backward passes" if self.num_backward > 1 else ", after each backward pass"


@dataclass(frozen=True, kw_only=True)
class StepSource:
    """How steps are found.

    Attributes:
        kind: optimizer, backward, or unknown.
        evidence: what was seen, in words.
        num_steps: steps found so far.
        num_irregular: updates out of order.
    """

    kind: str
    evidence: str
    num_steps: int = 0
    num_irregular: int = 0

    def __str__(self) -> str:
        irregular = f"; {plural(self.num_irregular, 'update')} out of order" if self.num_irregular else ""
        return f"{plural(self.num_steps, 'step')} by {self.kind}: {self.evidence}{irregular}"

    def after(self, num_steps: int) -> StepSource:
        """Return the same after further steps."""
        return replace(self, num_steps=self.num_steps + num_steps)

    def found(self, kind: str, evidence: str, num_irregular: int) -> StepSource:
        """Return what has been found out since."""
        return replace(self, kind=kind, evidence=evidence, num_irregular=num_irregular)


def _listed(names: tuple[str, ...]) -> str:
    """Return optimizers that step together, each class once: `2 x Adam and SGD`."""
    counts = Counter(names)
    return " and ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
