"""How far a run is: a bar on a terminal, a line every few steps in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpcpace.core.text import format_count, format_duration, nanoseconds

STYLES = ("auto", "bar", "lines", "off")


class ProgressView(Protocol):
    """Shows the progress of a run."""

    def __enter__(self) -> ProgressView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, num_steps: int, *, losses: Sequence[float], samples_per_s: float) -> None:
        """Show that `num_steps` are done; the losses known so far are those of the first steps."""
        ...

    def note(self, text: str) -> None:
        """Show a line that stays."""
        ...


class Bar:
    """A progress bar on stderr."""

    def __init__(self, num_steps: int, *, first_step: int, unit: str, is_forced: bool) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[rate]}} {unit}/s  ETA"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True, force_terminal=is_forced or None),
            # Drawing takes time from the rank that it runs on.
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=first_step, loss="-", rate="-")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, num_steps: int, *, losses: Sequence[float], samples_per_s: float) -> None:
        """Move the bar."""
        text = f"{losses[-1]:.4f}" if losses else "-"
        self._bar.update(self._task, completed=num_steps, loss=text, rate=format_count(samples_per_s))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False)


class Lines:
    """A line on stderr each time that the losses of some steps have become known."""

    def __init__(self, num_steps: int, *, first_step: int, unit: str) -> None:
        self._total, self._first, self._num_shown, self._unit = num_steps, first_step, first_step, unit
        self._begin_s = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, num_steps: int, *, losses: Sequence[float], samples_per_s: float) -> None:
        """Print the line when there is news."""
        if len(losses) == self._num_shown:
            return
        self._num_shown = len(losses)
        left_s = (time.monotonic() - self._begin_s) / (num_steps - self._first) * (self._total - num_steps)
        print(
            f"step {len(losses)}/{self._total}  loss {losses[-1]:.4f}  {format_count(samples_per_s)} {self._unit}/s  "
            f"ETA {format_duration(nanoseconds(left_s))}",
            file=sys.stderr,
            flush=True,
        )

    def note(self, text: str) -> None:
        """Print the line."""
        print(text, file=sys.stderr, flush=True)


class Silence:
    """Shows nothing: the other ranks."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, num_steps: int, *, losses: Sequence[float], samples_per_s: float) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""


def progress_view(style: str, *, num_steps: int, first_step: int = 0, unit: str = "tokens") -> ProgressView:
    """Return the view of a style; `auto` is a bar on a terminal and lines elsewhere.

    Args:
        style: one of STYLES.
        num_steps: steps of the whole training.
        first_step: steps done before.
        unit: what the rate counts.
    """
    if style == "off":
        return Silence()
    if style == "bar" or (style == "auto" and sys.stderr.isatty()):
        return Bar(num_steps, first_step=first_step, unit=unit, is_forced=style == "bar")
    return Lines(num_steps, first_step=first_step, unit=unit)
