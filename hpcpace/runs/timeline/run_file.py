"""From a run to a file of Perfetto: reads some steps, and writes them in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcpace.core.files import Folder, target_folder, write_all
from hpcpace.core.rundir import Attempt, RunDirectory
from hpcpace.runs.timeline.perfetto_file import Written, check_perfetto, write_processes
from hpcpace.runs.timeline.ranks import processes_of
from hpcpace.runs.timeline.steps import Progress, ShownSteps, Wanted, read_steps


@dataclass(frozen=True, kw_only=True)
class WrittenTimeline:
    """A timeline on disk, and what it shows."""

    path: Path
    shown: ShownSteps
    written: Written


def write_timeline(
    run: RunDirectory,
    attempt: Attempt,
    wanted: Wanted,
    *,
    target: Path | None,
    memory_bytes: int,
    begin_stage: Callable[[str], Progress],
) -> WrittenTimeline:
    """Write the timeline of some steps of an attempt.

    Args:
        run: the run, which gets the file where `target` names no other place.
        attempt: of the run.
        wanted: which steps of which ranks.
        target: the file; it is replaced.
        memory_bytes: memory for the tables of the run.
        begin_stage: takes the name of a stage that begins, and returns what is called as it advances.

    Raises:
        UsageError: the package perfetto is not installed, or there are no such steps or ranks.
        TraceError, CannotTell: as of `read_steps`.
        OSError: the file cannot be written.
    """
    check_perfetto()
    shown = read_steps(attempt, wanted, memory_bytes=memory_bytes, begin_stage=begin_stage)
    path = target or run.timeline_pftrace
    with run.open() if target is None else target_folder(path) as folder:
        written = _write(shown, folder, path.name, begin_stage("writing"))
    return WrittenTimeline(path=path, shown=shown, written=written)


def _write(shown: ShownSteps, folder: Folder, name: str, tell: Progress) -> Written:
    with folder.replacing(name) as descriptor:
        num_bytes = 0

        def append(content: bytes) -> None:
            nonlocal num_bytes
            write_all(descriptor, content, num_bytes)
            num_bytes += len(content)

        return write_processes(processes_of(shown), append, progress=lambda done: tell(done, len(shown.ranks)))
