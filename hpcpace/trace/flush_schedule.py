"""When a rank flushes: ranks share a file system, so their flushes are spread over the interval.

The golden ratio places any number of ranks evenly. A flush that is asked for, as at the start by all ranks at once, or
that takes long, does not move the later ones.
"""

from __future__ import annotations

_GOLDEN_RATIO = 0.6180339887498949
# A flush that begins this part of an interval early, as waits may end, is the one that is due.
_TOLERANCE = 0.01


class FlushSchedule:
    """The times of the flushes of one rank.

    Args:
        rank: decides on its place in the interval.
        interval_s: seconds between two flushes.
        start_s: time at which all ranks start.

    Attributes:
        first_wait_s: seconds from the start to the first flush.
    """

    def __init__(self, rank: int, interval_s: float, start_s: float) -> None:
        self._interval_s = interval_s
        self.first_wait_s = interval_s * (rank * _GOLDEN_RATIO % 1)
        self._place_s = start_s + self.first_wait_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next flush, after one that ends now; what that was in the way of is left out."""
        left_s = (self._place_s - now_s) % self._interval_s
        return left_s if left_s > _TOLERANCE * self._interval_s else left_s + self._interval_s
