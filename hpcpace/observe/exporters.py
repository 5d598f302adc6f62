"""Exports of one rank while the job runs: a file of metrics, a line in the job's comment.

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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpcpace import __version__
from hpcpace.core.environment import RankInfo, process_redaction
from hpcpace.core.exposition import Family, Kind, exposition
from hpcpace.core.files import target_folder, write_file
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, format_duration, plural, shell_word
from hpcpace.observe.settings import MetricsConfig

if TYPE_CHECKING:
    from hpcpace.observe.recording import Recording

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
        values: list[tuple[str, Kind, str, str, float | None]] = [
            ("hpcpace_running", Kind.GAUGE, "", "Whether the run is under way.", 1),
            ("hpcpace_step_seconds", Kind.GAUGE, "seconds", "Mean time of the last steps of this rank.", self._step_s),
            ("hpcpace_last_step_timestamp_seconds", Kind.GAUGE, "seconds", "Unix time of the end of the last step.",
             ended_ns / NS_PER_S if num_steps else None),
            ("hpcpace_clock_error_seconds", Kind.GAUGE, "seconds", "Uncertainty of this rank's clock.",
             None if halfwidth_ns is None else halfwidth_ns / NS_PER_S),
            ("hpcpace_steps", Kind.COUNTER, "", "Steps that this rank has ended in this attempt.", num_steps),
            ("hpcpace_samples", Kind.COUNTER, "", "Samples credited to this rank.", self._num_samples),
            ("hpcpace_dropped_rows", Kind.COUNTER, "", "Rows that this rank gave up.", recorder.num_dropped),
            ("hpcpace_recorder_seconds", Kind.COUNTER, "seconds", "The recorder's own time on this rank.",
             recorder.cost_ns / NS_PER_S),
        ]  # fmt: skip
        families = []
        for name, kind, unit, text, value in values:
            families.append(Family(name=name, kind=kind, help=text, unit=unit))
            families[-1].add(value, self._labels)
        families.append(Family(name="hpcpace_run", kind=Kind.INFO, help="What the run is."))
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
