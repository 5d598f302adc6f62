"""Commands for trace files: `hpcpace dump` shows one, `pack` joins those of a run, `collect` brings them home."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table as TextTable
from rich.text import Text

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, Whole, headed, option, shown_progress, verbose, warn, warn_of_old_hdf5
from hpcpace.core.codec import read_json
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import EXIT_WARNING, ConfigError, TraceError, UsageError
from hpcpace.core.rundir import Attempt, open_named_run
from hpcpace.core.settings import load_config
from hpcpace.core.text import MAX_LETTERS, folded, format_bytes, parse_size, plural, printable, shortened
from hpcpace.diagnosis.settings import ReportConfig
from hpcpace.observe.node_local import AUTO, LeftTrace, bring_left_traces_home, candidates
from hpcpace.observe.settings import TraceConfig
from hpcpace.trace.packing import PackPlan, PackResult, pack_attempt
from hpcpace.trace.reader import read_trace
from hpcpace.trace.schema import TABLES, header_values
from hpcpace.trace.tables import RankTrace, Table

_MAX_WIDTH = 100


@click.command(cls=Command)
@click.argument("file", type=PATH)
@option(
    "--table",
    type=click.Choice([*TABLES, "open_collectives"]),
    metavar="TABLE",
    help=f"Show only this table: {', '.join(TABLES)} or open_collectives.",
    show_default="all",
)
@option("--limit", type=Whole(0), default=5, help="Show this many rows of each table.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@option("--memory", metavar="SIZE", default="2GiB", help="Use at most this much memory for the tables.")
def dump_command(file: Path, table: str | None, limit: int, as_json: bool, memory: str) -> None:
    """Show what is in the trace FILE of one rank: header, tables, first rows, problems.

    FILE is a rank-NNNNN.h5. Rows that are still in its journal are included. Exit codes: 0 fine, 1 a part of the file
    was left out, 2 the file cannot be read.
    """
    warn_of_old_hdf5(file)
    trace = read_trace(file, memory_bytes=ReportConfig(memory=memory).memory_bytes)
    tables = {**trace.tables, "open_collectives": trace.open_collectives}
    chosen = {name: rows for name, rows in tables.items() if table in (None, name)}
    if as_json:
        click.echo(json.dumps(_content(trace, chosen, limit), indent=2))
    else:
        console = Console(highlight=False)
        console.width = min(console.width, _MAX_WIDTH) if console.is_terminal else _MAX_WIDTH
        _print(console, trace, chosen, limit)
    if trace.problems:
        raise SystemExit(1)


def _content(trace: RankTrace, tables: dict[str, Table], limit: int) -> dict[str, Any]:
    return {
        "file": str(trace.path),
        "closed_cleanly": trace.closed_cleanly,
        "problems": list(trace.problems),
        "header": header_values(trace.header),
        "tables": {name: {"num_rows": len(rows), "rows": _rows(name, rows, limit)} for name, rows in tables.items()},
    }


def _rows(name: str, rows: Table, limit: int) -> list[dict[str, Any]]:
    enums = TABLES["collectives" if name == "open_collectives" else name].enums
    first = rows.select(slice(limit))
    columns = {column: [_value(value, enums.get(column)) for value in first[column].tolist()] for column in first}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _value(value: Any, enum: type[IntEnum] | None) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if enum is not None and value in set(enum):
        return enum(value).name.lower()
    return value


def _print(console: Console, trace: RankTrace, tables: dict[str, Table], limit: int) -> None:
    state = "closed cleanly" if trace.closed_cleanly else "not closed: killed, or still running"
    console.print(shortened(f"{trace.path}: {state}", max_letters=MAX_LETTERS), markup=False, soft_wrap=True)
    for problem in folded(trace.problems, rest="--json"):
        console.print(f"problem: {problem}", markup=False, soft_wrap=True)
    header = TextTable(box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1))
    for name, value in header_values(trace.header).items():
        header.add_row(name, Text(printable(str(value))))
    console.print(header)
    for name, rows in tables.items():
        console.print(f"{name}: {len(rows)} rows")
        if len(rows) and limit:
            for block in _blocks(_rows(name, rows, limit), console.width):
                console.print(block)


def _blocks(rows: list[dict[str, Any]], width: int) -> Iterator[TextTable]:
    """Yield a table as blocks of as many columns as fit side by side, each with the row numbers in front."""
    numbers = [str(number) for number in range(len(rows))]
    columns: list[tuple[str, list[str]]] = []
    for name in rows[0]:
        column = (name, [printable(str(row[name])) for row in rows])
        # The space before each column, and those at both edges.
        if columns and sum(map(_width, [("", numbers), *columns, column])) + 1 > width:
            yield _text_table([("", numbers), *columns])
            columns = []
        columns.append(column)
    yield _text_table([("", numbers), *columns])


def _text_table(columns: list[tuple[str, list[str]]]) -> TextTable:
    text = TextTable(box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for name, _ in columns:
        text.add_column(name, justify="right", overflow="fold")
    for row in zip(*(values for _, values in columns), strict=True):
        text.add_row(*map(Text, row))
    return text


def _width(column: tuple[str, list[str]]) -> int:
    name, values = column
    return max(map(len, [name, *values])) + 1


@click.command(cls=Command)
@click.argument("run", type=PATH)
@headed(
    "What to pack",
    option("--attempt", "attempt_number", type=Whole(0), help="Pack only this attempt.", show_default="all"),
    option("--ended", is_flag=True, help="Pack ranks that wrote a short time ago: the job has ended."),
    option("--keep", is_flag=True, help="Keep the files of the ranks."),
)
@headed(
    "Sizes",
    option(
        "--size",
        metavar="SIZE",
        default="1GiB",
        help="Begin another pack when the files of its ranks have this size together.",
    ),
    option("--ranks-per-file", type=Whole(1), default=512, help="Put at most this many ranks into one pack."),
    option("--memory", metavar="SIZE", default="2GiB", help="Use about this much memory."),
)
@headed("Output", verbose)
def pack_command(
    run: Path,
    attempt_number: int | None,
    size: str,
    ranks_per_file: int,
    keep: bool,
    ended: bool,
    memory: str,
    is_verbose: bool,
) -> None:
    """Put the trace files of all ranks of RUN into a few, and remove them when these are verified.

    All commands read packs like the files of the ranks. Exit codes: 0 fine; 1 some files could not be packed and stay
    as they are; 2 bad input, or the run is still being written.
    """
    plan = PackPlan(
        size_bytes=_size(size),
        most_ranks=ranks_per_file,
        keep=keep,
        has_ended=ended,
        memory_bytes=ReportConfig(memory=memory).memory_bytes,
    )
    directory = open_named_run(run).directory
    warn_of_old_hdf5(run)
    attempts = [one for one in directory.attempts() if attempt_number in (None, one.number)]
    if not attempts:
        raise TraceError(f"no attempt {attempt_number} in {run}")
    has_kept = False
    for attempt in attempts:
        begin_s = time.monotonic()
        with shown_progress() as begin_stage:
            result = pack_attempt(attempt, plan, begin_stage=begin_stage)
        warn(result.kept, is_verbose=is_verbose)
        click.echo(_line(printable(str(attempt.path)), result, time.monotonic() - begin_s))
        has_kept |= bool(result.kept)
    if has_kept:
        raise SystemExit(EXIT_WARNING)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--size: {error}") from error


def _line(path: str, result: PackResult, taken_s: float) -> str:
    if not result.packs and not result.removed:
        return f"{path}: nothing to pack: {plural(result.files_after, 'file')}, {format_bytes(result.bytes_after)}"
    ratio = result.bytes_after / result.bytes_before if result.bytes_before else 1.0
    return (
        f"{path}: {plural(result.num_ranks, 'rank')} in {plural(len(result.packs), 'pack')}: {result.files_before} to "
        f"{plural(result.files_after, 'file')}, {format_bytes(result.bytes_before)} to "
        f"{format_bytes(result.bytes_after)} ({ratio:.2f} times), {taken_s:.1f} s"
    )


@click.command(cls=Command)
@option(
    "--trace-dir",
    type=PATH,
    help="Look in this folder.",
    show_default="that of the run's settings, SLURM_TMPDIR, TMPDIR, /tmp and /var/tmp",
)
@option("--config", "config_file", type=PATH, help="Read settings from this TOML file.", show_default="none")
@option("--quiet", is_flag=True, help="Say nothing where no trace is left.")
@verbose
@click.argument("run", type=PATH)
def collect_command(trace_dir: Path | None, config_file: Path | None, quiet: bool, is_verbose: bool, run: Path) -> None:
    """Bring traces of RUN home from the disk of this node, whose ranks were killed.

    A rank that ends in any other way does that itself. Call it once per node, after the ranks:
    srun --ntasks-per-node=1 hpcpace collect RUN
    """
    config = load_config(file=config_file, environ=process_environ())
    attempts = open_named_run(run).directory.attempts()
    folders = [trace_dir] if trace_dir is not None else _folders(attempts)
    homes = [attempt.trace_dir for attempt in attempts]
    passed_over: Counter[str] = Counter()
    found = [
        trace
        for folder in folders
        if trace_dir is not None or folder.is_dir()
        for trace in _collected(folder, homes, config.of(TraceConfig).copy_timeout_s, passed_over)
    ]
    brought = [f"{trace.path} -> {trace.destination}" for trace in found if not trace.problem]
    left = [f"{trace.path} stays: {trace.problem}" for trace in found if trace.problem]
    for sentences in (brought, left):
        for line in folded(sentences, rest="--verbose", is_verbose=is_verbose):
            click.echo(line, err=sentences is left)
    if not found and not quiet:
        click.echo(printable(f"no trace of {run} is left on {socket.gethostname()}"))
    if not quiet:
        for reason, count in sorted(passed_over.items()):
            click.echo(f"left alone: {plural(count, 'trace')}: {printable(reason)}")
    if left:
        click.echo(f"hpcpace: {plural(len(left), 'trace')} could not be copied", err=True)
        raise click.exceptions.Exit(EXIT_WARNING)


def _folders(attempts: list[Attempt]) -> list[Path]:
    """Return the folders in which ranks of a run may have left traces on this node."""
    named = [Path(folder) for attempt in attempts if (folder := _trace_dir(attempt))]
    found = [*named, *(folder for _, folder in candidates(process_environ()))]
    return list(dict.fromkeys(folder for folder in found if folder != AUTO))


def _trace_dir(attempt: Attempt) -> str:
    """Return trace.trace_dir of an attempt; empty where it is not set, or run.json cannot be read."""
    named = read_json(attempt, attempt.run_json.name, lambda record: record["config"]["trace"]["trace_dir"], [])
    return named if isinstance(named, str) and "\0" not in named else ""


def _collected(folder: Path, homes: list[Path], timeout_s: float, passed_over: Counter[str]) -> list[LeftTrace]:
    try:
        return bring_left_traces_home(folder, homes, timeout_s=timeout_s, passed_over=passed_over)
    except OSError as error:
        raise UsageError(f"cannot look for traces in {folder}: {error.strerror}; name another --trace-dir") from error
