"""Which times may be those at which a run began: the clock of a host or of a tool may be wrong."""

from __future__ import annotations

import time

from hpcpace.core.text import NS_PER_S

DAY_NS = 86_400 * NS_PER_S


def is_to_come(unix_ns: int) -> bool:
    """Return whether a time is later than a day from now, which clocks of different places do not explain."""
    return unix_ns > time.time_ns() + DAY_NS
