"""`hpcpace watch RUN`: what a run does now, on a terminal, as JSON or as metrics, from the files being written."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.live import Live

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, Real, Whole, headed, option, text_console
from hpcpace.core.environment import process_redaction
from hpcpace.core.errors import EXIT_CANNOT_TELL, EXIT_FAILED, EXIT_OK, EXIT_WARNING, TraceError, UsageError
from hpcpace.core.rundir import check_target, open_named_run
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.report.terminal import Shown, print_document
from hpcpace.watch.state import Doing, JobState
from hpcpace.watch.view import Choice, Keyboard, after_key, keyboard, page
from hpcpace.watch.watcher import Watcher

if TYPE_CHECKING:
    from hpcpace.watch.export import Exporter

_MAX_WIDTH = 120
_REDRAW_S = 1.0
_VERDICT_S = 60.0
_OVER = frozenset({Doing.FINISHED, Doing.FAILED, Doing.ENDED, Doing.REMOVED})
_BAD = frozenset({Doing.HANGS, Doing.FAILED, Doing.SILENT, Doing.REMOVED})


@click.command(cls=Command)
@click.argument("run", type=PATH)
@headed(
    "What to watch",
    option(
        "--attempt",
        "number",
        type=Whole(0),
        help="Watch this attempt of the run.",
        show_default="the newest, also once another begins",
    ),
    option("--interval", "interval_s", type=Real(0.1, 3600), default=1.0, help="Look every X seconds."),
    option(
        "--hang-s",
        type=Real(0.1, 86400),
        default=DiagnosisConfig().hang_s,
        help="Name who holds up whom once a step lasts X seconds, and at least 20 usual steps.",
    ),
)
@headed(
    "Output",
    option("--once", is_flag=True, help="Look once, print what there is, and end."),
    option("--json", "as_json", is_flag=True, help="Print one line of JSON for each look."),
    option(
        "--prometheus",
        type=PATH,
        metavar="FILE",
        help="Write metrics to FILE at each look, and print nothing.",
        show_default="no file",
    ),
    option(
        "--listen",
        metavar="ADDRESS",
        help="Give metrics at http://ADDRESS/metrics, like :9464 or n1:9464.",
        show_default="no server",
    ),
)
def command(
    run: Path,
    number: int | None,
    interval_s: float,
    hang_s: float,
    once: bool,
    as_json: bool,
    prometheus: Path | None,
    listen: str | None,
) -> None:
    """Show what RUN does now: steps, slow ranks, waits, network, and who is missing when it hangs.

    It reads the files that the ranks are writing, and may run on a login node. RUN may not have started yet, and a
    requeue is followed. Keys: s sorts, enter opens a rank, q quits.

    Exit codes: 0 fine; 1 ranks are silent or without a file, or rows were dropped; 2 bad input; 3 nothing to see yet; 4
    the run hangs or has failed.
    """
    path, named = _place(run)
    if named is not None and number not in (None, named):
        raise UsageError(f"{run} is attempt {named}, and --attempt is {number}: give one of them")
    check_target(prometheus, [run], "--prometheus")
    exporter = _exporter(prometheus, listen)
    if exporter is not None and as_json:
        raise UsageError("--json prints states, and --prometheus and --listen export metrics: give one of them")
    watcher = Watcher(path, number=named if number is None else number, interval_s=interval_s, hang_s=hang_s)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
    state: JobState | None
    with exporter or nullcontext(), _ended_by_signals():
        if once:
            state = watcher.look(wait_s=_VERDICT_S)
            _show(state, as_json=as_json, exporter=exporter)
        else:
            watcher.start()
            try:
                state = _watch(watcher, interval_s, as_json=as_json, exporter=exporter)
            finally:
                watcher.close()
    raise SystemExit(exit_code(state))


def exit_code(state: JobState | None) -> int:
    """Return the exit code for a state; None: nothing was seen."""
    if state is None or state.doing in (Doing.NOT_STARTED, Doing.STARTING):
        return EXIT_CANNOT_TELL
    if state.doing in _BAD:
        return EXIT_FAILED
    return EXIT_WARNING if state.silent or state.missing or state.num_dropped else EXIT_OK


def _place(run: Path) -> tuple[Path, int | None]:
    """Return the run that a path means and the attempt in it that it names; of a run to come, the path.

    Raises:
        TraceError: there is no run, and none can appear: the folder that it would be in does not exist.
    """
    try:
        named = open_named_run(run)
    except TraceError:
        can_appear = not run.exists() or (run.is_dir() and not any(run.glob("*/attempt-*")))
        if not can_appear or not run.absolute().parent.is_dir():
            raise
        return run, None
    return named.directory.path, named.attempt


def _exporter(prometheus: Path | None, listen: str | None) -> Exporter | None:
    if prometheus is None and listen is None:
        return None
    from hpcpace.watch.export import Exporter

    return Exporter(file=prometheus, address=listen)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that terminal and files are left in order."""

    def end(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(watcher: Watcher, interval_s: float, *, as_json: bool, exporter: Exporter | None) -> JobState | None:
    """Show the run until the user ends it, or, where there is no terminal, until the run has ended."""
    is_shown = exporter is None and not as_json and sys.stdout.isatty() and sys.stdin.isatty()
    state = None
    with suppress(KeyboardInterrupt, BrokenPipeError):
        if is_shown:
            return _show_live(watcher)
        after_s = -1.0
        while True:
            seen = watcher.seen(after_s=after_s, timeout_s=interval_s)
            if seen is None:
                continue
            state, after_s = seen.state, seen.at_s
            _show(state, as_json=as_json, exporter=exporter)
            if exporter is None and state.doing in _OVER:
                break
    return state


def _show(state: JobState, *, as_json: bool, exporter: Exporter | None) -> None:
    if exporter is not None:
        exporter.export(state)
    elif as_json:
        content = process_redaction().content(state.to_json())
        click.echo(json.dumps(content))
    else:
        console = text_console(log_width=_MAX_WIDTH, max_width=_MAX_WIDTH)
        print_document(console, page(state, Choice(), width=console.width, height=None))


def _show_live(watcher: Watcher) -> JobState | None:
    """Show the run on the whole terminal until a key quits."""
    console = Console(highlight=False, emoji=False, markup=False)
    choice: Choice | None = Choice()
    state = None
    with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while choice is not None:
            seen = watcher.seen(timeout_s=0.0 if state is not None else 0.2)
            if seen is not None:
                state = seen.state
                size = console.size
                view = page(state, choice, width=size.width, height=size.height, age_s=watcher.age_s, has_keys=True)
                live.update(Shown(view), refresh=True)
            choice = _pressed(keys, choice, watcher, 0 if state is None else len(state.ranks))
    return state


def _pressed(keys: Keyboard, choice: Choice, watcher: Watcher, num_ranks: int) -> Choice | None:
    """Return what to show after keys, or after a while without any."""
    after: Choice | None = choice
    for key in keys.keys(min(_REDRAW_S, watcher.interval_s)):
        after = after_key(after, key, num_ranks) if after is not None else None
    return after
