"""What a kind of damage is, and what one damaged input expects of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.damage.specimen import RunCopy

Random = np.random.Generator
ALL_WITH_FILES = ("plain", "hosts", "pipeline", "single")
"""Specimens whose files are all closed."""


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """What was done to a run.

    Attributes:
        hurt: ranks that the report may leave out.
        places: what an error has to name, one of them at least.
        says: what the report or the error has to say, all of it, whatever its line breaks.
        never: what must not occur in any output or file of the report.
        without_rights: whether the report runs without root's rights to pass by the modes of files.
    """

    hurt: frozenset[int] = frozenset()
    places: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    without_rights: bool = False


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of damage.

    Attributes:
        name: of the kind, unique.
        group: the row of the table in the document.
        damage: does it to a copy, by chance.
        specimens: what it is done to.
        weight: how many inputs it gets relative to others.
    """

    name: str
    group: str
    damage: Callable[[RunCopy, Random], Damaged]
    specimens: tuple[str, ...] = ALL_WITH_FILES
    weight: float = 1.0


def some_rank(run: RunCopy, random: Random) -> int:
    """Return a rank of the run by chance."""
    return int(random.integers(run.num_ranks))


def of_rank(run: RunCopy, rank: int, *says: str) -> Damaged:
    """Return the expectation where one rank's files are damaged."""
    places = (f"rank-{rank:05d}", f"rank {rank}", str(run.attempt.path))
    return Damaged(hurt=frozenset({rank}), places=places, says=says)


def of_ranks(run: RunCopy, ranks: frozenset[int], *says: str) -> Damaged:
    """Return the expectation where several ranks' files are damaged."""
    places = [name for rank in sorted(ranks) for name in (f"rank-{rank:05d}", f"rank {rank}")]
    return Damaged(hurt=ranks, places=(*places, str(run.attempt.path)), says=says)
