"""One row for each run of a folder: state, verdict, speed, ranks and date of its last attempt, read from its records.

No trace is read of a run that has a result or a report. A run that is damaged has a row that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcpace.diagnosis.run_state import State, attempt_state, journals_of, read_start
from hpcpace.errors import TraceError
from hpcpace.json_files import MOST_BYTES, read_json
from hpcpace.quoting import shown
from hpcpace.rundir import Attempt, RunDirectory, open_run
from hpcpace.units import NS_PER_S

NOT_REPORTED = "not reported"
_MOST_TEXT = 200
_MOST_RATE = 1e15
_MAX_RANKS = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run.

    Attributes:
        path: its folder.
        attempt: its last attempt, which the row is about; -1 where there is none.
        num_attempts: how many there are.
        state: what the attempt does.
        num_steps, planned_steps: steps done and planned, of an attempt that was looked into; None where unknown.
        verdict: the mode that its report found, or `not reported`.
        headline: the verdict as one line; empty without one.
        speed, speed_unit: per second; None where unknown.
        num_ranks: ranks of the job; 0 where unknown.
        created_unix_ns: when the attempt began; 0 where unknown.
        dtype: type that `hpcpace train` computed in; empty of other programs.
        problems: what cannot be read, one sentence each.
    """

    path: str
    attempt: int
    num_attempts: int
    state: State
    num_steps: int | None = None
    planned_steps: int | None = None
    verdict: str = NOT_REPORTED
    headline: str = ""
    speed: float | None = None
    speed_unit: str = ""
    num_ranks: int = 0
    created_unix_ns: int = 0
    dtype: str = ""
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What summary.json says of an attempt; `is_final` where all traces that it had read were closed."""

    attempt: int
    mode: str
    headline: str
    speed: float | None
    speed_unit: str
    num_ranks: int
    is_final: bool


@dataclass(frozen=True, kw_only=True)
class _Result:
    """What result.json says."""

    outcome: str = ""
    speed: float | None = None
    speed_unit: str = ""


def run_rows(paths: Iterable[Path]) -> list[RunRow]:
    """Return a row for each run, the newest first."""
    return sorted((run_row(path) for path in paths), key=lambda row: (-row.created_unix_ns, row.path))


def run_row(path: Path) -> RunRow:
    """Return the row of a run; whatever cannot be read is a problem of the row."""
    try:
        run = open_run(path)
        attempts = run.attempts()
    except TraceError as error:
        return RunRow(path=str(path), attempt=-1, num_attempts=0, state=State.CANNOT_TELL, problems=(str(error),))
    problems: list[str] = []
    attempt = attempts[-1]
    start = read_start(attempt, problems)
    result = read_json(attempt, attempt.result_json.name, _result, problems, most_bytes=MOST_BYTES) or _Result()
    report = _current_report(run, attempt, problems)
    mode = report.mode if report is not None else ""
    found = attempt_state(attempt, start, outcome=result.outcome, verdict=mode)
    measured = report if report is not None and report.speed is not None else result
    return RunRow(
        path=str(path),
        attempt=attempt.number,
        num_attempts=len(attempts),
        state=found.state,
        num_steps=found.num_steps,
        planned_steps=start.planned_steps,
        verdict=mode or NOT_REPORTED,
        headline=report.headline if report is not None else "",
        speed=measured.speed,
        speed_unit=measured.speed_unit if measured.speed is not None else "",
        num_ranks=start.num_ranks or (report.num_ranks if report is not None else 0),
        created_unix_ns=start.created_unix_ns or _changed_ns(attempt),
        dtype=start.dtype,
        problems=tuple(problems),
    )


def newest_run(paths: Iterable[Path]) -> Path | None:
    """Return the run whose last attempt began last; None without any."""
    return max(paths, key=lambda path: (_begun_ns(path), str(path)), default=None)


def _begun_ns(path: Path) -> int:
    try:
        attempt = open_run(path).last_attempt()
    except TraceError:
        return 0
    return read_start(attempt, []).created_unix_ns or _changed_ns(attempt)


def _changed_ns(attempt: Attempt) -> int:
    """Return when something was last put into the folder of an attempt, where its record does not say when it began."""
    try:
        with attempt.open() as folder:
            return folder.status(attempt.trace_dir.name).st_mtime_ns
    except OSError:
        return 0


def _current_report(run: RunDirectory, attempt: Attempt, problems: list[str]) -> _Report | None:
    """Return the report of an attempt; None if there is none, or one from before the attempt ended."""
    report = read_json(run, run.summary_json.name, _report, problems)
    if report is None or report.attempt != attempt.number:
        return None
    return report if report.is_final or journals_of(attempt) else None


def _report(content: Any) -> _Report:
    verdict, world, throughput = content["verdict"], content["world"], content["throughput"]
    speed, unit = _rate(throughput["samples_per_s"]), _text(world["samples_unit"])
    if speed is None:
        mean_ns = _rate(throughput["mean_ns"])
        speed, unit = (None if mean_ns is None else NS_PER_S / mean_ns), "steps"
    return _Report(
        attempt=int(content["attempt"]),
        mode=_text(verdict["mode"]),
        headline=_text(verdict["headline"]),
        speed=speed,
        speed_unit=unit,
        num_ranks=min(max(int(world["world_size"]), 0), _MAX_RANKS),
        is_final=not content["cut_off"]["not_closed"],
    )


def _result(content: Mapping[str, Any]) -> _Result:
    speed = _rate(content.get("samples_per_s"))
    return _Result(
        outcome=_text(content.get("outcome", "")), speed=speed, speed_unit=_text(content.get("samples_unit", ""))
    )


def _rate(value: Any) -> float | None:
    """Return a positive rate; None for what is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < _MOST_RATE else None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is no text")
    return value[:_MOST_TEXT]
