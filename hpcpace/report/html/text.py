"""Pieces of HTML that the sections of the report are made of; every one escapes the text that it is given."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from hpcpace.core.text import percent, printable
from hpcpace.report.document import DIRECTIVE, Plot
from hpcpace.report.glossary import GLOSSARY, terms_in


def escape(text: str) -> str:
    """Return text from a file so that a browser shows it as it is, control characters and tags included."""
    return html.escape(printable(text))


_CODE = re.compile(rf"`([^`]+)`|({DIRECTIVE.pattern})")
_TERM_LINK = re.compile(r'<a class="term" href="#([^"]*)">([^<]*)</a>')


def prose(text: str) -> str:
    """Return a sentence, escaped, with what belongs into a job script or shell set as code."""
    return _CODE.sub(lambda found: f"<code>{found[1] or found[2]}</code>", escape(text))


def with_terms(text: str) -> str:
    """Return what `prose` does of a sentence of hpcpace, with links from its terms to the glossary."""
    made, at = [], 0
    for found in _CODE.finditer(text):
        made += [_linked(text[at : found.start()]), prose(found[0])]
        at = found.end()
    return "".join([*made, _linked(text[at:])])


def _linked(text: str) -> str:
    made, at = [], 0
    for begin, end, term in terms_in(text):
        made += [escape(text[at:begin]), f'<a class="term" href="#{term.anchor}">{escape(text[begin:end])}</a>']
        at = end
    return "".join([*made, escape(text[at:])])


def first_terms(content: str) -> str:
    """Return HTML in which each term is a link where it comes up first, and plain afterwards."""
    seen: set[str] = set()

    def kept(found: re.Match[str]) -> str:
        is_first = found[1] not in seen
        seen.add(found[1])
        return found[0] if is_first else found[2]

    return _TERM_LINK.sub(kept, content)


def section(title: str, lead: str, *content: str) -> str:
    """Return a section; empty where it has no content. The lead is a sentence below its title."""
    inside = "\n".join(part for part in content if part)
    if not inside:
        return ""
    remark = f'<p class="lead">{with_terms(lead)}</p>\n' if lead else ""
    head = f'<h2 id="{anchor(title)}">{escape(title)}</h2>'
    return f'<section aria-labelledby="{anchor(title)}">\n{head}\n{first_terms(remark + inside)}\n</section>'


def anchor(title: str) -> str:
    """Return the id of a heading."""
    return "about-" + re.sub(r"[^a-z]+", "-", title.lower())


def contents(titles: Sequence[str]) -> str:
    """Return links to the headings."""
    links = "".join(f'<a href="#{anchor(title)}">{escape(title)}</a>' for title in titles)
    return f'<nav aria-label="Contents">{links}</nav>'


def side_by_side(left: str, right: str, *, is_even: bool = False) -> str:
    """Return two pieces side by side if the page is wide; the left one is twice as wide unless even."""
    if not (left and right):
        return left or right
    return f'<div class="pair{" even" if is_even else ""}">{left}{right}</div>'


def figure(plot: Plot, title: str = "") -> str:
    """Return the place of a plot with its caption and legend; page.js draws into it."""
    head = f"<h3>{escape(title)}</h3>\n" if title else ""
    return (
        f"<figure>\n{head}<figcaption>{with_terms(plot.caption)}</figcaption>\n{legend(plot.legend)}"
        f'<div class="plot" id="{plot.name}" role="img" aria-label="{escape(plot.label)}" '
        f'style="height:{plot.height_px}px"></div>\n</figure>'
    )


def legend(entries: Sequence[tuple[str, str, str]], values: Sequence[str] = ()) -> str:
    """Return a legend of (name, colour, pattern), with a value after each name if values are given."""
    shown = [f" <b>{escape(value)}</b>" for value in values] or [""] * len(entries)
    items = [
        f'<li><i class="{"hatched" if pattern else "plain"}" style="background-color:var(--{color[1:]})"></i>'
        f"{with_terms(name)}{value}</li>"
        for (name, color, pattern), value in zip(entries, shown, strict=True)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>\n' if items else ""


def stacked_bar(entries: Sequence[tuple[str, str, str]], shares: Sequence[float]) -> str:
    """Return shares of a whole as one bar, with a legend that has their figures.

    Args:
        entries: name, colour and pattern of each.
        shares: of each; together 1 at most.
    """
    values = [percent(share) for share in shares]
    label = ", ".join(f"{name} {value}" for (name, _, _), value in zip(entries, values, strict=True))
    spans = "".join(
        f'<span class="{"hatched" if pattern else "plain"}" '
        f'style="width:{100 * share:.2f}%;background-color:var(--{color[1:]})"></span>'
        for (_, color, pattern), share in zip(entries, shares, strict=True)
    )
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{spans}</div>\n{legend(entries, values)}'


About = tuple[str, str]
"""What a row is about, so that the reader can choose it: a rank or a range, as `6-7`, and hosts with blanks between."""


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text: Sequence[int] = (0,),
    about: Sequence[About] = (),
    commands: int = -1,
) -> str:
    """Return a table that scrolls by itself where it is wider than the page; empty without rows.

    On a phone each row is a card (page.css), which takes the names of the columns from the table's style.

    Args:
        caption: what it shows.
        head: names of the columns.
        rows: their cells.
        text: the columns that are text; the others are numbers.
        about: what each row is about; nothing if empty.
        commands: the column of lines to copy into a shell or job script, -1 without one.
    """
    if not rows:
        return ""
    classes = [' class="text"' if column in text else "" for column in range(len(head))]
    titles = "".join(f'<th scope="col"{kind}>{with_terms(name)}</th>' for name, kind in zip(head, classes, strict=True))
    kinds = [' class="text command"' if column == commands else kind for column, kind in enumerate(classes)]
    labels = ";".join(f"--head-{column}:{_css_string(name)}" for column, name in enumerate(head, 1))
    body = "\n".join(
        f"<tr{_chosen_by(subject)}>"
        f"{''.join(f'<td{kind}>{prose(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row, subject in zip(rows, about or [("", "")] * len(rows), strict=True)
    )
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f'<table style="{escape(labels)}">\n'
        f"<caption>{with_terms(caption)}</caption>\n<thead><tr>{titles}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _chosen_by(about: About) -> str:
    ranks, hosts = about
    return f' data-ranks="{escape(ranks)}"' * bool(ranks) + f' data-hosts="{escape(hosts)}"' * bool(hosts)


def _css_string(text: str) -> str:
    quoted = printable(text).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"


def notes(lines: Sequence[str], *, has_terms: bool = True) -> str:
    """Return sentences as a list; empty without any. Terms link to the glossary unless they mean something else."""
    shown = with_terms if has_terms else prose
    return f'<ul class="notes">{"".join(f"<li>{shown(line)}</li>" for line in lines)}</ul>' if lines else ""


def facts(pairs: Sequence[tuple[str, str]], kind: str = "facts") -> str:
    """Return names and values, without those whose value is empty."""
    inside = "".join(f"<div><dt>{with_terms(name)}</dt><dd>{prose(value)}</dd></div>" for name, value in pairs if value)
    return f'<dl class="{kind}">{inside}</dl>' if inside else ""


def warning(text: str, label: str = "Warning") -> str:
    """Return a sentence that must not be missed; empty without one."""
    return f'<p class="warning"><b>{escape(label)}:</b> {prose(text)}</p>' if text else ""


def terms() -> str:
    """Return the glossary, which the terms of the page link to."""
    entries = "\n".join(
        f'<dt id="{term.anchor}" tabindex="-1">{escape(term.name)}</dt><dd>{escape(term.meaning)}</dd>'
        for term in GLOSSARY
    )
    return f'<dl class="glossary">\n{entries}\n</dl>'
