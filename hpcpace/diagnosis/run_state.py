"""The state of runs for `hpcpace list`, from file times, records and a trace or two.

A rank that records writes its journal once per flush, whatever it does, and removes it when it closes its trace. So a
journal that was just written means a rank that runs, and an old one a rank that was killed. No trace is read of a run
that has a result or a report. A damaged run has a row that says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET, Meta, Struct

from hpcpace.core.codec import MAX_BYTES, Text, Whole, as_text, convert, read_json
from hpcpace.core.detail import MAX_RANKS, MAX_STEPS
from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, find_runs, open_run
from hpcpace.core.text import NS_PER_S, printable
from hpcpace.diagnosis.settings import DiagnosisConfig

if TYPE_CHECKING:
    from hpcpace.trace.tables import RankTrace

NOT_REPORTED = "not reported"
_FRESH_S, _FRESH_FLUSHES = 10.0, 5  # timing: a flush a second, and the delay of a busy disk and a file server's clock
_USUAL_STEPS = 20  # timing: as `hpcpace.hang` takes an operation for a hang
_MAX_LOOKED_AT = 4  # speed: traces that are opened for each run of a list
_MAX_HEADLINE, _MAX_DTYPE = 200, 32  # display: letters
# format: larger ones are damage, and what is computed from these stays a number
_MAX_RANKS, _MAX_INTERVAL_S, _MAX_RATE = (1 << 31) - 1, 1e9, 1e15


class RunState(StrEnum):
    """What an attempt does."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    HUNG = "hung"
    FAILED = "failed"
    CANNOT_TELL = "cannot tell"


_OUTCOMES = {"finished": RunState.FINISHED, "stopped": RunState.STOPPED, "out of memory": RunState.FAILED}


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """What run.json says of the start of an attempt; empty where it is missing or cannot be used.

    Attributes:
        created_unix_ns: when; 0 where unknown.
        num_ranks: ranks of the job; 0 where unknown.
        is_workload: whether `hpcpace train` wrote it, which leaves result.json if it ends in order.
        planned_steps: of such a workload; None elsewhere.
        flush_interval_s: seconds between two flushes.
        dtype: type that such a workload computes in; empty where unknown.
    """

    created_unix_ns: int = 0
    num_ranks: int = 0
    is_workload: bool = False
    planned_steps: int | None = None
    flush_interval_s: float = 1.0
    dtype: str = ""


def read_start(attempt: Attempt, problems: list[str]) -> StartRecord:
    """Return what run.json says; a sentence is added to `problems` where it cannot be used."""
    return read_json(attempt, attempt.run_json.name, _start, problems, most_bytes=MAX_BYTES) or StartRecord()


class _Train(Struct, frozen=True):
    steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)] | None = None
    shared_cores: Any = False


class _Trace(Struct, frozen=True):
    flush_interval_s: Annotated[float, Meta(ge=0, le=_MAX_INTERVAL_S)] = 1.0


class _Config(Struct, frozen=True):
    train: _Train = _Train()
    trace: _Trace = _Trace()


class _Rank(Struct):
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    host: Text


class ImportedContent(Struct):
    """The tool that recorded an imported run, and what its files leave out."""

    tool: Text = ""
    unknown: tuple[Text, ...] = ()


class RunContent(Struct):
    """The fields of run.json that its readers use; a user's script may record model and parallelism in words."""

    created_unix_ns: Whole = 0
    ranks: tuple[_Rank, ...] = ()
    environment: dict[str, Any] = {}
    versions: dict[Text, Text | None] = {}
    config: _Config = _Config()
    model: Any = None
    parallelism: Any = None
    resumed: Any = UNSET
    imported: ImportedContent | None = None

    @property
    def dtype(self) -> str:
        """The type of the computation; empty if the model has none.

        Raises:
            WrongValue: it is no text.
        """
        dtype = self.model.get("dtype", "") if isinstance(self.model, dict) else ""
        return printable(as_text(dtype))[:_MAX_DTYPE]


def _start(content: Any) -> StartRecord:
    found = convert(content, RunContent)
    is_workload = isinstance(found.parallelism, dict) and found.resumed is not UNSET
    return StartRecord(
        created_unix_ns=max(found.created_unix_ns, 0),
        num_ranks=len(found.ranks),
        is_workload=is_workload,
        planned_steps=found.config.train.steps if is_workload else None,
        flush_interval_s=found.config.trace.flush_interval_s,
        dtype=found.dtype,
    )


