"""Documents on a terminal or in a Slurm log: 80 to 100 columns, without colour in a log."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from hpcpace.core.records import dataclass
from hpcpace.core.text import folded, percent, printable
from hpcpace.report.document import (
    DIRECTIVE,
    TERMINAL,
    Bar,
    Block,
    Command,
    Document,
    Drawing,
    Facts,
    Notes,
    Row,
    Section,
    SideBySide,
    Table,
    Verdict,
    cell,
    shown_on,
)

_LABEL_WIDTH = 11
_LOG_WIDTH = 100
_BAR_WIDTH = 60
_IN_FIGURES = re.compile(r"(?<=\d) (?=(?:%|[num]?s|[kMGT]?B)(?!\w))")
_FIRST_PRIVATE = 0xE000  # private characters are not printable, so no text that is shown has one
_PLAIN = str.maketrans("▁▂▃▄▅▆▇█▓▒░├└│─", "_.-=+*%#=-.|`|-")
_STYLES = {"strong": "bold", "bad": "bold red", "good": "bold green", "warn": "bold yellow", "": ""}
_STYLES |= {"quiet": "dim", "marked": "reverse"}


def print_document(console: Console, document: Document, *, is_verbose: bool = False) -> None:
    """Print a document.

    Args:
        console: where to.
        document: what.
        is_verbose: whether to print every sentence, also many of one kind.
    """
    if document.heading:
        heading = f"{document.heading} {document.subject}".rstrip()
        if document.is_brief:
            console.print(Text(printable(heading), style="bold"), soft_wrap=True)
        else:
            title(console, heading)
    if document.verdict is not None:
        _print_verdict(console, document.verdict)
    for label, sentence in document.warnings:
        line(console, label, sentence, style="bold")
    for section in document.on(TERMINAL):
        print_section(console, section, rest=document.rest, is_verbose=is_verbose, has_title=not document.is_brief)


@dataclass(frozen=True)
class Shown:
    """A document as rich shows it, such as in a view that changes."""

    document: Document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield its lines."""
        own = Console(file=io.StringIO(), width=options.max_width, force_terminal=console.is_terminal)
        with own.capture() as printed:
            print_document(own, self.document)
        yield Text.from_ansi(printed.get().rstrip("\n"))


def num_lines(document: Document, width: int) -> int:
    """Return how many lines a document takes on a terminal of a width."""
    page = io.StringIO()
    print_document(Console(file=page, width=width), document)
    return page.getvalue().count("\n")


def print_section(
    console: Console,
    section: Section,
    *,
    rest: str = "summary.json",
    is_verbose: bool = False,
    has_title: bool = True,
) -> None:
    """Print a section; nothing where a terminal shows none of it. `rest` shows everything that is left out."""
    blocks = section.on(TERMINAL)
    if not blocks:
        return
    if has_title and section.title:
        title(console, section.title, section.lead)
    for place, block in enumerate(blocks):
        _print_block(console, block, is_first=not place, rest=rest, is_verbose=is_verbose)


def _print_block(console: Console, block: Block, *, is_first: bool, rest: str, is_verbose: bool) -> None:
    match block:
        case Notes():
            sentences = [sentence for sentence in block.lines if sentence]
            if block.is_folded:
                more = rest if rest.startswith("--verbose") else f"--verbose or {rest}"
                notes(console, sentences, rest=more, is_ranked=block.is_ranked, is_verbose=is_verbose)
                return
            for place, sentence in enumerate(sentences):
                if block.title:
                    line(console, "" if place else block.title, sentence)
                else:
                    note(console, sentence)
        case Command():  # in one piece, since it is to be pasted
            console.print(f"  {block.label}: {printable(block.line)}", soft_wrap=True, markup=False)
        case Facts(is_tiles=True):
            (name, value), *others = block.known
            more = ", ".join(f"{other.brief} {of_it.brief}" for other, of_it in others)
            line(console, name.brief, f"{value.brief}; {more}" if more else value.brief)
        case Facts():
            for name, value in block.known:
                styles = _STYLES[value.style], _STYLES[name.style or "quiet"]
                line(console, name.brief, value.brief, style=styles[0], label_style=styles[1])
        case Drawing():
            for drawn in block.lines:
                console.print(Text(printable(drawn)), soft_wrap=True)
        case Bar():
            _print_bar(console, block)
        case Table():
            _print_table(console, block, is_first=is_first, rest=rest)
        case SideBySide():
            for inner in shown_on(TERMINAL, block.blocks):
                _print_block(console, inner, is_first=is_first, rest=rest, is_verbose=is_verbose)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    sure = f" ({verdict.sure})" if verdict.sure else ""
    line(console, verdict.label, f"{verdict.headline}{sure}", style=_STYLES[verdict.style])
    for label, sentences in verdict.lines:
        for place, sentence in enumerate(sentences):
            line(console, "" if place else label, sentence)


