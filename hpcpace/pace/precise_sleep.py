"""A delay that is precise to microseconds and leaves the core to those who need it."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcpace.core.text import NS_PER_S

# The kernel wakes a sleeper some tens of microseconds late, so the last part of a delay spins.
_SPUN_NS = 80_000


class PreciseSleep:
    """Delays the calling thread, and measures by how much each delay was too long.

    Args:
        clock, sleep: replaced in tests.
    """

    def __init__(
        self, *, clock: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._overshoots_ns: list[float] = []

    def delay(self, ready_ns: int, delay_ns: int) -> int:
        """Block until `delay_ns` after `ready_ns`, or a little longer; return the end."""
        until_ns = ready_ns + delay_ns
        slept_ns = until_ns - self._clock() - _SPUN_NS
        if slept_ns > 0:
            self._sleep(slept_ns / NS_PER_S)
        now_ns = self._clock()
        self._overshoots_ns.append(float(max(now_ns - until_ns, 0)))
        while now_ns < until_ns:
            now_ns = self._clock()
        return now_ns

    def take_overshoots(self) -> tuple[float, ...]:
        """Return by how much each delay since the last call was too long, in nanoseconds."""
        taken, self._overshoots_ns = tuple(self._overshoots_ns), []
        return taken
