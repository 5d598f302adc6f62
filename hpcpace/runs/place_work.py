"""Own work of hosts and ranks in two groups of runs, as values that compare: each with itself, or with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median

from hpcpace.runs.measured import MeasuredRun, RankTimes

_LEAST_FOR_LEVEL = 3


@dataclass(frozen=True, kw_only=True)
class PlaceWork:
    """One place in each run of A and of B.

    Attributes:
        name: of the place.
        work_ns: own work per step in A and in B, mean over its ranks and runs; None in a group that lacks it.
        caused_ns: exposed wait that began there, mean over all ranks and over runs.
        values: of A and of B, the mean logarithm of own work in each run, less that of the others of its role where it
            is compared with them; 0 in a group that lacks it. None where nothing compares.
        errors: standard errors of them.
        is_itself: whether it is compared with itself.
    """

    name: str
    work_ns: tuple[float | None, float | None]
    caused_ns: tuple[float, float]
    values: tuple[Sequence[float], Sequence[float]] | None
    errors: tuple[Sequence[float], Sequence[float]]
    is_itself: bool

    @property
    def change(self) -> float:
        """ln(B / A) of its values."""
        return fmean(self.values[1]) - fmean(self.values[0]) if self.values is not None else 0.0


@dataclass(frozen=True)
class _Side:
    """The ranks of one place in each run of a group."""

    runs: list[list[RankTimes]]

    @property
    def work_ns(self) -> float:
        return fmean(rank.work_ns or 0.0 for run in self.runs for rank in run)

    @property
    def roles(self) -> set[str]:
        return {rank.role for run in self.runs for rank in run}

    @property
    def errors(self) -> list[float]:
        """Standard errors of the mean own work of each run's ranks, whose noise may be one and the same."""
        return [fmean(rank.work_error or 0.0 for rank in run) for run in self.runs]


def place_works(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    key: Callable[[RankTimes], str],
    *,
    has_same_layout: bool,
) -> list[PlaceWork]:
    """Return the places of both groups by name, those alone that all runs of a group have.

    Args:
        before, after: the groups; own work of all ranks is known.
        key: the place of a rank.
        has_same_layout: whether a rank has the same work in both groups.
    """
    groups = (before, after)
    sides = [_by_place(group, key) for group in groups]
    levels = [_levels(group) for group in groups]
    caused = [_caused(group, key) for group in groups]
    works = []
    for name in sorted({*sides[0], *sides[1]}, key=lambda name: (len(name), name)):
        one, two = (side.get(name) for side in sides)
        is_itself = has_same_layout and one is not None and two is not None and one.roles == two.roles
        values = [
            _values(side, None if is_itself else level, len(group))
            for side, level, group in zip((one, two), levels, groups, strict=True)
        ]
        errors = [
            [0.0] * len(group) if side is None else side.errors for side, group in zip((one, two), groups, strict=True)
        ]
        works.append(
            PlaceWork(
                name=name,
                work_ns=(None if one is None else one.work_ns, None if two is None else two.work_ns),
                caused_ns=(caused[0].get(name, 0.0), caused[1].get(name, 0.0)),
                values=None if values[0] is None or values[1] is None else (values[0], values[1]),
                errors=(errors[0], errors[1]),
                is_itself=is_itself,
            )
        )
    return works


def _by_place(group: Sequence[MeasuredRun], key: Callable[[RankTimes], str]) -> dict[str, _Side]:
    """Return the ranks of each place that all runs of a group have."""
    found: dict[str, list[list[RankTimes]]] = {}
    for run in group:
        of_run: dict[str, list[RankTimes]] = {}
        for rank in run.ranks:
            of_run.setdefault(key(rank), []).append(rank)
        for name, ranks in of_run.items():
            found.setdefault(name, []).append(ranks)
    return {name: _Side(runs) for name, runs in found.items() if len(runs) == len(group)}


def _levels(group: Sequence[MeasuredRun]) -> list[dict[str, float]]:
    """Return the logarithm of the median own work of each role with three ranks or more, of each run."""
    levels = []
    for run in group:
        by_role: dict[str, list[float]] = {}
        for rank in run.ranks:
            by_role.setdefault(rank.role, []).append(log(rank.work_ns or 1.0))
        levels.append({role: median(values) for role, values in by_role.items() if len(values) >= _LEAST_FOR_LEVEL})
    return levels


def _values(side: _Side | None, levels: Sequence[Mapping[str, float]] | None, num_runs: int) -> list[float] | None:
    """Return the values of a place in the runs of a group; None where a role has no level to be compared with."""
    if side is None:  # against the others alone: in the group that lacks the place, it is as usual
        return [0.0] * num_runs
    if levels is None:
        return [fmean(log(rank.work_ns or 1.0) for rank in ranks) for ranks in side.runs]
    if any(rank.role not in level for ranks, level in zip(side.runs, levels, strict=True) for rank in ranks):
        return None
    return [
        fmean(log(rank.work_ns or 1.0) - level[rank.role] for rank in ranks)
        for ranks, level in zip(side.runs, levels, strict=True)
    ]


def _caused(group: Sequence[MeasuredRun], key: Callable[[RankTimes], str]) -> dict[str, float]:
    """Return the exposed wait that began at each place, mean over runs."""
    found: dict[str, float] = {}
    for run in group:
        for rank in run.ranks:
            name = key(rank)
            found[name] = found.get(name, 0.0) + rank.caused_wait_ns / len(group)
    return found
