"""What an experiment on pacing is, and what it comes to: a table, and sentences that hold or do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Effort(StrEnum):
    """How long an experiment may take."""

    TRY = "try"
    """Seconds: shows that it runs; its figures mean nothing, and are not written down."""
    FULL = "full"
    """As long as its figures need."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What was expected, and whether it was found; None where the data do not tell."""

    text: str
    holds: bool | None

    def line(self) -> str:
        word = {True: "holds", False: "DOES NOT HOLD", None: "cannot tell"}[self.holds]
        return f"{word}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What an experiment came to.

    Attributes:
        table: rows of cells, the head first.
        claims: what was expected of it.
        notes: how it was set up, and what else is to be known.
    """

    table: Sequence[Sequence[str]]
    claims: Sequence[Claim]
    notes: Sequence[str] = ()


Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment; `run` takes an effort and a function that shows progress."""

    name: str
    title: str
    run: Callable[[Effort, Tell], Finding]
    needs_lab: bool = False


def percent(share: float, digits: int = 1) -> str:
    """Return a signed share in percent: `+3.1 %`."""
    return f"{100 * share:+.{digits}f} %"
