"""A run, or many, for analyses in Python: what its report says, and its data as frames on the common clock.

    run = hpcpace.load("runs/1234-gpt2")
    print(run.verdict.headline)
    run.collectives.groupby("late_rank").exposed_wait_ns.sum()

Frames have the steps and the ranks that the report uses, so their means are its figures. They are made when they are
first asked for. docs/frames.md lists their columns.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpace import __version__
from hpcpace.core.config import Config
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import TraceError, UsageError, check_package
from hpcpace.core.hostlist import short_list
from hpcpace.core.rundir import Attempt, RunDirectory, find_runs, open_named_run
from hpcpace.core.settings import load_config
from hpcpace.core.text import plural, printable, rank_list
from hpcpace.diagnosis.analyze import judge_traces, summary_of
from hpcpace.diagnosis.clocks import ClockThresholds, are_exits_early
from hpcpace.diagnosis.evidence import TABLES_USED
from hpcpace.diagnosis.incomplete import suspect_line
from hpcpace.diagnosis.judged import JudgedAttempt
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.settings import ReportConfig
from hpcpace.diagnosis.summary import Summary, Verdict
from hpcpace.frames import tables
from hpcpace.frames.columns import TABLES, Columns, Format, WrittenTable, frame_of, joined, write_tables
from hpcpace.frames.tables import Extent
from hpcpace.metrics.phases import Part
from hpcpace.runs.load import LoadedRun, load_runs, runs_of_csv
from hpcpace.runs.measured import MeasuredRun
from hpcpace.trace.attempt_reader import read_attempt

if TYPE_CHECKING:
    from pandas import DataFrame


Progress = Callable[[int, int], None]


class RunWarning(UserWarning):
    """A run lacks something: ranks, rows, or clocks that can be believed; `Run.problems` has all of it."""


def _checked(table: str) -> str:
    """Return the name of a frame.

    Raises:
        UsageError: there is none of this name.
    """
    if table not in TABLES:
        raise UsageError(f"there is no frame {table!r}: there are {', '.join(TABLES)}")
    return table


def _silent(_stage: str) -> Progress:
    return lambda _done, _total: None


def load(
    path: str | os.PathLike[str],
    *,
    attempt: int | None = None,
    include_warmup: bool = False,
    memory: str | None = None,
    topology: str | os.PathLike[str] | None = None,
    warns: bool = True,
) -> Run:
    """Open a run; nothing of its traces is read before something is asked for.

    Args:
        path: the folder of the run, of an attempt in it, or its report.
        attempt: number of the attempt; the last one if None.
        include_warmup: whether the warm-up steps count, as with `hpcpace report --include-warmup`.
        memory: bound on the memory for the tables of the run, like "8GiB"; 2 GiB if None.
        topology: file with the leaf switch of each host, as for `hpcpace report --topology`.
        warns: whether what the run lacks is a RunWarning, once.

    Thresholds and other settings are those that `hpcpace report` would use here (`hpcpace config`).

    Raises:
        TraceError: there is no such run or attempt.
        UsageError: the path names another attempt, or a setting is wrong.
    """
    named = open_named_run(Path(path))
    chosen = named.chosen_attempt(attempt)
    given = {"memory": memory, "topology": None if topology is None else str(topology)}
    config = load_config(file=None, environ=process_environ(), options={"report": given})
    return Run(_Source(named.directory, chosen, Selection(include_warmup=include_warmup), config, warns=warns))


def open_for_command(
    directory: RunDirectory,
    attempt: Attempt,
    selection: Selection,
    config: Config,
    begin_stage: Callable[[str], Progress],
) -> Run:
    """Return a run that shows its progress, and whose problems are left to the caller to print."""
    return Run(_Source(directory, attempt, selection, config, begin_stage=begin_stage, warns=False))


class _Source:
    """A run that is read and measured when it is first needed, once for all views of it."""

    def __init__(
        self,
        directory: RunDirectory,
        attempt: Attempt,
        selection: Selection,
        config: Config,
        *,
        begin_stage: Callable[[str], Progress] = _silent,
        warns: bool = True,
    ) -> None:
        self.directory, self.attempt, self.selection, self.config = directory, attempt, selection, config
        self.begin_stage, self._warns = begin_stage, warns

    @cached_property
    def judged(self) -> JudgedAttempt:
        """The run, measured; what is missing from it is one warning."""
        found = read_attempt(
            self.attempt,
            progress=self.begin_stage("reading traces"),
            most_rows=0,
            tables=TABLES_USED,
            memory_bytes=self.config.of(ReportConfig).memory_bytes,
        )
        measuring = self.begin_stage("measuring")
        judged = judge_traces(self.directory, self.attempt, found, self.selection, self.config, progress=measuring)
        if self._warns and (problems := _problems(judged)):
            more = f" and {plural(len(problems) - 1, 'more problem')}: see Run.problems" if problems[1:] else ""
            said = printable(f"{self.attempt.path}: {problems[0]}{more}")
            warnings.warn(said, RunWarning, stacklevel=_users_level())
        return judged

    @cached_property
    def summary(self) -> Summary:
        """What the report says."""
        return summary_of(self.judged)


def _users_level() -> int:
    """Return by how many calls the caller is below code that is not of this package, for the place of a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("hpcpace", "functools"):
        level, frame = level + 1, frame.f_back
    return level


