"""The rows of a rank's last steps, handed to whoever asks while the job runs, without a look at any file."""

from __future__ import annotations

from collections import deque

_MAX_ROWS = 16_384  # memory: 1 MB of the longest rows


class RecentRows:
    """The packed rows of one table that nobody has been handed yet, each handed out once.

    Rows go through a buffer, which the training thread fills and the flush thread empties. Some of those in the buffer
    may have been handed out before they leave it. The caller holds a lock around each call.

    Args:
        row_bytes: length of a row.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._parts: deque[bytes] = deque()
        self._num_rows = self._num_handed = 0
        self._has_gap = False

    def keep(self, packed: bytes) -> None:
        """Keep rows that leave the buffer, in place of the oldest where they are too many."""
        num_rows = len(packed) // self._row_bytes
        new = packed[self._num_handed * self._row_bytes :]
        self._num_handed = max(self._num_handed - num_rows, 0)
        if new:
            self._parts.append(new)
            self._num_rows += len(new) // self._row_bytes
        while self._num_rows > _MAX_ROWS:
            oldest = self._parts.popleft()
            excess = min(self._num_rows - _MAX_ROWS, len(oldest) // self._row_bytes)
            if left := oldest[excess * self._row_bytes :]:
                self._parts.appendleft(left)
            self._num_rows -= excess
            self._has_gap = True

    def take(self, buffer: list[bytes]) -> tuple[bytes, bool]:
        """Return all rows that were not handed out yet, and whether older ones were given up before.

        Args:
            buffer: the rows that stay in the buffer and may be handed out, from its first on.
        """
        packed = b"".join((*self._parts, *buffer[self._num_handed :]))
        has_gap, self._has_gap = self._has_gap, False
        self._parts.clear()
        self._num_rows, self._num_handed = 0, max(self._num_handed, len(buffer))
        return packed, has_gap
