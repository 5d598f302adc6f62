"""What one rank reports while the job runs: figures of its last steps to loggers, metrics to a file, the job's comment.

The figures for loggers, see `Session.metrics`, are made when somebody asks, from rows that the recorder has in memory
anyway: the thread that trains does nothing for them. What a nanosecond counts as is decided by the function that
reports use, so that logged figures and those of `hpcpace report` agree.

The file is for node_exporter, and is written in a thread. One rank knows its own steps, and no more: which ranks wait
for which, and which are silent, is what `hpcpace watch` exports. The comment is what `sacct -o comment` and
`squeue -o %k` show.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace import __version__
from hpcpace.core.environment import RankInfo, process_redaction
from hpcpace.core.exposition import Family, MetricType, exposition
from hpcpace.core.files import target_folder, write_file
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, format_duration, plural, shell_word
from hpcpace.observe.settings import MetricsConfig
from hpcpace.trace.recorder import Recorder
from hpcpace.trace.schema import NO_STEP, TABLES, StepFlag

if TYPE_CHECKING:
    from hpcpace.observe.recording import Recording


MeasureParts = Callable[..., NDArray[np.float64]]
"""Divides steps into parts: `hpcpace.metrics.phases.parts_of_steps`, whose parts PART_NAMES names."""

PART_NAMES = (
    *("data", "forward", "backward", "optimizer", "gc", "pace", "checkpoint", "eval"),
    *("communication", "communication", "communication", "communication", "other", "other"),
)
"""The parts of a step in their order, as they are logged. How much of communication is waiting for others shows only
in the traces of all ranks."""

_ALWAYS = ("data", "forward", "backward", "optimizer", "communication", "other")
_PREFIX = "hpcpace/"
_MAX_STEPS = 1024  # memory: 150 kB
_MAX_WAITING = 65_536  # memory: 4 MB
_NS_PER_MS = 1e6
_BYTES_PER_MIB = 1 << 20
_TABLES = ("steps", "phases", "collectives")  # steps first: rows of a step that has ended are there before its own


class _Step(NamedTuple):
    """A step that has ended; `parts_ns` is None where its phases were not recorded."""

    duration_ns: int
    samples: int
    parts_ns: NDArray[np.float64] | None


class StepFigures:
    """Makes figures of the last steps of one rank.

    Args:
        recorder: of the rank.
        measure_parts: divides steps into parts.

    Attributes:
        memory_bytes: memory of the process and of its GPU, as sampled last; 0 where unknown.
    """

    def __init__(self, recorder: Recorder, measure_parts: MeasureParts) -> None:
        self.memory_bytes = (0, 0)
        self._recorder, self._measure_parts = recorder, measure_parts
        self._rows: dict[str, list[NDArray[np.void]]] = {name: [] for name in _TABLES}
        self._steps: deque[_Step] = deque(maxlen=_MAX_STEPS)
        self._num_new = 0
        self._incomplete_until = NO_STEP
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def take(self, last_steps: int | None) -> dict[str, float]:
        """Return the figures of the steps since the last call, or of the last steps; see `Session.metrics`."""
        if not self._lock.acquire(blocking=False):  # another thread asks, or this one from a signal handler
            return {}
        try:
            self._look()
            if last_steps is None:
                num_steps, self._num_new = min(self._num_new, len(self._steps)), 0
            else:
                num_steps = min(max(last_steps, 0), len(self._steps))
            return self._figures(list(self._steps)[len(self._steps) - num_steps :]) if num_steps else {}
        finally:
            self._lock.release()

    def _look(self) -> None:
        """Take the rows since the last look, and divide the steps that have ended."""
        for name in _TABLES:
            rows, has_gap = self._recorder.take_recent(name)
            if has_gap and len(rows):
                self._incomplete_until = max(self._incomplete_until, int(rows["step"][0]))
            if len(rows):
                self._rows[name].append(rows)
        if sum(len(part) for parts in self._rows.values() for part in parts) > _MAX_WAITING:  # of one step without end
            self._incomplete_until = max(int(part["step"].max()) for parts in self._rows.values() for part in parts)
            self._rows = {**self._rows, "phases": [], "collectives": []}
        steps, phases, calls = (np.concatenate(parts) if (parts := self._rows[name]) else None for name in _TABLES)
        if steps is None:
            return
        last = int(steps["step"].max())
        self._rows = {"steps": [], "phases": _later(phases, last), "collectives": _later(calls, last)}
        steps = _timed_there(steps)
        parts_ns = self._measured(steps, phases, calls)
        for index, row in enumerate(steps):
            is_divided = row["step"] > self._incomplete_until and not row["flags"] & (
                StepFlag.PLAIN | StepFlag.UNPHASED
            )
            duration_ns = int(row["end_ns"] - row["begin_ns"])
            self._steps.append(_Step(duration_ns, int(row["samples"]), parts_ns[index] if is_divided else None))
        self._num_new += len(steps)

    def _measured(
        self, steps: NDArray[np.void], phases: NDArray[np.void] | None, calls: NDArray[np.void] | None
    ) -> NDArray[np.float64]:
        """Return the parts of steps, float64, (num_steps, num_parts), ns; all blocked time is transfer."""
        phases = np.zeros(0, TABLES["phases"].dtype) if phases is None else _timed_there(phases)
        calls = np.zeros(0, TABLES["collectives"].dtype) if calls is None else calls
        if "enqueue_ns" in (calls.dtype.names or ()):  # those of the host begin as they are issued
            calls = calls[calls["enter_ns"] != calls["enqueue_ns"]]
        calls = calls[calls["exit_ns"] > 0]
        columns = (calls["enter_ns"], calls["exit_ns"], calls["blocked_ns"], np.zeros(len(calls)))
        return self._measure_parts(
            tuple(steps[name].astype(np.int64) for name in ("begin_ns", "end_ns")),
            (phases["phase"].astype(np.uint8), phases["begin_ns"].astype(np.int64), phases["end_ns"].astype(np.int64)),
            tuple(column.astype(np.int64) for column in columns),
        )

    def _figures(self, steps: Sequence[_Step]) -> dict[str, float]:
        total_ns, samples = sum(step.duration_ns for step in steps), sum(step.samples for step in steps)
        found: dict[str, float] = {"steps": float(len(steps)), "step_ms": total_ns / len(steps) / _NS_PER_MS}
        if samples and total_ns:
            found["samples_per_s"] = samples / total_ns * NS_PER_S
        divided = [step.parts_ns for step in steps if step.parts_ns is not None]
        if divided:
            mean_ns = np.mean(divided, axis=0)
            named: dict[str, float] = {}
            for name, part_ns in zip(PART_NAMES, mean_ns.tolist(), strict=True):
                named[name] = named.get(name, 0.0) + part_ns
            self._seen |= {name for name, part_ns in named.items() if part_ns}
            found |= {f"{name}_ms": ns / _NS_PER_MS for name, ns in named.items() if name in (*_ALWAYS, *self._seen)}
        for name, size_bytes in zip(("memory_mib", "gpu_memory_mib"), self.memory_bytes, strict=True):
            if size_bytes > 0:
                found[name] = size_bytes / _BYTES_PER_MIB
        return {f"{_PREFIX}{name}": value for name, value in found.items()}


def _later(rows: NDArray[np.void] | None, step: int) -> list[NDArray[np.void]]:
    """Return the rows of later steps than one."""
    kept = None if rows is None else rows[rows["step"] > step]
    return [] if kept is None or not len(kept) else [kept.copy()]


def _timed_there(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Return rows with their times on the device, those without any left out; on ranks without a device, all."""
    if "device_end_ns" not in (rows.dtype.names or ()):
        return rows
    found = rows[(rows["device_begin_ns"] > 0) & (rows["device_end_ns"] > 0)].copy()
    found["begin_ns"], found["end_ns"] = found["device_begin_ns"], found["device_end_ns"]
    return found


