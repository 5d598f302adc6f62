"""Measure the noise of one core in a process of its own: `python -m hpcpace.probe.quanta CPU BEGIN_S LENGTH_S`.

The process binds itself to the core, waits until the monotonic clock shows BEGIN_S, so that all cores of a host begin
together, works in equal pieces for LENGTH_S seconds, and prints what it found as one line of JSON. A piece is square
roots of a small array: nothing in it depends on memory, and in a C loop of numpy the interpreter adds little.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_S
from hpcpace.probe.detours import find_detours, find_period
from hpcpace.probe.noise_record import CoreFigures

QUANTUM_NS = 50_000
_ARRAY_LENGTH = 512
_CALIBRATION_CALLS = 2_000
_LEAST_MARKS = 3


def measure_core(length_s: float) -> CoreFigures:
    """Work in equal pieces for a time, and return the noise of the core.

    Args:
        length_s: in seconds.
    """
    marks_ns = _work(length_s)
    detours = find_detours(marks_ns)
    period = find_period(detours)
    return CoreFigures(
        share=detours.share,
        longest_ns=float(detours.lost_ns.max(initial=0.0)),
        num_detours=len(detours.begin_ns),
        quantum_ns=detours.usual_ns,
        resolution_ns=detours.resolution_ns,
        span_ns=detours.span_ns,
        period_ns=None if period is None else period.period_ns,
        period_share=None if period is None else period.share,
    )


def _work(length_s: float) -> NDArray[np.int64]:
    """Return when each piece of work began, and when the last one ended."""
    values, roots = np.linspace(1.0, 2.0, _ARRAY_LENGTH), np.empty(_ARRAY_LENGTH)
    root, now_ns = np.sqrt, time.perf_counter_ns
    calls = range(max(int(QUANTUM_NS / _call_ns(lambda: root(values, roots))), 1))
    marks_ns = np.empty(int(2 * length_s * NS_PER_S / QUANTUM_NS) + _LEAST_MARKS, np.int64)
    end_ns = now_ns() + int(length_s * NS_PER_S)
    for number in range(len(marks_ns)):
        mark_ns = now_ns()
        marks_ns[number] = mark_ns
        if mark_ns >= end_ns and number >= _LEAST_MARKS:
            return marks_ns[: number + 1]
        for _ in calls:
            root(values, roots)
    return marks_ns


def _call_ns(call: Callable[[], object]) -> float:
    times_ns = np.empty(_CALIBRATION_CALLS)
    for number in range(_CALIBRATION_CALLS):
        begin_ns = time.perf_counter_ns()
        call()
        times_ns[number] = time.perf_counter_ns() - begin_ns
    return float(np.median(times_ns))


def main() -> None:
    """Run as the process of one core."""
    cpu, begin_s, length_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    os.sched_setaffinity(0, {cpu})
    time.sleep(max(begin_s - time.monotonic(), 0.0))
    print(json.dumps(dataclasses.asdict(measure_core(length_s))))


if __name__ == "__main__":
    main()
