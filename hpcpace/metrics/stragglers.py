"""Find stragglers by recurrence: which ranks, nodes or slots are late again and again beyond chance, and in which way.

"None" and "cannot tell" are valid answers. Tests are corrected for the number of ranks, and ranks are only compared
with others of their role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.recurrence import (
    FixedShift,
    Lateness,
    LatenessThresholds,
    fixed_shifts,
    intervals,
    lateness,
    periods,
    rotation,
)
from hpcpace.metrics.resampling import Estimate

MIN_STEPS = 20  # statistics: fewer have too few blocks for the tests
_NUM_TESTS = 3  # statistics: rotations, lasting or passing shifts, periods
_POWER, _PERCENTILE = 1.28, 90  # statistics: normal deviate of 90 % power, for nine ranks of ten


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Who is late, how, and by how much.

    Attributes:
        kind: "rank", "node" or "slot" (the same place on every node).
        ids: its number; several for rotating ranks or nodes.
        ranks: indices of all ranks concerned, ascending.
        pattern: "fixed", "transient", "periodic" or "rotating".
        effect: local work above the others of the role in the steps concerned, relative to the role's median.
        p_value: probability of as much by chance, over all ranks together.
        late_share: share of all steps in which it, or one of its ranks, is the latest beyond noise.
        step_range: first and last + 1 column of the steps concerned if transient.
        period_steps: the period if periodic, or if a rotation is.
        aliases: units that the data cannot separate from it, as (kind, id).
    """

    kind: str
    ids: tuple[int, ...]
    ranks: tuple[int, ...]
    pattern: str
    effect: Estimate
    p_value: float
    late_share: float
    step_range: tuple[int, int] | None = None
    period_steps: int | None = None
    aliases: tuple[tuple[str, int], ...] = ()


class SearchObstacle(Enum):
    """Why a search could not find any straggler."""

    NOBODY_COMPARED = "no rank has another one of its role with work to compare with"
    TOO_FEW_STEPS = "fewer than `MIN_STEPS` steps"
    TOO_MUCH_NOISE = "only a rank that is slower by very much would stand out from noise"


@dataclass(frozen=True, kw_only=True)
class StragglerSearch:
    """What a search for stragglers found.

    Attributes:
        found: largest loss first; empty if there are none, or if the search was not possible.
        obstacle: why the search was not possible; None if it was.
        smallest_share: the smallest fixed excess that would be found on nine ranks of ten; a share.
        num_compared: ranks that have others of their role.
        slow: indices of all ranks that are slow throughout or for a while, also where that is too little to matter.
    """

    found: tuple[Straggler, ...]
    obstacle: SearchObstacle | None
    smallest_share: float | None
    num_compared: int
    slow: tuple[int, ...] = ()


