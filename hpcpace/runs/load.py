"""Loads many runs: from fresh summaries, by analysing them, or from a CSV file.

A run that cannot be loaded is reported and never raised: in a folder of thousands some are broken or still running. A
CSV file has runs that another tool has measured, one a line (docs/history.md). A file with a wrong line is refused as
a whole, so that no result rests on the part of it that happened to be readable.
"""

from __future__ import annotations

import csv
import io
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from hpcpace.core.config import Config
from hpcpace.core.errors import CannotTell, HpcpaceError, TraceError, UsageError
from hpcpace.core.files import read_file
from hpcpace.core.hostlist import expand
from hpcpace.core.pool import keep_freed_memory, map_processes
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, RunDirectory, open_named_run
from hpcpace.core.text import NS_PER_S, first_few, one_line, printable
from hpcpace.diagnosis.run_state import is_running, journals_of, read_start
from hpcpace.runs.measured import Conditions, MeasuredRun, from_summary, is_to_come, read_conditions, stored_run

COLUMNS = ("date", "run", "step_time_s", "throughput", "nodes", "job", "ranks", "batch")
_SPEEDS = ("step_time_s", "throughput")
_ALSO = {
    "run": ("name",),
    "job": ("job_name",),
    "nodes": ("num_nodes", "nnodes"),
    "ranks": ("num_ranks", "world_size", "gpus", "num_gpus", "ngpus"),
    "batch": ("global_batch", "global_batch_size", "samples_per_step"),
}
"""Further names of columns, as `hpcpace.load_many` and launchers have them; none that may be of one rank."""
_MAX_BYTES = 1 << 26
_MAX_TOLD = 3
_MIN_VALUE, _MAX_VALUE = 1e-9, 1e15
_MAX_COUNT = 10_000_000
_MAX_RATIO = 1.5
_MAX_NODES = 1 << 20
"""Names of nodes in all lines, as of 1,000 runs on 1,000 nodes: a list like n[0-9999] is far shorter than its names."""
_NUMBER = re.compile(r"\+?(\d+(?:\.\d*)?|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class CsvRun:
    """One line.

    Attributes:
        line: its number in the file, the header being 1.
        begun_unix_ns: when the run began; 0 where it has no date.
        run, job: names of the run, by default its line, and of its kind; the kind is empty where not given.
        step_ns: median step time; None where only a throughput is given.
        throughput: of all ranks, per second; None where only a step time is given.
        nodes: names of the nodes; empty where only their number is given, or nothing.
        num_nodes, num_ranks: 0 where not given.
        batch: samples of the global batch; 0 where not given.
        is_rate_assumed: whether nothing says that the throughput is that of all ranks and not of one.
    """

    line: int
    begun_unix_ns: int
    run: str
    job: str
    step_ns: float | None
    throughput: float | None
    nodes: tuple[str, ...]
    num_nodes: int
    num_ranks: int
    batch: float
    is_rate_assumed: bool = False

    @property
    def is_per_sample(self) -> bool:
        """Whether only a throughput is given, and no batch."""
        return self.step_ns is None and not self.batch

    @property
    def time_ns(self) -> float:
        """The time of a step; where only a throughput is given, that of a batch, or else of a sample."""
        if self.step_ns is not None:
            return self.step_ns
        return (self.batch or 1.0) * NS_PER_S / (self.throughput or 1.0)


def read_csv(path: Path, *, per: Per | None = None) -> list[CsvRun]:
    """Return the runs of a CSV file, in the order of its lines.

    Args:
        path: of the file.
        per: what its throughput is of; by default as the name of the column says, else of all ranks.

    Raises:
        UsageError: it cannot be read, has no or wrong columns, or wrong values.
    """
    try:
        text = read_file(path, most_bytes=_MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no CSV in UTF-8 (byte {error.start}): save it as UTF-8") from error
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True, restkey="", strict=True)
    mistakes: list[str] = []
    try:
        columns, named = _known_columns(path, rows.fieldnames, per)
        _check_columns(path, columns)
        rows.fieldnames = columns
        found = list(_runs(rows, per or named, mistakes))
    except csv.Error as error:
        raise UsageError(f"{path}, line {rows.line_num}: not CSV ({error})") from error
    if mistakes:
        said = "; ".join(first_few(mistakes, _MAX_TOLD))
        raise UsageError(f"{path}: {said}: correct them or leave the lines out")
    if not found:
        raise UsageError(f"{path} has no runs below its header")
    return found


def _known_columns(path: Path, names: object, per: Per | None) -> tuple[list[str], Per | None]:
    """Return the columns of a file by the names of `COLUMNS`, and what its throughput is of.

    Raises:
        UsageError: it has more than one throughput, or the name of its column says something else than `per`.
    """
    columns = [str(name) for name in names] if isinstance(names, list) else []
    rates = {name: per_of_column(name) for name in columns if is_throughput(name)}
    if len(rates) > 1:
        raise UsageError(f"{path} has the columns {printable(', '.join(rates))}: leave one throughput")
    name, named = next(iter(rates.items()), ("", None))
    if named and per not in (None, named):
        raise UsageError(f"{path} has a column {printable(name)!r}, and --throughput says {per}: leave the option out")
    also = {name: "throughput"} | {other: known for known, others in _ALSO.items() for other in others}
    return [also.get(column, also.get(column.lower(), column)) for column in columns], named


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    known = f"known are {', '.join(COLUMNS)}, and a throughput like tokens_per_s or samples/s/GPU"
    if not set(_SPEEDS) & set(columns):
        told = "write one, like `nodes,throughput`, with commas between"
        raise UsageError(f"{path} has neither a column step_time_s nor throughput in its first line: {told}; {known}")
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise UsageError(f"{path} has a column {printable(unknown[0])!r}; {known}")
    if len(set(columns)) < len(columns):
        raise UsageError(f"{path} has a column twice: {printable(', '.join(columns))}")


def _runs(rows: csv.DictReader[str], per: Per | None, mistakes: list[str]) -> Iterator[CsvRun]:
    nodes = _NodeLists()
    for row in rows:
        try:
            yield _csv_run(rows.line_num, row, per, nodes)
        except ValueError as error:
            mistakes.append(f"line {rows.line_num}: {printable(str(error))}")


def _csv_run(line: int, row: Mapping[str, str | None], per: Per | None, node_lists: _NodeLists) -> CsvRun:
    if "" in row:
        raise ValueError("it has more values than there are columns")
    step_s, rate = (_optional(row, name, _speed) for name in _SPEEDS)
    if step_s is None and rate is None:
        raise ValueError("it has neither a step time nor a throughput")
    name = (row.get("run", f"line {line}") or "").strip()
    if not name:
        raise ValueError("its run has no name")
    nodes, num_nodes = _optional(row, "nodes", node_lists.read) or ((), 0)
    num_ranks = _optional(row, "ranks", _count) or 0
    if rate is not None and per in (Per.GPU, Per.NODE):
        rate *= _counted_of(per, num_ranks, num_nodes)
    batch = _optional(row, "batch", _speed) or 0.0
    if step_s and rate and batch:
        _check_batch(rate * step_s, batch)
    elif rate and batch and not _MIN_VALUE <= batch / rate <= _MAX_VALUE:
        raise ValueError(f"batch / throughput is {batch / rate:.3g} s, which no step takes")
    return CsvRun(
        line=line,
        begun_unix_ns=_optional(row, "date", _unix_ns) or 0,
        run=name,
        job=(row.get("job") or "").strip(),
        step_ns=None if step_s is None else step_s * 1e9,
        throughput=rate,
        nodes=nodes,
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        batch=batch,
        is_rate_assumed=rate is not None and per is None and not (step_s and batch),
    )


def _counted_of(per: Per, num_ranks: int, num_nodes: int) -> int:
    """Return how many GPUs or nodes there are.

    Raises:
        ValueError: the line does not say.
    """
    count, column = (num_ranks, "ranks") if per is Per.GPU else (num_nodes, "nodes")
    if not count:
        raise ValueError(f"its throughput is that of one {per}, so the column {column} is needed")
    return count


def _check_batch(found: float, batch: float) -> None:
    """Refuse a figure of one rank beside one of all: a factor of 2 or more, which a mean step over its median is not.

    Args:
        found: samples of a step by its time and the throughput.
        batch: the same as the line says it.
    """
    if not batch / _MAX_RATIO <= found <= batch * _MAX_RATIO:
        raise ValueError(
            f"throughput x step_time_s is {found:.4g} samples, batch is {batch:.4g}: both are of all ranks, in one unit"
        )


def _optional(row: Mapping[str, str | None], name: str, made_of: Callable[[str], _Value]) -> _Value | None:
    text = (row.get(name) or "").strip()
    if not text:
        return None
    try:
        return made_of(text)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {text[:60]!r}: {error}") from None


def _speed(text: str) -> float:
    # float takes 1_0.5 and digits of other scripts, too.
    if not _NUMBER.fullmatch(text) or not _MIN_VALUE <= float(text) <= _MAX_VALUE:
        raise ValueError(f"write a number like 1200.5, from {_MIN_VALUE:.0e} to {_MAX_VALUE:.0e}")
    return float(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= _MAX_COUNT:
        raise ValueError(f"write a whole number from 1 to {_MAX_COUNT}")
    return int(text)


def _unix_ns(text: str) -> int:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("write a date like 2026-05-07 or 2026-05-07T14:00:00+02:00") from None
    # Without a zone, a date is of the place where it is read, as dates on a terminal are.
    seconds = (date if date.tzinfo else date.astimezone()).astimezone(UTC).timestamp()
    unix_ns = round(seconds * 1e9)
    if unix_ns <= 0:
        raise ValueError("write a date after 1970")
    if is_to_come(unix_ns):
        raise ValueError("write a date that is not to come")
    return unix_ns


class _NodeLists:
    """Reads the lists of nodes in a file, each text once, until there are too many names."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[str, ...], int]] = {}
        self._num_left = _MAX_NODES

    def read(self, text: str) -> tuple[tuple[str, ...], int]:
        """Return the names of nodes and their number; see `_nodes`.

        Raises:
            ValueError: it is no list, or the file has too many names.
        """
        if self._num_left >= 0:
            found = self._found.get(text) or self._found.setdefault(text, _nodes(text))
            self._num_left -= len(found[0])
        if self._num_left < 0:
            raise ValueError(
                f"with it the file names more than {_MAX_NODES:,} nodes: write only their number, like 1024"
            )
        return found


def _nodes(text: str) -> tuple[tuple[str, ...], int]:
    """Return the names of nodes and their number, of a number, a list of hosts as Slurm writes it, or names with ;."""
    if re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?|nan|inf", text, re.IGNORECASE):  # -1 and 2.0 are no names
        return (), _count(text)
    names = tuple(dict.fromkeys(name for part in re.split(r"[;\s]+", text) if part for name in expand(part)))
    if numbers := [name for name in names if name.isdigit()]:
        raise ValueError(
            f"{numbers[0]} is no name of a node: write their number alone, like 1024, or names like n[1-4] or n1;n2"
        )
    return names, len(names)


def runs_of_csv(path: Path) -> list[MeasuredRun]:
    """Return the runs of a CSV file, those with a throughput alone with the time of one sample as their step.

    Such a time is not compared with that of a step, of which it is not known how many samples it has, or whose batch is
    known.

    Raises:
        UsageError: as of `read_csv`.
    """
    return [_run(path, run) for run in read_csv(path)]


def _run(path: Path, run: CsvRun) -> MeasuredRun:
    batch = 1.0 if run.is_per_sample else run.batch
    return MeasuredRun(
        path=f"{path}:{run.line} {run.run}",
        p50_ns=run.time_ns,
        mean_ns=run.time_ns,
        # How long steps differ within the run is not said, and is in the spread between runs; its one speed is judged
        # once.
        log_p50_error=0.0,
        log_mean_error=None,
        samples_per_s=run.throughput,
        samples_per_step=batch,
        samples_unit="samples" if batch else "",
        world_size=run.num_ranks,
        num_nodes=run.num_nodes,
        is_per_sample=run.is_per_sample,
        hosts=run.nodes,
        conditions=Conditions(
            name=run.run,
            job_name=run.job or run.run,
            begun_unix_ns=run.begun_unix_ns,
            work={"job": run.job} if run.job else {},
        ),
    )


_MIN_SHARED = 3  # runs that are analysed side by side; fewer have all cores each


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

    found = map_processes(load, paths) if len(paths) >= _MIN_SHARED else map(load, paths)
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


class Per(StrEnum):
    """What a throughput is of."""

    TOTAL = "total"
    GPU = "gpu"
    NODE = "node"


_GPU = frozenset(("gpu", "rank", "device", "card", "accelerator", "worker", "process", "gcd", "tpu", "npu"))
_NODE = frozenset(("node", "host", "server"))
_SPEED = frozenset(("throughput", "tps", "ips"))
_THING = frozenset(
    (
        *("sample", "token", "tok", "image", "img", "sequence", "seq", "sentence", "frame", "item", "example"),
        *("record", "speed", "rate"),
    )
)
_SECOND = frozenset(("s", "sec", "second"))
_OTHER = frozenset(("per", "in", "k"))


def _words(name: str) -> set[str]:
    """Return the words of a name in lower case; those of more than three letters in the singular."""
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    return {word.removesuffix("s") if len(word) > 3 and not word.endswith("ss") else word for word in words}


def is_throughput(name: str) -> bool:
    """Return whether the name of a column is that of a throughput: `tokens_per_s`, `samples/s/GPU`, `per_gpu`."""
    words = _words(name)
    if words - _GPU - _NODE - _SPEED - _THING - _SECOND - _OTHER:
        return False
    return bool(words & _SPEED or (words & _THING and words & _SECOND) or (words & (_GPU | _NODE) and "per" in words))


def per_of_column(name: str) -> Per | None:
    """Return what the throughput of a column is of by its name; None if that says neither GPU nor node, or both."""
    found = {Per.GPU if word in _GPU else Per.NODE for word in _words(name) if word in _GPU | _NODE}
    return found.pop() if len(found) == 1 else None
