"""How much of each step a rank records: which level of detail holds in which steps, and orders that change it.

All ranks work it out alike from the same settings and orders, so nothing has to be exchanged for it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum

from hpcpace.core.records import dataclass
from hpcpace.core.text import shown

MAX_STEPS = (1 << 31) - 1
"""Behind the last step that a trace can number."""
MAX_RANKS = 1 << 20
"""The most ranks of a run: sixty times the largest run ever reported, and few enough to list those missing."""


class Detail(IntEnum):
    """What is recorded of a step; each level has all of those before it.

    STEPS is one row a step, with the counters of host and network. COLLECTIVES adds communication, FULL the phases.
    """

    STEPS = 0
    COLLECTIVES = 1
    FULL = 2


DETAILS = tuple(detail.name.lower() for detail in Detail)
"""The names of the levels, least first."""

Steps = tuple[int, int]
"""The first step, and the one behind the last."""

ALL_STEPS: Steps = (0, MAX_STEPS)

_RANGE = re.compile(r"([0-9]{1,10}):([0-9]{0,10})")


def parse_detail(text: str) -> Detail:
    """Return the level of a name.

    Raises:
        ValueError: there is none of that name.
    """
    if text not in DETAILS:
        raise ValueError(f"{shown(text)} is no level of detail: choose one of {', '.join(DETAILS)}")
    return Detail(DETAILS.index(text))


def parse_steps(text: str) -> tuple[Steps, ...]:
    """Return the ranges of steps in `A:B[,C:D...]`, each from its first step to the one before its second number.

    The last one may lack its end: `100:` goes on from step 100. An empty text means all steps.

    Raises:
        ValueError: one is no range, is empty, or begins before the one in front of it ends.
    """
    ranges: list[Steps] = []
    for part in text.split(",") if text else ():
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{shown(part.strip())} is not a range of steps: write A:B, like 100:200")
        first, stop = int(found[1]), min(int(found[2] or MAX_STEPS), MAX_STEPS)
        if stop <= first:
            raise ValueError(f"{shown(part.strip())} is an empty range: B must be larger than A")
        if ranges and first < ranges[-1][1]:
            raise ValueError(
                f"{shown(text)} has steps out of order or twice: each range must begin where the last one ends"
            )
        ranges.append((first, stop))
    return tuple(ranges) or (ALL_STEPS,)


@dataclass(frozen=True)
class Order:
    """Record some steps at a level of detail from now on, and of all others the least."""

    detail: Detail
    steps: Steps = ALL_STEPS

    @property
    def text(self) -> str:
        """The order as one line, which `parse_order` reads."""
        if self.detail == Detail.STEPS:
            return "off"
        level = "" if self.detail == Detail.FULL else f" {self.detail.name.lower()}"
        first, stop = self.steps
        return f"on{level}" if self.steps == ALL_STEPS else f"steps {first}:{'' if stop == MAX_STEPS else stop}{level}"


def parse_order(text: str) -> Order:
    """Return the order of a line: `off`, `on [LEVEL]` or `steps A:B [LEVEL]`.

    Raises:
        ValueError: the line is no order.
    """
    words = text.split()
    if words == ["off"]:
        return Order(Detail.STEPS)
    kind, arguments = (words[0], words[1:]) if words else ("", [])
    num_needed = {"on": 0, "steps": 1}.get(kind)
    if num_needed is None or not num_needed <= len(arguments) <= num_needed + 1:
        raise ValueError(f"{shown(text.strip())} is no order: write off, on [LEVEL], or steps A:B [LEVEL]")
    detail = parse_detail(arguments[num_needed]) if len(arguments) > num_needed else Detail.FULL
    if kind == "on":
        return Order(detail)
    ranges = parse_steps(arguments[0])
    if len(ranges) > 1:
        raise ValueError(f"{shown(arguments[0])} has {len(ranges)} ranges: an order takes one")
    return Order(detail, ranges[0])


@dataclass(frozen=True)
class DetailPlan:
    """Which level of detail holds in which steps.

    Attributes:
        starts: the first step of each stretch with one level, ascending, beginning with 0.
        details: the level of each stretch.
    """

    starts: tuple[int, ...]
    details: tuple[Detail, ...]

    @classmethod
    def of(cls, ranges: Sequence[Steps], detail: Detail) -> DetailPlan:
        """Return the plan that records some ranges at a level, and all other steps with the least detail."""
        plan = cls((0,), (Detail.STEPS,))
        for first, stop in ranges:
            plan = plan._with(first, detail)._with(stop, Detail.STEPS)
        return plan

    @property
    def is_always_full(self) -> bool:
        """Whether every step is recorded in full."""
        return set(self.details) == {Detail.FULL}

    def at(self, step: int) -> Detail:
        """Return the level of a step; what comes before the first step belongs to it."""
        return self.details[max(bisect_right(self.starts, step) - 1, 0)]

    def follow(self, order: Order, step: int) -> DetailPlan:
        """Return the plan with an order that takes effect at a step; earlier steps keep their level."""
        first, stop = max(order.steps[0], step), max(order.steps[1], step)
        plan = self._with(step, Detail.STEPS)
        return plan._with(first, order.detail)._with(stop, Detail.STEPS) if first < stop else plan

    def _with(self, step: int, detail: Detail) -> DetailPlan:
        """Return the plan with a level from a step on, whatever came after it."""
        num_kept = bisect_right(self.starts, step - 1)
        starts, details = self.starts[:num_kept], self.details[:num_kept]
        if step >= MAX_STEPS or (details and details[-1] == detail):
            return DetailPlan(starts, details)
        return DetailPlan((*starts, step), (*details, detail))
