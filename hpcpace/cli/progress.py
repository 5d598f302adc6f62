"""The progress of a long command on stderr: a bar on a terminal, a line every half minute in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress

Tell = Callable[[int, int], None]
"""Takes the number done and the total."""
_LINE_EVERY_S = 30.0


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
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(clock_s)
        return
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
