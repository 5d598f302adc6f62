"""Hosts and ranks that do their own work more slowly in one group of runs than in another.

A unit, host or rank, is compared with itself where it does the same work in both groups, else with the ranks of its
role in the same run. If most units change alike, no single one is at fault: only those that differ from the others are
named. How much a unit varies by itself is known from repeats, of hosts pooled over hosts and of ranks over ranks, else
from the prior and the scatter of 8 units or more. A change that all share is judged by how much whole runs differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import copysign, hypot, inf, log
from statistics import fmean, median
from typing import TypeVar

from hpcpace.core.records import dataclass
from hpcpace.metrics.run_difference import (
    MIN_REPEATS,
    LogDifference,
    RunSpread,
    log_difference,
    spread_beyond_prior,
    spread_of_places,
    spread_of_repeats,
)
from hpcpace.runs.measured import MeasuredRun, RankTimes

_MIN_FOR_LEVEL = 3


@dataclass(frozen=True, kw_only=True)
class UnitWork:
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
    """The ranks of one place in each run of a group; of no run where the group lacks it."""

    runs: list[list[RankTimes]]

    @property
    def work_ns(self) -> float | None:
        return fmean(rank.work_ns or 0.0 for run in self.runs for rank in run) if self.runs else None

    @property
    def roles(self) -> set[str]:
        return {rank.role for run in self.runs for rank in run}

    @property
    def errors(self) -> list[float]:
        """Standard errors of the mean own work of each run's ranks, whose noise may be one and the same."""
        return [fmean(rank.work_error or 0.0 for rank in run) for run in self.runs]


