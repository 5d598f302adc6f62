"""What a recorder has lost: rows by table, their steps, and why; one line at the end reports it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hpcpace.trace.schema import NO_STEP


class Losses:
    """Rows that were dropped."""

    def __init__(self) -> None:
        self._num_rows: Counter[str] = Counter()
        self._first_step = self._last_step = NO_STEP
        # In order of their first occurrence.
        self._reasons: dict[str, None] = {}

    @property
    def num_rows(self) -> int:
        """Their number."""
        return self._num_rows.total()

    def copy(self) -> Losses:
        """Return a copy, so that adding to one does not change the other."""
        copied = Losses()
        copied._num_rows, copied._reasons = self._num_rows.copy(), dict(self._reasons)
        copied._first_step, copied._last_step = self._first_step, self._last_step
        return copied

    def add(
        self, table: str, num_rows: int, reason: str, *, first_step: int = NO_STEP, last_step: int = NO_STEP
    ) -> None:
        """Count rows of a table, and the steps they belong to, if any."""
        if not num_rows:
            return
        self._num_rows[table] += num_rows
        self._reasons[reason] = None
        if first_step != NO_STEP:
            self._first_step = first_step if self._first_step == NO_STEP else min(self._first_step, first_step)
            self._last_step = max(self._last_step, last_step)

    def add_rows(self, table: str, rows: NDArray[np.void], reason: str) -> None:
        """Count rows of a table."""
        steps = rows["step"] if "step" in (rows.dtype.names or ()) else np.zeros(0, np.int32)
        known = steps[steps != NO_STEP]
        first, last = (int(known.min()), int(known.max())) if len(known) else (NO_STEP, NO_STEP)
        self.add(table, len(rows), reason, first_step=first, last_step=last)

    def sentence(self, place: object, *, is_certain: bool = True) -> str:
        """Return what was lost, without a full stop.

        Args:
            place: the trace file.
            is_certain: whether they are lost, or may be.
        """
        tables = ", ".join(f"{count} of {table}" for table, count in self._num_rows.most_common() if count)
        steps = f"; steps {self._first_step} to {self._last_step}" if self._first_step != NO_STEP else ""
        verb = ("is" if self.num_rows == 1 else "are") + " lost" if is_certain else "may be lost"
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        return f"{rows} of {place} {verb} ({tables}{steps}): {', '.join(self._reasons)}"
