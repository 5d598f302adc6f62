"""The command line of an experiment, which the docstring of its module describes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

_OPTION = re.compile(r" +([\w-]+)(?: ([\w|-]+)(\.\.\.|\?)?)?(?:  +(.*?))?(?: ?\[(.*)\])?")
_TYPES: Mapping[str, Callable[[str], Any]] = {"N": int, "X": float, "PATH": Path}


def command_line(doc: str | None, **choices: Iterable[Any]) -> argparse.Namespace:
    """Return the options of the command line that the docstring of a module has behind `Options:`, one a line.

    `--name N...  what it is for [default]`: N is an integer, X a number, PATH a path, a|b one of these words, and any
    other word a text; `...` takes any number, `?` one or, for the default, none. What has no word is a switch, and
    without -- it is no option.

    Args:
        doc: the docstring, of which the rest is the description.
        choices: words that an option may have, by its name, where the docstring cannot list them.
    """
    about, _, options = (doc or "").partition("Options:\n")
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for line in options.splitlines():
        found = _OPTION.fullmatch(line)
        assert found is not None, line
        name, word, several, text, default = found.groups()
        text = text and text.replace("%", "%%")
        if word is None and name.startswith("--"):
            parser.add_argument(name, action="store_true", help=text)
            continue
        of = _TYPES.get(word or "", str)
        values = [of(value) for value in default.split()] if default else [None]
        one_of = choices.get(name.lstrip("-").replace("-", "_"), word.split("|") if word and "|" in word else None)
        more: dict[str, Any] = {"nargs": several.replace("...", "*")} if several else {}
        usual = values if several == "..." and default else values[0]
        if several == "?" and name.startswith("--"):
            usual, more["const"] = None, usual
        said = f"{text or ''} (default {default})" if default else text
        parser.add_argument(name, type=of, default=usual, choices=one_of, help=said, metavar=word, **more)
    return parser.parse_args()
