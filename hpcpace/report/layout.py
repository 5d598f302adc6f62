"""Lines, tables and wordings that all parts of a report share."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcpace.metrics.open_operations import OpenOperation
from hpcpace.units import NS_PER_MS, format_duration

_LABEL_WIDTH = 11


def printable(text: str) -> str:
    """Return text from a file with everything escaped that could steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def title(console: Console, content: str, remark: str = "") -> None:
    """Print the heading of a section, after an empty line."""
    console.print()
    text = Text(printable(content), style="bold")
    if remark:
        text.append(f"  {remark}", style="not bold dim")
    console.print(text)


def line(console: Console, label: str, content: str) -> None:
    """Print a label and its content, wrapped beside it."""
    _hanging(console, Text(label.ljust(_LABEL_WIDTH), style="dim"), content)


def note(console: Console, content: str) -> None:
    """Print a remark below a table."""
    _hanging(console, Text("- "), content)


def _hanging(console: Console, label: Text, content: str) -> None:
    wrapped = Text(printable(content)).wrap(console, max(console.width - len(label), 20))
    for index, part in enumerate(wrapped):
        part.rstrip()
        console.print((label if index == 0 else Text(" " * len(label))) + part, soft_wrap=True)


def table(first: str, others: Sequence[str]) -> Table:
    """Return an empty table with a left column and numbers to its right."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    made.add_column(first, vertical="bottom")
    for name in others:
        made.add_column(name, justify="right", vertical="bottom")
    return made


def milliseconds(time_ns: float) -> str:
    """Return milliseconds with three significant digits, without their unit."""
    value = time_ns / NS_PER_MS
    if not value:
        return "0"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def percent(share: float) -> str:
    """Return a share as percent."""
    return f"{100 * share:.1f} %"


def plural(count: int, noun: str) -> str:
    """Return `1 step` or `2 steps`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def rank_list(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0-3, 7` for ascending ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(names)}"


def open_line(operation: OpenOperation) -> str:
    """Return one sentence on an operation that never completed."""
    where = f"{operation.op} {operation.seq} of group '{printable(operation.group)}' in step {operation.step}"
    parts = [f"{rank_list(operation.inside)} inside for {format_duration(operation.age_ns)}"]
    parts += [f"{rank_list(operation.completed)} completed it"] if operation.completed else []
    parts += [f"no record of it from {rank_list(operation.absent)}"] if operation.absent else []
    return f"{where} never completed: {', '.join(parts)}"
