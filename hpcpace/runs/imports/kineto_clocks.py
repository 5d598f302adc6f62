"""How ranks with a profile each go together: numbers of their steps, and clocks: one on a host, or by collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.clocks.collective_bounds import ClockBounds, collective_bounds
from hpcpace.metrics.operations.dependence import synchronises
from hpcpace.runs.imports.imported_run import UNKNOWN_GROUP, Rows
from hpcpace.runs.imports.kineto_profile import Profile
from hpcpace.runs.imports.kineto_rows import ProfileRows
from hpcpace.trace.schema import NO_STEP, NUMBER_BITS
from hpcpace.units import format_duration
from hpcpace.wording import rank_list

Array = NDArray[Any]

_MOST_CONTRADICTION = 0.5  # of the half-width
_MOST_DRIFT = 0.01  # of a step
_LEAST_OVERLAP, _LEAST_OVERLAP_MOVED = 0.5, 0.9
_MOST_TRIED = 8


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """A profile, its rows, and its clock: None where there is one for all, or nothing says it."""

    profile: Profile
    rows: ProfileRows
    clock: ClockBounds | None = None
    reference: int = 0


def host_key(rank: int, profile: Profile) -> str:
    """Return what is equal on ranks with one clock: those of a host that count from the same time."""
    return f"{profile.host} {profile.base_ns}" if profile.host else f"rank {rank}"


def with_common_steps(ranks: dict[int, RankProfile]) -> tuple[list[str], list[str]]:
    """Number the steps of ranks with one clock alike, in place: those in which the same collectives took place.

    Returns:
        Which steps were numbered anew, and which collectives are of no step of the others.
    """
    numbered = {rank: _numbered(one) for rank, one in ranks.items()}
    more: dict[int, int] = {}
    of_host: dict[str, list[int]] = {}
    notes, problems = [], []
    for rank, one in ranks.items():
        before = of_host.setdefault(host_key(rank, one.profile), [])
        reference = next((other for other in before if _have_a_group(numbered[rank], numbered[other])), rank)
        by = 0 if reference == rank else _steps_apart(numbered[rank], numbered[reference])
        if by is None:
            _match_nothing(one)
            problems.append(
                f"{one.profile.path}: collectives of rank {rank} and rank {reference} do not overlap in time, whichever"
                " step is taken for which; nothing there is compared with others"
            )
            continue
        before.append(rank)
        more[rank] = by + more.get(reference, 0)
        if by:
            notes.append(
                f"steps of rank {rank} are numbered as those of rank {reference}, whose collectives took place at the"
                f" same times: by {abs(by)} {'higher' if by > 0 else 'lower'}"
            )
    steps = {rank: ranks[rank].rows.tables["steps"]["step"] for rank in more}
    lowest = min((int(of_rank.min()) + more[rank] for rank, of_rank in steps.items() if len(of_rank)), default=0)
    for rank, one in ranks.items():  # no number may be negative
        _add_to_steps(one.rows.tables, more.get(rank, 0) - min(lowest, 0))
    return notes, problems


def _have_a_group(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    return bool(np.isin(one[0]["group"], other[0]["group"]).any())


def _steps_apart(one: tuple[Array, Array], other: tuple[Array, Array]) -> int | None:
    """Return by how many steps the numbers of one must grow for its collectives to be another's.

    None where they share numbers, but not times: no rank leaves a collective before all have entered it, so what does
    not overlap is not one.
    """
    has_shared = len(_shared(one, other)[0]) > 0
    for by in (0, *_likely_steps_apart(one, other)):
        keys = one[0].copy()
        keys["seq"] += by << NUMBER_BITS
        mine, theirs = _shared((keys, one[1]), other)
        overlaps = (mine[:, 0] <= theirs[:, 1]) & (theirs[:, 0] <= mine[:, 1])
        if len(mine) and overlaps.mean() >= (_LEAST_OVERLAP_MOVED if by else _LEAST_OVERLAP):
            return by
    return None if has_shared else 0


def _likely_steps_apart(one: tuple[Array, Array], other: tuple[Array, Array]) -> list[int]:
    """Return by how many steps collectives of a kind differ that ended next to each other, the most frequent first."""
    apart = [np.zeros(0, np.int64)]
    for kind in np.unique(one[0][["group", "op"]]):
        mine, theirs = (np.flatnonzero(each[0][["group", "op"]] == kind) for each in (one, other))
        if len(theirs):
            theirs = theirs[np.argsort(other[1][theirs, 1], kind="stable")]
            ends = other[1][theirs, 1]
            at = np.searchsorted(ends[:-1] + np.diff(ends) // 2, one[1][mine, 1])
            apart.append((other[0]["seq"][theirs[at]] >> NUMBER_BITS) - (one[0]["seq"][mine] >> NUMBER_BITS))
    found, count = np.unique(np.concatenate(apart), return_counts=True)
    return [by for by in found[np.argsort(-count, kind="stable")][:_MOST_TRIED].tolist() if by]


def _add_to_steps(tables: Mapping[str, Rows], by: int) -> None:
    """Add to numbers of steps, in place, and to those of operations in them."""
    if not by:
        return
    for rows in tables.values():
        rows["step"] = np.where(rows["step"] != NO_STEP, rows["step"] + by, NO_STEP)
    tables["collectives"]["seq"] += by << NUMBER_BITS


def with_clocks(ranks: dict[int, RankProfile]) -> tuple[dict[int, RankProfile], list[str], list[str]]:
    """Align ranks with the lowest one, by the collectives that they have in common.

    Returns:
        The ranks with their clocks, how these were aligned, and what is wrong with them.
    """
    first = min(ranks)
    keys = {rank: host_key(rank, one.profile) for rank, one in ranks.items()}
    if len(set(keys.values())) == 1:
        alone = len(ranks) == 1
        notes = [] if alone else ["all ranks are on one host and count from the same time: their clocks are one"]
        return ranks, notes, []
    numbered = {rank: _numbered(one) for rank, one in ranks.items()}
    shortest = _shortest(list(numbered.values()))
    zero = np.zeros(1, np.int64)
    clocks: dict[int, ClockBounds | None] = {}
    for rank, one in ranks.items():
        if keys[rank] == keys[first]:
            times = one.rows.tables["collectives"]["enter_ns"]
            local_ns = times[:1] if len(times) else zero
            clocks[rank] = ClockBounds(
                local_ns=local_ns, offset_ns=zero, halfwidth_ns=zero, contradiction_ns=0, num_operations=zero
            )
        else:
            mine, theirs = _shared(numbered[rank], numbered[first])
            keys_of_both = np.intersect1d(numbered[rank][0], numbered[first][0], assume_unique=True)
            transfer_ns = shortest[1][np.searchsorted(shortest[0], keys_of_both)]
            clocks[rank] = collective_bounds(mine[:, 0], mine[:, 1], theirs[:, 0], theirs[:, 1], transfer_ns)
    most_ns = _most_contradiction_ns(ranks[first])
    wrong = {rank: clock for rank, clock in clocks.items() if clock is not None and _is_wrong(clock, most_ns)}
    found = {
        rank: replace(one, clock=None if rank in wrong else clocks[rank], reference=first)
        for rank, one in ranks.items()
    }
    for rank in wrong:
        _match_nothing(ranks[rank])
    notes = list(_notes([one.clock for rank, one in found.items() if keys[rank] != keys[first]]))
    if lost := [rank for rank, clock in clocks.items() if clock is None]:
        notes.append(
            f"{rank_list(lost)} shares no collective with rank {first}: times there are not compared with others"
        )
    problems = [
        f"{ranks[rank].profile.path}: collectives of rank {rank} and rank {first} contradict each other by"
        f" {format_duration(clock.contradiction_ns)}; nothing there is compared with others, for the file is of another"
        " run, or its clock drifts"
        for rank, clock in wrong.items()
    ]
    return found, notes, problems


def without_clock(ranks: dict[int, RankProfile]) -> list[int]:
    """Return the ranks whose clock nothing says."""
    has_clocks = any(one.clock is not None for one in ranks.values())
    return [rank for rank, one in ranks.items() if has_clocks and one.clock is None]


def _most_contradiction_ns(one: RankProfile) -> float:
    """Return by how much bounds may contradict each other by drift that matters to no step."""
    steps = one.rows.tables["steps"]
    return _MOST_DRIFT * float(np.median(steps["end_ns"] - steps["begin_ns"])) if len(steps) else 0.0


def _match_nothing(one: RankProfile) -> None:
    """Take the operations of a rank as those of an unknown group, in place: they are not those of other ranks."""
    one.rows.tables["collectives"]["group"] = UNKNOWN_GROUP


def _is_wrong(clock: ClockBounds, least_ns: float) -> bool:
    return clock.contradiction_ns > max(least_ns, _MOST_CONTRADICTION * float(np.median(clock.halfwidth_ns)))


def _notes(clocks: Sequence[ClockBounds | None]) -> Iterator[str]:
    known = [clock for clock in clocks if clock is not None]
    if not known:
        return
    widths = [int(np.median(clock.halfwidth_ns)) for clock in known]
    yield (
        "clocks are aligned by collectives, which ranks leave together, and none before the last has entered:"
        f" to within {format_duration(min(widths))} to {format_duration(max(widths))}"
    )
    worst = max(clock.contradiction_ns for clock in known)
    if worst:
        yield f"collectives contradict each other by up to {format_duration(worst)}: clocks drift"


def _shared(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return enters and exits, (n, 2) each, of the operations that two ranks have in common."""
    _, own, others = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    return one[1][own], other[1][others]


def _shortest(ranks: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return the keys of the operations of all ranks, unique, and the shortest time that a rank was in each."""
    keys, inverse = np.unique(np.concatenate([keys for keys, _ in ranks]), return_inverse=True)
    shortest = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(shortest, inverse, np.concatenate([times[:, 1] - times[:, 0] for _, times in ranks]))
    return keys, shortest


def _numbered(one: RankProfile) -> tuple[Array, Array]:
    """Return the synchronising operations of a rank: an array of keys, unique, and their enters and exits, (n, 2)."""
    rows = one.rows.tables["collectives"]
    rows = rows[synchronises(rows["op"]) & (rows["group"] != UNKNOWN_GROUP)]
    groups = one.profile.groups  # of which those of the same name may be others on other ranks
    names = np.array([f"{name} {min(groups[name])} {len(groups[name])}" for name in one.rows.groups] or [""])
    keys = np.empty(len(rows), np.dtype([("group", "U80"), ("op", "u1"), ("seq", "i8")]))
    keys["group"], keys["op"], keys["seq"] = names[rows["group"]], rows["op"], rows["seq"]
    unique, first = np.unique(keys, return_index=True)
    return unique, np.stack([rows["enter_ns"], rows["exit_ns"]], axis=1)[first]
