"""How long ranks were ready to run and waited for a core, from the cumulative counters that each records once a second.

A thread runs, waits for a core, or sleeps. With c of processor time and w of run-queue wait for each second, summed
over the threads of a rank, c + w threads of it are ready on average, and w / (c + w) of that time is waiting. So a rank
is held up for min(1, c + w) w / (c + w) of the time: exactly w where one thread does the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_S

Floats = NDArray[np.float64]

_LEAST_ROWS = 3
_MOST_DIGITS = 5
_MOST_THREADS = 1 << 16
_COUNTERS = ("cpu_time_ns", "run_wait_ns", "cpu_pressure_ns", "cpu_throttled_ns", "involuntary_switches")


@dataclass(frozen=True, kw_only=True)
class CoreUse:
    """What ranks had of their cores; one value a rank, float64, (num_ranks,), NaN where it is not known.

    Attributes:
        running: processor time of a rank's threads for each second.
        queued: run-queue wait of a rank's threads for each second.
        waiting: share of the time for which a rank was ready to run and waited for a core.
        error: standard error of `waiting`.
        pressure: share of the time for which some task of the rank's cgroup, or else of its host, waited for a core.
        throttled: share of the time for which the quota of its cgroup kept a rank from running.
        switches: involuntary context switches of a rank for each second.
        cpus: the CPUs that a rank may use; empty where they are not known.
    """

    running: Floats
    queued: Floats
    waiting: Floats
    error: Floats
    pressure: Floats
    throttled: Floats
    switches: Floats
    cpus: tuple[frozenset[int], ...]


def core_use(
    tables: Sequence[Mapping[str, NDArray[Any]]], begin_ns: Sequence[int], end_ns: Sequence[int], cpus: Sequence[str]
) -> CoreUse:
    """Return what ranks had of their cores between two times.

    Args:
        tables: the `host` table of each rank.
        begin_ns, end_ns: from when to when, on each rank's own clock.
        cpus: the CPUs of each rank, as the kernel lists them.
    """
    rates = [_rates(table, begin, end) for table, begin, end in zip(tables, begin_ns, end_ns, strict=True)]
    mean = np.array([rate.mean(axis=0) if len(rate) else np.full(len(_COUNTERS), np.nan) for rate in rates])
    mean = mean.reshape(len(rates), len(_COUNTERS))
    waiting = [held_up(rate[:, 0], rate[:, 1]) for rate in rates]
    return CoreUse(
        running=mean[:, 0],
        queued=mean[:, 1],
        waiting=held_up(mean[:, 0], mean[:, 1]),
        error=np.array([each.std() / np.sqrt(len(each)) if len(each) else np.nan for each in waiting]),
        pressure=np.minimum(mean[:, 2], 1.0),
        throttled=np.minimum(mean[:, 3], 1.0),
        switches=mean[:, 4] * NS_PER_S,
        cpus=tuple(cpus_of(text) for text in cpus),
    )


def held_up(running: Floats, queued: Floats) -> Floats:
    """Return the share of the time for which a rank waits for a core, from running and queued threads for each."""
    ready = running + queued
    share: Floats = np.minimum(ready, 1.0) * queued / np.maximum(ready, 1e-9)
    return share


def _rates(table: Mapping[str, NDArray[Any]], begin_ns: int, end_ns: int) -> Floats:
    """Return how fast each counter grew between neighbouring rows, float64, (num_seconds, num_counters).

    No rows where the run-queue wait is not known, or a counter runs backwards or faster than any number of threads can.
    """
    none = np.zeros((0, len(_COUNTERS)))
    time_ns = np.asarray(table["time_ns"], np.float64)
    inside = (time_ns >= begin_ns) & (time_ns <= end_ns)
    if inside.sum() < _LEAST_ROWS or not np.any(table["run_wait_ns"][inside]):
        return none
    rows = np.array([np.asarray(table[name][inside], np.float64) for name in _COUNTERS]).T
    passed_ns = np.diff(time_ns[inside])
    grown = np.diff(rows, axis=0)
    if (passed_ns <= 0).any() or (grown < 0).any() or (grown[:, :2] > _MOST_THREADS * passed_ns[:, None]).any():
        return none
    rates: Floats = grown / passed_ns[:, None]
    return rates


def cpus_of(text: str) -> frozenset[int]:
    """Return the CPUs of a list like `0-3,8`; none where the text is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        ends = part.split("-")
        if len(ends) > 2 or not all(end.isdigit() and len(end) <= _MOST_DIGITS for end in ends):
            return frozenset()
        found.update(range(int(ends[0]), int(ends[-1]) + 1))
    return frozenset(found)
