"""The operation of a step at which ranks are paced: the one where they wait longest for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_MOST_CANDIDATES = 64


@dataclass(frozen=True, kw_only=True)
class PacingPoint:
    """One blocking operation per step, at which some ranks meet.

    Attributes:
        name: like `all_reduce 3`: the fourth blocking all_reduce of a step.
        ranks: global ranks that meet there.
        wait_ns: how long they wait for each other, mean over ranks and steps.
    """

    name: str
    ranks: tuple[int, ...]
    wait_ns: float

    @property
    def kind(self) -> str:
        """Return the kind of operation, like `all_reduce`."""
        return self.name.rpartition(" ")[0]

    def facts(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": self.name, "ranks": list(self.ranks), "wait_ns": round(self.wait_ns)}


@dataclass(frozen=True, kw_only=True)
class PointCandidate:
    """An operation at which this rank was blocked once in every step.

    Attributes:
        name: as in `PacingPoint`.
        ranks: the group's.
        own_ns: exit - ready of each step, (num_steps,).
    """

    name: str
    ranks: tuple[int, ...]
    own_ns: tuple[int, ...]


@dataclass
class CandidateLog:
    """The waits of this rank in the first steps, by name of the operation."""

    own_ns: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ranks: dict[str, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))

    def add(self, name: str, ranks: tuple[int, ...], own_ns: int) -> None:
        """Note that this rank was blocked on an operation; `ranks` are empty where they are not known."""
        self.own_ns[name].append(own_ns)
        if ranks:
            self.ranks[name].add(ranks)

    def regular(self, num_steps: int) -> list[PointCandidate]:
        """Return the operations that came once in each of so many steps, in one group; the longest ones of many."""
        found = [
            PointCandidate(name=name, ranks=next(iter(self.ranks[name])), own_ns=tuple(own_ns))
            for name, own_ns in self.own_ns.items()
            if len(own_ns) == num_steps and len(self.ranks.get(name, ())) == 1
        ]
        return sorted(found, key=lambda candidate: (-sum(candidate.own_ns), candidate.name))[:_MOST_CANDIDATES]


def choose_points(candidates: Sequence[Sequence[PointCandidate]]) -> list[PacingPoint]:
    """Return the pacing points, at most one for each rank, the longest waits first; the same from the same input.

    A group has a point where all of its ranks were blocked on one operation in every step. Ranks in several groups
    are paced in the one in which more is waited for.

    Args:
        candidates: those of each rank, in order of rank.
    """
    columns: dict[tuple[str, tuple[int, ...]], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, rows in enumerate(candidates):
        for row in rows:
            columns[row.name, row.ranks][rank] = row.own_ns
    points = []
    for (name, ranks), own_ns in columns.items():
        if len(ranks) < 2 or set(own_ns) != set(ranks):
            continue
        panel_ns = np.array([own_ns[rank] for rank in ranks], dtype=np.float64)
        wait_ns = float((panel_ns - panel_ns.min(axis=0)).mean())
        points.append(PacingPoint(name=name, ranks=ranks, wait_ns=wait_ns))
    taken: set[int] = set()
    chosen = []
    for point in sorted(points, key=lambda point: (-point.wait_ns * len(point.ranks), point.name, point.ranks)):
        if taken.isdisjoint(point.ranks):
            taken.update(point.ranks)
            chosen.append(point)
    return chosen