def find_stragglers(
    work_ns: Floats,
    role: Ints,
    node: Ints,
    *,
    floor_share: float,
    level: float,
    seed: int = 0,
    limits: LatenessThresholds | None = None,
) -> StragglerSearch:
    """Return the ranks, nodes and slots that are late again and again.

    There are three tests, each at a third of `level` over all ranks together: for a rotation of lateness over ranks or
    nodes (late steps avoid each other, compared with circular shifts), for an interval of steps in which late steps
    cluster or a shift in all steps (t test on blocks of steps, and sign flips of whole blocks), and for a period (late
    steps recur at one distance). Each effect must also exceed `floor_share`. A node is named if all its ranks are
    equally slow, a slot if the same place on every node is. Cost: about 0.5 s for 1,024 ranks and 1,000 steps.

    Args:
        work_ns: local work, float64, (num_ranks, num_steps).
        role: int64, (num_ranks,).
        node: int64, (num_ranks,).
        floor_share: the smallest effect that is named, relative to the role's median work.
        level: probability of a false accusation over all ranks.
        seed: of the permutations.
        limits: the other thresholds; the defaults if None.
    """
    limits = limits or LatenessThresholds()
    late = lateness(np.asarray(work_ns, np.float64), np.asarray(role), floor_share=floor_share, limits=limits)
    num_compared = int(late.is_compared.sum())
    nothing = StragglerSearch(found=(), obstacle=None, smallest_share=None, num_compared=num_compared)
    if not num_compared:
        return replace(nothing, obstacle=SearchObstacle.NOBODY_COMPARED)
    if late.excess.shape[1] < MIN_STEPS:
        return replace(nothing, obstacle=SearchObstacle.TOO_FEW_STEPS)
    node, level = np.unique(node, return_inverse=True)[1].astype(np.int64), level / _NUM_TESTS
    random = np.random.default_rng(seed)

    found = _rotating(late, node, level=level, random=random, limits=limits)
    free = late.is_compared.copy()
    for straggler in found:
        free[list(straggler.ranks)] = False
    shifts = fixed_shifts(late, level=level, random=random)
    rhythmic = _periodic(late, free, level=level, limits=limits)
    of_rank = _steady(late, shifts, free, rhythmic, floor_share=floor_share, level=level, limits=limits)
    found += _taking_turns(late, _merged(late, of_rank, shifts, node, limits.alike_part), limits)
    smallest = _smallest(shifts, late, floor_share)
    is_blind = not found and _smallest(shifts, late, 0.0) > limits.max_smallest_share
    return StragglerSearch(
        found=tuple(sorted(found, key=lambda each: -_size(each, late))),
        obstacle=SearchObstacle.TOO_MUCH_NOISE if is_blind else None,
        smallest_share=smallest,
        num_compared=num_compared,
    )


def _smallest(shifts: FixedShift, late: Lateness, floor_share: float) -> float:
    """Return the lasting shift that is found with 90 % power on nine of ten ranks."""
    error = float(np.percentile(shifts.error[late.is_compared], _PERCENTILE))
    return max(shifts.critical_error * error, floor_share) + _POWER * error


def _straggler(
    late: Lateness, ranks: Sequence[int], pattern: str, effect: Estimate, p_value: float, **more: Any
) -> Straggler:
    """Return some ranks as a straggler; `more` are the fields of units other than ranks and of single patterns."""
    late_share = float(late.is_latest[list(ranks)].any(axis=0).mean())
    whole = {"kind": "rank", "ids": tuple(ranks), "late_share": late_share, **more}
    return Straggler(ranks=tuple(ranks), pattern=pattern, effect=effect, p_value=float(p_value), **whole)


def _share_of_steps(straggler: Straggler, late: Lateness) -> float:
    num_steps = late.excess.shape[1]
    if straggler.step_range is not None:
        return float((straggler.step_range[1] - straggler.step_range[0]) / num_steps)
    if straggler.pattern == "periodic":
        return 1 / max(straggler.period_steps or 1, 1)
    return 1.0


def _rotating(
    late: Lateness, node: Ints, *, level: float, random: np.random.Generator, limits: LatenessThresholds
) -> list[Straggler]:
    """Return the nodes, or failing that the ranks, that take turns in being late."""
    by_node = np.zeros((int(node.max()) + 1, late.excess.shape[1]))
    np.add.at(by_node, node, late.is_outlier)
    size = np.bincount(node)
    levels = [("rank", late.is_outlier, np.arange(len(node)))]
    if size.max() > 1:
        levels.insert(0, ("node", 2 * by_node > size[:, None], node))
    for kind, events, unit_of in levels:
        units, p_value = rotation(events, random=random, limits=limits)
        if not len(units) or p_value > level:
            continue
        ranks = np.flatnonzero(np.isin(unit_of, units))
        period, chance = periods(events[units], num_compared=len(units), limits=limits)
        is_periodic = 2 * int((chance <= level).sum()) > len(units)
        effect = Estimate.of_mean(late.excess[ranks][events[unit_of[ranks]]])
        period_steps = int(np.median(period[chance <= level])) if is_periodic else None
        unit = {"kind": kind, "ids": tuple(units.tolist())}
        return [_straggler(late, ranks.tolist(), "rotating", effect, p_value, period_steps=period_steps, **unit)]
    return []


