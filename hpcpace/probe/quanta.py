"""Measure the noise of one core in a process of its own: `python -m hpcpace.probe.quanta CPU BEGIN_S LENGTH_S`.

The process binds itself to the core, waits until the monotonic clock shows BEGIN_S, so that all cores of a host begin
together, works in equal pieces for LENGTH_S seconds, and prints what it found as one line of JSON. A piece is square
roots of a small array: nothing in it depends on memory, and in a C loop of numpy the interpreter adds little.

A quantum that takes 10 % longer than the shortest one is a detour: the core did something else meanwhile (Sottile and
Minnich, "Analysis of microbenchmarks for performance tuning of clusters", 2004). Detours next to each other are one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.probe.record import CoreFigures

_MIN_EXCESS = 0.10
_MIN_CYCLES = 4
# Cycles for each event, at most: some cycles may have passed without one.
_MAX_CYCLES = 1.5
_QUANTILES = (0.0, 0.5, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99)
# Lines of the spectrum between two independent frequencies.
_PADDING = 4
_MAX_BINS = 1 << 18
_SIGNIFICANCE = 1e-3
# Pulses have harmonics of almost their own power, but nothing below their frequency.
_HARMONIC_SHARE = 0.5
# Detours of a periodic cause are within this part of a period around its phase.
_PHASE_WIDTH = 0.15
_NUM_REFINEMENTS = 3
_MAX_OF_USUAL = 3.0
_ALIKE = 0.9  # of the largest share, from which on sets cost about the same


@dataclass(frozen=True, kw_only=True)
class Detours:
    """What kept a core from its work.

    Attributes:
        begin_ns: when each detour began, from the first quantum on, int64, (num_detours,).
        lost_ns: what it cost beyond the usual time of the quanta that it hit, float64, (num_detours,).
        span_ns: time over which quanta were measured.
        least_ns: shortest quantum.
        usual_ns: median quantum.
    """

    begin_ns: Ints
    lost_ns: Floats
    span_ns: int
    least_ns: float
    usual_ns: float

    @property
    def share(self) -> float:
        """Part of the time that detours cost."""
        return float(self.lost_ns.sum()) / self.span_ns

    @property
    def resolution_ns(self) -> float:
        """Shortest detour that shows."""
        return _MIN_EXCESS * self.least_ns


@dataclass(frozen=True, kw_only=True)
class PeriodicNoise:
    """Detours that recur.

    Attributes:
        period_ns: their distance.
        share: part of the time that they cost, without what chance puts into their phase.
        num_detours: how many there are.
        p_value: that detours at random are as regular, corrected for the frequencies tried.
    """

    period_ns: float
    share: float
    num_detours: int
    p_value: float


def find_detours(marks_ns: Ints) -> Detours:
    """Return the detours between equal pieces of work.

    Args:
        marks_ns: when each quantum began, and the last one ended, int64, (num_quanta + 1,); at least two quanta.
    """
    quanta_ns = np.diff(marks_ns)
    least_ns, usual_ns = float(quanta_ns.min()), float(np.median(quanta_ns))
    is_long = quanta_ns > (1 + _MIN_EXCESS) * least_ns
    begins = np.flatnonzero(is_long & ~np.append(False, is_long[:-1]))
    number = np.cumsum(is_long & ~np.append(False, is_long[:-1])) - 1
    lost_ns = np.zeros(len(begins))
    np.add.at(lost_ns, number[is_long], np.maximum(quanta_ns[is_long] - usual_ns, 0.0))
    return Detours(
        begin_ns=(marks_ns[begins] - marks_ns[0]).astype(np.int64),
        lost_ns=lost_ns,
        span_ns=int(marks_ns[-1] - marks_ns[0]),
        least_ns=least_ns,
        usual_ns=usual_ns,
    )


def find_period(detours: Detours) -> PeriodicNoise | None:
    """Return the period of the detours; None if they do not recur regularly.

    Detours of all lengths are searched, then the longest half, quarter and fewer, down to a hundredth: a regular thief
    of milliseconds is found among the many short interruptions of a clock. The search is a spectrum of their times
    (Rayleigh's test, as in `hpcpace.metrics.recurrence`), corrected for all frequencies and sets.
    """
    if not len(detours.begin_ns):
        return None
    limits = dict.fromkeys(np.quantile(detours.lost_ns, _QUANTILES).tolist())
    found = [one for limit in limits if (one := _period_of(detours, detours.lost_ns >= limit, len(limits))) is not None]
    # Of sets that cost about the same, the most regular one has the period; others may have a part of it.
    most = max((one.share for one in found), default=0.0)
    return min((one for one in found if one.share >= _ALIKE * most), key=lambda one: one.p_value, default=None)


def _period_of(detours: Detours, chosen: Bools, num_sets: int) -> PeriodicNoise | None:
    begin_ns = detours.begin_ns[chosen].astype(np.float64)
    if len(begin_ns) < _MIN_CYCLES:
        return None
    frequencies, power = _spectrum(begin_ns, detours.span_ns, detours.usual_ns)
    if not len(power):
        return None
    p_value = min(1.0, num_sets * len(power) / _PADDING * math.exp(-float(power.max())))
    if p_value > _SIGNIFICANCE:
        return None
    at = int(np.flatnonzero(power >= _HARMONIC_SHARE * power.max())[0])
    period_ns, is_in_phase = _refined(begin_ns, 1 / _peak(frequencies, power, at))
    # What recurs takes about as long each time; a long interruption in its phase is another one.
    lost_ns = detours.lost_ns[chosen]
    lost_ns = np.minimum(lost_ns, _MAX_OF_USUAL * np.median(lost_ns[is_in_phase]))
    expected_ns = 2 * _PHASE_WIDTH / (1 - 2 * _PHASE_WIDTH) * float(lost_ns[~is_in_phase].sum())
    share = max(float(lost_ns[is_in_phase].sum()) - expected_ns, 0.0) / detours.span_ns
    return PeriodicNoise(period_ns=period_ns, share=share, num_detours=int(is_in_phase.sum()), p_value=p_value)


def _spectrum(begin_ns: Floats, span_ns: int, usual_ns: float) -> tuple[Floats, Floats]:
    """Return frequencies, 1/ns, and the power of events there: n R^2, exponentially distributed for random events."""
    num_bins = int(min(max(span_ns / (2 * usual_ns), 16), _MAX_BINS))
    counts = np.bincount((begin_ns / span_ns * num_bins).astype(np.int64).clip(0, num_bins - 1), minlength=num_bins)
    length = _PADDING * num_bins
    power = np.abs(np.fft.rfft(counts.astype(np.float64), n=length)) ** 2 / len(begin_ns)
    frequencies = np.arange(len(power)) / (_PADDING * span_ns)
    # At least so many cycles, no period shorter than a few bins, and about one event in each cycle.
    highest = min(num_bins / 4, _MAX_CYCLES * len(begin_ns)) / span_ns
    kept = (frequencies >= _MIN_CYCLES / span_ns) & (frequencies <= highest)
    return frequencies[kept], power[kept]


def _peak(frequencies: Floats, power: Floats, at: int) -> float:
    """Return the frequency of the highest line of the peak that begins at a line."""
    while at + 1 < len(power) and power[at + 1] >= power[at]:
        at += 1
    return float(frequencies[at])


def _refined(begin_ns: Floats, period_ns: float) -> tuple[float, Bools]:
    """Return the period by a line through the times of the events over their cycles, and which events it explains."""
    is_in_phase = np.ones(len(begin_ns), np.bool_)
    for _ in range(_NUM_REFINEMENTS):
        turns = begin_ns / period_ns
        phase = float(np.angle(np.exp(2j * np.pi * turns[is_in_phase]).sum()) / (2 * np.pi))
        cycle = np.round(turns - phase)
        is_in_phase = np.abs(turns - phase - cycle) <= _PHASE_WIDTH
        if len(np.unique(cycle[is_in_phase])) < _MIN_CYCLES:
            break
        slope, _ = np.polyfit(cycle[is_in_phase], begin_ns[is_in_phase], 1)
        period_ns = float(slope)
    return period_ns, is_in_phase


QUANTUM_NS = 50_000
_ARRAY_LENGTH = 512
_CALIBRATION_CALLS = 2_000
_MIN_MARKS = 3


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


def _work(length_s: float) -> Ints:
    """Return when each piece of work began, and when the last one ended."""
    values, roots = np.linspace(1.0, 2.0, _ARRAY_LENGTH), np.empty(_ARRAY_LENGTH)
    root, now_ns = np.sqrt, time.perf_counter_ns
    calls = range(max(int(QUANTUM_NS / _call_ns(lambda: root(values, roots))), 1))
    marks_ns = np.empty(int(2 * length_s * NS_PER_S / QUANTUM_NS) + _MIN_MARKS, np.int64)
    end_ns = now_ns() + int(length_s * NS_PER_S)
    for number in range(len(marks_ns)):
        mark_ns = now_ns()
        marks_ns[number] = mark_ns
        if mark_ns >= end_ns and number >= _MIN_MARKS:
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
