"""Every file name of a run, as properties of one class, so that no other module spells one.

RUN/attempt-0/trace/rank-00003.h5 and rank-00003.journal while it runs
RUN/attempt-0/snapshot/HOST.json   RUN/attempt-0/run.json   RUN/attempt-0/trial.json
RUN/report.html   RUN/summary.json   RUN/checkpoints/step-00000100
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpace.errors import TraceError

_ATTEMPT = re.compile(r"attempt-(\d+)$")
_TRACE = re.compile(r"rank-(\d+)\.(h5|journal)$")


@dataclass(frozen=True)
class Attempt:
    """One start of a run: the first, or one after a requeue or an elastic restart."""

    path: Path

    @property
    def number(self) -> int:
        """The attempt's number, counted from 0."""
        match = _ATTEMPT.search(self.path.name)
        return int(match.group(1)) if match else 0

    @property
    def trace_dir(self) -> Path:
        """The folder of the trace files."""
        return self.path / "trace"

    @property
    def run_json(self) -> Path:
        """Resolved configuration, versions, hosts and commit."""
        return self.path / "run.json"

    @property
    def result_json(self) -> Path:
        """What a reference workload came to: losses, throughput and memory, or that it had too little memory."""
        return self.path / "result.json"

    @property
    def trial_json(self) -> Path:
        """What came of pacing, where the run was paced."""
        return self.path / "trial.json"

    @property
    def snapshot_dir(self) -> Path:
        """The folder of the audit's snapshots, one file per host."""
        return self.path / "snapshot"

    def trace_file(self, rank: int) -> Path:
        """Return the trace file of a rank."""
        return self.trace_dir / f"rank-{rank:05d}.h5"

    def trace_files(self) -> dict[int, Path]:
        """Return the trace file of every rank that left one, or only its journal, by rank."""
        found = {}
        for path in sorted(self.trace_dir.glob("rank-*")):
            match = _TRACE.search(path.name)
            if match:
                found[int(match.group(1))] = path.with_suffix(".h5")
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class RunDirectory:
    """A run: its attempts, and what was computed from all of them."""

    path: Path

    @property
    def report_html(self) -> Path:
        """The report as one page."""
        return self.path / "report.html"

    @property
    def summary_json(self) -> Path:
        """The report for programs."""
        return self.path / "summary.json"

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of the checkpoints of all attempts, as hpcpace.train.checkpoint writes them."""
        return self.path / "checkpoints"

    @property
    def next_attempt_number(self) -> int:
        """The number that the next attempt will have."""
        existing = self.attempts()
        return existing[-1].number + 1 if existing else 0

    def attempt(self, number: int) -> Attempt:
        """Return an attempt, whether it exists or not."""
        return Attempt(self.path / f"attempt-{number}")

    def attempts(self) -> list[Attempt]:
        """Return the attempts that exist, in order of their number."""
        found = [Attempt(p) for p in self.path.glob("attempt-*") if _ATTEMPT.search(p.name) and p.is_dir()]
        return sorted(found, key=lambda attempt: attempt.number)

    def new_attempt(self) -> Attempt:
        """Create and return the next attempt; two processes that ask at once get two.

        Raises:
            OSError: the folder cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        while True:
            attempt = self.attempt(self.next_attempt_number)
            try:
                attempt.path.mkdir()
            except FileExistsError:
                continue
            attempt.trace_dir.mkdir()
            return attempt


def open_run(path: str | os.PathLike[str]) -> RunDirectory:
    """Return an existing run directory.

    Raises:
        TraceError: the path does not exist or holds no attempt.
    """
    run = RunDirectory(Path(path))
    if not run.path.is_dir():
        raise TraceError(f"no run directory at {run.path}: name the folder that holds attempt-0 (runs/ lists them)")
    if not run.attempts():
        raise TraceError(f"{run.path} holds no attempt-N folder: it is no run directory, or the job never started")
    return run


def default_run_path(name: str, environ: Mapping[str, str], *, base: Path = Path("runs")) -> Path:
    """Return `runs/JOB[.STEP]-NAME` in a Slurm job and `runs/TIMESTAMP-NAME` elsewhere.

    A requeued job keeps its path, and so gets a further attempt. A second run without Slurm in the same
    second gets a number behind its name.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    if job_id:
        step_id = environ.get("SLURM_STEP_ID", "")
        # Inside a batch script outside any srun, SLURM_STEP_ID is unset; step 0 of each job is the usual one.
        step = f".{step_id}" if step_id.isdigit() else ""
        return base / f"{job_id}{step}-{name}"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, number = base / f"{stamp}-{name}", 1
    while path.exists():
        number += 1
        path = base / f"{stamp}-{name}-{number}"
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file to a temporary name and rename it, so that nobody reads half of it.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=2, sort_keys=True)
            stream.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