def _problems(judged: JudgedAttempt) -> tuple[str, ...]:
    """Return what frames of a run lack, a sentence each."""
    credible, measured = judged.credible, judged.measured
    found = list(credible.incomplete.problems)
    if wrong := suspect_line(measured.clocks):
        found.append(wrong)
    elif are_exits_early(measured.clocks, judged.limits(ClockThresholds)):
        found.append("ranks leave operations before others enter them: transfers and bandwidths cannot be judged")
    if credible.missing:
        found.append(f"{rank_list(credible.missing)} left no trace that can be used: waits for them are not known")
    if measured.timed.unknown_clocks:
        unknown = rank_list(measured.timed.unknown_clocks)
        found.append(f"the clock of {unknown} is unknown: times, waits and transfers there are NaN")
    if measured.unknown:
        found.append(f"parts of steps are NaN: {measured.unknown}")
    elif measured.unknown_waits:
        ranks = rank_list(measured.unknown_waits)
        found.append(f"waits of {ranks} are NaN and in the transfers: what blocks them has no counterpart")
    if credible.incomplete.not_closed:
        ranks = rank_list(credible.incomplete.not_closed)
        found.append(f"the trace of {ranks} was not closed: killed, crashed, or still running")
    return tuple(found)


class Run:
    """A run, or some of its steps and ranks; `load` opens one.

    Every frame has the rows 0, 1, 2 ... and is made once; `del run.collectives` frees its memory. Times are nanoseconds
    on the common clock since the first of the used steps began on any rank.
    """

    def __init__(self, source: _Source, *, within: Callable[[Extent], Extent] = lambda whole: whole) -> None:
        self._source, self._within = source, within

    def __repr__(self) -> str:
        return f"<hpcpace run {printable(str(self.path))}, attempt {self.attempt}>"

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self._source.directory.path

    @property
    def attempt(self) -> int:
        """The number of the attempt."""
        return self._source.attempt.number

    @property
    def summary(self) -> Summary:
        """What `hpcpace report` says of the whole run: the content of summary.json as objects (docs/summary.md).

        Raises:
            TraceError: no trace can be read.
            CannotTell: there is no step that all ranks have.
        """
        return self._source.summary

    @property
    def verdict(self) -> Verdict:
        """The verdict on the whole run: headline, mode, culprits, loss_share with loss_interval, confidence."""
        return self.summary.verdict

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be read, is left out or cannot be believed, a sentence each; empty for an intact run."""
        return _problems(self._source.judged)

    @property
    def judged(self) -> JudgedAttempt:
        """What the figures of the report rest on, as arrays: for what frames do not have, and free to change."""
        return self._source.judged

    @property
    def num_steps(self) -> int:
        """How many steps the frames have."""
        return len(self._extent.columns)

    @property
    def origin_ns(self) -> int:
        """Time 0 of all frames, on the clock of the reference rank."""
        return self._extent.origin_ns

    def between(
        self, first_step: int | None = None, stop_step: int | None = None, *, ranks: Collection[int] | None = None
    ) -> Run:
        """Return the run with frames of the steps `first_step <= step < stop_step` and of some ranks alone.

        Only these steps are read again for `collectives`. Waits are still known from all ranks; summary, verdict and
        the origin of times stay those of the whole run.

        Args:
            first_step: None leaves that end open.
            stop_step: likewise.
            ranks: numbers of ranks; all if None.

        Raises:
            UsageError: the run has no such rank; raised when something is read. No step is no error, as in a slice.
        """
        outer = self._within
        return Run(self._source, within=lambda whole: outer(whole).narrowed(first_step, stop_step, ranks))

    @cached_property
    def _extent(self) -> Extent:
        return self._within(Extent.whole(self._source.judged))

    @cached_property
    def ranks(self) -> DataFrame:
        """A row per rank: its host, node, places in the mesh and role."""
        return self._frame("ranks")

    @cached_property
    def steps(self) -> DataFrame:
        """A row per step and rank: begin, end, and the time of the step for the whole job."""
        return self._frame("steps")

    @cached_property
    def parts(self) -> DataFrame:
        """A row per step and rank: what its nanoseconds were spent on; the parts add up to the step."""
        return self._frame("parts")

    @cached_property
    def phases(self) -> DataFrame:
        """A row per phase of a step of a rank, with begin and end; phases nest."""
        return self._frame("phases")

    @cached_property
    def collectives(self) -> DataFrame:
        """A row per rank and operation, messages included: wait, transfer, late rank, bandwidths."""
        return self._frame("collectives")

    @cached_property
    def connections(self) -> DataFrame:
        """A row per TCP connection and interval, about a second: bytes, repetitions, round trips."""
        return self._frame("connections")

    @cached_property
    def network(self) -> DataFrame:
        """A row per network interface of a host and interval: bytes, errors, drops, pauses, marks."""
        return self._frame("network")

    @cached_property
    def hosts(self) -> DataFrame:
        """A row per rank and interval: cores, memory, GPU."""
        return self._frame("hosts")

    @cached_property
    def clocks(self) -> DataFrame:
        """A row per rank: how well its times compare with those of others."""
        return self._frame("clocks")

    @cached_property
    def audit(self) -> DataFrame:
        """A row per finding of the audit on the snapshots of the run."""
        return self._frame("audit")

    def blocks(self, table: str) -> Iterator[DataFrame]:
        """Yield a frame in blocks of some 250,000 rows, at least one: for runs that do not fit into memory as a whole.

        Raises:
            UsageError: there is no such frame, or pandas is not installed.
        """
        return (frame_of(table, columns) for columns in self.columns(table))

    def columns(self, table: str) -> Iterator[Columns]:
        """Yield what `blocks` does as arrays of numpy.

        Raises:
            UsageError: there is no such frame.
        """
        known = _checked(table)  # before the run is read
        return tables.blocks(self._extent, known)

    def to_parquet(self, folder: str | os.PathLike[str], *, only: Collection[str] = TABLES) -> list[WrittenTable]:
        """Write frames as FOLDER/TABLE.parquet, block by block, and return what was written.

        Args:
            folder: is made; files of these names in it are replaced, each when it is complete.
            only: names of the frames; all if not given.

        Raises:
            UsageError: there is no such frame, pyarrow is not installed, or a file cannot be written.
        """
        return self.write(Path(folder), Format.PARQUET, only)

    def to_csv(self, folder: str | os.PathLike[str], *, only: Collection[str] = TABLES) -> list[WrittenTable]:
        """Write frames as FOLDER/TABLE.csv; otherwise as `to_parquet`."""
        return self.write(Path(folder), Format.CSV, only)

    def write(self, folder: Path, kind: Format, only: Collection[str]) -> list[WrittenTable]:
        """Write frames in a format; arguments and errors as of `to_parquet`."""
        check_package("pyarrow", extra="frames")  # before anything is read
        chosen = {table: partial(self.columns, table) for table in TABLES if table in set(map(_checked, only))}
        about = {"version": __version__, "run": str(self.path), "attempt": str(self.attempt)}
        about["origin_ns"] = str(self.origin_ns)
        stages = self._source.begin_stage
        return write_tables(folder, kind, chosen, step=self._extent.step, about=about, begin_stage=stages)

    def _frame(self, table: str) -> DataFrame:
        check_package("pandas", extra="frames")  # before anything is read
        return frame_of(table, joined(table, self.columns(table)))


_FIGURES = ("attempt", "p50_ns", "mean_ns", "cv", "samples_per_s", "samples_per_step", "samples_unit", "num_steps")
_OTHERS = ("world_size", "num_missing", "num_nodes", "mesh", "mode", "emulation", "is_final")
_CONDITIONS = ("job_name", "begun_unix_ns", "dtype", "commit", "tool")
_SHARES = ("busy_share", "exposed_wait_share", "transfer_share", "other_share")
_PARTS = tuple(part.name.lower() for part in Part)
COLUMNS = (
    *("path", "name", *_CONDITIONS, *_FIGURES, *_OTHERS, "hosts", "work", *_SHARES),
    *(f"{part}_ns" for part in _PARTS),
    "problem",
)
"""The columns, as docs/python.md describes them."""


def load_many(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DataFrame:
    """Return a frame with a row per run: speed, size, conditions, verdict and where the step goes.

    A run is taken from its summary.json where that is of its traces as they are, else it is analysed. Figures are NaN
    where they are not known, and of a run that cannot be loaded: `problem` says why.

    Args:
        paths: runs, folders of runs, and CSV files of runs that another tool has measured (docs/history.md).
        progress: called with the number of runs done and of all.

    Raises:
        UsageError: pandas is not installed, there is no run, or a CSV file cannot be used.
    """
    check_package("pandas", extra="frames")
    import pandas as pd

    named = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    tables = [path for path in named if _is_table(path)]
    found = list(_runs_of(path for path in named if not _is_table(path)))
    if not found and not tables:
        raise UsageError("there is no run to load: name runs, or folders of runs")
    rows = [_row(run) for run in load_runs(found, progress=progress)] if found else []
    rows += [_figures(run) for path in tables for run in runs_of_csv(path)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    numbers = [name for name in COLUMNS if name.endswith(("_ns", "_share", "_per_s", "_per_step")) or name == "cv"]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def _is_table(path: Path) -> bool:
    return path.suffix.lower() == ".csv" and not path.is_dir()


def _runs_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the runs that paths mean: themselves, or those in a folder of runs."""
    for path in paths:
        try:
            open_named_run(path)
        except TraceError:
            inside = sorted(find_runs(path)) if path.is_dir() else []
            yield from inside or [path]
        else:
            yield path


def _row(run: LoadedRun) -> dict[str, Any]:
    if run.measured is None:
        return {"path": str(run.path), "name": run.path.name, "problem": run.problem}
    return {**_figures(run.measured), "problem": run.problem}


def _figures(run: MeasuredRun) -> dict[str, Any]:
    known = [rank.parts_ns for rank in run.ranks if rank.parts_ns is not None]
    parts = {
        f"{part}_ns": sum(values[part] for values in known) / len(known)
        for part in _PARTS
        if known and all(part in values for values in known)
    }
    return {
        "path": run.path,
        "name": run.conditions.name or run.name,
        **{name: getattr(run.conditions, name) for name in _CONDITIONS},
        **{name: getattr(run, name) for name in (*_FIGURES, *_OTHERS)},
        "begun_unix_ns": run.conditions.begun_unix_ns or None,
        "hosts": short_list(run.hosts),
        "work": "; ".join(f"{name}={value}" for name, value in sorted(run.conditions.work.items())),
        **dict(zip(_SHARES, run.shares or (), strict=False)),
        **parts,
        "problem": "",
    }
