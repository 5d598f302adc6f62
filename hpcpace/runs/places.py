"""Which host or rank does its own work more slowly in one group of runs than in another one.

A place is compared with itself where it does the same work in both, else with the ranks of its role in the same run. If
most places change alike, that is no place's fault: only those that differ from the others are named. How much a place
changes by itself is known from repeats, pooled over hosts, else from the prior and how much 8 hosts or more scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import expm1, log
from statistics import fmean, median

import numpy as np

from hpcpace.metrics.run_difference import (
    LEAST_REPEATS,
    LogDifference,
    RunSpread,
    log_difference,
    spread_beyond_prior,
    spread_of_places,
    spread_of_repeats,
)
from hpcpace.runs.measured import MeasuredRun, RankTimes

_LEAST_FOR_MEDIAN = 5
LEAST_NAMED = 0.01
"""Change of own work below which a place is not named, however certain it is."""


@dataclass(frozen=True, kw_only=True)
class PlaceRow:
    """The own work of one place in both groups, means over their runs.

    Attributes:
        kind, name: host or rank, and which.
        before_ns, after_ns: own work per step, mean over its ranks; None in a group that does not have it.
        caused_before_ns, caused_after_ns: exposed wait that began there, mean over all ranks.
        change: ln(B / A) of its own work; None where nothing compares. Where a group lacks it, that group has the
            level of the others in its run.
        beyond: the same less what most hosts changed by; None likewise.
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
        """By how much it is slower in B beyond what most hosts changed by, relative."""
        return expm1(self.beyond.value) if self.beyond is not None else 0.0

    @property
    def is_in_both(self) -> bool:
        """Whether all runs of both groups have it, so that its change is one from A to B."""
        return self.before_ns is not None and self.after_ns is not None

    @property
    def change_share(self) -> float:
        """By how much it is slower in B, relative."""
        return expm1(self.change.value) if self.change is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class PlaceChanges:
    """What changed where.

    Attributes:
        common: ln(B / A) of own work at most hosts; 0 where that cannot be told.
        is_common: whether that is beyond noise.
        hosts: all hosts of both groups, the largest change first.
        ranks: ranks that are named, and are not all of a named host.
        roles: own work of each role, by name, before and after.
    """

    common: float
    is_common: bool
    hosts: tuple[PlaceRow, ...]
    ranks: tuple[PlaceRow, ...]
    roles: tuple[tuple[str, float, float], ...]

    @property
    def named(self) -> tuple[PlaceRow, ...]:
        """The places that are slower or faster than before, hosts first."""
        return (*(row for row in self.hosts if row.is_named), *self.ranks)


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


def place_changes(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    *,
    prior_cv: float,
    has_same_layout: bool,
) -> PlaceChanges | None:
    """Return what changed where; None where own work is not known of all ranks, or there are none.

    Args:
        before, after: the groups.
        prior_cv: of own work between runs, where there are too few repeats.
        has_same_layout: whether a rank has the same work in both groups.
    """
    ranks = [rank for run in (*before, *after) for rank in run.ranks]
    if not ranks or any(rank.work_ns is None or rank.work_ns <= 0 for rank in ranks):
        return None
    spread = _spread_of_hosts(before, after)
    if min(len(before), len(after)) < LEAST_REPEATS or not spread.freedom:
        spread = spread_beyond_prior(spread, prior_cv)
    hosts = _rows(before, after, lambda rank: rank.host, spread, has_same_layout)
    if len(before) == len(after) == 1:
        changes = [row.change.value for row in hosts if row.change is not None]
        hosts = _rows(before, after, lambda rank: rank.host, spread_of_places(changes, prior_cv), has_same_layout)
    reference, is_common = _common(hosts, has_same_layout)
    found = [_named(row, reference) for row in hosts]
    return PlaceChanges(
        common=reference,
        is_common=is_common,
        hosts=tuple(sorted(found, key=_size)),
        ranks=_ranks(before, after, spread, has_same_layout, found, reference),
        roles=_roles(before, after),
    )