def attempt_state(
    attempt: Attempt, start: StartRecord, *, outcome: str = "", verdict: str = ""
) -> tuple[RunState, int | None]:
    """Return what an attempt does, and how many steps it has done, None unless traces were looked at.

    Args:
        attempt: the attempt.
        start: what run.json says.
        outcome: what result.json says; empty without one.
        verdict: the mode that a report has found on the traces as they are; empty without one.
    """
    if outcome in _OUTCOMES:
        return _OUTCOMES[outcome], None
    if journals := journals_of(attempt):
        traces = list(_looked_at(attempt, journals))
        num_steps = max((steps_of(trace) for trace in traces), default=None)
        if verdict == "hang" or any(_hangs(trace) for trace in traces):
            return RunState.HUNG, num_steps
        return RunState.RUNNING if is_running(attempt, start) else RunState.FAILED, num_steps
    if verdict in ("hang", "ended early"):
        return RunState.HUNG if verdict == "hang" else RunState.FAILED, None
    ranks = list(attempt.trace_files())
    if not ranks and attempt.packs():
        ranks = list(range(max(start.num_ranks, 1)))
    if not ranks:
        return RunState.CANNOT_TELL, None
    if start.is_workload:  # it leaves result.json if it ends in order
        return RunState.FAILED, None
    traces = list(_looked_at(attempt, ranks[:1] + ranks[1:][-1:]))
    if any(_has_failed(trace) for trace in traces):
        return RunState.FAILED, None
    return RunState.FINISHED if traces or verdict else RunState.CANNOT_TELL, None


def journals_of(attempt: Attempt) -> list[int]:
    """Return the ranks that have not closed their trace, ascending: they run, or were killed."""
    try:
        with attempt.open() as folder, folder.folder(attempt.trace_dir.name) as traces:
            names = set(traces.names())
    except OSError:
        return []
    return [rank for rank, path in attempt.trace_files().items() if path.with_suffix(".journal").name in names]


def is_running(attempt: Attempt, start: StartRecord) -> bool:
    """Return whether a rank of an attempt wrote its journal a moment ago."""
    least_s = time.time() - max(_FRESH_S, _FRESH_FLUSHES * min(start.flush_interval_s, _FRESH_S))
    return any(written_s >= least_s for written_s in _written_s(attempt, journals_of(attempt)[:_MAX_LOOKED_AT]))


def progress_words(attempt: Attempt, num_steps: int) -> str:
    """Return how far an attempt is if it runs, like `running, step 38 of 150`; empty otherwise.

    Args:
        attempt: the attempt.
        num_steps: steps that its traces have.
    """
    start = read_start(attempt, [])
    if not is_running(attempt, start):
        return ""
    return progress_line(RunState.RUNNING, num_steps, start.planned_steps)


def progress_line(state: RunState, num_steps: int, planned_steps: int | None) -> str:
    """Return what an attempt does and how far it is."""
    return f"{state}, step {num_steps}" + ("" if planned_steps is None else f" of {planned_steps}")


def steps_of(trace: RankTrace) -> int:
    """Return how many steps a rank has ended."""
    return int(trace.tables["steps"]["step"].max(initial=-1)) + 1


def _written_s(attempt: Attempt, ranks: Sequence[int]) -> Iterator[float]:
    """Yield when journals were last written; opening a file makes a network file system ask its server."""
    with suppress(OSError), attempt.open() as folder, folder.folder(attempt.trace_dir.name) as traces:
        for rank in ranks:
            with suppress(OSError):
                descriptor = traces.open_file(attempt.trace_file(rank).with_suffix(".journal").name)
                try:
                    yield os.fstat(descriptor).st_mtime
                finally:
                    os.close(descriptor)


def _looked_at(attempt: Attempt, ranks: Sequence[int]) -> Iterator[RankTrace]:
    """Yield the traces of the first of some ranks, without their collectives."""
    from hpcpace.trace.reader import stream_trace

    for rank in ranks[:_MAX_LOOKED_AT]:
        with suppress(TraceError, OSError, MemoryError):
            yield stream_trace(attempt.trace_file(rank)).trace