def _periodic(late: Lateness, free: Bools, *, level: float, limits: LatenessThresholds) -> dict[int, Straggler]:
    """Return the ranks whose late steps have a period, or else whose large ones have: noise may add small ones."""
    found: dict[int, Straggler] = {}
    for events, num_tried in ((late.is_outlier, 1), (_large(late), 2)):
        ranks = np.array([rank for rank in np.flatnonzero(free).tolist() if rank not in found], np.int64)
        period, p_value = periods(events[ranks], num_compared=max(int(free.sum()), 1), limits=limits)
        for index in np.flatnonzero((period > 0) & (num_tried * p_value <= level)).tolist():
            rank, at = int(ranks[index]), events[ranks[index]]
            effect = Estimate.of_mean(late.excess[rank][at])
            if float(np.median(late.excess[rank][~at])) > limits.alike_part * effect.value:
                continue  # late all the time: the period is in its noise
            chance, period_steps = num_tried * p_value[index], int(period[index])
            found[rank] = _straggler(late, [rank], "periodic", effect, chance, period_steps=period_steps)
    return found


def _large(late: Lateness) -> Bools:
    """Return which late steps of each rank are at least half as late as the median of them."""
    rows = zip(late.excess, late.is_outlier, strict=True)
    usual = np.array([np.median(excess[is_late]) if is_late.any() else np.inf for excess, is_late in rows])
    return np.asarray(late.is_outlier & (late.excess >= usual[:, None] / 2))


def _steady(
    late: Lateness,
    shifts: FixedShift,
    free: Bools,
    rhythmic: dict[int, Straggler],
    *,
    floor_share: float,
    level: float,
    limits: LatenessThresholds,
) -> dict[int, Straggler]:
    """Return the ranks that are always slow, or slow in one interval of steps and hardly outside it, and `rhythmic`.

    If a rank has a period and is also slow in between, the class that loses more counts.
    """
    scan = intervals(late)
    num_steps = late.excess.shape[1]
    is_fixed = free & (shifts.p_value <= level) & (shifts.effect >= floor_share)
    is_passing = free & (scan.p_value <= level) & (scan.inside >= floor_share)
    is_passing &= scan.stop - scan.first < limits.passing_part * num_steps
    is_passing &= scan.outside < scan.inside / limits.passing_ratio
    found = dict(rhythmic)
    for rank in np.flatnonzero(is_fixed | is_passing).tolist():
        first, stop = int(scan.first[rank]), int(scan.stop[rank])
        passing = bool(is_passing[rank])
        if passing:
            inside = Estimate.of_mean(late.excess[rank, first:stop])
            chance, step_range = scan.p_value[rank], (first, stop)
            straggler = _straggler(late, [rank], "transient", inside, chance, step_range=step_range)
        else:
            straggler = _straggler(late, [rank], "fixed", shifts.effect_of(np.array([rank])), shifts.p_value[rank])
        other = rhythmic.get(rank)
        between = 0.0 if other is None else float(np.median(late.excess[rank][~late.is_outlier[rank]]))
        lost = _size(straggler, late) if passing else between
        if other is None or (lost > _size(other, late) and (passing or between >= floor_share)):
            found[rank] = straggler
    return found


def _size(straggler: Straggler, late: Lateness) -> float:
    return straggler.effect.value * _share_of_steps(straggler, late)


