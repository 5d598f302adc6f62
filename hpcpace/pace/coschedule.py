"""Runs Python's full garbage collections on the same step of all ranks.

A full collection stops one rank for tens of milliseconds, and in a synchronous job all others with it. If P ranks
collect on different steps, the job stops P times as often as if they collect on the same step. Collections of the young
generations cost microseconds, keep memory in check and stay as they are.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FULL = 2
_NEVER = 2**31 - 1
# Blocks of a trial hold two collections; if these are further apart, a trial takes too long.
_LONGEST_BLOCK_STEPS = 400


@dataclass(kw_only=True)
class CollectionCount:
    """Full collections of one rank over some steps.

    Attributes:
        num_steps: number of these steps.
        num_full: full collections in them.
        time_ns: their total time.
    """

    num_steps: int = 0
    num_full: int = 0
    time_ns: int = 0


class CollectionWatch:
    """Counts full collections, separately for steps with and without the schedule.

    Attributes:
        counts: by whether the schedule is on.
        steps_since: unscheduled steps since this rank's last unscheduled collection.
    """

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._begin_ns = 0
        self._num_full = self._time_ns = 0
        self.counts = {False: CollectionCount(), True: CollectionCount()}
        self.steps_since = 0

    def start(self) -> None:
        """Start to count."""
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        """Stop to count."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def end_step(self, *, is_scheduled: bool) -> None:
        """Assign the collections since the last call to a step with or without the schedule."""
        if not is_scheduled:
            self.steps_since = 0 if self._num_full else self.steps_since + 1
        count = self.counts[is_scheduled]
        count.num_steps += 1
        count.num_full += self._num_full
        count.time_ns += self._time_ns
        self._num_full = self._time_ns = 0

    @property
    def steps_until(self) -> int | None:
        """The steps until this rank would collect again without a schedule; None if it never did."""
        count = self.counts[False]
        return max(count.num_steps // count.num_full - self.steps_since, 1) if count.num_full else None

    def _note(self, moment: str, info: dict[str, int]) -> None:
        if info["generation"] != _FULL:
            return
        if moment == "start":
            self._begin_ns = self._clock()
        else:
            self._num_full += 1
            self._time_ns += self._clock() - self._begin_ns


class CollectionSchedule:
    """Collects at a fixed interval of steps while it is on; Python collects by itself while it is off.

    It sends no messages: ranks that turn it on and off at the same steps collect on the same steps. When it is turned
    off, each rank returns to its own earlier rhythm; otherwise the ranks would stay in step for long, and a trial would
    compare the schedule with itself.

    Args:
        collect: replaced in tests.
    """

    def __init__(self, *, collect: Callable[[], object] = gc.collect) -> None:
        self._collect = collect
        self._thresholds: tuple[int, int, int] | None = None
        self._num_steps = 0
        self._interval_steps = 0
        self._steps_until = 0

    @property
    def is_on(self) -> bool:
        """Whether the ranks collect together."""
        return self._interval_steps > 0

    def turn_on(self, interval_steps: int) -> None:
        """Collect on every `interval_steps`-th step from here on."""
        self._interval_steps = interval_steps
        if self._thresholds is None:
            self._thresholds = gc.get_threshold()
            gc.set_threshold(*self._thresholds[:2], _NEVER)

    def turn_off(self, *, steps_until: int | None = None) -> None:
        """Let Python collect by itself again.

        Args:
            steps_until: in how many steps this rank would have collected by itself: it collects then, and Python takes
                over. None: Python takes over at once, without a collection.
        """
        self._interval_steps = self._num_steps = 0
        self._steps_until = steps_until or 0
        if not steps_until and self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
            self._thresholds = None

    def begin_step(self, *, is_last: bool = False) -> bool:
        """Collect if a collection is due in this step; return whether it was, the same on all ranks.

        Args:
            is_last: whether the schedule is turned off after this step. A collection that is due by then runs in this
                step; otherwise the steps after it would bear the cost.
        """
        if not self.is_on:
            if self._steps_until:  # this rank returns to its own rhythm
                self._steps_until -= 1
                if not self._steps_until:
                    self._collect()
                    self.turn_off()
            return False
        self._num_steps += 1
        owed = self._interval_steps // 2 if is_last else self._interval_steps
        if self._num_steps < max(owed, 1):
            return False
        self._num_steps = 0
        self._collect()
        return True


class CollectionPlan:
    """How often the ranks collect together: as often as the rank that collected most often by itself.

    Args:
        interval: steps between two collections; 0 to find out.
        least_share: share of the steps' time spent in full collections, below which a schedule is not worth it.

    Attributes:
        interval: the same; 0 while unknown.
    """

    def __init__(self, interval: int = 0, *, least_share: float = 0.0) -> None:
        self.interval = interval
        self._least_share = least_share
        self._num_steps = self._num_full = self._full_ns = 0
        self._time_ns = 0.0

    def note(self, steps_ns: Sequence[float], *, num_full: int, full_ns: int, is_scheduled: bool) -> None:
        """Take a window of steps, and the most collections of any rank up to its end without a schedule."""
        if is_scheduled:
            return
        counted = [time_ns for time_ns in steps_ns if time_ns == time_ns]
        self._num_steps += len(counted)
        self._time_ns += sum(counted)
        self._num_full, self._full_ns = num_full, full_ns

    def decide(self) -> str:
        """Fix the interval; return why that is not possible, or an empty text."""
        if self.interval:
            return ""
        if not self._num_steps:
            return "the trial starts before any step without a schedule was counted"
        if not self._num_full:
            return f"no full garbage collection in {self._num_steps} steps"
        if self._full_ns < self._least_share * self._time_ns:
            return f"garbage collection takes {self._full_ns / self._time_ns:.2%} of the steps"
        # That of the rank that collects most often.
        self.interval = max(self._num_steps // self._num_full, 1)
        return ""

    def block_steps(self) -> int:
        """Return the least number of steps in a block of a trial; 0 if that is too long for a trial."""
        return 2 * self.interval if 2 * self.interval <= _LONGEST_BLOCK_STEPS else 0
