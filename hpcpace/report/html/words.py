"""Texts as HTML: printable, escaped, with code set as code and terms as links to the glossary."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

from hpcpace.core.text import printable
from hpcpace.report.document import DIRECTIVE
from hpcpace.report.glossary import GLOSSARY, Term, terms_in

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
