"""What changed from before to after, in times and in facts: whether it is beyond noise, and how that is said.

Times are compared by their logarithms, so that a change and its reverse have the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from math import expm1, log1p
from typing import Any

from hpcpace.core.records import dataclass

MISSING = "-"
"""The value of a fact that one side lacks."""


class Outcome(StrEnum):
    """What became of a time."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "no difference"


@dataclass(frozen=True, kw_only=True)
class TimeChange:
    """The change of a time, ln(after / before), with its interval."""

    value: float
    low: float
    high: float

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def half_width(self) -> float:
        """Half of the interval: about the smallest change that would have been seen."""
        return (self.high - self.low) / 2

    @property
    def share(self) -> float:
        """By how much the time is longer, relative."""
        return expm1(self.value)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of `share`."""
        return expm1(self.low), expm1(self.high)

    def outcome(self, least: float = 0.0) -> Outcome:
        """Return what became of the time; the same where that may be noise, or where less than a share was added."""
        if self.low > 0 and self.value > log1p(least):
            return Outcome.SLOWER
        return Outcome.FASTER if self.high < 0 and self.value < -log1p(least) else Outcome.SAME


def signed(share: float) -> str:
    """Return a change in percent; one that is none has no sign."""
    percents = round(100 * share, 1)
    return f"{percents:+.1f} %" if percents else "0.0 %"


def signed_interval(change: TimeChange) -> str:
    """Return the interval of a change of runs in words: `95 %: -0.3 % to +2.1 %`."""
    low, high = change.interval
    return f"95 %: {signed(low)} to {signed(high)}"


def whole_interval(change: TimeChange) -> str:
    """Return the interval of a change in whole percent: `-1 to +14 %`."""
    low, high = change.interval
    return f"{100 * low:+.0f} to {100 * high:+.0f} %"


@dataclass(frozen=True, kw_only=True)
class FactChange:
    """Something that is not the same before and after, as text; `-` where one side lacks it.

    Attributes:
        kind: what the fact is of, such as settings or a host.
        name: of the fact.
        before, after: its values, all of them where a side has several.
    """

    kind: str
    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


def fact_changes(
    kind: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    words: Callable[[Any], str] = str,
    tolerance: float = 0.0,
) -> Iterator[FactChange]:
    """Yield the facts that are not the same, those of `before` first.

    Args:
        kind: of all of them.
        before, after: values by name.
        words: puts a value, or `MISSING`, into words.
        tolerance: the share of the larger one by which numbers may differ.
    """
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name, MISSING), after.get(name, MISSING)
        if one != other and not is_close(one, other, tolerance):
            yield FactChange(kind=kind, name=name, before=words(one), after=words(other))


def is_close(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether both are numbers that differ by at most a share of the larger one."""
    are_numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return are_numbers and bool(abs(one - other) <= tolerance * max(one, other))
