"""How a rank ended, as its trace says it."""

from __future__ import annotations

import signal

import numpy as np

from hpcpace.trace.schema import EventKind
from hpcpace.trace.tables import RankTrace

_ENDS = (EventKind.EXCEPTION, EventKind.EXIT, EventKind.SIGNAL)
_FOREVER_NS = 1 << 62

STOPPED_FOR_HANG = b"stopped because of a hang"
"""The text of the event of an exit with which hpcpace ends a rank of a job that hangs."""


def last_word(trace: RankTrace) -> int | None:
    """Return the row of the event with which a rank ended; None without one, and of a signal that it survived."""
    events = trace.tables["events"]
    last_ns = trace.tables["steps"]["end_ns"].max(initial=-_FOREVER_NS)
    is_end = np.isin(events["kind"], _ENDS) & (events["time_ns"] >= last_ns)
    if trace.closed_cleanly:
        is_end &= events["kind"] != EventKind.SIGNAL
    rows = np.flatnonzero(is_end)
    return int(rows[events["time_ns"][rows].argmin()]) if len(rows) else None


def end_name(kind: EventKind, code: int, text: bytes) -> str:
    """Return what `RankEnd.what` says of the event with which a rank ended."""
    if kind is EventKind.EXCEPTION:
        return text.rstrip(b"\0").decode(errors="replace") or "an exception"
    return signal_name(code) if kind is EventKind.SIGNAL else str(code)


def signal_name(number: int) -> str:
    """Return the name of a signal, or `signal N` for one that this system does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
