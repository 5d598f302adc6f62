"""`hpcpace switch`: change how much of each step a running job records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, checked_steps, option
from hpcpace.detail import DETAILS, Detail, Order, parse_detail, parse_steps
from hpcpace.diagnosis.run_state import is_running, read_start
from hpcpace.errors import TraceError, UsageError
from hpcpace.pace.settings import NO_POLICY
from hpcpace.quoting import printable
from hpcpace.run_search import open_named_run
from hpcpace.rundir import Attempt, RunDirectory
from hpcpace.units import format_duration

_MOST_RECORD_BYTES = 64 << 20
_NS_PER_S = 1_000_000_000


@click.command(cls=Command)
@option(
    "--steps",
    metavar="A:B",
    callback=checked_steps,
    help="Record the steps from A to B - 1 in detail, and of all others their times.",
    show_default="none",
)
@option(
    "--detail",
    type=click.Choice(DETAILS),
    metavar="LEVEL",
    help="Record this: full, collectives (no phases), or steps (no collectives either).",
    show_default="full",
)
@click.argument("run", type=PATH)
@click.argument("state", type=click.Choice(["on", "off"]), required=False)
def command(steps: str | None, detail: str | None, run: Path, state: str | None) -> None:
    """Switch detail of the running job in RUN on or off.

    It writes the order into RUN/switch, which rank 0 reads every two seconds. All ranks follow it from the same step,
    the one after their next comparison of the clocks.
    """
    order = _order(steps, detail, state)
    directory = open_named_run(run).directory
    interval_s = _interval_s(directory)
    try:
        directory.write(directory.switch_file.name, f"{order.text}\n")
    except OSError as error:
        raise TraceError(f"cannot write {directory.switch_file}: {error.strerror}") from error
    within = format_duration(round(interval_s * _NS_PER_S))
    is_over = _is_over(directory.last_attempt())
    who = "no rank runs now, the next attempt follows" if is_over else f"the ranks follow within about {within}"
    click.echo(printable(f"{directory.switch_file}: {order.text}; {who}"))


def _is_over(attempt: Attempt) -> bool:
    """Return whether an attempt has left traces, and no rank of it writes; while they are elsewhere it may run."""
    return bool(attempt.trace_files() or attempt.packs()) and not is_running(attempt, read_start(attempt, []))


def _order(steps: str | None, detail: str | None, state: str | None) -> Order:
    """Return the order that a call means.

    Raises:
        UsageError: it means none, or two.
    """
    level = Detail.FULL if detail is None else parse_detail(detail)
    if state == "off":
        if steps is not None or detail is not None:
            raise UsageError("off takes neither --steps nor --detail: nothing is recorded in detail then")
        return Order(Detail.STEPS)
    if steps is None:
        if state is None and detail is None:
            raise UsageError("nothing to switch: say on, off, --steps A:B or --detail LEVEL")
        return Order(level)
    ranges = parse_steps(steps)
    if len(ranges) > 1:
        raise UsageError(f"--steps {steps} has {len(ranges)} ranges: an order takes one")
    return Order(level, ranges[0])


def _interval_s(directory: RunDirectory) -> float:
    """Return the seconds between two comparisons of the clocks, with which ranks hear of orders.

    Raises:
        UsageError: the run does not follow orders.
        TraceError: it does not say whether it does.
    """
    attempt = directory.last_attempt()
    try:
        with attempt.open() as folder:
            text = folder.read(attempt.run_json.name, most_bytes=_MOST_RECORD_BYTES)
        record = json.loads(text)
        if "imported" in record:
            raise UsageError(f"{directory.path} follows no orders: it is what another tool recorded")
        settings: dict[str, dict[str, Any]] = record["config"]
        interval_s, is_compared = float(settings["clock"]["interval_s"]), settings["clock"]["enabled"]
        is_paced = settings["pace"]["policy"] != NO_POLICY
    except OSError as error:
        raise TraceError(f"cannot read {attempt.run_json}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{attempt.run_json} is damaged: it does not say how the job was started") from error
    if not is_compared:
        raise UsageError(f"{directory.path} follows no orders: its ranks do not compare clocks (clock.enabled)")
    if is_paced:
        raise UsageError(f"{directory.path} follows no orders: it is paced, and pacing needs what is recorded in full")
    return interval_s