def _hangs(trace: RankTrace) -> bool:
    """Return whether a rank stood in an operation for as long as a report takes for a hang, when it last wrote."""
    account, steps, waits = trace.tables["account"], trace.tables["steps"], trace.open_collectives
    if not len(account) or not len(waits):
        return False
    usual_ns = sorted((steps["end_ns"] - steps["begin_ns"]).tolist())[len(steps) // 2] if len(steps) else 0
    age_ns = int(account["time_ns"].max()) - int(waits["enter_ns"].min())
    return age_ns >= max(DiagnosisConfig().hang_s * NS_PER_S, _USUAL_STEPS * usual_ns)


def _has_failed(trace: RankTrace) -> bool:
    """Return whether a rank did not close its trace, or an exception or an exit code other than 0 ended it."""
    from hpcpace.trace.schema import EventKind

    events = trace.tables["events"]
    last_ns = int(trace.tables["steps"]["end_ns"].max(initial=0))
    is_error = (events["kind"] == EventKind.EXCEPTION) | ((events["kind"] == EventKind.EXIT) & (events["code"] != 0))
    return not trace.closed_cleanly or bool((is_error & (events["time_ns"] >= last_ns)).any())


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
    state: RunState
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
class _Result:
    """What result.json says."""

    outcome: str = ""
    speed: float | None = None
    speed_unit: str = ""


@dataclass(frozen=True, kw_only=True)
class _Report(_Result):
    """What summary.json says of an attempt, by default nothing; `is_final` if all traces that it had read were closed.

    The outcome is the mode of the verdict.
    """

    attempt: int = -1
    headline: str = ""
    num_ranks: int = 0
    is_final: bool = False


def run_rows(paths: Iterable[Path]) -> list[RunRow]:
    """Return a row for each run, the newest first."""
    return sorted((run_row(path) for path in paths), key=lambda row: (-row.created_unix_ns, row.path))


def run_row(path: Path) -> RunRow:
    """Return the row of a run; whatever cannot be read is a problem of the row."""
    try:
        run = open_run(path)
        attempts = run.attempts()
    except TraceError as error:
        return RunRow(path=str(path), attempt=-1, num_attempts=0, state=RunState.CANNOT_TELL, problems=(str(error),))
    problems: list[str] = []
    attempt = attempts[-1]
    start = read_start(attempt, problems)
    result = read_json(attempt, attempt.result_json.name, _result, problems, most_bytes=MAX_BYTES) or _Result()
    report = read_json(run, run.summary_json.name, _report, problems) or _Report()
    # A report from before the attempt ended, or on another one, says nothing.
    if report.attempt != attempt.number or not (report.is_final or journals_of(attempt)):
        report = _Report()
    state, num_steps = attempt_state(attempt, start, outcome=result.outcome, verdict=report.outcome)
    measured = report if report.speed is not None else result
    return RunRow(
        path=str(path),
        attempt=attempt.number,
        num_attempts=len(attempts),
        state=state,
        num_steps=num_steps,
        planned_steps=start.planned_steps,
        verdict=report.outcome or NOT_REPORTED,
        headline=report.headline,
        speed=measured.speed,
        speed_unit=measured.speed_unit if measured.speed is not None else "",
        num_ranks=start.num_ranks or report.num_ranks,
        created_unix_ns=start.created_unix_ns or _changed_ns(attempt),
        dtype=start.dtype,
        problems=tuple(problems),
    )


def newest_run(folder: Path) -> Path | None:
    """Return the run in a folder whose last attempt began last; None without any, or where it cannot be read."""
    try:
        return max(find_runs(folder), key=lambda path: (_begun_ns(path), str(path)), default=None)
    except OSError:
        return None


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


def _report(content: Any) -> _Report:
    verdict, world, throughput = content["verdict"], content["world"], content["throughput"]
    speed, unit = _rate(throughput["samples_per_s"]), as_text(world["samples_unit"])
    if speed is None:
        mean_ns = _rate(throughput["mean_ns"])
        speed, unit = (None if mean_ns is None else NS_PER_S / mean_ns), "steps"
    steps = content.get("steps", {})
    if steps.get("num_plain") and int(steps["num_used"]) < DiagnosisConfig().least_steps:
        speed = None  # that of a few steps with detail says nothing of the others
    return _Report(
        attempt=int(content["attempt"]),
        outcome=as_text(verdict["mode"]),
        headline=as_text(verdict["headline"])[:_MAX_HEADLINE],
        speed=speed,
        speed_unit=unit,
        num_ranks=min(max(int(world["world_size"]), 0), _MAX_RANKS),
        is_final=not content["cut_off"]["not_closed"],
    )


def _result(content: Mapping[str, Any]) -> _Result:
    outcome, unit = as_text(content.get("outcome", "")), as_text(content.get("samples_unit", ""))
    return _Result(outcome=outcome, speed=_rate(content.get("samples_per_s")), speed_unit=unit)


def _rate(value: Any) -> float | None:
    """Return a positive rate; None for what is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < _MAX_RATE else None
