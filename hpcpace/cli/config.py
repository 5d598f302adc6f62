"""`hpcpace config` shows settings, `help` the guide and the terms of a report, `completion` completes in shells.

A wheel has the pages in hpcpace/guide, where setup.py puts them; a checkout has them in docs.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, headed, option, text_console
from hpcpace.core.config import DECLARED_BY, Config, section_class
from hpcpace.core.environment import process_environ, process_redaction
from hpcpace.core.errors import UsageError
from hpcpace.core.settings import DEFAULT, Resolved, resolve
from hpcpace.core.text import printable
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.report.document import GLOSSARY

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_HPCPACE_COMPLETE"
"""By this variable the shell asks for completions."""


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print the completion script of SHELL, to be read by its start-up file.

    bash 4.4 or newer, in ~/.bashrc: eval "$(hpcpace completion bash)". zsh, in ~/.zshrc: eval "$(hpcpace completion
    zsh)". fish, in ~/.config/fish/config.fish: hpcpace completion fish | source.
    """
    from hpcpace.cli import cli

    found = get_completion_class(shell)
    assert found is not None  # click has all of them
    click.echo(found(cli, {}, "hpcpace", VARIABLE).source())


_WIDTH = 80
_VALUE_COLUMN, _ORIGIN_COLUMN = 24, 44
_NOT_SET = "-"
_REQUESTED_NOTE = (
    "trace.enabled is off for jobs that the site traces by itself. `hpcpace trace`, `hpcpace train` and sessions in "
    "scripts record, because their users ask for it."
)


@click.command(cls=Command)
@headed(
    "Where settings come from",
    option("--config", "config_file", type=PATH, help="Read settings from this TOML file, too.", show_default="none"),
    option(
        "--site-file",
        type=PATH,
        help="Try this file as that of the site.",
        show_default="HPCPACE_SITE_FILE, else /etc/hpcpace.toml",
    ),
)
@headed(
    "Output",
    option("--changed", is_flag=True, help="Leave out defaults."),
    option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)
@click.argument("names", metavar="[SECTION]...", nargs=-1)
def command(
    config_file: Path | None, site_file: Path | None, changed: bool, as_json: bool, names: tuple[str, ...]
) -> None:
    """Show the settings that hold here, all or those of each SECTION, and where each comes from.

    Inside a Slurm job the rules of the site's roll-out are those that hold for this job. Elsewhere, say which job is
    meant by its variables: SLURM_JOB_PARTITION=gpu SLURM_JOB_ID=7 hpcpace config trace
    """
    chosen = names or tuple(DECLARED_BY)
    for name in chosen:
        if name not in DECLARED_BY:
            raise UsageError(f"no section {name!r}: the sections are {', '.join(DECLARED_BY)}")
    if site_file is not None and not site_file.is_file():
        raise UsageError(f"no site file at {site_file}: name a TOML file")
    resolved = resolve(file=config_file, environ=process_environ(), site_file=site_file)
    content = process_redaction().content(_content(resolved, chosen, changed))
    if as_json:
        click.echo(json.dumps(content, indent=2))
    else:
        for line in _lines(content):
            click.echo(line)


def _content(resolved: Resolved, chosen: tuple[str, ...], changed: bool) -> dict[str, Any]:
    return {
        "site_file": {"path": str(resolved.site_file), "exists": resolved.site_file.exists()},
        "rollout": [
            {"rule": rule.source, "holds": not objection, "reason": objection, "sets": _plain(rule.values)}
            for rule, objection in resolved.rules
        ],
        "settings": {
            section: {
                key: {"value": _plain(value), "source": resolved.origin(section, key)}
                for key, value in _values(resolved.config, section).items()
                if not changed or resolved.origin(section, key) != DEFAULT
            }
            for section in chosen
        },
    }


def _values(config: Config, section: str) -> dict[str, Any]:
    if section == "thresholds":
        table = config.of(ThresholdValues).table()
        return {f"{topic}.{name}": value for topic, values in table.items() for name, value in values.items()}
    return dict(vars(config.of(section_class(section))))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _lines(content: dict[str, Any]) -> Iterator[str]:
    if content["rollout"]:
        yield from _wrapped(f"Roll-out of {content['site_file']['path']}", 0)
    for rule in content["rollout"]:
        number = rule["rule"].partition(" of ")[0]
        verdict = "holds for this job" if rule["holds"] else f"does not hold: {rule['reason']}"
        yield from _wrapped(f"  {number} {verdict}", 4)
    if content["rollout"]:
        yield ""
    if not any(content["settings"].values()):
        yield "all settings have their defaults"
    for section, table in content["settings"].items():
        if table:
            yield f"[{section}]"
        for key, entry in table.items():
            yield from _setting_lines(key, _shown(entry["value"]), entry["source"])
    enabled = content["settings"].get("trace", {}).get("enabled", {"value": True})
    if not enabled["value"] and enabled["source"].endswith(content["site_file"]["path"]):
        yield ""
        yield from _wrapped(_REQUESTED_NOTE, 0)


def _setting_lines(key: str, value: str, source: str) -> Iterator[str]:
    """Yield a setting in columns; a long value or source goes on in lines of its own."""
    head = f"  {key}".ljust(_VALUE_COLUMN - 1) + " " + printable(value)
    if len(head) < _ORIGIN_COLUMN and _ORIGIN_COLUMN + len(source) <= _WIDTH:
        yield head.ljust(_ORIGIN_COLUMN) + printable(source)
        return
    yield from _wrapped(head, _VALUE_COLUMN)
    yield from _wrapped(" " * _VALUE_COLUMN + source, _VALUE_COLUMN)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        printable(text), _WIDTH, subsequent_indent=" " * indent, drop_whitespace=True, break_on_hyphens=False
    )


def _shown(value: Any) -> str:
    if value is None or value in ("", []):
        return _NOT_SET
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)


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
def help_command(words: tuple[str, ...]) -> None:
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
    # The whole name; its first words, as headings of rules begin with their numbers; or its last, as `straggler`.
    found = begun or [name for name in known if name.endswith(f" {topic}")]
    if len(found) == 1:
        return known[found[0]]
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
