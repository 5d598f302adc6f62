"""`hpcpace help TOPIC`: pages of the guide, their sections, and the terms of a report, without a network.

A wheel has the pages in hpcpace/guide, where setup.py puts them; a checkout has them in docs.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import text_console
from hpcpace.core.errors import UsageError
from hpcpace.report.glossary import GLOSSARY

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "guide", _PACKAGE.parent / "docs")
_MAX_NEAR = 5
_HEADING = re.compile(r"^(#+) +(.+?)$", re.MULTILINE)
_MARKS = re.compile(r"[`\[\]:]")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Return the text of each page by its name, such as `slurm` or `results/attach`; nothing without a guide."""
    folder = next((folder for folder in _FOLDERS if (folder / "diagnosis.md").is_file()), None)
    if folder is None:
        return {}
    paths = {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.md"))}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if name != "README"}


def topics(guide: dict[str, str]) -> dict[str, list[str]]:
    """Return the Markdown of each topic in lower case: pages, terms and sections, of which several may share a name.

    Args:
        guide: as `pages` returns it.
    """
    found: dict[str, list[str]] = {}
    for term in GLOSSARY:
        found.setdefault(term.name.lower(), []).append(f"# {term.name}\n{term.meaning}")
    for name, text in guide.items():
        for title, section in _sections(text) if name != "modules" else ():
            found.setdefault(title, []).append(section)
    return found | {name: [text] for name, text in guide.items()}


def _sections(text: str) -> list[tuple[str, str]]:
    """Return the sections of a page below its title, each with its heading in lower case and what is below it."""
    hidden = _FENCE.sub(lambda fence: re.sub("#", " ", fence[0]), text)  # a comment of a shell is no heading
    headings = list(_HEADING.finditer(hidden))
    sections = []
    for place, heading in enumerate(headings):
        level = len(heading[1])
        later = (other.start() for other in headings[place + 1 :] if len(other[1]) <= level)
        if level > 1:
            title = _MARKS.sub("", heading[2]).removeprefix("hpcpace ").lower()
            sections.append((title, text[heading.start() : next(later, len(text))]))
    return sections


@click.command(cls=Command)
@click.argument("words", metavar="[TOPIC]", nargs=-1)
def command(words: tuple[str, ...]) -> None:
    """Show a page or a section of the guide, or what a term of a report means.

    TOPIC is a name such as attach, slurm, exposed or persistent straggler. Without TOPIC it lists the pages. For
    the options of a command, see hpcpace COMMAND --help.
    """
    guide = pages()
    topic = _MARKS.sub("", " ".join(words)).lower().removesuffix(".md").removeprefix("docs/")
    if topic:
        _show(_texts_of(topic, topics(guide)))
        return
    if not guide:
        raise UsageError("this installation has no guide: install a wheel or a checkout; terms of reports are known")
    titles = {name: _HEADING.search(text) for name, text in guide.items()}
    rows = [f"| {name} | {title[2]} |" for name, title in titles.items() if title is not None]
    _show(["\n".join(["| topic | page |", "|---|---|", *rows])])


def _texts_of(topic: str, known: dict[str, list[str]]) -> list[str]:
    begun = [topic] if topic in known else [name for name in known if name.startswith(f"{topic} ")]
    if len(begun) == 1:  # the whole name, or its first words: the headings of rules begin with their numbers
        return known[begun[0]]
    near = sorted((name for name in known if topic in name), key=len) or _mentioning(topic, known)
    near = near or difflib.get_close_matches(topic, known, n=_MAX_NEAR)
    advice = f"try {', '.join(near[:_MAX_NEAR])}" if near else "`hpcpace help` lists the pages"
    raise UsageError(f"no topic {topic!r} in the guide: {advice}")


def _mentioning(topic: str, known: dict[str, list[str]]) -> list[str]:
    """Return the topics whose text has that word, the one that has it most often first."""
    word = re.compile(rf"\b{re.escape(topic)}\b", re.IGNORECASE)
    times = {name: sum(len(word.findall(text)) for text in texts) for name, texts in known.items()}
    return sorted((name for name, num in times.items() if num), key=lambda name: -times[name])


def _show(texts: list[str]) -> None:
    """Print Markdown, page by page on a terminal."""
    from rich.markdown import Markdown

    console = text_console()
    text = re.sub(r"<!-- .*? -->\n?", "", "\n\n".join(texts))
    with console.capture() as capture:
        console.print(Markdown(text, hyperlinks=False))
    shown = "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
    click.echo_via_pager(shown) if sys.stdout.isatty() else click.echo(shown, nl=False)