def unit_works(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    key: Callable[[RankTimes], str],
    *,
    has_same_layout: bool,
) -> list[UnitWork]:
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
        one, two = (side.get(name, _Side([])) for side in sides)
        is_itself = has_same_layout and bool(one.runs and two.runs) and one.roles == two.roles
        first, second = (
            _values(side, [defaultdict(float)] * len(group) if is_itself else of_roles)
            for side, of_roles, group in zip((one, two), levels, groups, strict=True)
        )
        works.append(
            UnitWork(
                name=name,
                work_ns=(one.work_ns, two.work_ns),
                caused_ns=(caused[0].get(name, 0.0), caused[1].get(name, 0.0)),
                values=None if first is None or second is None else (first, second),
                errors=(one.errors or [0.0] * len(before), two.errors or [0.0] * len(after)),
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
    works = [_by_role([run], lambda rank: log(rank.work_ns or 1.0)) for run in group]
    return [
        {role: median(values) for role, values in by_role.items() if len(values) >= _MIN_FOR_LEVEL} for by_role in works
    ]


def _by_role(group: Sequence[MeasuredRun], value: Callable[[RankTimes], float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in group:
        for rank in run.ranks:
            found.setdefault(rank.role, []).append(value(rank))
    return found


def _values(side: _Side, levels: Sequence[Mapping[str, float]]) -> list[float] | None:
    """Return the values of a place in the runs of a group; None where a role has no level to be compared with."""
    if not side.runs:  # against the others alone: in the group that lacks the place, it is as usual
        return [0.0] * len(levels)
    try:
        return [
            fmean(log(rank.work_ns or 1.0) - level[rank.role] for rank in ranks)
            for ranks, level in zip(side.runs, levels, strict=True)
        ]
    except KeyError:
        return None


def _caused(group: Sequence[MeasuredRun], key: Callable[[RankTimes], str]) -> dict[str, float]:
    """Return the exposed wait that began at each place, mean over runs."""
    found: dict[str, float] = {}
    for run in group:
        for rank in run.ranks:
            name = key(rank)
            found[name] = found.get(name, 0.0) + rank.caused_wait_ns / len(group)
    return found


_MIN_FOR_MEDIAN = 5
_Levels = tuple[Sequence[float], Sequence[float]]
_Place = TypeVar("_Place")
MIN_NAMED = 0.01
"""Change of own work below which a place is not named, however certain it is."""


@dataclass(frozen=True, kw_only=True)
class UnitRow:
    """The own work of one place in both groups, means over their runs.

    Attributes:
        kind, name: host or rank, and which.
        before_ns, after_ns: own work per step, mean over its ranks; None in a group that does not have it.
        caused_before_ns, caused_after_ns: exposed wait that began there, mean over all ranks.
        change: ln(B / A) of its own work; None where nothing compares. Where a group lacks it, that group has the
            level of the others in its run.
        beyond: the same less what most others changed by; None likewise.
        is_named: whether it is slower or faster in B beyond noise, and others are not.
        against: what it is compared with: itself, or the others of its run.
    """

    kind: str
    name: str
    before_ns: float | None
    after_ns: float | None
    caused_before_ns: float
    caused_after_ns: float
    change: LogDifference | None
    beyond: LogDifference | None
    is_named: bool
    against: str

    @property
    def beyond_share(self) -> float:
        """By how much it is slower in B beyond what most others changed by, relative."""
        return self.beyond.share if self.beyond is not None else 0.0

    @property
    def is_in_both(self) -> bool:
        """Whether all runs of both groups have it, so that its change is one from A to B."""
        return self.before_ns is not None and self.after_ns is not None

    @property
    def change_share(self) -> float:
        """By how much it is slower in B, relative."""
        return self.change.share if self.change is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class UnitChanges:
    """What changed where.

    Attributes:
        common: ln(B / A) of own work at most places; 0 where that is unknown.
        is_common: whether that is beyond the noise of whole runs.
        common_kind: of these places: host, or rank where there is one host.
        hosts: all hosts of both groups, the largest change first.
        ranks: ranks that are named, while the others of their host are as before.
        of_only_host: all ranks where there is one host, the largest change first; empty otherwise.
        roles: own work of each role, by name, before and after.
    """

    common: float
    is_common: bool
    common_kind: str
    hosts: tuple[UnitRow, ...]
    ranks: tuple[UnitRow, ...]
    of_only_host: tuple[UnitRow, ...]
    roles: tuple[tuple[str, float, float], ...]

    @property
    def named(self) -> tuple[UnitRow, ...]:
        """The places that are slower or faster than before, hosts first."""
        return (*(row for row in self.hosts if row.is_named), *self.ranks)


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """What runs differ by as a whole, at most places: hosts, or the ranks of the only host.

    Attributes:
        levels: the median over places of each run of A and of B, as logarithms.
        change: ln(B / A) of them; None where no place compares with itself.
        is_common: whether that is beyond the noise of runs, and most places changed by as much.
        num_places: those that compare with themselves.
    """

    levels: _Levels
    change: LogDifference | None
    is_common: bool
    num_places: int

    @property
    def is_known(self) -> bool:
        """Whether there are enough places: the median of few may be that of the changed ones."""
        return self.num_places >= _MIN_FOR_MEDIAN

    @property
    def reference(self) -> float:
        """What a place changes by that changes as the others do."""
        return self.change.value if self.change is not None and (self.is_known or self.is_common) else 0.0


def unit_changes(
    before: Sequence[MeasuredRun], after: Sequence[MeasuredRun], *, prior_cv: float, has_same_layout: bool
) -> UnitChanges | None:
    """Return what changed where; None where own work is not known of all ranks, or there are none.

    Args:
        before, after: the groups.
        prior_cv: of own work between runs, where there are too few repeats.
        has_same_layout: whether a rank has the same work in both groups.
    """
    ranks = [rank for run in (*before, *after) for rank in run.ranks]
    if not ranks or any(rank.work_ns is None or rank.work_ns <= 0 for rank in ranks):
        return None
    works = unit_works(before, after, lambda rank: rank.host, has_same_layout=has_same_layout)
    of_ranks = unit_works(before, after, lambda rank: f"{rank.rank} on {rank.host}", has_same_layout=has_same_layout)
    # What one host changed by may be the change of one of its ranks: there, what most ranks did counts.
    common_kind, of_most = ("host", works) if len(works) > 1 or len(of_ranks) < 2 else ("rank", of_ranks)
    whole = _whole(of_most, (len(before), len(after)), prior_cv)
    is_shared = any(len({rank.host for rank in run.ranks}) < len(run.ranks) for run in after)
    num_kinds = 2 if is_shared else 1  # hosts, and then ranks
    hosts = _rows("host", works, whole, prior_cv, num_kinds * len(works))
    of_hosts: dict[str, list[UnitRow]] = {}
    if is_shared:
        for row in _rows("rank", of_ranks, whole, prior_cv, num_kinds * len(of_ranks)):
            of_hosts.setdefault(row.name.partition(" on ")[2], []).append(row)
    apart = {row.name for row in hosts if _is_of_ranks(row, of_hosts.get(row.name, []))}
    hosts = [replace(row, is_named=row.is_named and row.name not in apart) for row in hosts]
    return UnitChanges(
        common=whole.reference,
        is_common=whole.is_common,
        common_kind=common_kind,
        hosts=tuple(sorted(hosts, key=_size)),
        ranks=tuple(row for name, rows in of_hosts.items() if name in apart for row in rows if row.is_named),
        of_only_host=tuple(sorted(of_hosts.get(hosts[0].name, []), key=_size)) if len(hosts) == 1 else (),
        roles=_roles(before, after),
    )


def _whole(places: Sequence[UnitWork], num_runs: tuple[int, int], prior_cv: float) -> _Whole:
    """Return what runs differ by as a whole, judged by how much runs differ, as their step times are."""
    itself = [(place, place.values) for place in places if place.is_itself and place.values is not None]
    if not itself:
        none = ([0.0] * num_runs[0], [0.0] * num_runs[1])
        return _Whole(levels=none, change=None, is_common=False, num_places=0)
    num_places, itself = len(itself), _without_changed_half(itself, key=lambda one: one[0].change)
    # Each place about its own middle, so that the median over places is not always that of the same one.
    middles = [fmean(fmean(of_side) for of_side in values) for _, values in itself]
    one, two = (
        [
            median(values[side][run] - middle for (_, values), middle in zip(itself, middles, strict=True))
            for run in range(num)
        ]
        for side, num in enumerate(num_runs)
    )
    errors = [
        [fmean(place.errors[side][run] for place, _ in itself) for run in range(n)] for side, n in enumerate(num_runs)
    ]
    change = log_difference(one, two, before_errors=errors[0], after_errors=errors[1], prior_cv=prior_cv)
    num_alike = sum(copysign(1.0, change.value) * place.change > change.half_width for place, _ in itself)
    return _Whole(
        levels=(one, two),
        change=change,
        is_common=change.is_beyond_noise and 2 * num_alike > num_places,
        num_places=num_places,
    )


def _without_changed_half(places: Sequence[_Place], *, key: Callable[[_Place], float]) -> list[_Place]:
    """Return all places, or, where two halves are further apart than both are wide, the one that changed less.

    The median of two such halves lies between them, where no place is.

    Args:
        places: what changed.
        key: the change of one.
    """
    ordered = sorted(places, key=key)
    if len(ordered) % 2 or len(ordered) < _MIN_FOR_MEDIAN:
        return ordered
    halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    if key(halves[1][0]) - key(halves[0][-1]) <= sum(key(half[-1]) - key(half[0]) for half in halves):
        return ordered
    return min(halves, key=lambda half: abs(fmean(map(key, half))))


def _rows(kind: str, works: Sequence[UnitWork], whole: _Whole, prior_cv: float, num_compared: int) -> list[UnitRow]:
    values = [_without(work, whole) for work in works]
    spread = _spread(works, values, whole, prior_cv)
    rows = []
    for work, of_work in zip(works, values, strict=True):
        beyond = change = None
        if of_work is not None:
            beyond = log_difference(
                *of_work,
                before_errors=work.errors[0],
                after_errors=work.errors[1],
                spread=spread,
                num_compared=num_compared,
            )
            change, beyond = _with_whole(beyond, whole) if work.is_itself else (beyond, beyond)
        rows.append(
            UnitRow(
                kind=kind,
                name=work.name,
                before_ns=work.work_ns[0],
                after_ns=work.work_ns[1],
                caused_before_ns=work.caused_ns[0],
                caused_after_ns=work.caused_ns[1],
                change=change,
                beyond=beyond,
                is_named=beyond is not None and beyond.is_beyond_noise and abs(beyond.value) > MIN_NAMED,
                against="itself" if work.is_itself else "others",
            )
        )
    return rows


def _without(work: UnitWork, whole: _Whole) -> _Levels | None:
    """Return the values of a place without what runs differ by as a whole, if enough hosts tell that."""
    if work.values is None or not (work.is_itself and whole.is_known):
        return work.values
    one, two = (
        [value - level for value, level in zip(values, levels, strict=True)]
        for values, levels in zip(work.values, whole.levels, strict=True)
    )
    return one, two


def _with_whole(own: LogDifference, whole: _Whole) -> tuple[LogDifference, LogDifference]:
    """Return the change of a place and that beyond what most others changed by.

    Args:
        own: the difference of its values without what runs differ by as a whole, if that is known.
        whole: what they differ by.
    """
    if not whole.is_known or whole.change is None:
        return own, _shifted(own, -whole.reference, own.half_width)
    half = hypot(own.half_width, whole.change.half_width)  # both are noise, and independent
    return _shifted(own, whole.change.value, half), own


def _shifted(difference: LogDifference, by: float, half: float) -> LogDifference:
    value = difference.value + by
    return replace(difference, value=value, low=value - half, high=value + half)


def _spread(works: Sequence[UnitWork], values: Sequence[_Levels | None], whole: _Whole, prior_cv: float) -> RunSpread:
    """Return how much a place differs between runs, from repeats if there are enough.

    Args:
        works: hosts, or ranks.
        values: theirs, without what runs differ by as a whole if that is known.
        whole: what they differ by.
        prior_cv: standard deviation between runs, where there are too few repeats.
    """
    pairs = [(work, of_work) for work, of_work in zip(works, values, strict=True) if of_work is not None]
    groups = [[of_work[side] for work, of_work in pairs if work.work_ns[side] is not None] for side in (0, 1)]
    seen = spread_of_repeats(groups)
    is_apart = whole.is_known or not whole.num_places
    if is_apart:  # the level that was taken out is one of each run, as the mean of a sample is
        share = 1 - 1 / max(whole.num_places, len(pairs), 2)
        seen = RunSpread(value=seen.value / share**0.5, freedom=seen.freedom * share)
    num_runs = [len(levels) for levels in whole.levels]
    if min(num_runs) >= MIN_REPEATS and seen.freedom:
        return seen
    if max(num_runs) > 1:
        return spread_beyond_prior(seen, prior_cv)
    changes = [fmean(of_work[1]) - fmean(of_work[0]) for _, of_work in pairs]
    scatter = spread_of_places(_without_changed_half(changes, key=float), prior_cv)
    # The scatter of places does not see what runs differ by as a whole, which their changes still have.
    return scatter if is_apart or scatter.value > prior_cv else RunSpread(value=prior_cv, freedom=inf)


def _is_of_ranks(host: UnitRow, ranks: Sequence[UnitRow]) -> bool:
    """Return whether some ranks of a host changed while the others are as before."""
    changed = [abs(row.beyond.value) for row in ranks if row.is_named and row.beyond is not None]
    others = [row.beyond.value for row in ranks if not row.is_named and row.beyond is not None]
    if not changed or not others or host.beyond is None:
        return False
    return abs(fmean(others)) <= min(host.beyond.half_width, fmean(changed) / 2)


def _size(row: UnitRow) -> tuple[bool, float]:
    return not row.is_named, -abs(row.beyond.value) if row.beyond is not None else 0.0


def _roles(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> tuple[tuple[str, float, float], ...]:
    one, two = (_by_role(group, lambda rank: rank.work_ns or 0.0) for group in (before, after))
    return tuple((role, fmean(one[role]), fmean(two[role])) for role in one if role in two)
