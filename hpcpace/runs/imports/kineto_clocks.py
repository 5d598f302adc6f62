"""How the clocks of ranks with a profile each go together: one on a host, else aligned by collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.clocks.collective_bounds import ClockBounds, collective_bounds
from hpcpace.metrics.operations.dependence import synchronises
from hpcpace.runs.imports.imported_run import UNKNOWN_GROUP
from hpcpace.runs.imports.kineto_profile import Profile
from hpcpace.runs.imports.kineto_rows import ProfileRows
from hpcpace.units import format_duration
from hpcpace.wording import rank_list

Array = NDArray[Any]

_MOST_CONTRADICTION = 0.5  # of the half-width
_MOST_DRIFT = 0.01  # of a step


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
            clocks[rank] = collective_bounds(mine[:, 0], mine[:, 1], theirs[:, 0], theirs[:, 1])
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
        "clocks are aligned by collectives, none of which a rank leaves before the last has entered:"
        f" to within {format_duration(min(widths))} to {format_duration(max(widths))}"
    )
    worst = max(clock.contradiction_ns for clock in known)
    if worst:
        yield f"collectives contradict each other by up to {format_duration(worst)}: clocks drift"


def _shared(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return enters and exits, (n, 2) each, of the operations that two ranks have in common."""
    _, own, others = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    return one[1][own], other[1][others]


def _numbered(one: RankProfile) -> tuple[Array, Array]:
    """Return the synchronising operations of a rank: an array of keys, unique, and their enters and exits, (n, 2)."""
    rows = one.rows.tables["collectives"]
    rows = rows[synchronises(rows["op"]) & (rows["group"] != UNKNOWN_GROUP)]
    names = np.array([str(name) for name in one.rows.groups] or [""])
    keys = np.empty(len(rows), np.dtype([("group", "U64"), ("op", "u1"), ("seq", "i8")]))
    keys["group"], keys["op"], keys["seq"] = names[rows["group"]], rows["op"], rows["seq"]
    unique, first = np.unique(keys, return_index=True)
    return unique, np.stack([rows["enter_ns"], rows["exit_ns"]], axis=1)[first]
