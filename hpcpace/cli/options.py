"""Options of commands, with defaults and bounds in the help, and their problems and progress.

Click has no headings, puts defaults in words into parentheses, and lets nan through every bound. cloup has headings
alone, needs a package more and doubles the time in which click loads (27 to 54 ms), so this stays ours.
"""

from __future__ import annotations

import atexit
import gc
import io
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcpace.core.config import MAX, section_class
from hpcpace.core.detail import parse_steps
from hpcpace.core.errors import UsageError
from hpcpace.core.files import write_file
from hpcpace.core.text import folded, parse_range, printable

if TYPE_CHECKING:
    from rich.console import Console

    from hpcpace.frames.run import Run
    from hpcpace.report.document import Document

MIN_WIDTH, MAX_WIDTH = 80, 100
_OBJECTS_PER_COLLECTION = 100_000
"""Speed: Python's own 700 are reached a hundred times while a report loads."""


Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Whole(click.IntRange):
    """A whole number within bounds, both of them included."""

    name = "integer"

    def __init__(self, least: int, most: int = MAX) -> None:
        super().__init__(least, most)


class Real(click.FloatRange):
    """A number within bounds, both of them included, unless `is_open`: then the lower one is not."""

    name = "number"

    def __init__(self, least: float, most: float = MAX, *, is_open: bool = False) -> None:
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
        if kind.max < MAX:
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


memory = option(
    "--memory", metavar="SIZE", help="Use at most this much memory for the tables of a run.", show_default="2GiB"
)
config_file = option(
    "--config", "config_file", type=PATH, help="Read settings from this TOML file.", show_default="none"
)


def setting(
    section: str, name: str, words: str, default: str = "", *, flag: str = "", **attributes: Any
) -> Callable[[Decorated], Decorated]:
    """Return an option that sets one setting, within its bounds; its help shows the default of that setting.

    Args:
        section: one of `hpcpace.core.config.DECLARED_BY`.
        name: key of the setting.
        words: help.
        default: words for a default that depends on other things.
        flag: name of the option where it is not that of the setting.
        attributes: of the option.
    """
    flag = flag or f"--{name.replace('_', '-')}"
    of_section = section_class(section)()
    value, declared = getattr(of_section, name), of_section.__dataclass_fields__[name]
    if "bounds" in declared.metadata and "type" not in attributes:
        least, most = of_section.bounds_of(declared)
        is_whole = str(declared.type).startswith("int")
        attributes["type"] = Whole(int(least), int(most)) if is_whole else Real(least, most)
    if isinstance(value, bool):
        attributes["default"], default = None, "on" if value else "off"
        flag = f"{flag}/--no-{flag[2:]}"
    shown = default or (f"{value:g}" if isinstance(value, float) else str(value))
    return option(flag, name, help=words, show_default=shown, **attributes)


def settings(section: str, **words: str | tuple[str, str]) -> Iterator[Callable[[Any], Any]]:
    """Yield options that set settings of a section: the help of each by its key, also with words for its default."""
    for name, text in words.items():
        yield setting(section, name, *((text,) if isinstance(text, str) else text))


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


