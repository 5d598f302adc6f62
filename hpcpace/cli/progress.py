"""How far a long command is: a bar on a terminal, a line from time to time in a log; both on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress

Tell = Callable[[int, int], None]
"""Takes how many of how many are done."""
_LINE_EVERY_S = 30.0


@contextmanager
def shown_progress(*, clock_s: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], Tell]]:
    """Yield what begins a stage: it takes the stage's name and returns what is told how far it is.

    Args:
        clock_s: seconds, from any begin.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(clock_s)
        return
    with Progress(console=console, transient=True) as bar:

        def begin(name: str) -> Tell:
            task = bar.add_task(name, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        yield begin


def _lines(clock_s: Callable[[], float]) -> Callable[[str], Tell]:
    """Return what begins a stage whose progress is a line every half minute; a short command writes none."""
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
