"""How ranks with a profile each go together: numbers of their steps, and clocks: one on a host, or by collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.text import format_duration, rank_list
from hpcpace.metrics.clock_suspects import ClockBounds, collective_bounds
from hpcpace.metrics.operations import synchronises
from hpcpace.runs.imports.imported_run import UNKNOWN_GROUP
from hpcpace.runs.imports.kineto_profile import Profile
from hpcpace.runs.imports.kineto_rows import ProfileRows
from hpcpace.trace.schema import NO_STEP, NUMBER_BITS

Array = NDArray[Any]

_MAX_CONTRADICTION = 0.5  # of the half-width
_MAX_DRIFT = 0.01  # of a step
_MIN_OVERLAP, _MIN_OVERLAP_MOVED = 0.5, 0.9
_MAX_TRIED = 8
_MAX_STEP = (1 << 31) - 1


def host_key(rank: int, profile: Profile) -> str:
    """Return what is equal on ranks with one clock: those of a host that count from the same time."""
    return f"{profile.host} {profile.base_ns}" if profile.host else f"rank {rank}"


class _Numbered(NamedTuple):
    """The synchronising operations of a rank.

    Attributes:
        keys: group (a number that is the same on all ranks), operation and number, unique, (num_operations,).
        times_ns: enters and exits, (num_operations, 2).
        steps: the step of each, (num_operations,).
        has_numbers: whether numbers are recorded ones, which are of the whole job, and not of steps.
    """

    keys: Array
    times_ns: Array
    steps: Array
    has_numbers: bool


def with_common_steps(ranks: dict[int, ProfileRows]) -> tuple[list[str], list[str]]:
    """Number the steps of ranks with one clock alike, in place: those in which the same collectives took place.

    Returns:
        Which steps were numbered anew, and which collectives are of no step of the others.
    """
    numbered = _numbered_ranks(ranks)
    more: dict[int, int] = {}
    first_with: dict[tuple[str, int], int] = {}
    notes, problems = [], []
    for rank, one in ranks.items():
        host = host_key(rank, one.profile)
        places = [(host, group) for group in np.unique(numbered[rank].keys["group"]).tolist()]
        reference = min((first_with[place] for place in places if place in first_with), default=rank)
        is_apart = reference != rank and _are_apart(numbered[rank], numbered[reference])
        by = 0 if reference == rank or is_apart else _steps_apart(numbered[rank], numbered[reference])
        if is_apart:
            problems.append(
                f"{one.profile.path}: rank {rank} was recorded while rank {reference} was not, and shares none of its"
                " collectives; the two are not compared: name files of the same cycle of a schedule"
            )
        if by is None:
            _match_nothing(one)
            problems.append(
                f"{one.profile.path}: collectives of rank {rank} and rank {reference} do not overlap in time, whichever"
                " step is taken for which; nothing there is compared with others"
            )
            continue
        for place in places:
            first_with.setdefault(place, rank)
        more[rank] = by + more.get(reference, 0)
        if by:
            notes.append(
                f"steps of rank {rank} are numbered as those of rank {reference}, whose collectives took place at the"
                f" same times: by {abs(by)} {'higher' if by > 0 else 'lower'}"
            )
    steps = {rank: ranks[rank].tables["steps"]["step"] for rank in more}
    lowest = min((int(of_rank.min()) + more[rank] for rank, of_rank in steps.items() if len(of_rank)), default=0)
    highest = max((int(of_rank.max()) + more[rank] for rank, of_rank in steps.items() if len(of_rank)), default=0)
    if highest - min(lowest, 0) > _MAX_STEP:
        raise TraceError(
            f"the steps of the profiles would be numbered {min(lowest, 0)} to {highest}, and a trace has at most"
            f" {_MAX_STEP}: name the files of one run"
        )
    for rank, one in ranks.items():  # no number may be negative
        _add_to_steps(one, more.get(rank, 0) - min(lowest, 0))
    return notes, problems


def _are_apart(one: _Numbered, other: _Numbered) -> bool:
    """Return whether all collectives of one rank were over before those of another began, and none is one of them."""
    is_before = one.times_ns.max() < other.times_ns.min() or other.times_ns.max() < one.times_ns.min()
    return bool(is_before) and not len(_shared(one, other)[0])


def _steps_apart(one: _Numbered, other: _Numbered) -> int | None:
    """Return by how many steps the numbers of one must grow for its collectives to be another's.

    None where they share numbers, but not times: no rank leaves a collective before all have entered it, so what does
    not overlap is not one.
    """
    mine, theirs = _shared(one, other)
    if not one.has_numbers and not other.has_numbers:
        for by in (0, *_likely_steps_apart(one, other)):
            keys = one.keys.copy()
            keys["seq"] += by << NUMBER_BITS
            moved, at = _shared(one._replace(keys=keys), other)
            if len(moved) and _overlaps(one, other, moved, at).mean() >= (_MIN_OVERLAP_MOVED if by else _MIN_OVERLAP):
                return by
    elif len(mine) and _overlaps(one, other, mine, theirs).mean() >= _MIN_OVERLAP:
        has_steps = (one.steps[mine] != NO_STEP) & (other.steps[theirs] != NO_STEP)
        return next(iter(_most_frequent((other.steps[theirs] - one.steps[mine])[has_steps])), 0)
    return None if len(mine) else 0


def _overlaps(one: _Numbered, other: _Numbered, mine: Array, theirs: Array) -> Array:
    """Return which pairs of operations were under way at once."""
    own_ns, others_ns = one.times_ns[mine], other.times_ns[theirs]
    return (own_ns[:, 0] <= others_ns[:, 1]) & (others_ns[:, 0] <= own_ns[:, 1])


def _likely_steps_apart(one: _Numbered, other: _Numbered) -> list[int]:
    """Return by how many steps collectives of a kind differ that ended next to each other, the most frequent first."""
    apart = [np.zeros(0, np.int64)]
    of_one, of_other = _by_kind(one), _by_kind(other)
    for kind in of_one.keys() & of_other.keys():
        mine, theirs = of_one[kind], of_other[kind]
        ends = other.times_ns[theirs, 1]
        at = np.searchsorted(ends[:-1] + np.diff(ends) // 2, one.times_ns[mine, 1])
        apart.append((other.keys["seq"][theirs[at]] >> NUMBER_BITS) - (one.keys["seq"][mine] >> NUMBER_BITS))
    return [by for by in _most_frequent(np.concatenate(apart))[:_MAX_TRIED] if by]


def _by_kind(numbered: _Numbered) -> dict[tuple[int, int], Array]:
    """Return the indices of the operations of each group and kind, in the order of their ends."""
    group, op = numbered.keys["group"], numbered.keys["op"]
    order = np.lexsort((numbered.times_ns[:, 1], op, group))
    is_new = (np.diff(group[order]) != 0) | (np.diff(op[order]) != 0)
    parts = np.split(order, np.flatnonzero(is_new) + 1) if len(order) else []
    return {(int(group[part[0]]), int(op[part[0]])): part for part in parts}


def _most_frequent(values: Array) -> list[int]:
    """Return the different values, the most frequent first."""
    found, count = np.unique(values, return_counts=True)
    ordered: list[int] = found[np.argsort(-count, kind="stable")].tolist()
    return ordered


def _add_to_steps(rows: ProfileRows, by: int) -> None:
    """Add to numbers of steps, in place, and to those of operations that are numbered in them."""
    if not by:
        return
    for table in rows.tables.values():
        table["step"] = np.where(table["step"] != NO_STEP, table["step"] + by, NO_STEP)
    if not rows.has_numbers:
        rows.tables["collectives"]["seq"] += by << NUMBER_BITS


def with_clocks(ranks: dict[int, ProfileRows]) -> tuple[dict[int, ProfileRows], list[str], list[str]]:
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
    numbered = _numbered_ranks(ranks)
    shortest = _shortest(list(numbered.values()))
    zero = np.zeros(1, np.int64)
    clocks: dict[int, ClockBounds | None] = {}
    for rank, one in ranks.items():
        if keys[rank] == keys[first]:
            times = one.tables["collectives"]["enter_ns"]
            local_ns = times[:1] if len(times) else zero
            clocks[rank] = ClockBounds(
                local_ns=local_ns, offset_ns=zero, halfwidth_ns=zero, contradiction_ns=0, num_operations=zero
            )
        else:
            own, others = _shared(numbered[rank], numbered[first])
            mine, theirs = numbered[rank].times_ns[own], numbered[first].times_ns[others]
            transfer_ns = shortest[1][np.searchsorted(shortest[0], numbered[rank].keys[own])]
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


def without_clock(ranks: dict[int, ProfileRows]) -> list[int]:
    """Return the ranks whose clock nothing says."""
    has_clocks = any(one.clock is not None for one in ranks.values())
    return [rank for rank, one in ranks.items() if has_clocks and one.clock is None]


def _most_contradiction_ns(one: ProfileRows) -> float:
    """Return by how much bounds may contradict each other by drift that matters to no step."""
    steps = one.tables["steps"]
    return _MAX_DRIFT * float(np.median(steps["end_ns"] - steps["begin_ns"])) if len(steps) else 0.0


def _match_nothing(one: ProfileRows) -> None:
    """Take the operations of a rank as those of an unknown group, in place: they are not those of other ranks."""
    one.tables["collectives"]["group"] = UNKNOWN_GROUP


def _is_wrong(clock: ClockBounds, least_ns: float) -> bool:
    return clock.contradiction_ns > max(least_ns, _MAX_CONTRADICTION * float(np.median(clock.halfwidth_ns)))


def _notes(clocks: Sequence[ClockBounds | None]) -> Iterator[str]:
    known = [clock for clock in clocks if clock is not None]
    if not known:
        return
    widths = [int(np.median(clock.halfwidth_ns)) for clock in known]
    span = [format_duration(width) for width in (min(widths), max(widths))]
    yield (
        "clocks are aligned by collectives, which ranks leave together, and none before the last has entered:"
        f" to within {' to '.join(dict.fromkeys(span))}"
    )
    worst = max(clock.contradiction_ns for clock in known)
    if worst:
        yield f"collectives contradict each other by up to {format_duration(worst)}: clocks drift"


def _shared(one: _Numbered, other: _Numbered) -> tuple[Array, Array]:
    """Return the indices, (n,) each, of the operations that two ranks have in common."""
    _, own, others = np.intersect1d(one.keys, other.keys, assume_unique=True, return_indices=True)
    return own, others


def _shortest(ranks: Sequence[_Numbered]) -> tuple[Array, Array]:
    """Return the keys of the operations of all ranks, unique, and the shortest time that a rank was in each."""
    keys, inverse = np.unique(np.concatenate([one.keys for one in ranks]), return_inverse=True)
    shortest = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(shortest, inverse, np.concatenate([one.times_ns[:, 1] - one.times_ns[:, 0] for one in ranks]))
    return keys, shortest


def _numbered_ranks(ranks: dict[int, ProfileRows]) -> dict[int, _Numbered]:
    numbers: dict[tuple[str, int, int], int] = {}
    return {rank: _numbered(one, numbers) for rank, one in ranks.items()}


def _numbered(one: ProfileRows, numbers: dict[tuple[str, int, int], int]) -> _Numbered:
    """Return the operations of a rank; `numbers` has those of the groups of all ranks, and takes new ones."""
    rows = one.tables["collectives"]
    rows = rows[synchronises(rows["op"]) & (rows["group"] != UNKNOWN_GROUP)]
    groups = one.profile.groups  # of which those of the same name may be others on other ranks
    facts = [(name, min(groups[name]), len(groups[name])) for name in one.groups]
    number = np.array([numbers.setdefault(group, len(numbers)) for group in facts] or [0], np.int64)
    keys = np.empty(len(rows), np.dtype([("group", "i8"), ("op", "u1"), ("seq", "i8")]))
    keys["group"], keys["op"], keys["seq"] = number[rows["group"]], rows["op"], rows["seq"]
    unique, first = np.unique(keys, return_index=True)
    times_ns = np.stack([rows["enter_ns"], rows["exit_ns"]], axis=1)[first]
    steps = rows["step"].astype(np.int64)[first]
    return _Numbered(keys=unique, times_ns=times_ns, steps=steps, has_numbers=one.has_numbers)
