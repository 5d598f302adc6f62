"""Documents as one HTML file that opens without a network, with styles, scripts, plots and data to download.

Nothing in it can load anything: a content security policy allows only the scripts written here, by their hashes. All
text is made printable and escaped where it is put between tags, so that the name of a host is never more than a name.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from hpcpace.core.text import folded, percent, printable
from hpcpace.report.document import (
    DIRECTIVE,
    GLOSSARY,
    PAGE,
    Bar,
    Block,
    Command,
    Document,
    Drawing,
    Facts,
    Link,
    Notes,
    Plot,
    Row,
    Section,
    SideBySide,
    Stack,
    Table,
    Term,
    Text,
    Verdict,
    cell,
    shown_on,
    terms_in,
)

_FOLDER = Path(__file__).parent
_SCRIPTS = ("base.js", "plots.js", "tables.js", "controls.js")
_GZIP_LEVEL = 6


def html_page(document: Document) -> str:
    """Return a document as a page; the same document gives the same page."""
    library = plot_library() if document.plots() else compressed("")
    inflate, script = _asset("fflate.umd.js"), _script()
    hashes = " ".join(script_hash(code) for code in (unpacked(library), inflate.encode(), script.encode()))
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    data = {plot.name: _description(plot) for plot in document.plots()}
    licenses = "\n".join(_asset(f"{name}-LICENSE") for name in ("plotly", "fflate"))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escaped(document.title)} · hpcpace</title>
<style>
{_asset("page.css")}
</style>
<style id="dark" media="(prefers-color-scheme: dark)">
{_asset("dark.css")}
</style>
</head>
<body>
{_main(document)}
<script type="application/json" id="plot-data">{_json(data)}</script>
<script type="application/gzip" id="summary-json">{embedded(compressed(document.data))}</script>
<!-- This page contains plotly.js and fflate.

{licenses}-->
<script type="application/gzip" id="plot-library">{embedded(library)}</script>
<script>{inflate}</script>
<script>{script}</script>
</body>
</html>"""


def _main(document: Document) -> str:
    """Return all that a reader of the page sees."""
    sections = sorted(document.on(PAGE), key=lambda section: section.is_reference)
    written = {section.title: _written(section, document) for section in sections}
    verdict = ""
    if document.verdict is not None:
        head = verdict_html(document.verdict, titles=written, rest=document.rest)
        verdict = first_terms(head, keeps=document.has_glossary)
    glossary = terms_of([verdict, *written.values()]) if document.has_glossary else []
    titles = [*written, *(["Terms"] if glossary else [])]
    remark = f", {escaped(document.remark)}" if document.remark else ""
    warnings = "".join(
        f'<p class="warning"><b>{escaped(capital(label))}:</b> {prose(text)}</p>\n' for label, text in document.warnings
    )
    links = "".join(f'<a href="#{anchor(title)}">{escaped(title)}</a>\n' for title in titles)
    bodies = "".join(_section(title, content) for title, content in written.items())
    if glossary:
        terms = "".join(
            f'<dt id="{term.anchor}" tabindex="-1">{escaped(term.name)}</dt><dd>{escaped(term.meaning)}</dd>\n'
            for term in glossary
        )
        bodies += _section("Terms", f'<dl class="glossary">\n{terms}</dl>')
    name = escaped(document.data_name)
    return f"""<main>
<div class="head">
  <header class="run">{escaped(document.heading)} <b>{escaped(document.subject)}</b>{remark}</header>
  <div class="tools" hidden>
    <button type="button" id="save-summary" data-name="{name}">Save {name}</button>
    <button type="button" id="theme"></button>
  </div>
</div>
{verdict}
{warnings}<nav aria-label="Contents">
{links}</nav>
{_CHOICE if document.has_choice else ""}<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>
{bodies}</main>"""


_CHOICE = """<div class="tools choose" hidden role="search"><label for="choose">Only ranks or hosts</label>
<input type="search" id="choose" placeholder="3, 8-15, n2" autocomplete="off" spellcheck="false">
<span id="chosen" role="status"></span></div>
"""


def _section(title: str, content: str) -> str:
    name = anchor(title)
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escaped(title)}</h2>\n{content}\n</section>\n'


