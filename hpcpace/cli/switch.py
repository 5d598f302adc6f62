"""`hpcpace switch`: change how much of each step a running job records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, checked_steps, option
from hpcpace.core.codec import read_json
from hpcpace.core.config import MAX, NO_POLICY
from hpcpace.core.detail import DETAILS, Detail, Order, parse_detail, parse_steps
from hpcpace.core.errors import TraceError, UsageError
from hpcpace.core.files import user_name
from hpcpace.core.rundir import Attempt, RunDirectory, open_named_run
from hpcpace.core.text import format_duration, printable
from hpcpace.diagnosis.run_state import is_running, read_start

_NS_PER_S = 1_000_000_000
# Whatever the umask: the rank that reads it may be another user's than root, and follows no file that others can write.
_MODE = 0o644


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
    the one after their next comparison of the clocks. They follow the user of the job and root alone.
    """
    order = _order(steps, detail, state)
    directory = open_named_run(run).directory
    interval_s = _interval_s(directory)
    _check_user(directory)
    _write(directory, order)
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


def _check_user(directory: RunDirectory) -> None:
    """Let the user of the job and root pass.

    Raises:
        UsageError: this is somebody else, whose orders no rank follows.
        TraceError: the attempt was removed.
    """
    attempt = directory.last_attempt()
    try:
        with attempt.open() as folder:
            owner = os.fstat(folder.descriptor).st_uid
    except OSError as error:
        raise TraceError(f"cannot read {attempt.path}: {error.strerror}") from error
    if os.geteuid() not in (owner, 0):
        raise UsageError(
            f"{directory.path} follows no orders of yours: the job belongs to {user_name(owner)}, and only that user "
            "and root can switch it"
        )


def _write(directory: RunDirectory, order: Order) -> None:
    """Write an order as a file that the ranks follow.

    Raises:
        TraceError: it cannot be written.
        UsageError: the file system makes it the file of somebody else, as one that squashes root does.
    """
    path = directory.switch_file
    try:
        with directory.open() as folder:
            folder.write(path.name, f"{order.text}\n", mode=_MODE, is_exact=True)
            owner = folder.status(path.name).st_uid
            if owner != os.geteuid():
                folder.remove(path.name)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from error
    if owner != os.geteuid():
        raise UsageError(
            f"{path}: the file system gives what you write to {user_name(owner)}, whose orders no rank follows: run "
            "this as the user of the job"
        )


def _interval_s(directory: RunDirectory) -> float:
    """Return the seconds between two comparisons of the clocks, with which ranks hear of orders.

    Raises:
        UsageError: the run does not follow orders.
        TraceError: it does not say whether it does.
    """
    attempt, problems = directory.last_attempt(), list[str]()
    settings = read_json(attempt, attempt.run_json.name, _settings, problems)
    if settings is None:
        reason = "; ".join(problems) or f"{attempt.run_json} does not exist"
        raise TraceError(f"{directory.path} does not say how the job was started: {reason}")
    interval_s, objection = settings
    if objection:
        raise UsageError(f"{directory.path} follows no orders: {objection}")
    return interval_s


def _settings(record: Any) -> tuple[float, str]:
    """Return the seconds between two comparisons, and why the job follows no orders; empty if it does."""
    if "imported" in record:
        return 0.0, "it is what another tool recorded"
    clock, pace = record["config"]["clock"], record["config"]["pace"]
    interval_s = float(clock["interval_s"])
    if not 0 < interval_s <= MAX:
        raise ValueError(f"clock.interval_s is {interval_s}")
    if not clock["enabled"]:
        return interval_s, "its ranks do not compare clocks (clock.enabled)"
    is_paced = pace["policy"] != NO_POLICY
    return interval_s, "it is paced, and pacing needs what is recorded in full" if is_paced else ""
