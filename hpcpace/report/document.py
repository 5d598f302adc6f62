"""A document: what a command has to say, said once, in pieces that the terminal and the page both show.

A topic makes a `Section` of its figures; `hpcpace.report.terminal` prints it, `hpcpace.report.html` writes it:

    section = Section(
        "Clock error",
        (
            Facts([("bound", "half-width median 1.5 us, max 1.9 us")]),
            Notes(sentences, is_folded=True, is_ranked=True),
            Table(("host", "drift"), rows, caption="By host", limits=(8, 256)),
            drawn_plot,  # a page has it, a terminal leaves it out; None is left out by both
        ),
        lead="how well times of different hosts compare",
    )
    print_section(Console(width=80), section)
    document = Document(heading="hpcpace report", subject="runs/demo", title="demo", sections=(section,), data="{}")
    print_document(Console(width=80), document)
    write_file(path, html_page(document))

All texts are plain, also names from files: renderers make them printable, escape, wrap, fold and cut them, and set as
code what is in backquotes. A piece that only one of them shows says so by `on`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from hpcpace.core.records import dataclass


class Medium(Enum):
    """Where a document is shown."""

    TERMINAL = auto()
    PAGE = auto()


TERMINAL, PAGE = Medium.TERMINAL, Medium.PAGE
DIRECTIVE = re.compile(r"#SBATCH --[a-z-]+=[\w.,\[\]-]*[\w\]]")
"""A line for a job script inside a sentence."""
UNKNOWN = "?"
"""A cell whose value is not known."""
NONE = "-"
"""A cell that has no value."""


@dataclass(frozen=True)
class Cell:
    """A text that is not the same everywhere: a cell or the name of a column or of a fact.

    Attributes:
        text: on a page.
        short: on a terminal; the same if None. A name of a column breaks where it has a line break.
        below: a second line on a terminal.
        style: `strong`, `good`, `warn`, `bad`, `quiet` or `marked` on a terminal; empty for none.
    """

    text: str
    short: str | None = None
    _: KW_ONLY
    below: str = ""
    style: str = ""

    @property
    def brief(self) -> str:
        """The text on a terminal, without the second line."""
        return self.text if self.short is None else self.short


Text = str | Cell


def cell(text: Text) -> Cell:
    """Return a text as a cell."""
    return text if isinstance(text, Cell) else Cell(text)


@dataclass(frozen=True)
class Block:
    """A piece of a section; `on` is the only medium that shows it, None if both do."""

    _: KW_ONLY
    on: Medium | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return True


@dataclass(frozen=True)
class Notes(Block):
    """Sentences, one below the other.

    Attributes:
        lines: the sentences; empty ones are left out.
        title: above them on a page, before them on a terminal, where it has ten letters or less.
        is_folded, is_ranked: whether those of one kind become one line, as of `folded`.
        has_terms: whether terms in them mean what the glossary of a report says.
    """

    lines: Sequence[str]
    _: KW_ONLY
    title: str = ""
    is_folded: bool = False
    is_ranked: bool = False
    has_terms: bool = True

    def __bool__(self) -> bool:
        """Whether there is a sentence."""
        return any(self.lines)


@dataclass(frozen=True)
class Command(Block):
    """A line to paste, which nothing may break."""

    label: str
    line: str


@dataclass(frozen=True)
class Facts(Block):
    """Names and values; those without a value are left out.

    Attributes:
        rows: name and value; a name of a terminal has ten letters or less, an empty one goes on with the fact above.
        is_tiles: whether a page shows them as tiles; a terminal then prints them in one line, named by the first.
        has_terms: whether terms in the values mean what the glossary of a report says.
    """

    rows: Sequence[tuple[Text, Text]]
    _: KW_ONLY
    is_tiles: bool = False
    has_terms: bool = False

    @property
    def known(self) -> list[tuple[Cell, Cell]]:
        """The facts that have a value."""
        return [(cell(name), cell(value)) for name, value in self.rows if cell(value).text]

    def __bool__(self) -> bool:
        """Whether one has a value."""
        return bool(self.known)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        cells: one for each column.
        ranks, hosts: what it is about, so that the reader of a page can choose it: a rank or a range, as `6-7`, and
            hosts with blanks between.
        style: of all its cells, as of `Cell`.
    """

    cells: Sequence[Text]
    _: KW_ONLY
    ranks: str = ""
    hosts: str = ""
    style: str = ""


