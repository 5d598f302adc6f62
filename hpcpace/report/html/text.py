"""Pieces of HTML that the sections of the report are made of; every one escapes the text that it is given."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from hpcpace.quoting import printable
from hpcpace.report.html.figure import Plot
from hpcpace.report.words.directive import DIRECTIVE
from hpcpace.wording import percent


def escape(text: str) -> str:
    """Return text from a file so that a browser shows it as it is, control characters and tags included."""
    return html.escape(printable(text))


def prose(text: str) -> str:
    """Return a sentence, escaped, with what belongs into a job script or shell set as code."""
    return re.sub(
        rf"`([^`]+)`|({DIRECTIVE.pattern})", lambda found: f"<code>{found[1] or found[2]}</code>", escape(text)
    )


def section(title: str, lead: str, *content: str) -> str:
    """Return a section; empty where it has no content. The lead is a sentence below its title."""
    inside = "\n".join(part for part in content if part)
    if not inside:
        return ""
    remark = f'<p class="lead">{prose(lead)}</p>\n' if lead else ""
    head = f'<h2 id="{anchor(title)}">{escape(title)}</h2>'
    return f'<section aria-labelledby="{anchor(title)}">\n{head}\n{remark}{inside}\n</section>'


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
        f"<figure>\n{head}<figcaption>{escape(plot.caption)}</figcaption>\n{legend(plot.legend)}"
        f'<div class="plot" id="{plot.name}" role="img" aria-label="{escape(plot.label)}" '
        f'style="height:{plot.height_px}px"></div>\n</figure>'
    )


def legend(entries: Sequence[tuple[str, str, str]], values: Sequence[str] = ()) -> str:
    """Return a legend of (name, colour, pattern), with a value after each name if values are given."""
    shown = [f" <b>{escape(value)}</b>" for value in values] or [""] * len(entries)
    items = [
        f'<li><i class="{"hatched" if pattern else "plain"}" style="background-color:var(--{color[1:]})"></i>'
        f"{escape(name)}{value}</li>"
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


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,)) -> str:
    """Return a table that scrolls by itself where it is wider than the page; empty without rows.

    Args:
        caption: what it shows.
        head: names of the columns.
        rows: their cells.
        text: the columns that are text; the others are numbers.
    """
    if not rows:
        return ""
    classes = [' class="text"' if column in text else "" for column in range(len(head))]
    titles = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(head, classes, strict=True))
    body = "\n".join(
        f"<tr>{''.join(f'<td{kind}>{prose(cell)}</td>' for cell, kind in zip(row, classes, strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{escape(caption)}"><table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{titles}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def notes(lines: Sequence[str]) -> str:
    """Return sentences as a list; empty without any."""
    return f'<ul class="notes">{"".join(f"<li>{prose(line)}</li>" for line in lines)}</ul>' if lines else ""


def facts(pairs: Sequence[tuple[str, str]], kind: str = "facts") -> str:
    """Return names and values, without those whose value is empty."""
    inside = "".join(f"<div><dt>{escape(name)}</dt><dd>{prose(value)}</dd></div>" for name, value in pairs if value)
    return f'<dl class="{kind}">{inside}</dl>' if inside else ""


def warning(text: str, label: str = "Warning") -> str:
    """Return a sentence that must not be missed; empty without one."""
    return f'<p class="warning"><b>{escape(label)}:</b> {prose(text)}</p>' if text else ""
