"""Which rows a trace keeps that is to hold only the last steps: whole chunks go, some thousand steps at a time.

With N steps to keep, all rows of steps before k x N go once step (k + 1) x N has ended, for k = 1, 2, ... So a trace
holds N to 2 N whole steps, and those of all ranks begin with the same one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import StepFlag

_BY_STEP = ("steps", "phases", "collectives", "pacing")
_BY_TIME = {"clock": "local_ns", **dict.fromkeys(("network", "host", "account", "flows"), "time_ns")}
# `groups` and `connections` are needed by all later rows, and `events` are few.


class KeptSteps:
    """Follows which rows are in the file, and says from which chunk on they are kept.

    Args:
        num_steps: how many to keep at least; 0 keeps all.

    Attributes:
        first_step: the first step whose rows are all kept; 0 while nothing was dropped.
    """

    def __init__(self, num_steps: int) -> None:
        self.first_step = 0
        self._num_steps = num_steps
        self._last: dict[str, list[int]] = {}  # of each chunk in the file, its last step or time
        self._begins_ns: dict[int, int] = {}  # of the steps from which rows may be kept
        self._ended = -1

    def note_step_rows(self, rows: NDArray[np.void]) -> None:
        """Note rows of `steps` that have been recorded."""
        if not self._num_steps or not len(rows):
            return
        self._ended = max(self._ended, int(rows["step"].max()))
        firsts = rows[rows["step"] % self._num_steps == 0]
        self._begins_ns |= zip(firsts["step"].tolist(), firsts["begin_ns"].tolist(), strict=True)

    def note_chunk(self, table: str, rows: NDArray[np.void]) -> None:
        """Note a chunk that is in the file now."""
        if not self._num_steps:
            return
        if table in _BY_STEP:
            self._last.setdefault(table, []).append(int(rows["step"].max()))
        elif table in _BY_TIME:
            self._last.setdefault(table, []).append(int(rows[_BY_TIME[table]].max()))

    @property
    def next_first_step(self) -> int | None:
        """The step before which all is to be dropped now; None if nothing is."""
        if not self._num_steps:
            return None
        first = (self._ended + 1) // self._num_steps * self._num_steps - self._num_steps
        return first if first > self.first_step else None

    def num_dropped_chunks(self, first_step: int) -> dict[str, int]:
        """Return how many of the first chunks of each table have no row of a step, or a time, that is to be kept."""
        begins_ns = self._begins_ns.get(first_step)
        bounds = dict.fromkeys(_BY_STEP, first_step)
        if begins_ns is not None:
            bounds |= dict.fromkeys(_BY_TIME, begins_ns)
        found = {}
        for table, last in self._last.items():
            kept = np.flatnonzero(np.array(last) >= bounds.get(table, -1))
            num_dropped = int(kept[0]) if len(kept) else len(last)
            if table == "clock":  # a time between two comparisons needs both
                num_dropped = max(num_dropped - 1, 0)
            found[table] = num_dropped
        return {table: num_dropped for table, num_dropped in found.items() if num_dropped}

    def drop(self, first_step: int, num_chunks: Mapping[str, int]) -> None:
        """Note that rows before a step, and chunks with them, have been dropped."""
        self.first_step = first_step
        for table, num_dropped in num_chunks.items():
            del self._last[table][:num_dropped]
        self._begins_ns = {step: begin_ns for step, begin_ns in self._begins_ns.items() if step >= first_step}


def mark_steps(flags: NDArray[np.uint8], step: NDArray[np.int32], first_step: int) -> NDArray[np.uint8]:
    """Return the marks of steps, of which those before `first_step` are no longer known in detail."""
    plain = np.uint8(StepFlag.PLAIN | StepFlag.WARMUP)
    marked: NDArray[np.uint8] = np.where(step < first_step, flags | plain, flags)
    return marked
