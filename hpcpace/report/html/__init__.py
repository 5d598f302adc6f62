"""Documents as one HTML file that opens without a network, with styles, scripts, plots and data to download.

Nothing in it can load anything: a content security policy allows only the scripts written here, by their hashes. All
text is made printable and escaped by the templates, so that the name of a host is never more than a name.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Container
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from hpcpace.core.text import folded, percent, printable
from hpcpace.report.document import DIRECTIVE, PAGE, Block, Document, Notes, Plot, Section, Table, cell, shown_on
from hpcpace.report.glossary import GLOSSARY, terms_in

# Only writing a page needs the library of templates.
if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_FOLDER = files("hpcpace.report.html")
_SCRIPTS = ("base.js", "plots.js", "tables.js", "controls.js")
_CODE = re.compile(rf"`([^`]+)`|({DIRECTIVE.pattern})")
_TERM_LINK = re.compile(r'<a class="term" href="#([^"]*)">([^<]*)</a>')
_LONG_HEADLINE = 80
"""Letters beyond which a headline is set smaller."""
_GZIP_LEVEL = 6


def html_page(document: Document) -> str:
    """Return a document as a page; the same document gives the same page."""
    from markupsafe import Markup

    library = plot_library() if document.plots() else compressed("")
    inflate, script = _asset("fflate.umd.js"), _script()
    sections = sorted(document.on(PAGE), key=lambda section: section.is_reference)
    written = {section.title: _written(section, document) for section in sections}
    data = {plot.name: _description(plot) for plot in document.plots()}
    return (
        _environment()
        .get_template("page.html")
        .render(
            document=document,
            sections=written,
            titles=[*written, "Terms"] if document.has_glossary else [*written],
            glossary=GLOSSARY if document.has_glossary else (),
            verdict=_verdict(document, written) if document.verdict is not None else "",
            hashes=Markup(
                " ".join(script_hash(code) for code in (unpacked(library), inflate.encode(), script.encode()))
            ),
            style=Markup(_asset("page.css")),
            dark=Markup(_asset("dark.css")),
            plots=Markup(_json(data)),
            summary=embedded(compressed(document.data)),
            licenses=Markup("\n".join(_asset(f"{name}-LICENSE") for name in ("plotly", "fflate"))),
            library=embedded(library),
            inflate=Markup(inflate),
            script=Markup(script),
        )
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    # Whatever is written is printable before it is escaped; what is HTML already stays as it is.
    made = Environment(
        loader=FunctionLoader(lambda name: _FOLDER.joinpath("templates", name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    made.filters |= {"prose": _prose, "terms": _with_terms, "css": _css_string, "percent": percent, "cell": cell}
    made.filters |= {"capital": _capital, "sentence": _sentence, "anchor": anchor, "first_terms": _first_terms}
    return made


def _written(section: Section, document: Document) -> Markup:
    """Return the pieces of a section, in which each term is a link where it comes up first."""
    from markupsafe import Markup

    lead = Markup('<p class="lead">{}</p>\n').format(_with_terms(_sentence(section.lead))) if section.lead else ""
    blocks = [_block(block, section.title, document.rest) for block in section.on(PAGE)]
    return _first_terms(Markup(lead) + Markup("\n").join(blocks), keeps=document.has_glossary)


def _block(block: Block, title: str, rest: str) -> Markup:
    """Return a piece of the section with a title, by the macro of its name."""
    write = getattr(_environment().get_template("blocks.html").module, type(block).__name__.lower())
    more: dict[str, Any] = {}
    if isinstance(block, Notes):
        sentences = [sentence for sentence in block.lines if sentence]
        more["lines"] = folded(sentences, rest=rest, is_ranked=block.is_ranked) if block.is_folded else sentences
    elif isinstance(block, Table):
        more |= {"rows": block.shown(PAGE), "caption": _caption(block, title)}
    elif blocks := getattr(block, "blocks", None):
        more["inside"] = [_block(inner, title, rest) for inner in shown_on(PAGE, blocks)]
    made: Markup = write(block, **more)
    return made


def _caption(table: Table, title: str) -> str:
    which = table.cut(PAGE)
    return f"{table.caption or title}, {which}" if which else table.caption or title


def _verdict(document: Document, titles: Container[str]) -> Markup:
    verdict = document.verdict
    assert verdict is not None
    headline = verdict.headline.removeprefix(f"{verdict.tag}: ")
    blocks: Any = _environment().get_template("blocks.html").module
    made: Markup = blocks.verdict(
        verdict,
        lines=[
            (
                name,
                [(line, [title for title in verdict.evidence.get(line, ()) if title in titles]) for line in lines],
            )
            for name, lines in verdict.lines
            if lines
        ],
        headline=headline,
        is_long=len(headline) > _LONG_HEADLINE,
        inside=[_block(block, "", document.rest) for block in shown_on(PAGE, verdict.content)],
    )
    return _first_terms(made, keeps=document.has_glossary)


def anchor(title: str) -> str:
    """Return the id of a heading."""
    return "about-" + re.sub(r"[^a-z]+", "-", title.lower())


def _prose(text: str) -> Markup:
    """Return a sentence, escaped, with what belongs into a job script or shell set as code."""
    from markupsafe import Markup, escape

    made, at = Markup(), 0
    text = printable(text)
    for found in _CODE.finditer(text):
        made += escape(text[at : found.start()]) + Markup("<code>{}</code>").format(found[1] or found[2])
        at = found.end()
    return made + escape(text[at:])


def _with_terms(text: str) -> Markup:
    """Return what `_prose` does of a sentence of hpcpace, with links from its terms to the glossary."""
    from markupsafe import Markup

    made, at = Markup(), 0
    for found in _CODE.finditer(text):
        made += _linked(text[at : found.start()]) + _prose(found[0])
        at = found.end()
    return made + _linked(text[at:])


def _linked(text: str) -> Markup:
    from markupsafe import Markup, escape

    made, at = Markup(), 0
    for begin, end, term in terms_in(text):
        made += escape(printable(text[at:begin]))
        made += Markup('<a class="term" href="#{}">{}</a>').format(term.anchor, printable(text[begin:end]))
        at = end
    return made + escape(printable(text[at:]))


def _first_terms(content: str, *, keeps: bool = True) -> Markup:
    """Return HTML in which each term is a link where it comes up first, and plain afterwards; nowhere unless kept."""
    from markupsafe import Markup

    seen: set[str] = set()

    def kept(found: re.Match[str]) -> str:
        is_first = keeps and found[1] not in seen
        seen.add(found[1])
        return found[0] if is_first else found[2]

    return Markup(_TERM_LINK.sub(kept, content))


def _css_string(text: str) -> str:
    """Return a text as a string of a style sheet."""
    quoted = printable(text).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"


def _capital(text: str) -> str:
    return text if text[:1] in "#`" else text[:1].upper() + text[1:]


def _sentence(text: str) -> str:
    return _capital(text if text.endswith(".") else f"{text}.")


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