def numbers(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Read whole numbers such as `1,2,4`; an option that is not given has none."""
    if text is None:
        return ()
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        raise click.BadParameter(f"{printable(text)!r}: give whole numbers separated by commas") from None
    if any(not 1 <= number <= MAX for number in found):
        raise click.BadParameter(f"{printable(text)!r}: every number must be from 1 to {MAX}")
    return found


def rank_set(_: click.Context, __: click.Parameter, value: str | None) -> frozenset[int] | None:
    """Return the ranks of a list; for the `callback` of an option."""
    if value is None:
        return None
    ranks: set[int] = set()
    for item in value.split(","):
        try:
            some = parse_range(item.strip())
        except ValueError:
            some = range(0)
        if not 0 < some.stop <= _MAX_RANK + 1:
            raise click.BadParameter(f"{item!r} is not a rank or a range of ranks: write a list like 0,4-7")
        ranks.update(some)
    return frozenset(ranks)


def text_console(*, log_width: int | None = None, max_width: int | None = None) -> Console:
    """Return a console for names from files: as wide as the terminal within bounds, and of a fixed width in logs.

    A fixed width keeps two reports in logs comparable line by line.

    Args:
        log_width: width in a log, `MAX_WIDTH` if not given.
        max_width: bound on the width of a terminal, likewise.
    """
    from rich.console import Console

    columns = _terminal_columns() if sys.stdout.isatty() else log_width or MAX_WIDTH
    if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII, and names of hosts and folders more
        sys.stdout.reconfigure(errors="backslashreplace")
    # Without markup, since names of hosts come from files and may have brackets.
    return Console(
        width=min(max(columns, MIN_WIDTH), max_width or MAX_WIDTH), highlight=False, emoji=False, markup=False
    )


def fitted(sentence: str) -> str:
    """Return a sentence in lines as wide as the terminal; in a log it is one line."""
    if not sys.stdout.isatty():
        return sentence
    columns = min(max(_terminal_columns(), MIN_WIDTH), MAX_WIDTH)
    return textwrap.fill(sentence, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _terminal_columns() -> int:
    from shutil import get_terminal_size

    return get_terminal_size().columns


def collect_less_garbage() -> None:
    """Search for cycles of garbage less often, and not at the end: for a command that loads much and ends soon.

    What is loaded stays, and to look through it again and again took a third of a small report.
    """
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    atexit.register(gc.freeze)


@contextmanager
def opened_run(
    path: Path, number: int | None, *, memory: str | None, topology: Path | None = None, include_warmup: bool = False
) -> Iterator[Run]:
    """Open a run as commands read it, with its progress; what it lacks is left to the caller to say.

    Args:
        path: of the run, an attempt in it, or its report.
        number: of the attempt; the last one if None.
        memory, topology, include_warmup: as options of `hpcpace report`.
    """
    from hpcpace.core.environment import process_environ
    from hpcpace.core.rundir import open_named_run
    from hpcpace.core.settings import load_config

    collect_less_garbage()
    named = open_named_run(path)
    attempt = named.chosen_attempt(number)
    warn_of_old_hdf5(named.directory.path)
    given = {"memory": memory, "topology": topology and str(topology)}
    settings = load_config(file=None, environ=process_environ(), options={"report": given})

    from hpcpace.diagnosis.measure import Selection
    from hpcpace.frames.run import open_for_command

    with shown_progress() as stage:
        selection = Selection(include_warmup=include_warmup)
        yield open_for_command(named.directory, attempt, selection, settings, stage)


def write_target(path: Path, content: str | bytes, name: str) -> None:
    """Write the file that an option names.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_file(path, content)
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror}): name another file with {name}") from error


def show(
    document: Document,
    data: str,
    *,
    as_json: bool,
    is_verbose: bool,
    written: Path | None = None,
    console: Console | None = None,
) -> None:
    """Print a result: its data, which are JSON, or else its text and the file that was written from it."""
    if as_json:
        click.echo(data, nl=False)
        return
    from hpcpace.report.terminal import print_document

    print_document(console or text_console(), document, is_verbose=is_verbose)
    if written is not None:
        click.echo(f"\nwritten: {printable(str(written))}")


def warn(problems: Iterable[str], *, rest: str = "--verbose", is_verbose: bool) -> None:
    """Print problems in few lines, or one by one; arguments as of `hpcpace.core.text.folded`."""
    for line in folded(problems, rest=rest, is_verbose=is_verbose):
        click.echo(f"hpcpace: warning: {line}", err=True)


def warn_of_old_hdf5(path: Path) -> None:
    """Warn if traces of another user are about to be read by an HDF5 with known vulnerabilities."""
    import h5py

    from hpcpace.trace.hdf5_files import MIN_HDF5

    try:
        owner = path.stat().st_uid
    except OSError:
        return  # whoever opens it says so
    if owner != os.geteuid() and h5py.version.hdf5_version_tuple < MIN_HDF5:
        least = ".".join(map(str, MIN_HDF5))
        known = f"HDF5 {h5py.version.hdf5_version} has known vulnerabilities"
        advice = f"update h5py to one with HDF5 {least} or newer"
        warn([f"{path} belongs to another user (uid {owner}), and {known}: {advice}"], is_verbose=False)


Tell = Callable[[int, int], None]
"""Takes the number done and the total."""
_LINE_EVERY_S = 30.0
_MAX_RANK = 999_999


@contextmanager
def shown_progress(
    *, clock_s: Callable[[], float] = time.monotonic, is_shown: bool = True, redraws_alone: bool = True
) -> Iterator[Callable[[str], Tell]]:
    """Yield a function that begins a stage: it takes the name of the stage and returns a `Tell`.

    Args:
        clock_s: a monotonic clock, in seconds.
        is_shown: whether anything is shown, as by only one of several processes.
        redraws_alone: whether a thread redraws the bar ten times a second; otherwise only being told draws it, so that
            it takes no time in between from what is measured.
    """
    if not is_shown:
        yield lambda _: lambda _done, _total: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(clock_s)
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True, auto_refresh=redraws_alone) as bar:

        def begin(name: str) -> Tell:
            task = bar.add_task(name, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total, refresh=not redraws_alone)

        yield begin


def _lines(clock_s: Callable[[], float]) -> Callable[[str], Tell]:
    """Return a function that begins a stage and prints a line every half minute; a short command prints none."""
    last_s = clock_s()

    def begin(name: str) -> Tell:
        def tell(done: int, total: int) -> None:
            nonlocal last_s
            now_s = clock_s()
            if now_s - last_s >= _LINE_EVERY_S:
                last_s = now_s
                click.echo(f"hpcpace: {name}: {done} of {total}", err=True)

        return tell

    return begin
