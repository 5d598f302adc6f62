"""The operations that recur in every step, so that all steps have the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.lateness.segments import LocalWork
from hpcpace.metrics.operations.matching import Matching, Operations
from hpcpace.metrics.steps import StepPanel

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Slots:
    """The operations that recur in each step. A slot is an operation of one rank, the same in all steps.

    Attributes:
        table: rows, int64, (num_slots, num_steps).
        column: which steps of the panel those are, int64, (num_steps,).
        rank: index of the rank, int64, (num_slots,).
        position: position as in `LocalWork`, int64, (num_slots,).
        partner: the first slot of the same operation, int64, (num_slots,).
    """

    table: Int64Array
    column: Int64Array
    rank: Int64Array
    position: Int64Array
    partner: Int64Array


def recurring_slots(
    operations: Operations, matching: Matching, work: LocalWork, steps: StepPanel, ranks: Sequence[int]
) -> Slots | None:
    """Return the operations that recur in most steps, for the steps that have exactly these; None without any.

    Args:
        operations: rows of all ranks.
        matching: which of them belong together.
        work: from `local_work`.
        steps: the steps that all ranks have.
        ranks: what the rows of `steps` are, ascending, (num_ranks,).
    """
    rows = np.flatnonzero(work.is_known & matching.is_matched)
    if not len(rows) or not work.num_positions:
        return None
    column = np.searchsorted(steps.step, operations.step[rows])
    key = np.searchsorted(np.asarray(ranks), operations.rank[rows]) * work.num_positions + work.position[rows]
    names, slot = _named(key)
    present = np.full((len(names), len(steps)), -1, np.int64)
    present[slot, column] = rows
    usual = 2 * (present >= 0).sum(axis=1) > len(steps)
    kept = ((present >= 0) == usual[:, None]).all(axis=0)
    table = present[usual][:, kept]
    if not table.size or len(np.unique(names[usual] // work.num_positions)) < len(ranks):
        return None
    partner = _first_slots(matching, table)
    same = (partner == partner[:, :1]).all(axis=0)
    return Slots(
        # Selecting columns lays them out one after the other, and all figures of slots would be.
        np.ascontiguousarray(table[:, same]),
        np.flatnonzero(kept)[same],
        names[usual] // work.num_positions,
        names[usual] % work.num_positions,
        partner[:, 0],
    )


def _named(key: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return what `np.unique` does with the inverse, of keys from 0 that mostly are not much more than there are."""
    if int(key.max()) > 4 * len(key) + 4096:
        names, slot = np.unique(key, return_inverse=True)
        return names, slot.astype(np.int64)
    occurs = np.bincount(key) > 0
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[key]


def _first_slots(matching: Matching, table: Int64Array) -> Int64Array:
    """Return the first slot with a row of the same operation, like `table`, (num_slots, num_steps)."""
    first = np.full(len(matching.starts), len(table), np.int64)
    instance = matching.instance[table]
    np.minimum.at(first, instance.ravel(), np.repeat(np.arange(len(table)), table.shape[1]))
    return first[instance]
