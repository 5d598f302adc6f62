"""Documents as one HTML file that opens without a network, with styles, scripts, plots and data to download.

Nothing in it can load anything: a content security policy allows only the scripts written here, by their hashes. All
text is made printable and escaped where it is put between tags, so that the name of a host is never more than a name.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path

from hpcpace.report.document import PAGE, Document, Plot, Section
from hpcpace.report.html.pieces import block_html, verdict_html
from hpcpace.report.html.words import anchor, capital, escaped, first_terms, prose, sentence, terms_of, with_terms

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
