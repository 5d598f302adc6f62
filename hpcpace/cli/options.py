"""Options of commands: under headings, each with its default and its bounds in the help, and numbers within bounds.

Click has no headings, puts defaults in words into parentheses, and lets nan through every bound. cloup has headings
alone, needs a package more and doubles the time in which click loads (27 to 54 ms), so this stays ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from hpcpace.config import BOUNDS, MOST, Config
from hpcpace.core.detail import parse_steps

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Whole(click.IntRange):
    """A whole number within bounds, both of them included."""

    name = "integer"

    def __init__(self, least: int, most: int = MOST) -> None:
        super().__init__(least, most)


class Real(click.FloatRange):
    """A number within bounds, both of them included, unless `is_open`: then the lower one is not."""

    name = "number"

    def __init__(self, least: float, most: float = MOST, *, is_open: bool = False) -> None:
        super().__init__(least, most, min_open=is_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; nan is within no bounds."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(
                f"{value} is not in the range {self.min}{'<' if self.min_open else '<='}x<={self.max}.", param, ctx
            )
        return number


PATH: click.Path = click.Path(path_type=Path)


class Option(click.Option):
    """An option whose help ends with its default and its bounds, in brackets.

    Attributes:
        heading: what it stands under in the help.
    """

    heading = ""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        if self.metavar is None and isinstance(self.type, (click.IntRange, click.FloatRange)):
            self.metavar = "N" if isinstance(self.type, click.IntRange) else "X"

    def default_words(self) -> str:
        """Return the default as the help shows it; empty where there is none, as of a switch, which is off."""
        if isinstance(self.show_default, str):
            return self.show_default
        if self.required:
            return "required"
        if self.is_flag or isinstance(self.default, bool):
            return ""
        if isinstance(self.default, float):
            return f"{self.default:g}"
        # Not given, click has a value of its own for it, which is no number and no text.
        return str(self.default) if isinstance(self.default, (int, str)) else ""

    def bounds_words(self) -> str:
        """Return the bounds of a number, without one that only keeps out nonsense; empty for anything else."""
        kind = self.type
        if not isinstance(kind, (click.IntRange, click.FloatRange)) or kind.min is None or kind.max is None:
            return ""
        if kind.max < MOST:
            least = f"above {kind.min:.9g} and at most" if kind.min_open else f"{kind.min:.9g} to"
            return f"{least} {kind.max:.9g}"
        return f"{'above' if kind.min_open else 'at least'} {kind.min:.9g}"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return names and help."""
        record = super().get_help_record(ctx)
        if record is None:
            return None
        default = self.default_words()
        shown = default if default in ("", "required") else f"default: {default}"
        extra = "; ".join(filter(None, (shown, self.bounds_words())))
        return record[0], f"{self.help}  [{extra}]" if extra else str(self.help)


option = partial(click.option, cls=Option)
"""Add an option to a command, as click.option does."""

verbose = option("--verbose", "is_verbose", is_flag=True, help="Show every problem, also many of one kind.")
"""Add the option that shows problems one by one, which are folded otherwise (`hpcpace.core.text`)."""


def setting(
    section: str, name: str, *, flag: str = "", default: str = "", **attributes: Any
) -> Callable[[Decorated], Decorated]:
    """Return an option that sets one setting, within its bounds; its help shows the default of that setting.

    Args:
        section: of hpcpace.config.
        name: key of the setting.
        flag: name of the option where it is not that of the setting.
        default: words for a default that depends on other things.
        attributes: of the option; of its `type`, int and float take the bounds of the setting.
    """
    flag = flag or f"--{name.replace('_', '-')}"
    value = getattr(getattr(Config(), section), name)
    kind = attributes.get("type")
    if kind in (int, float):
        least, most = BOUNDS[section][name]
        attributes["type"] = Whole(int(least), int(most)) if kind is int else Real(least, most)
    if isinstance(value, bool):
        attributes["default"], default = None, "on" if value else "off"
        flag = f"{flag}/--no-{flag[2:]}"
    shown = default or (f"{value:g}" if isinstance(value, float) else str(value))
    return option(flag, name, show_default=shown, **attributes)


def headed(heading: str, *options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds options to a command, below a heading in its help."""

    def decorate(function: Decorated) -> Decorated:
        for one in reversed(options):
            function = one(function)
            function.__click_params__[-1].heading = heading  # type: ignore[attr-defined]
        return function

    return decorate


def checked_steps(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Refuse what is no list of ranges of steps; for the `callback` of an option."""
    try:
        parse_steps(text or "")
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error
    return text


def step_range(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int | None, int | None] | None:
    """Return the ends of a range of steps, None where one is open; for the `callback` of an option."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{0,9}):(\d{0,9})", value)
    if not found:
        raise click.BadParameter(f"{value!r} is not a range of steps: write A:B, like 10:50, 10: or :50")
    first, stop = (int(part) if part else None for part in found.groups())
    if first is not None and stop is not None and stop <= first:
        raise click.BadParameter(f"{value!r} is an empty range: B must be larger than A")
    return first, stop


def rank_set(_: click.Context, __: click.Parameter, value: str | None) -> frozenset[int] | None:
    """Return the ranks of a list; for the `callback` of an option."""
    if value is None:
        return None
    ranks: set[int] = set()
    for item in value.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", item)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise click.BadParameter(f"{item!r} is not a rank or a range of ranks: write a list like 0,4-7")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
