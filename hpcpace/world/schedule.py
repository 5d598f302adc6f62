"""When the next clock synchronisation is due, as a step number that rank 0 decides and all ranks share."""

from __future__ import annotations

from collections import deque

_RECENT_STEPS = 16


class SyncSchedule:
    """Turns an interval of time into a number of steps, from the steps seen so far.

    The first steps are often long (compilation, caches), and the length of steps changes later. So the number of steps
    to the next synchronisation at most doubles each time, and it follows the slower of the whole last interval and its
    last steps: a wrong guess costs a millisecond by being early rather than minutes by being late.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_STEPS + 1)
        self._last: tuple[int, int] | None = None
        self._stride = 1

    def note(self, step: int, now_ns: int) -> None:
        """Note the start of a step."""
        self._recent.append((step, now_ns))

    def next_step(self, step: int, now_ns: int) -> int:
        """Return the step of the next synchronisation, given that one has just ended before `step`."""
        if self._last is not None and step > self._last[0]:
            step_ns = max(_mean_step_ns(self._last, (step, now_ns)), self._recent_step_ns(), 1.0)
            self._stride = max(1, min(2 * self._stride, round(self._interval_ns / step_ns)))
        self._last = step, now_ns
        self._recent.clear()
        self._recent.append(self._last)
        return step + self._stride

    def _recent_step_ns(self) -> float:
        first, last = (self._recent[0], self._recent[-1]) if self._recent else ((0, 0), (0, 0))
        return _mean_step_ns(first, last) if last[0] > first[0] else 0.0


def _mean_step_ns(first: tuple[int, int], last: tuple[int, int]) -> float:
    return (last[1] - first[1]) / (last[0] - first[0])
