"""Metrics of a running job from one of its ranks: a file for node_exporter, written in a thread of its own.

One rank knows its own steps, and no more: who waits for whom, and who is silent, is what `hpcpace watch` exports.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.exposition import Family, Kind, exposition
from hpcpace.core.files import target_folder, write_file
from hpcpace.core.text import NS_PER_S

_LAST_WRITE_TIMEOUT_S = 2.0


class StepTally:
    """Counts the steps of this rank; the training thread adds to it, another one reads it."""

    def __init__(self) -> None:
        self.num_steps = self.total_ns = self.num_samples = self.last_end_ns = 0

    def add(self, begin_ns: int, end_ns: int, samples: int) -> None:
        """Take a step; the sums may be read while one of them lacks it."""
        self.num_steps += 1
        self.total_ns += end_ns - begin_ns
        self.num_samples += samples
        self.last_end_ns = end_ns


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What this rank's recorder says besides steps.

    Attributes:
        num_dropped: rows given up.
        cost_ns: the recorder's own time.
        halfwidth_ns: uncertainty of this rank's clock at its last comparison; None without one.
    """

    num_dropped: int
    cost_ns: int
    halfwidth_ns: int | None = None


class MetricsFile:
    """Writes the metrics of one rank until it is closed, and then removes them: a job that has ended has none.

    Args:
        path: the file.
        labels: jobid, step and node.
        info: what else the job is, for the info metric.
        tally: its steps.
        reading: returns what the recorder says.
        warn: takes one warning if the file cannot be written; writing goes on.
        clock, unix_clock: nanoseconds of the clock of steps, and of the time of day.
    """

    def __init__(
        self,
        path: Path,
        *,
        labels: dict[str, str],
        info: dict[str, str],
        tally: StepTally,
        reading: Callable[[], Reading],
        interval_s: float,
        warn: Callable[[str], None],
        clock: Callable[[], int] = time.monotonic_ns,
        unix_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path, self._labels, self._info = path, labels, info
        self._tally, self._reading, self._interval_s, self._warn = tally, reading, interval_s, warn
        self._clock, self._unix_clock = clock, unix_clock
        self._before = (0, 0)
        self._step_s: float | None = None
        self._is_closed = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="hpcpace-metrics", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """End and remove the file; a disk that hangs is not waited for."""
        self._is_closed.set()
        self._thread.join(_LAST_WRITE_TIMEOUT_S)

    def write(self) -> None:
        """Write the file once."""
        try:
            write_file(self._path, self.text())
        except OSError as error:
            if not self._has_failed:
                self._warn(f"metrics cannot be written to {self._path} ({error.strerror}): the job goes on without")
            self._has_failed = True

    def text(self) -> str:
        """Return the metrics: the step time is the mean since the last text, or the one before if no step has ended."""
        num_steps, total_ns = self._tally.num_steps, self._tally.total_ns
        if num_steps > self._before[0]:
            self._step_s = (total_ns - self._before[1]) / (num_steps - self._before[0]) / NS_PER_S
            self._before = num_steps, total_ns
        return exposition(self._families(self._reading(), num_steps))

    def _families(self, reading: Reading, num_steps: int) -> list[Family]:
        ended_ns = self._unix_clock() - (self._clock() - self._tally.last_end_ns)
        halfwidth_s = None if reading.halfwidth_ns is None else reading.halfwidth_ns / NS_PER_S
        values: list[tuple[str, Kind, str, str, float | None]] = [
            ("hpcpace_running", Kind.GAUGE, "", "Whether the run is under way.", 1),
            ("hpcpace_step_seconds", Kind.GAUGE, "seconds", "Mean time of the last steps of this rank.", self._step_s),
            ("hpcpace_last_step_timestamp_seconds", Kind.GAUGE, "seconds", "Unix time of the end of the last step.",
             ended_ns / NS_PER_S if num_steps else None),
            ("hpcpace_clock_error_seconds", Kind.GAUGE, "seconds", "Uncertainty of this rank's clock.", halfwidth_s),
            ("hpcpace_steps", Kind.COUNTER, "", "Steps that this rank has ended in this attempt.", num_steps),
            ("hpcpace_samples", Kind.COUNTER, "", "Samples credited to this rank.", self._tally.num_samples),
            ("hpcpace_dropped_rows", Kind.COUNTER, "", "Rows that this rank gave up.", reading.num_dropped),
            ("hpcpace_recorder_seconds", Kind.COUNTER, "seconds", "The recorder's own time on this rank.",
             reading.cost_ns / NS_PER_S),
        ]  # fmt: skip
        families = []
        for name, kind, unit, text, value in values:
            families.append(Family(name=name, kind=kind, help=text, unit=unit))
            families[-1].add(value, self._labels)
        families.append(Family(name="hpcpace_run", kind=Kind.INFO, help="What the run is."))
        families[-1].add(1, {**self._labels, **self._info})
        return families

    def _run(self) -> None:
        try:
            while not self._is_closed.wait(self._interval_s):
                self.write()
            with contextlib.suppress(OSError), target_folder(self._path) as folder:
                folder.remove(self._path.name)
        except Exception as error:  # the boundary of this thread: the job does not depend on metrics
            self._warn(f"metrics stop: {type(error).__name__}: {error}")


def metrics_path(pattern: str, labels: dict[str, str], rank: int) -> Path:
    """Return the file of a pattern in which {jobid}, {step}, {node} and {rank} stand for what they say."""
    found = pattern
    for name, value in {**labels, "rank": str(rank)}.items():
        found = found.replace(f"{{{name}}}", value.replace("/", "_").replace("\0", "") or "none")
    return Path(found)
