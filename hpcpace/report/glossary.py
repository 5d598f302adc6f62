"""The terms of a report, each in a few sentences: the page links to them, and docs/measuring.md has the same."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


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
    for entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["term"]
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
