"""Compares two ways of doing the same thing, alternating within one run: medians of pairs, with intervals.

Absolute times drift with the machine; the ratio of two measurements taken one after the other does so much less.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.trace.schema import TraceHeader

# A process reports its own peak: the one that the kernel gives its parent starts at the parent's.
_WITH_PEAK = """
import atexit, pathlib, resource, sys
def keep_peak(path=sys.argv.pop(1)):
    own = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
    pathlib.Path(path).write_text(str(max(int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024))
atexit.register(keep_peak)
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one process took; its peak of memory is that of its largest process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a process may take; its memory is its address space."""

    wall_s: float
    memory_bytes: int


class NotFinished(Exception):
    """A process took more than it may, or failed; the message says which."""


def run_apart(python: Path, code: str, *args: object, result: Path, limits: Limits) -> Sample:
    """Run a program and measure it; it must write `result`, whatever its exit code says of what it found.

    Raises:
        NotFinished: it did not.
    """
    result.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        peak, log = Path(folder) / "peak", Path(folder) / "log"
        command = [str(python), "-c", _WITH_PEAK + code, str(peak), *map(str, args)]
        with log.open("w") as output:
            begin_s = time.perf_counter()
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            resource.prlimit(child.pid, resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
            killer = threading.Timer(limits.wall_s, _kill, [child.pid])
            killer.start()
            try:
                _, status, usage = os.wait4(child.pid, 0)
                wall_s = time.perf_counter() - begin_s
            finally:
                killer.cancel()
                _kill(child.pid)  # also what it has started
        child.returncode = os.waitstatus_to_exitcode(status)
        if wall_s >= limits.wall_s:
            raise NotFinished(f"not finished after {limits.wall_s:.0f} s")
        if not result.exists():
            lines = log.read_text().strip().splitlines() or ["no output"]
            memory = f"{limits.memory_bytes / 2**30:.0f} GiB of memory"
            raise NotFinished(f"ended with {child.returncode} in {memory}: {lines[-1][:200]}")
        cpu_s = usage.ru_utime + usage.ru_stime
        return Sample(wall_s=wall_s, cpu_s=cpu_s, peak_bytes=int(peak.read_text()))


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


Measure = Callable[[], float]


@dataclass(frozen=True)
class Pairs:
    """Times of A and B, pair by pair, in seconds or any other unit, float64, (num_pairs,)."""

    a: np.ndarray
    b: np.ndarray

    def ratio(self) -> tuple[float, float, float]:
        """Return the median of A / B and its 95 % bootstrap interval."""
        return median_interval(self.a / self.b)

    def difference(self) -> tuple[float, float, float]:
        """Return the median of A - B and its 95 % bootstrap interval."""
        return median_interval(self.a - self.b)


def alternate(a: Measure, b: Measure, *, num_pairs: int, num_warmups: int = 1) -> Pairs:
    """Measure A and B in turn, in changing order."""
    times = take_turns({"a": a, "b": b}, num_rounds=num_pairs, num_warmups=num_warmups)
    return Pairs(times["a"], times["b"])


def take_turns(measures: Mapping[str, Measure], *, num_rounds: int, num_warmups: int = 1) -> dict[str, np.ndarray]:
    """Measure several things in turn, in changing order; return the values of each by name, (num_rounds,)."""
    names = list(measures)
    values: dict[str, list[float]] = {name: [] for name in names}
    for index in range(num_rounds + num_warmups):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            values[name].append(measures[name]())
    return {name: np.array(values[name][num_warmups:]) for name in names}


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the median of values, and the 95 % bootstrap interval of it."""
    draws = np.random.default_rng(0).choice(values, size=(10_000, values.size))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def interval(values: np.ndarray, form: str, unit: str = "") -> str:
    """Return the median and its interval as text, like `1.2 us [1.1, 1.3]`, the unit with a space behind it."""
    median, low, high = median_interval(values)
    return f"{median:{form}} {unit}[{low:{form}}, {high:{form}}]"


def processor_s(*who: int) -> float:
    """Return the processor time of this process and of its children that have ended, or of one of both, in seconds."""
    usage = [resource.getrusage(one) for one in who or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(own.ru_utime + own.ru_stime for own in usage)


@dataclass
class Taken:
    """Seconds of a clock on the wall, and of all cores together, which other load does not change."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def taken(*who: int) -> Iterator[Taken]:
    """Measure what a block takes, in this process and its children, or in one of both."""
    found, cpu_s, begin_s = Taken(), processor_s(*who), time.perf_counter()
    yield found
    found.wall_s, found.cpu_s = time.perf_counter() - begin_s, processor_s(*who) - cpu_s


def python_taken(*arguments: str, codes: Container[int] = range(256)) -> Taken:
    """Return what a process of Python takes, imports included.

    Raises:
        RuntimeError: it failed.
    """
    with taken(resource.RUSAGE_CHILDREN) as found:
        done = subprocess.run(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    if done.returncode not in codes or "Traceback" in done.stderr:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return found


@contextmanager
def compiled_kept(folder: Path) -> Iterator[None]:
    """Let each Python that starts inside keep what it compiles in a folder, as it does for a user."""
    changed = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    before = {name: os.environ.pop(name, None) for name in changed}
    os.environ |= {name: value for name, value in changed.items() if value is not None}
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ |= {name: value for name, value in before.items() if value is not None}


def medians(samples: Sequence[Mapping[str, float]], *names: str) -> dict[str, float]:
    """Return the medians of figures of several samples, by name; of all figures if none is named."""
    return {name: statistics.median(sample[name] for sample in samples) for name in names or samples[0]}


def taken_medians(samples: Sequence[Taken]) -> tuple[float, float]:
    """Return the median seconds of the clock on the wall, and of all cores."""
    return statistics.median(one.wall_s for one in samples), statistics.median(one.cpu_s for one in samples)


def timed(
    function: Callable[..., Any], name: str, seconds: dict[str, float], clock: Callable[[], float] = time.perf_counter
) -> Callable[..., Any]:
    """Return a function that adds the seconds that each call takes under a name."""

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        begin_s = clock()
        result = function(*args, **options)
        seconds[name] = seconds.get(name, 0.0) + clock() - begin_s
        return result

    return called


def on_one_core() -> None:
    """Stay on the last core that this process may use."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def measured_apart(module: str, *arguments: object) -> dict[str, float]:
    """Return the figures that a module prints as JSON, run in a process of its own."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def header(rank: int = 0, world_size: int = 1, **more: Any) -> TraceHeader:
    """Return the header of a trace of a benchmark, on one host."""
    place = {"local_rank": rank, "local_size": world_size, "node": 0, "host": "bench"}
    return TraceHeader(run_id="bench", attempt=0, rank=rank, world_size=world_size, **{**place, **more})