def _written(section: Section, document: Document) -> str:
    """Return the pieces of a section, in which each term is a link where it comes up first."""
    lead = f'<p class="lead">{with_terms(sentence(section.lead))}</p>\n' if section.lead else ""
    blocks = [block_html(block, title=section.title, rest=document.rest) for block in section.on(PAGE)]
    return first_terms(lead + "\n".join(blocks), keeps=document.has_glossary)


def _script() -> str:
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _description(plot: Plot) -> dict[str, object]:
    rows = {"rows": plot.rows} if plot.rows else {}
    return {"height": plot.height_px, "traces": plot.traces, "layout": plot.layout, **rows}


def _json(data: object) -> str:
    # No text in it may end the element that holds it.
    made = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return made.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return _FOLDER.joinpath("assets", name).read_text(encoding="utf-8")


def plot_library() -> bytes:
    """Return plotly.js as gzip: the bundle of cartesian plots, which has all that a page draws.

    The page unpacks it by itself, with fflate, so that it is small to copy and opens before plotly.js is unpacked.
    Browsers can unpack, too (`DecompressionStream`), but not at once, and printing does not wait.
    """
    return _FOLDER.joinpath("assets", "plotly-cartesian.min.js.gz").read_bytes()


def compressed(text: str) -> bytes:
    """Return a text as gzip; the same text gives the same bytes."""
    return gzip.compress(text.encode(), _GZIP_LEVEL, mtime=0)


def unpacked(data: bytes) -> bytes:
    """Return what was compressed."""
    return gzip.decompress(data)


def embedded(data: bytes) -> str:
    """Return compressed data as the page has it between tags."""
    return base64.b64encode(data).decode()


def script_hash(code: bytes) -> str:
    """Return what a content security policy allows this script by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code).digest()).decode()}'"


_CODE = re.compile(rf"`([^`]+)`|({DIRECTIVE.pattern})")
_TERM_LINK = re.compile(r'<a class="term" href="#([^"]*)">([^<]*)</a>')


def escaped(text: str) -> Markup:
    """Return a text, printable and escaped; what is HTML already stays as it is."""
    return text if isinstance(text, Markup) else escape(printable(text))


def anchor(title: str) -> str:
    """Return the id of a heading."""
    return "about-" + re.sub(r"[^a-z]+", "-", title.lower())


def prose(text: str) -> Markup:
    """Return a sentence, escaped, with what belongs into a job script or shell set as code."""
    made, at = Markup(), 0
    text = printable(text)
    for found in _CODE.finditer(text):
        made += escape(text[at : found.start()]) + Markup("<code>{}</code>").format(found[1] or found[2])
        at = found.end()
    return made + escape(text[at:])


def with_terms(text: str) -> Markup:
    """Return what `prose` does of a sentence of hpcpace, with links from its terms to the glossary."""
    made, at = Markup(), 0
    for found in _CODE.finditer(text):
        made += _linked(text[at : found.start()]) + prose(found[0])
        at = found.end()
    return made + _linked(text[at:])


def _linked(text: str) -> Markup:
    made, at = Markup(), 0
    for begin, end, term in terms_in(text):
        made += escape(printable(text[at:begin]))
        made += Markup('<a class="term" href="#{}">{}</a>').format(term.anchor, printable(text[begin:end]))
        at = end
    return made + escape(printable(text[at:]))


def first_terms(content: str, *, keeps: bool = True) -> Markup:
    """Return HTML in which each term is a link where it comes up first, and plain afterwards; nowhere unless kept."""
    seen: set[str] = set()

    def kept(found: re.Match[str]) -> str:
        is_first = keeps and found[1] not in seen
        seen.add(found[1])
        return found[0] if is_first else found[2]

    return Markup(_TERM_LINK.sub(kept, content))


def terms_of(pieces: Iterable[str]) -> list[Term]:
    """Return the terms that the pieces of a page link to."""
    linked = {found[1] for piece in pieces for found in _TERM_LINK.finditer(piece)}
    return [term for term in GLOSSARY if term.anchor in linked]


def css_string(text: str) -> str:
    """Return a text as a string of a style sheet."""
    quoted = printable(text).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"


def capital(text: str) -> str:
    """Return a text that begins with a capital, unless with code or a number."""
    return text if text[:1] in "#`" else text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Return a text that begins with a capital and ends with a full stop."""
    return capital(text if text.endswith(".") else f"{text}.")


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
