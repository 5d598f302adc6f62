"""Which run and which attempt of it a command is called for."""

from __future__ import annotations

from pathlib import Path

from hpcpace.core.errors import TraceError, UsageError
from hpcpace.core.rundir import RUNS, Attempt, RunDirectory, find_runs, open_named_run

_MAX_ROWS = 16


def chosen_run(path: Path | None, number: int | None, *, is_shown: bool) -> tuple[RunDirectory, Attempt]:
    """Return the run and the attempt that a user means; of a folder of runs, list them if `is_shown`.

    Args:
        path: what the user named; None takes the newest run in runs.
        number: of the attempt; None takes the last one.
        is_shown: whether a list is printed.

    Raises:
        TraceError: there is no such run or attempt, or the path is a folder of runs.
    """
    if path is None:
        from hpcpace.diagnosis.run_state import newest_run

        try:
            path = newest_run(find_runs(RUNS))
        except OSError:
            path = None
        if path is None:
            raise TraceError(f"no run in {RUNS}: name a run directory, the folder that holds attempt-0")
    try:
        named = open_named_run(path)
    except TraceError:
        if is_shown and path.is_dir():
            from hpcpace.cli.runs import rows_in, show_runs

            if rows := rows_in(path):
                show_runs(rows[:_MAX_ROWS], path)
                more = f"; `hpcpace list` shows all {len(rows)}" if len(rows) > _MAX_ROWS else ""
                raise TraceError(f"{path} is a folder of runs: name one of them{more}") from None
        raise
    if named.attempt is not None and number not in (None, named.attempt):
        raise UsageError(f"{path} is attempt {named.attempt}, and --attempt is {number}: give one of them")
    return named.directory, _attempt(named.directory, named.attempt if number is None else number)


def _attempt(directory: RunDirectory, number: int | None) -> Attempt:
    if number is None:
        return directory.last_attempt()
    attempts = directory.attempts()
    if number not in [attempt.number for attempt in attempts]:
        raise TraceError(
            f"no attempt {number} in {directory.path}: it has {', '.join(str(a.number) for a in attempts)}"
        )
    return directory.attempt(number)