@dataclass(frozen=True)
class Table(Block):
    """A table.

    Attributes:
        head: names of the columns.
        rows: their cells.
        caption: what it shows.
        text: the columns that are text; the others are numbers.
        command: the column of lines to copy into a shell or job script, -1 without one.
        limits: the most rows on a terminal and on a page; 0 is no limit.
        which: which rows come first, as in `the busiest 8 of 300`.
        foot: a row below all others, such as a sum or a median.
        is_cut: whether a terminal cuts cells that are too wide, instead of breaking them.
        details: if not empty, a page shows the table when the reader opens these words.
    """

    head: Sequence[Text]
    rows: Sequence[Row | Sequence[Text]]
    caption: str = ""
    _: KW_ONLY
    text: Sequence[int] = (0,)
    command: int = -1
    limits: tuple[int, int] = (0, 0)
    which: str = "first"
    foot: Sequence[Text] = ()
    is_cut: bool = False
    details: str = ""

    def shown(self, medium: Medium) -> list[Row]:
        """Return the rows that a medium shows."""
        limit = self.limits[medium is PAGE] or len(self.rows)
        return [row if isinstance(row, Row) else Row(row) for row in self.rows[:limit]]

    def cut(self, medium: Medium) -> str:
        """Return which rows a medium shows, as `the first 8 of 20`; empty where it shows all."""
        shown = len(self.shown(medium))
        return f"the {self.which} {shown} of {len(self.rows)}" if shown < len(self.rows) else ""

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return bool(self.rows)


@dataclass(frozen=True)
class Part:
    """A share of a whole, with its colour, a name in the style sheet as `@busy`, and whether a page hatches it."""

    name: str
    share: float
    color: str
    is_hatched: bool = False


@dataclass(frozen=True)
class Bar(Block):
    """Shares of a whole as one bar, with their figures.

    Attributes:
        label: name on a terminal.
        parts: the shares; together 1 at most.
        title: above it on a page.
        remark: goes on with the figures on a terminal, and is a sentence below the bar on a page.
        is_drawn: whether a terminal draws it, too.
    """

    label: str
    parts: Sequence[Part]
    _: KW_ONLY
    title: str = ""
    remark: str = ""
    is_drawn: bool = False

    def __bool__(self) -> bool:
        """Whether there is a share."""
        return bool(self.parts)


@dataclass(frozen=True)
class Plot(Block):
    """A plot, which only a page has.

    A plot is plain dictionaries for plotly.js, so that no figure is checked twice. Colours are names that page.js looks
    up in the style sheet (`@wait`), because light, dark and print differ.

    Attributes:
        name: unique in the page, the id of its element.
        label: what it shows, for those who cannot see it.
        caption: how to read it, and what was thinned out.
        height_px: its height.
        traces, layout: as plotly.js takes them; `packed` in a trace stands for its z.
        legend: names, colours and patterns.
        rows: names of its rows, with the ranks and hosts of each as of `Row`, so that the reader can choose some;
            empty where rows are not about ranks.
        title: above it.
    """

    _: KW_ONLY
    name: str
    label: str
    caption: str
    height_px: int
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    legend: Sequence[tuple[str, str, str]] = ()
    rows: Sequence[tuple[str, str, str]] = ()
    title: str = ""
    on: Medium | None = PAGE


@dataclass(frozen=True)
class Drawing(Block):
    """A drawing: lines on a terminal, which nothing breaks or cuts, and SVG on a page.

    Attributes:
        lines: 80 letters each.
        svg: one element, in which names are printable and escaped; without it a page has no drawing.
    """

    lines: Sequence[str]
    svg: str = ""

    def __bool__(self) -> bool:
        """Whether something is drawn."""
        return bool(self.lines)


@dataclass(frozen=True)
class SideBySide(Block):
    """Pieces next to each other where a page is wide, the first one twice as wide unless even."""

    blocks: Sequence[Block | None]
    _: KW_ONLY
    is_even: bool = False

    def __bool__(self) -> bool:
        """Whether one of them has anything to show."""
        return any(self.blocks)


@dataclass(frozen=True)
class Stack(Block):
    """Lines of code below words that a reader can close; only a page has it."""

    words: str
    lines: Sequence[str]
    _: KW_ONLY
    on: Medium | None = PAGE


@dataclass(frozen=True)
class Link(Block):
    """A sentence with a file beside the page to download; only a page has it. `{}` in the sentence is the link."""

    sentence: str
    file: str = ""
    _: KW_ONLY
    on: Medium | None = PAGE


