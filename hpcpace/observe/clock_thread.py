"""Comparisons of the clocks while the job trains: in a thread, so that no step ever waits for another rank.

Ranks meet at times, not at steps: where one has ended a step, it may be needed by one that has not, as in a pipeline.
For what all ranks are to do before the same step, such as following an order, they agree on one that none has reached.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

from hpcpace.core.errors import ClockSyncError
from hpcpace.core.text import NS_PER_S
from hpcpace.world.clock import Agreement, ClockSample, ClockSync, Standing

_NUM_RECENT_STEPS = 16
# The first steps compile and fill caches: before so many, nobody knows how long a step takes.
_MIN_STEPS = 4
# Of a rank that never reaches the steps that the others agree on.
_MAX_AHEAD = 64
# How much longer than its last comparison a thread may take to end.
_GRACE_S = 1.0


class ClockThread:
    """Compares the clocks of the ranks from `start` to `close`.

    Args:
        sync: the comparisons.
        add: takes each sample of this rank's clock.
        notice: returns what rank 0 says about the step to agree on.
        warn: takes the one warning that comparisons stop.
        leave_timeout_s: how long a rank that leaves waits for the others.
        leaves_together: whether all of them are to leave then; otherwise nobody is warned of one that does not.

    Attributes:
        halfwidth_ns: uncertainty of this rank's clock at the last comparison; None before the first.
    """

    def __init__(
        self,
        sync: ClockSync,
        *,
        add: Callable[[ClockSample], object],
        notice: Callable[[], tuple[int, ...]],
        warn: Callable[[str], None],
        leave_timeout_s: float,
        leaves_together: bool,
    ) -> None:
        self._leave_timeout_s, self._leaves_together = leave_timeout_s, leaves_together
        self.halfwidth_ns: int | None = None
        self._sync, self._add, self._notice, self._warn = sync, add, notice, warn
        self._step, self._recent_ns = 0, deque[int](maxlen=_NUM_RECENT_STEPS)
        self._agreed = 0
        # A rank that is behind has still to reach one step when those ahead agree on the next.
        self._ahead = deque[Agreement](maxlen=_MAX_AHEAD)
        self._offset_ns = 0
        self._is_leaving, self._is_dropped = threading.Event(), False
        self._until_ns: int | None = None
        self._thread: threading.Thread | None = None

    def start(self, step: int) -> None:
        """Compare the clocks for the first time, here, and from then on in a thread. Collective."""
        self._step = step
        if self._compare() and self._sync.works_in_any_thread:
            self._thread = threading.Thread(target=self._run, name="hpcpace-clock", daemon=True)
            self._thread.start()

    def begins(self, step: int, duration_ns: int) -> tuple[int, ...] | None:
        """Note that a step begins, after one of some length; return the notice if it is one that was agreed on."""
        self._step = step
        self._recent_ns.append(duration_ns)
        notice = None
        while self._ahead and self._ahead[0].step <= step:
            notice = self._ahead.popleft().notice
        return notice

    def close(self, *, in_order: bool) -> None:
        """End the comparisons; if all ranks end here, with a last one, for which each waits up to a timeout."""
        self._until_ns = time.monotonic_ns() + round(self._leave_timeout_s * NS_PER_S)
        self._is_dropped = not in_order
        self._is_leaving.set()
        if self._thread is None:
            self._run()
        else:
            self._thread.join(self._leave_timeout_s + _GRACE_S)
            if self._thread.is_alive():
                return  # it still uses the messages
        if in_order and not self._sync.broken:
            self._sync.close()

    def _run(self) -> None:
        while not self._sync.broken and (agreement := self._sync.agreement) is not None and not agreement.all_leave:
            due_ns = agreement.next_ns + self._offset_ns
            self._is_leaving.wait(max((due_ns - time.monotonic_ns()) / NS_PER_S, 0.0))
            if self._is_dropped or not self._compare():
                break

    def _ends(self) -> bool:
        """Return whether this rank ends: by an error, of which one that has left was a sign, or before the others."""
        if threading.current_thread() is self._thread:
            self._is_leaving.wait(_GRACE_S)
        return self._is_dropped or (self._is_leaving.is_set() and not self._leaves_together)

    def _compare(self) -> bool:
        recent_ns = [*self._recent_ns]
        length = statistics.median if len(recent_ns) == _NUM_RECENT_STEPS else min
        step_ns = int(length(recent_ns)) if len(recent_ns) >= _MIN_STEPS else 0
        standing = Standing(self._step, step_ns, self._is_leaving.is_set(), self._notice())
        try:
            sample = self._sync.sync(standing, until_ns=self._until_ns)
            self._add(sample)
        except ClockSyncError as error:
            if not self._ends():
                self._warn(f"clock comparisons stop: {error}; times of different hosts lose precision from here on")
            return False
        except Exception as error:  # the boundary of this thread: the job does not depend on it
            self._warn(f"clock comparisons stop: {type(error).__name__}: {error}")
            return False
        agreement = self._sync.agreement
        if agreement is not None and agreement.step > self._agreed:
            self._agreed = agreement.step
            self._ahead.append(agreement)
        self._offset_ns, self.halfwidth_ns = sample.offset_ns, sample.halfwidth_ns
        return True