def _print_bar(console: Console, bar: Bar) -> None:
    figures = ", ".join(f"{part.name} {percent(part.share)}" for part in bar.parts)
    line(console, bar.label, f"{figures}; {bar.remark}" if bar.remark else figures)
    if bar.is_drawn:
        drawn, done = "", 0.0
        for symbol, part in zip("█▓▒░", bar.parts, strict=False):
            done += part.share
            drawn += symbol * (round(_BAR_WIDTH * done) - len(drawn))
        line(console, "", _encoded(console, drawn))


def _print_table(console: Console, table: Table, *, is_first: bool, rest: str) -> None:
    rows = table.shown(TERMINAL)
    if table.caption:
        if not is_first:
            console.print()
        _quietly(console, table.caption)
    made = _empty_table()
    made.show_header = any(cell(name).text for name in table.head)
    for column, name in enumerate(map(cell, table.head)):
        cells = [cell(row.cells[column]) for row in rows]
        widest = max((len(text) for one in cells for text in (printable(one.brief), printable(one.below))), default=0)
        is_text = column in table.text
        made.add_column(
            name.brief if is_text else _broken(name.brief, widest),
            justify="left" if is_text else "right",
            vertical="bottom",
            # Names that differ at their ends alone stay apart, unless each row is to take one line.
            overflow="fold" if is_text and not table.is_cut else "ellipsis",
            no_wrap=table.is_cut,
        )
    for row in rows:
        _add_row(console, made, row)
    if table.foot:
        _add_row(console, made, Row(table.foot, style="strong"))
    console.print(made)
    if cut := table.cut(TERMINAL):
        note(console, f"{cut}; all: {rest}")


def _add_row(console: Console, made: RichTable, row: Row) -> None:
    cells = [cell(one) for one in row.cells]
    texts = (_encoded(console, printable(one.brief)) for one in cells)
    made.add_row(*(Text(text, style=_STYLES[one.style or row.style]) for text, one in zip(texts, cells, strict=True)))
    if any(one.below for one in cells):
        made.add_row(*(Text(printable(one.below)) for one in cells), style="dim")


def _encoded(console: Console, text: str) -> str:
    """Return a text with blocks as letters where the console has no blocks."""
    return text if console.encoding.startswith("utf") else text.translate(_PLAIN)


def _broken(name: str, widest: int) -> str:
    """Return the name of a column in two lines where it is wider than its cells."""
    if "\n" in name or len(name) <= widest or " " not in name:
        return name
    width = max(widest, *map(len, name.split()))
    while len(lines := wrap(name, width, break_long_words=False, break_on_hyphens=False)) > 2:
        width += 1
    return "\n".join(lines)


def table(first: str, others: Sequence[str]) -> RichTable:
    """Return an empty table without lines, with a left column and numbers to its right."""
    made = _empty_table()
    made.add_column(first, vertical="bottom", overflow="fold")
    for name in others:
        made.add_column(name, justify="right", vertical="bottom")
    return made


def _empty_table() -> RichTable:
    return RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def title(console: Console, content: str, remark: str = "") -> None:
    """Print the heading of a section, after an empty line."""
    console.print()
    text = Text(printable(content), style="bold")
    is_short = len(content) + 2 + len(remark) <= console.width
    if remark and is_short:
        text.append(f"  {printable(remark)}", style="not bold dim")
    console.print(text)
    if remark and not is_short:
        _quietly(console, remark)


def _quietly(console: Console, content: str) -> None:
    for part in _wrapped(console, printable(content), console.width):
        console.print(Text(part, style="dim"), soft_wrap=True)


def line(console: Console, label: str, content: str, *, style: str = "", label_style: str = "dim") -> None:
    """Print a label and its content, wrapped with a hanging indent."""
    _hanging(console, Text(f"{label.ljust(_LABEL_WIDTH - 1)} ", style=label_style), content, style=style)


def note(console: Console, content: str) -> None:
    """Print a remark."""
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
        console.print(Text.assemble(label if index == 0 else " " * len(label), (part, style)), soft_wrap=True)


def _wrapped(console: Console, text: str, width: int) -> list[str]:
    """Return lines; a number stays with its unit, and a line for a job script stays whole, however long it is."""
    if text.isascii() and text.isprintable() and len(text) <= width:
        return [text.rstrip()]
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


def console_for_tables() -> Console:
    """Return a console that is as wide in a log as in a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII, and names of hosts and folders more
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(width=_LOG_WIDTH, highlight=False, emoji=False, markup=False)