def _merged(
    late: Lateness, of_rank: dict[int, Straggler], shifts: FixedShift, node: Ints, alike_part: float
) -> list[Straggler]:
    """Return stragglers with those of a node or slot merged into one if all its ranks are equally slow."""
    size = np.bincount(node)
    place = np.zeros(len(node), np.int64)
    order = np.argsort(node, kind="stable")
    place[order] = np.arange(len(node)) - (np.cumsum(size) - size)[node[order]]
    found: list[Straggler] = []
    left = dict(of_rank)
    candidates = [("node", node)] if len(size) > 1 else []
    candidates += [("slot", place)] if len(size) > 1 and size.max() > 1 else []
    for kind, unit_of in candidates:
        for unit in sorted({int(unit_of[rank]) for rank in left}):
            ranks = np.flatnonzero((unit_of == unit) & late.is_compared)
            if len(ranks) > 1 and (whole := _alike(late, left, shifts, ranks, alike_part)) is not None:
                found.append(replace(whole, kind=kind, ids=(unit,)))
                left = {rank: straggler for rank, straggler in left.items() if rank not in ranks}
    for rank, straggler in left.items():
        aliases = (("node", int(node[rank])),) if size[node[rank]] == 1 and len(size) > 1 else ()
        found.append(replace(straggler, aliases=aliases))
    return found


def _taking_turns(late: Lateness, found: list[Straggler], limits: LatenessThresholds) -> list[Straggler]:
    """Return stragglers with those that have the same period but are late at different steps merged into a rotation.

    The test of rotations may miss these, because shifts by whole periods do not change them.
    """
    result = [straggler for straggler in found if straggler.pattern != "periodic"]
    rest = [straggler for straggler in found if straggler.pattern == "periodic"]
    for kind, period in dict.fromkeys((straggler.kind, straggler.period_steps) for straggler in rest):
        same = [straggler for straggler in rest if (straggler.kind, straggler.period_steps) == (kind, period)]
        events = np.array([late.is_outlier[list(straggler.ranks)].any(axis=0) for straggler in same])
        least = min(limits.min_turns, int(late.is_compared.sum()))
        if len(same) < least or events.any(axis=0).sum() < limits.apart_part * events.sum():
            result += same
            continue
        ranks = sorted(rank for straggler in same for rank in straggler.ranks)
        effect = Estimate.of_mean(late.excess[ranks][late.is_outlier[ranks]])
        unit = {"kind": kind, "ids": tuple(sorted(number for straggler in same for number in straggler.ids))}
        p_value = max(straggler.p_value for straggler in same)
        result.append(_straggler(late, ranks, "rotating", effect, p_value, period_steps=period, **unit))
    return result


def _alike(
    late: Lateness, of_rank: dict[int, Straggler], shifts: FixedShift, ranks: Ints, alike_part: float
) -> Straggler | None:
    """Return the ranks as one straggler if all of them are late in the same way and by about as much, else None."""
    own = [of_rank[rank] for rank in ranks.tolist() if rank in of_rank]
    largest = max((straggler.effect.value for straggler in own), default=0.0)
    first = max(own, key=lambda straggler: straggler.effect.value, default=None)
    if first is None or any(straggler.pattern != first.pattern for straggler in own):
        return None
    p_value = min(straggler.p_value for straggler in own)
    if first.pattern == "fixed":
        is_one = (shifts.effect[ranks] >= alike_part * largest).all()
        return _straggler(late, ranks.tolist(), "fixed", shifts.effect_of(ranks), p_value) if is_one else None
    if len(own) < len(ranks) or min(straggler.effect.value for straggler in own) < alike_part * largest:
        return None
    is_outlier = late.is_outlier[ranks]
    if first.pattern == "periodic" and is_outlier.all(axis=0).sum() < alike_part * is_outlier[0].sum():
        return None
    ranges = [straggler.step_range for straggler in own if straggler.step_range is not None]
    step_range = (max(low for low, _ in ranges), min(high for _, high in ranges)) if ranges else None
    if len({straggler.period_steps for straggler in own}) > 1 or (step_range and step_range[0] >= step_range[1]):
        return None
    parts = [(straggler.effect.value, straggler.effect.low, straggler.effect.high) for straggler in own]
    value, low, high = (float(np.mean(part)) for part in zip(*parts, strict=True))
    effect, when = Estimate(value=value, low=low, high=high), {"period_steps": first.period_steps}
    return _straggler(late, ranks.tolist(), first.pattern, effect, p_value, step_range=step_range, **when)
