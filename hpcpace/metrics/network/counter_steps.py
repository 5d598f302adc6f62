"""Differences of cumulative counters between consecutive samples, whatever the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.network.flow_tables import IntArray

_MOST = 1 << 60


@dataclass(frozen=True, kw_only=True)
class CounterSteps:
    """What counters grew by from one sample to the next, by key and time.

    Attributes:
        key: whose counters, (num_steps,).
        begin_ns, end_ns: times of both samples, as recorded, (num_steps,).
        last_row: row of the later sample, (num_steps,).
        grown: by column what was added, (num_steps,) each.
    """

    key: IntArray
    begin_ns: IntArray
    end_ns: IntArray
    last_row: IntArray
    grown: dict[str, IntArray]


def counter_steps(
    keys: IntArray, table: Mapping[str, NDArray[Any]], columns: Sequence[str], resettable: Sequence[str] = ()
) -> CounterSteps:
    """Return the steps of counters; those over which one of `columns` fell are left out.

    Args:
        keys: whose counters a row has, (num_rows,).
        table: `time_ns` and the columns; of rows with one key and time the first counts, and rows with values that no
            counter has do not.
        columns: counters that only ever grow.
        resettable: counters of which nothing is known where they fell, so that they count as unchanged.
    """
    times_ns = table["time_ns"].astype(np.int64)
    is_sound = (times_ns > -_MOST) & (times_ns < _MOST)
    for name in (*columns, *resettable):
        is_sound &= (table[name] >= 0) & (table[name] < _MOST)
    rows = np.flatnonzero(is_sound)
    rows = rows[np.lexsort((times_ns[rows], keys[rows]))]
    is_repeated = (np.diff(keys[rows]) == 0) & (np.diff(times_ns[rows]) == 0)
    rows = np.delete(rows, np.flatnonzero(is_repeated) + 1)
    first, last = rows[:-1], rows[1:]
    grown = {name: table[name][last].astype(np.int64) - table[name][first] for name in (*columns, *resettable)}
    is_step = keys[first] == keys[last]
    for name in columns:
        is_step &= grown[name] >= 0
    return CounterSteps(
        key=keys[last][is_step],
        begin_ns=times_ns[first][is_step],
        end_ns=times_ns[last][is_step],
        last_row=last[is_step],
        grown={name: np.maximum(values[is_step], 0) for name, values in grown.items()},
    )
