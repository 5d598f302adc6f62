"""Lines and tables that all parts of a report on a terminal share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcpace.core.text import folded, printable
from hpcpace.report.words.directive import DIRECTIVE

_LABEL_WIDTH = 11
_IN_FIGURES = re.compile(r"(?<=\d) (?=(?:%|[num]?s|[kMGT]?B)(?!\w))")
_FIRST_PRIVATE = 0xE000  # private characters are not printable, so no text that is shown has one


def title(console: Console, content: str, remark: str = "") -> None:
    """Print the heading of a section, after an empty line."""
    console.print()
    text = Text(printable(content), style="bold")
    if remark:
        text.append(f"  {remark}", style="not bold dim")
    console.print(text)


def line(console: Console, label: str, content: str, *, style: str = "") -> None:
    """Print a label and its content, wrapped with a hanging indent."""
    _hanging(console, Text(f"{label.ljust(_LABEL_WIDTH - 1)} ", style="dim"), content, style=style)


def note(console: Console, content: str) -> None:
    """Print a remark below a table."""
    _hanging(console, Text("- "), content)


def notes(
    console: Console, problems: Iterable[str], *, rest: str, is_ranked: bool = False, is_verbose: bool = False
) -> None:
    """Print problems as remarks, folded; arguments as of `hpcpace.core.text.folded`."""
    for content in folded(problems, rest=rest, is_ranked=is_ranked, is_verbose=is_verbose):
        note(console, content)


def _hanging(console: Console, label: Text, content: str, *, style: str = "") -> None:
    """Print text wrapped to the right of a label."""
    for index, part in enumerate(_wrapped(console, printable(content), max(console.width - len(label), 20))):
        console.print((label if index == 0 else Text(" " * len(label))) + Text(part, style=style), soft_wrap=True)


def _wrapped(console: Console, text: str, width: int) -> list[str]:
    """Return lines; a number stays with its unit, and a line for a job script stays whole, however long it is."""
    whole = DIRECTIVE.findall(text)
    # A word as long as each of them, but no longer than a line, stands for it.
    words = [chr(_FIRST_PRIVATE + 1 + index) * min(len(one), width) for index, one in enumerate(whole)]
    text = _IN_FIGURES.sub(chr(_FIRST_PRIVATE), text)
    for one, word in zip(whole, words, strict=True):
        text = text.replace(one, word, 1)
    lines = [part.plain.rstrip() for part in Text(text).wrap(console, width)]
    for one, word in zip(whole, words, strict=True):
        lines = [part.replace(word, one) for part in lines]
    return [part.replace(chr(_FIRST_PRIVATE), " ") for part in lines]


def table(first: str, others: Sequence[str]) -> Table:
    """Return an empty table with a left column and numbers to its right."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    made.add_column(first, vertical="bottom", overflow="fold")  # names that differ at their ends alone stay apart
    for name in others:
        made.add_column(name, justify="right", vertical="bottom")
    return made