def _spread_of_hosts(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> RunSpread:
    """Return how much a host differs between repeats; without a degree of freedom where no host has any.

    With five hosts or more, what runs differ by as a whole is taken out first.
    """
    groups = []
    for group in (before, after):
        logs = {
            name: np.array([fmean(log(rank.work_ns or 1.0) for rank in ranks) for ranks in side.runs])
            for name, side in _by_place(group, lambda rank: rank.host).items()
        }
        whole = np.median(list(logs.values()), axis=0) if len(logs) >= _LEAST_FOR_MEDIAN else 0.0
        groups.append([(values - whole).tolist() for values in logs.values()])
    return spread_of_repeats(groups)


def _ranks(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    spread: RunSpread,
    has_same_layout: bool,
    hosts: Sequence[PlaceRow],
    reference: float,
) -> tuple[PlaceRow, ...]:
    named = {row.name for row in hosts if row.is_named}
    num_by_host: dict[str, int] = {}
    for rank in after[0].ranks:
        num_by_host[rank.host] = num_by_host.get(rank.host, 0) + 1
    rows = _rows(before, after, lambda rank: f"{rank.rank} on {rank.host}", spread, has_same_layout, "rank")
    found = [_named(row, reference) for row in rows]
    return tuple(
        row
        for row in found
        if row.is_named and (host := row.name.partition(" on ")[2]) not in named and num_by_host.get(host, 0) > 1
    )


def _rows(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    key: Callable[[RankTimes], str],
    spread: RunSpread,
    has_same_layout: bool,
    kind: str = "host",
) -> list[PlaceRow]:
    sides = [_by_place(group, key) for group in (before, after)]
    names = sorted({*sides[0], *sides[1]}, key=lambda name: (len(name), name))
    levels = [_levels(group) for group in (before, after)]
    caused = [_caused(group, key) for group in (before, after)]
    num_compared = len(names) * (2 if _has_shared_hosts(after) else 1)  # hosts, and then ranks
    rows = []
    for name in names:
        one, two = (side.get(name) for side in sides)
        is_itself = has_same_layout and one is not None and two is not None and one.roles == two.roles
        change = _change([one, two], levels, (before, after), spread, num_compared, is_itself)
        rows.append(
            PlaceRow(
                kind=kind,
                name=name,
                before_ns=None if one is None else one.work_ns,
                after_ns=None if two is None else two.work_ns,
                caused_before_ns=caused[0].get(name, 0.0),
                caused_after_ns=caused[1].get(name, 0.0),
                change=change,
                beyond=change,
                is_named=False,
                against="itself" if is_itself else "others",
            )
        )
    return rows


def _has_shared_hosts(group: Sequence[MeasuredRun]) -> bool:
    return any(len({rank.host for rank in run.ranks}) < len(run.ranks) for run in group)


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
        levels.append({role: median(values) for role, values in by_role.items() if len(values) > 2})
    return levels


def _change(
    sides: Sequence[_Side | None],
    levels: Sequence[Sequence[Mapping[str, float]]],
    groups: Sequence[Sequence[MeasuredRun]],
    spread: RunSpread,
    num_places: int,
    is_itself: bool,
) -> LogDifference | None:
    values: list[list[float]] = []
    errors: list[list[float]] = []
    for side, levels_of_runs, group in zip(sides, levels, groups, strict=True):
        if side is None:  # against the others alone: in the group that lacks the place, it is as usual
            values.append([0.0] * len(group))
            errors.append([0.0] * len(group))
            continue
        of_group = []
        for ranks, level in zip(side.runs, levels_of_runs, strict=True):
            if not is_itself and not all(rank.role in level for rank in ranks):
                return None
            logs = [log(rank.work_ns or 1.0) for rank in ranks]
            usual = [0.0 if is_itself else level[rank.role] for rank in ranks]
            of_group.append(fmean(value - other for value, other in zip(logs, usual, strict=True)))
        values.append(of_group)
        errors.append([_error(ranks) for ranks in side.runs])
    return log_difference(
        values[0],
        values[1],
        before_errors=errors[0],
        after_errors=errors[1],
        spread=spread,
        num_compared=num_places,
    )


def _error(ranks: Sequence[RankTimes]) -> float:
    """Return the standard error of the mean own work of some ranks, whose noise may be one and the same."""
    return fmean(rank.work_error or 0.0 for rank in ranks)


def _caused(group: Sequence[MeasuredRun], key: Callable[[RankTimes], str]) -> dict[str, float]:
    """Return the exposed wait that began at each place, mean over runs."""
    found: dict[str, float] = {}
    for run in group:
        for rank in run.ranks:
            name = key(rank)
            found[name] = found.get(name, 0.0) + rank.caused_wait_ns / len(group)
    return found


def _common(rows: Sequence[PlaceRow], has_same_layout: bool) -> tuple[float, bool]:
    """Return the change of most places, and whether it is beyond noise.

    Runs differ as a whole as well, which is no place's doing. The median of few places may be that of the changed ones:
    with fewer than 5 it is 0 unless more than half of them changed beyond noise.
    """
    changes = [row.change for row in rows if row.change is not None and row.against == "itself"]
    if not has_same_layout or not changes:
        return 0.0, False
    slower, faster = sum(change.low > 0 for change in changes), sum(change.high < 0 for change in changes)
    is_common = 2 * max(slower, faster) > len(changes)
    if not is_common and len(changes) < _LEAST_FOR_MEDIAN:
        return 0.0, False
    return median(change.value for change in changes), is_common


def _size(row: PlaceRow) -> tuple[bool, float]:
    return not row.is_named, -abs(row.beyond.value) if row.beyond is not None else 0.0


def _named(row: PlaceRow, reference: float) -> PlaceRow:
    change = row.change
    if change is None:
        return row
    usual = reference if row.against == "itself" else 0.0
    beyond = replace(change, value=change.value - usual, low=change.low - usual, high=change.high - usual)
    return replace(row, beyond=beyond, is_named=beyond.is_beyond_noise and abs(beyond.value) > LEAST_NAMED)


def _roles(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> tuple[tuple[str, float, float], ...]:
    def means(group: Sequence[MeasuredRun]) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for run in group:
            for rank in run.ranks:
                found.setdefault(rank.role, []).append(rank.work_ns or 0.0)
        return {role: fmean(values) for role, values in found.items()}

    one, two = means(before), means(after)
    return tuple((role, one[role], two[role]) for role in one if role in two)