_TIMEOUT_S = 5.0
_LAST_WRITE_TIMEOUT_S = 2.0
# Slurm keeps comments in its database, where they may have 64 KiB; users read them in a column.
_MAX_COMMENT = 1000


def add_to_comment(job_id: str, line: str) -> str:
    """Add a line to the comment of a job, behind what is there; return why that failed, empty if it did not.

    Args:
        job_id: of Slurm.
        line: without line breaks.
    """
    try:
        found = re.search(r"^\s*Comment=(.*?)\s*$", _output_of("scontrol", "show", "job", job_id), re.MULTILINE)
        before = "" if found is None or found[1] == "(null)" else found[1]
        if line in before:
            return ""
        if len(before) + len(line) > _MAX_COMMENT:
            return f"the comment of job {job_id} has {len(before)} characters already"
        _output_of("scontrol", "update", f"JobId={job_id}", f"Comment={f'{before}; ' if before else ''}{line}")
    except subprocess.CalledProcessError as error:
        return str(error.stderr or error).strip().splitlines()[-1]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def _output_of(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
    ).stdout


def metrics_path(pattern: str, labels: dict[str, str], rank: int) -> Path:
    """Return the file of a pattern in which {jobid}, {step}, {node} and {rank} stand for what they say."""
    found = pattern
    for name, value in {**labels, "rank": str(rank)}.items():
        found = found.replace(f"{{{name}}}", value.replace("/", "_").replace("\0", "") or "none")
    return Path(found)


