"""`hpcpace dump`: print a trace file as tables or as JSON."""

from __future__ import annotations

import json
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
from hpcpace.cli.foreign import warn_of_old_hdf5
from hpcpace.cli.options import PATH, Whole, option
from hpcpace.config import ReportConfig
from hpcpace.core.text import MAX_LETTERS, folded, printable, shortened
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
@option("--limit", type=Whole(0), default=5, show_default=True, help="Show this many rows of each table.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@option(
    "--memory", metavar="SIZE", default="2GiB", show_default=True, help="Use at most this much memory for the tables."
)
def command(file: Path, table: str | None, limit: int, as_json: bool, memory: str) -> None:
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
