"""Loads many runs: their summaries where these are fresh, else by analysing them, several at a time.

A run that cannot be loaded is reported and never raised: in a folder of thousands some are broken or still running.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hpcpace.config import Config
from hpcpace.core.errors import CannotTell, HpcpaceError, TraceError
from hpcpace.core.pool import keep_freed_memory, map_processes
from hpcpace.core.rundir import Attempt, RunDirectory, open_named_run
from hpcpace.core.text import one_line
from hpcpace.diagnosis.run_state import is_running, journals_of, read_start
from hpcpace.runs.conditions import read_conditions
from hpcpace.runs.measured import MeasuredRun, from_summary, stored_run

_LEAST_SHARED = 3  # runs that are analysed side by side; fewer have all cores each


class NotLoaded(StrEnum):
    """Why a run cannot be loaded."""

    RUNNING = "running"
    BROKEN = "broken"
    NO_STEPS = "without steps to use"


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """One run that was asked for.

    Attributes:
        path: as it was named.
        measured: what is known of it; None where it cannot be loaded.
        why_not: why not; None of one that is loaded.
        message: the same as an error has it, with a line for each of many reasons; of a loaded run, what could not be
            used of it. May be empty.
    """

    path: Path
    measured: MeasuredRun | None
    why_not: NotLoaded | None = None
    message: str = ""

    @property
    def problem(self) -> str:
        """The message in one line."""
        return one_line(self.message)


def load_runs(
    paths: Sequence[Path],
    config: Config | None = None,
    *,
    takes_running: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LoadedRun]:
    """Return what is known of some runs, in their order.

    Args:
        paths: of the runs, of attempts in them or of their reports.
        config: memory for reading, and thresholds.
        takes_running: whether runs that still record are analysed, and not reported as running.
        progress: called with the number of runs done and of all.

    Raises:
        NotEnoughMemory: one of the processes that share the work was killed.
    """
    config = config or Config()
    keep_freed_memory()

    def load(path: Path) -> LoadedRun:
        return load_run(path, config, takes_running=takes_running)

    found = map_processes(load, paths) if len(paths) >= _LEAST_SHARED else map(load, paths)
    return list(_counted(found, len(paths), progress))


def _counted(found: Iterator[LoadedRun], total: int, progress: Callable[[int, int], None]) -> Iterator[LoadedRun]:
    for done, run in enumerate(found, 1):
        progress(done, total)
        yield run


def load_run(path: Path, config: Config | None = None, *, takes_running: bool = True) -> LoadedRun:
    """Return what is known of one run; arguments as of `load_runs`."""
    problems: list[str] = []
    try:
        named = open_named_run(path)
        attempt = named.directory.last_attempt() if named.attempt is None else named.directory.attempt(named.attempt)
        if not takes_running and journals_of(attempt) and is_running(attempt, read_start(attempt, problems)):
            return LoadedRun(path=path, measured=None, why_not=NotLoaded.RUNNING, message=f"{path} still runs")
        measured = stored_run(named.directory, attempt, problems)
        if measured is None:
            measured = _analysed(named.directory, attempt, config or Config(), problems)
    except CannotTell as error:
        return LoadedRun(path=path, measured=None, why_not=NotLoaded.NO_STEPS, message=str(error))
    except (HpcpaceError, OSError, MemoryError) as error:
        return LoadedRun(path=path, measured=None, why_not=NotLoaded.BROKEN, message=str(error) or "memory ran out")
    except Exception as error:  # the boundary of everything that is computed from files
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}; {Path(place.filename).name}:{place.lineno}"
        problem = f"{path}: a bug in hpcpace ended its analysis ({what}): please report it, with the run if you can"
        return LoadedRun(path=path, measured=None, why_not=NotLoaded.BROKEN, message=problem)
    return LoadedRun(path=path, measured=measured, message="\n- ".join(problems))


def _analysed(run: RunDirectory, attempt: Attempt, config: Config, problems: list[str]) -> MeasuredRun:
    if not attempt.trace_sizes():
        raise TraceError(
            f"{attempt.path} has no traces and no summary that can be used: it never recorded, or they were removed"
        )
    # Loads all of the diagnosis, which summaries that are fresh do not need.
    from hpcpace.diagnosis.analyze import analyze
    from hpcpace.diagnosis.measure import Selection

    analysis = analyze(run, attempt, Selection(), config, begin_stage=lambda _: lambda done, total: None)
    assert analysis is not None  # there is no team
    try:
        return from_summary(analysis.summary.to_json(), run, read_conditions(attempt, problems), is_from_summary=False)
    except (ValueError, TypeError) as error:
        raise CannotTell(f"{attempt.path}: its steps cannot be compared ({error})") from error