class Exporters:
    """Exports one rank's steps until it is closed; what fails is a warning, and writing goes on.

    The training thread counts steps, another one writes them; the sums may be read while one of them lacks a step. The
    file is removed at the end: a job that has ended has no metrics.

    Args:
        config: what is asked for.
        world: this rank's place.
        host: its host.
        attempt: the folder of this attempt.
        recording: what records this rank.
        warn: takes a warning.
        clock, unix_clock: nanoseconds of the clock of steps, and of the time of day.
    """

    def __init__(
        self,
        config: MetricsConfig,
        *,
        world: RankInfo,
        host: str,
        attempt: Attempt,
        recording: Recording,
        warn: Callable[[str], None],
        clock: Callable[[], int] = time.monotonic_ns,
        unix_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._recording, self._interval_s, self._warn = recording, config.interval_s, warn
        self._clock, self._unix_clock = clock, unix_clock
        self._num_steps = self._total_ns = self._num_samples = self._last_end_ns = 0
        self._before = (0, 0)
        self._step_s: float | None = None
        self._job_id = world.job_id if config.job_comment and world.rank == 0 else ""
        redaction, run = process_redaction(), attempt.path.parent
        self._run, name = redaction.text(str(run)), redaction.text(run.name)
        self._labels = {"jobid": world.job_id or name, "step": world.step_id, "node": host}
        self._info = {"run": self._run, "name": name, "hpcpace_version": __version__}
        self._path: Path | None = None
        if config.prometheus is not None and (world.rank == 0 if config.ranks == "first" else world.local_rank <= 0):
            self._path = metrics_path(config.prometheus, self._labels, world.rank)
        self._is_closed = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._write_until_closed, name="hpcpace-metrics", daemon=True)

    def start(self) -> None:
        """Begin to export."""
        if self._path is not None:
            self._thread.start()

    def end_step(self, begin_ns: int, end_ns: int, samples: int) -> None:
        """Take a step."""
        self._num_steps += 1
        self._total_ns += end_ns - begin_ns
        self._num_samples += samples
        self._last_end_ns = end_ns

    def close(self) -> None:
        """End the metrics, and say in the job's comment what was recorded; a disk that hangs is not waited for."""
        self._is_closed.set()
        if self._path is not None:
            self._thread.join(_LAST_WRITE_TIMEOUT_S)
        if self._job_id and (problem := add_to_comment(self._job_id, self.line())):
            self._warn(f"the comment of job {self._job_id} stays as it is ({problem})")

    def line(self) -> str:
        """Return what the job's comment gets, which others see."""
        dropped = self._recording.recorder.num_dropped
        mean = f" of {format_duration(self._total_ns / self._num_steps)}" if self._num_steps else ""
        lost = f", {plural(dropped, 'row')} dropped" if dropped else ""
        return f"hpcpace: {plural(self._num_steps, 'step')}{mean}{lost}, see hpcpace report {shell_word(self._run)}"

    def write(self, path: Path) -> None:
        """Write the metrics once."""
        try:
            write_file(path, self.text())
        except OSError as error:
            if not self._has_failed:
                self._warn(f"metrics cannot be written to {path} ({error.strerror}): the job goes on without")
            self._has_failed = True

    def text(self) -> str:
        """Return the metrics: the step time is the mean since the last text, or the one before if no step has ended."""
        num_steps, total_ns = self._num_steps, self._total_ns
        if num_steps > self._before[0]:
            self._step_s = (total_ns - self._before[1]) / (num_steps - self._before[0]) / NS_PER_S
            self._before = num_steps, total_ns
        ended_ns = self._unix_clock() - (self._clock() - self._last_end_ns)
        recorder, clocks = self._recording.recorder, self._recording.clocks
        halfwidth_ns = None if clocks is None else clocks.halfwidth_ns
        values: list[tuple[str, MetricType, str, str, float | None]] = [
            ("hpcpace_running", MetricType.GAUGE, "", "Whether the run is under way.", 1),
            ("hpcpace_step_seconds", MetricType.GAUGE, "seconds", "Mean time of the last steps of this rank.",
             self._step_s),
            ("hpcpace_last_step_timestamp_seconds", MetricType.GAUGE, "seconds",
             "Unix time of the end of the last step.",
             ended_ns / NS_PER_S if num_steps else None),
            ("hpcpace_clock_error_seconds", MetricType.GAUGE, "seconds", "Uncertainty of this rank's clock.",
             None if halfwidth_ns is None else halfwidth_ns / NS_PER_S),
            ("hpcpace_steps", MetricType.COUNTER, "", "Steps that this rank has ended in this attempt.", num_steps),
            ("hpcpace_samples", MetricType.COUNTER, "", "Samples credited to this rank.", self._num_samples),
            ("hpcpace_dropped_rows", MetricType.COUNTER, "", "Rows that this rank gave up.", recorder.num_dropped),
            ("hpcpace_recorder_seconds", MetricType.COUNTER, "seconds", "The recorder's own time on this rank.",
             recorder.cost_ns / NS_PER_S),
        ]  # fmt: skip
        families = []
        for name, kind, unit, text, value in values:
            families.append(Family(name=name, kind=kind, help=text, unit=unit))
            families[-1].add(value, self._labels)
        families.append(Family(name="hpcpace_run", kind=MetricType.INFO, help="What the run is."))
        families[-1].add(1, {**self._labels, **self._info})
        return exposition(families)

    def _write_until_closed(self) -> None:
        assert self._path is not None
        try:
            while not self._is_closed.wait(self._interval_s):
                self.write(self._path)
            with contextlib.suppress(OSError), target_folder(self._path) as folder:
                folder.remove(self._path.name)
        except Exception as error:  # the boundary of this thread: the job does not depend on metrics
            self._warn(f"metrics stop: {type(error).__name__}: {error}")
