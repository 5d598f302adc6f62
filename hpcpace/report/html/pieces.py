"""The pieces of a document as HTML, each written by the function of its class.

Plain functions, because a library of templates takes longer to compile those than to write the page of a small run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hpcpace.core.text import folded, percent
from hpcpace.report.document import (
    PAGE,
    Bar,
    Block,
    Command,
    Drawing,
    Facts,
    Link,
    Notes,
    Plot,
    Row,
    SideBySide,
    Stack,
    Table,
    Text,
    Verdict,
    cell,
    shown_on,
)
from hpcpace.report.html.words import anchor, capital, css_string, escaped, prose, with_terms

_LONG_HEADLINE = 80
"""Letters beyond which a headline is set smaller."""
Legend = Iterable[tuple[str, str, Any, str]]
"""Names, colours, whether they are hatched, and values."""


def block_html(block: Block, *, title: str, rest: str) -> Markup:
    """Return a piece of the section with a title.

    Args:
        block: the piece.
        title: names a table without a caption.
        rest: where folded notes are in full.
    """
    if isinstance(block, Notes):
        sentences = [sentence for sentence in block.lines if sentence]
        lines = folded(sentences, rest=rest, is_ranked=block.is_ranked) if block.is_folded else sentences
        return _notes(block, lines)
    if isinstance(block, Table):
        return _table(block, title)
    if isinstance(block, SideBySide):
        return _side_by_side(block, [block_html(one, title=title, rest=rest) for one in shown_on(PAGE, block.blocks)])
    return _WRITERS[type(block)](block)


def _heading(title: str) -> str:
    return f"<h3>{escaped(title)}</h3>\n" if title else ""


def _text(text: str, has_terms: bool) -> Markup:
    return with_terms(text) if has_terms else prose(text)


def _notes(block: Notes, lines: Iterable[str]) -> Markup:
    items = "".join(f"<li>{_text(line, block.has_terms)}</li>" for line in lines)
    return Markup(f'{_heading(block.title)}<ul class="notes">{items}</ul>\n')


def _command(block: Command) -> Markup:
    return Markup(f"<p>{escaped(block.label)}: <code>{escaped(block.line)}</code></p>\n")


def _facts(block: Facts) -> Markup:
    rows = "".join(
        f"<div><dt>{with_terms(capital(name.text))}</dt><dd>{_text(value.text, block.has_terms)}</dd></div>\n"
        for name, value in block.known
    )
    return Markup(f'<dl class="{"tiles" if block.is_tiles else "facts"}">\n{rows}</dl>\n')


def _table(block: Table, title: str) -> Markup:
    which = block.cut(PAGE)
    caption = capital(f"{block.caption or title}, {which}" if which else block.caption or title)
    names = [cell(name).text for name in block.head]
    heads = ";".join(f"--head-{number}:{escaped(css_string(name))}" for number, name in enumerate(names, 1))
    head = "".join(
        f'<th scope="col"{_class(index in block.text)}>{with_terms(name)}</th>' for index, name in enumerate(names)
    )
    rows = "".join(_row(row, block) for row in block.shown(PAGE))
    foot = f"<tfoot><tr>{_cells(block.foot, block)}</tr></tfoot>\n" if block.foot else ""
    table = (
        f'<div class="table" role="region" tabindex="0" aria-label="{escaped(caption)}"><table style="{heads}">\n'
        f"<caption>{with_terms(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n{foot}"
        "</table></div>\n"
    )
    if block.details:
        table = f"<details><summary>{escaped(block.details)}</summary>\n{table}</details>\n"
    return Markup(table)


def _row(row: Row, block: Table) -> str:
    ranks = f' data-ranks="{escaped(row.ranks)}"' if row.ranks else ""
    hosts = f' data-hosts="{escaped(row.hosts)}"' if row.hosts else ""
    return f"<tr{ranks}{hosts}>{_cells(row.cells, block)}</tr>\n"


def _cells(row: Sequence[Text], block: Table) -> str:
    return "".join(
        f"<td{_class(index in block.text, is_command=index == block.command)}>{prose(cell(text).text)}</td>"
        for index, text in enumerate(row)
    )


def _class(is_text: bool, *, is_command: bool = False) -> str:
    return ' class="text command"' if is_command else ' class="text"' if is_text else ""


def _legend(entries: Legend) -> str:
    items = "".join(
        f'<li><i class="{_pattern(is_hatched)}" style="background-color:var(--{escaped(color[1:])})"></i>'
        f"{with_terms(name)}{f' <b>{escaped(value)}</b>' if value else ''}</li>"
        for name, color, is_hatched, value in entries
    )
    return f'<ul class="legend">{items}</ul>\n' if items else ""


def _pattern(is_hatched: object) -> str:
    return "hatched" if is_hatched else "plain"


def _bar(block: Bar) -> Markup:
    label = ", ".join(f"{escaped(part.name)} {percent(part.share)}" for part in block.parts)
    spans = "".join(
        f'<span class="{_pattern(part.is_hatched)}" style="width:{100 * part.share:.2f}%;'
        f'background-color:var(--{escaped(part.color[1:])})"></span>'
        for part in block.parts
    )
    legend = _legend((part.name, part.color, part.is_hatched, percent(part.share)) for part in block.parts)
    remark = f'<ul class="notes"><li>{with_terms(capital(block.remark))}</li></ul>\n' if block.remark else ""
    return Markup(
        f'<figure>\n{_heading(block.title)}<div class="bar" role="img" aria-label="{label}">{spans}</div>\n'
        f"{legend}\n{remark}</figure>\n"
    )


def _plot(block: Plot) -> Markup:
    return Markup(
        f"<figure>\n{_heading(block.title)}<figcaption>{with_terms(block.caption)}</figcaption>\n"
        f"{_legend((*entry, '') for entry in block.legend)}\n"
        f'<div class="plot" id="{escaped(block.name)}" role="img" aria-label="{escaped(block.label)}" '
        f'style="height:{block.height_px}px"></div>\n</figure>\n'
    )


def _drawing(block: Drawing) -> Markup:
    return Markup(f"<figure>{block.svg}</figure>\n" if block.svg else "")


def _side_by_side(block: SideBySide, inside: Sequence[Markup]) -> Markup:
    if len(inside) == 2:
        return Markup(f'<div class="pair{" even" if block.is_even else ""}">{inside[0]}{inside[1]}</div>\n')
    return Markup("".join(f"{piece}\n" for piece in inside))


def _stack(block: Stack) -> Markup:
    lines = "".join(f"{escaped(line)}\n" for line in block.lines)
    return Markup(f"<details open><summary>{escaped(block.words)}</summary><pre>{lines}</pre></details>\n")


def _link(block: Link) -> Markup:
    before, _, behind = block.sentence.partition("{}")
    file = escaped(block.file)
    link = f'<a href="{file}" download>{file}</a>' if block.file else ""
    return Markup(f'<p class="lead">{prose(before)}{link}{prose(behind)}</p>\n')


_WRITERS: Mapping[type[Block], Callable[[Any], Markup]] = {
    Command: _command,
    Facts: _facts,
    Bar: _bar,
    Plot: _plot,
    Drawing: _drawing,
    Stack: _stack,
    Link: _link,
}
"""By class of a piece without others inside, the function that writes it."""


def verdict_html(verdict: Verdict, *, titles: Iterable[str], rest: str) -> Markup:
    """Return the head of a page, whose sentences link to the sections of those titles that they rest on."""
    headline = verdict.headline.removeprefix(f"{verdict.tag}: ")
    sure = f" · {with_terms(verdict.sure)}" if verdict.sure else ""
    size = ' class="long"' if len(headline) > _LONG_HEADLINE else ""
    is_there = frozenset(titles)
    groups = []
    for name, lines in verdict.lines:
        if lines:
            sentences = "".join(_evident(line, verdict, is_there) for line in lines)
            groups.append(f"<dt>{escaped(name)}</dt><dd>{sentences}</dd>")
    inside = "".join(f"{block_html(block, title='', rest=rest)}\n" for block in shown_on(PAGE, verdict.content))
    return Markup(
        f'<div class="verdict {escaped(verdict.kind)}">\n'
        f'<p class="mode">{escaped(capital(verdict.tag))}<span>{sure}</span></p>\n'
        f"<h1{size}>{prose(capital(headline))}</h1>\n"
        f"<dl>{''.join(groups)}</dl>\n{inside}</div>\n"
    )


def _evident(line: str, verdict: Verdict, titles: frozenset[str]) -> str:
    text = with_terms(capital(line)) if verdict.has_terms else prose(line)
    shown = [title for title in verdict.evidence.get(line, ()) if title in titles]
    links = "".join(f' <a class="evidence" href="#{anchor(title)}">{escaped(title)}</a>' for title in shown)
    return f"<p>{text}{links}</p>"