@dataclass(frozen=True)
class Section:
    """A part of a document with a heading.

    Attributes:
        title: the heading.
        content: the pieces; None and those without anything to show are left out, and a section without any, too.
        lead: a clause or sentence beside the heading.
        is_reference: whether it is for looking things up: then it comes last on a page.
    """

    title: str
    content: Sequence[Block | None]
    _: KW_ONLY
    lead: str = ""
    is_reference: bool = False

    def on(self, medium: Medium) -> list[Block]:
        """Return what a medium shows of it."""
        return shown_on(medium, self.content)


def shown_on(medium: Medium, blocks: Sequence[Block | None]) -> list[Block]:
    """Return the pieces that a medium shows."""
    return [
        block
        for block in blocks
        if block
        and block.on in (None, medium)
        and not (isinstance(block, SideBySide) and not shown_on(medium, block.blocks))
    ]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a document says first.

    Attributes:
        label: its name on a terminal, in one word.
        headline: one line.
        tag: what a page has above it, as the name of a mode.
        sure: how sure it is, beside the tag and behind the headline; may be empty.
        kind: how a page frames it: empty for something wrong, else `healthy` or `unsure`.
        style: of the headline on a terminal.
        lines: names with their sentences.
        evidence: titles of the sections that show what a sentence rests on, by sentence.
        content: what a page has below them.
        has_terms: whether the sentences are those of a report, whose terms a page links; others may begin with names,
            which stay as they are.
    """

    label: str = "Verdict"
    headline: str
    tag: str
    sure: str = ""
    kind: str = ""
    style: str = "strong"
    lines: Sequence[tuple[str, Sequence[str]]] = ()
    evidence: Mapping[str, Sequence[str]] = field(default_factory=dict)
    content: Sequence[Block | None] = ()
    has_terms: bool = True


@dataclass(frozen=True, kw_only=True)
class Document:
    """All that a command has to say.

    Attributes:
        heading, subject, remark: its first line: `hpcpace report`, the run, and which part of it.
        title: of the window of a page.
        verdict: what it says first.
        warnings: what must not be missed, with a word for each.
        sections: in their order.
        data, data_name: JSON that a page carries, and the name under which its reader can save it.
        rest: what shows everything, where rows or sentences are left out.
        has_choice: whether a page lets its reader choose ranks and hosts.
        has_glossary: whether a page links terms to a glossary at its end.
        is_brief: whether a terminal leaves out empty lines and the titles of sections.
    """

    heading: str
    subject: str = ""
    remark: str = ""
    title: str
    verdict: Verdict | None = None
    warnings: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section]
    data: str = "{}"
    data_name: str = "summary.json"
    rest: str = "summary.json"
    has_choice: bool = False
    has_glossary: bool = True
    is_brief: bool = False

    def on(self, medium: Medium) -> Iterator[Section]:
        """Yield the sections of which a medium shows something."""
        return (section for section in self.sections if section.on(medium))

    def plots(self) -> list[Plot]:
        """Return all plots, in their order."""
        return list(_plots_in([block for section in self.sections for block in section.content]))


def _plots_in(blocks: Sequence[Block | None]) -> Iterator[Plot]:
    for block in blocks:
        if isinstance(block, Plot):
            yield block
        elif isinstance(block, SideBySide):
            yield from _plots_in(block.blocks)


@dataclass(frozen=True, kw_only=True)
class Term:
    """One entry.

    Attributes:
        name: as it is listed.
        meaning: in sentences.
        spoken: regular expressions of what links to it; the name, also in the plural, if empty.
    """

    name: str
    meaning: str
    spoken: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """The id of the entry in the page."""
        return "term-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


GLOSSARY = tuple(
    Term(name=entry["name"], meaning=entry["meaning"], spoken=tuple(entry.get("spoken", ())))
    for entry in tomllib.loads(Path(__file__).with_name("glossary.toml").read_text(encoding="utf-8"))["term"]
)
"""In alphabetical order."""


def _pattern() -> re.Pattern[str]:
    forms = ["|".join(term.spoken) or _usual(term.name) for term in GLOSSARY]
    return re.compile("|".join(rf"(?P<t{place}>(?<![\w-])(?:{form})(?![\w-]))" for place, form in enumerate(forms)))


def _usual(name: str) -> str:
    return f"[{name[0].upper()}{name[0]}]{re.escape(name[1:])}s?"


_PATTERN = _pattern()


def terms_in(text: str) -> list[tuple[int, int, Term]]:
    """Return where a text has terms, from begin to end, and which."""
    return [(found.start(), found.end(), GLOSSARY[int(str(found.lastgroup)[1:])]) for found in _PATTERN.finditer(text)]
