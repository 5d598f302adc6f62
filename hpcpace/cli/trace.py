"""Commands for recording: `hpcpace trace`, `task-prolog` for a site's jobs, and `switch`."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, Whole, checked_steps, headed, option
from hpcpace.core.codec import read_json
from hpcpace.core.config import MAX, NO_POLICY
from hpcpace.core.detail import DETAILS, Detail, Order, parse_detail, parse_steps
from hpcpace.core.environment import process_environ
from hpcpace.core.errors import TraceError, UsageError
from hpcpace.core.files import user_name
from hpcpace.core.redaction import Redaction
from hpcpace.core.rundir import Attempt, RunDirectory, default_run_path, open_named_run
from hpcpace.core.settings import SITE_FILE_VARIABLE, is_opted_out, load_config
from hpcpace.core.text import NS_PER_S, format_duration, printable
from hpcpace.diagnosis.run_state import is_running, read_start
from hpcpace.observe.launch.launch import OF_PYTHON, find_launch, has_launch, site_launch
from hpcpace.observe.settings import ON_HANG, ON_HANG_VARIABLE, TraceConfig
from hpcpace.observe.steps import StepFrom
from hpcpace.pace.settings import POLICIES
from hpcpace.train.settings import SHARED_CORES_VARIABLE

# Names of jobs become names of folders, which users then type.
_NOT_IN_NAMES = re.compile(r"[^\w .,:+@=~-]")
_MAX_NAME, _MAX_WARNING = 100, 1000


class _NeverFails(Command):
    """A command whose wrong options do not end the task either."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; what is wrong with it is a warning."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _say(_warning(error.format_message(), process_environ()))
            raise click.exceptions.Exit(0) from error


@click.command(cls=_NeverFails)
@option(
    "--run-dir",
    type=PATH,
    help="Write runs into this folder, as JOB.STEP-NAME.",
    show_default="runs in the job's folder",
)
def task_prolog_command(run_dir: Path | None) -> None:
    """Print the environment that traces a task, if the site's settings say that its job is traced.

    For Slurm's TaskProlog, which reads lines like "export NAME=VALUE". It prints nothing where trace.enabled does not
    hold for the job, or the user says no, and never fails: that would end the task.
    """
    environ = process_environ()
    try:
        lines = _lines(environ, Path("runs") if run_dir is None else run_dir)
    except Exception as error:  # the boundary to somebody else's task, which goes on untraced
        lines = _warning(str(error) or type(error).__name__, environ)
    _say(lines)


def _lines(environ: Mapping[str, str], base: Path) -> list[str]:
    """Return what Slurm is to put into the environment of the task; nothing where its job is not traced."""
    outer = find_launch(environ)
    # A record that cannot be read may be that of a user who traces the job by another version of hpcpace.
    is_somebody_elses = outer.is_requested if outer is not None else has_launch(environ)
    if is_somebody_elses or not load_config(environ=environ).of(TraceConfig).enabled:
        return []
    name = _NOT_IN_NAMES.sub("-", environ.get("SLURM_JOB_NAME", ""))[:_MAX_NAME].strip(".") or "job"
    launch = site_launch(default_run_path(name, environ, base=base).absolute(), name, environ)
    if outer is not None:  # of the batch script: each of its steps is a run
        launch = dataclasses.replace(launch, had_python_path=outer.had_python_path)
    # The settings of its file hold in the task, too.
    changes = {**launch.changes(environ), SITE_FILE_VARIABLE: environ.get(SITE_FILE_VARIABLE)}
    for variable, value in changes.items():
        if value is not None and "\n" in value:
            raise UsageError(f"{variable} has a line break, which a TaskProlog cannot hand on")
    return [f"export {variable}={value}" for variable, value in changes.items() if value is not None]


def _warning(message: str, environ: Mapping[str, str]) -> list[str]:
    """Return the line on why nothing is recorded; one task says it for all."""
    if environ.get("SLURM_PROCID", "0") != "0":
        return []
    message = Redaction.of(environ, sys.argv).text(" ".join(message[:_MAX_WARNING].split()))
    return [f"print hpcpace: warning: nothing is recorded: {printable(message)}"]


def _say(lines: list[str]) -> None:
    """Print lines as bytes, as which variables come and go: they need not be text in any encoding."""
    content = "".join(f"{line}\n" for line in lines)
    try:
        click.echo(content.encode(sys.getfilesystemencoding(), "surrogateescape"), nl=False)
    except UnicodeEncodeError:  # of a warning, in letters that the locale does not have
        click.echo(content.encode("ascii", "backslashreplace"), nl=False)
    except OSError:  # Slurm does not listen any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
def switch_command(steps: str | None, detail: str | None, run: Path, state: str | None) -> None:
    """Switch detail of the running job in RUN on or off.

    It writes the order into RUN/switch, which rank 0 reads every two seconds. All ranks follow it from the same step,
    the one after their next comparison of the clocks. They follow the user of the job and root alone.
    """
    order = _order(steps, detail, state)
    directory = open_named_run(run).directory
    interval_s = _interval_s(directory)
    _check_user(directory)
    _write(directory, order)
    within = format_duration(round(interval_s * NS_PER_S))
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


class _BeforeProgram(Command):
    """A command whose options end where a program begins: at its name, at `-m` or `-c`, or behind `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; the program's options stay as they are.

        Raises:
            click.UsageError: an option before the program is unknown, or its value wrong.
        """
        valued = {name for one in self.params if isinstance(one, click.Option) and not one.is_flag for name in one.opts}
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] not in ("-", "--"):
            if args[place] in OF_PYTHON:
                args = [*args[:place], "--", *args[place:]]
                break
            place += 2 if args[place] in valued else 1
        return super().parse_args(ctx, args)


@click.command(cls=_BeforeProgram, context_settings={"allow_interspersed_args": False})
@headed(
    "Where to write",
    option("--run-dir", type=PATH, help="Write the run to this folder.", show_default="runs/JOB-SCRIPT"),
    option(
        "--trace-dir",
        type=PATH,
        help="Keep traces in this node-local folder (auto: a disk of the node) while the program runs, and move them "
        "into the run at the end.",
        show_default="the run",
    ),
)
@headed(
    "Steps",
    option(
        "--steps",
        metavar="A:B[,C:D]",
        callback=checked_steps,
        help="Record only the steps from A to B - 1 in detail, and of all others their times.",
        show_default="all",
    ),
    option(
        "--detail",
        type=click.Choice(DETAILS),
        metavar="LEVEL",
        help="Record this of them: full, collectives (no phases), or steps (no collectives either).",
        show_default="full",
    ),
    option(
        "--keep-last",
        type=Whole(0),
        help="Keep at least this many of the last steps, and drop what is older while the program runs; 0: keep all.",
        show_default="0",
    ),
    option(
        "--step-from",
        default="auto",
        callback=lambda _context, _option, text: StepFrom.parse(text) and text,
        metavar="WHAT",
        help="End a step after every 'optimizer' step or 'backward' pass, or every second one: 'optimizer:2'; 'auto' "
        "finds out what repeats.",
    ),
    option("--warmup-steps", type=Whole(0), default=2, help="Leave this many first steps out of the report."),
    option("--samples-unit", metavar="WORD", default="samples", help="Name what session.step(samples=...) counts."),
)
@headed(
    "Pacing, hangs and settings",
    option(
        "--pace",
        type=click.Choice(POLICIES),
        metavar="POLICY",
        help=f"Hold early ranks back by this policy, if a trial in the job shows a gain: {', '.join(POLICIES)}; see "
        "hpcpace help pacing.",
        show_default="none",
    ),
    option(
        "--on-hang",
        type=click.Choice(ON_HANG),
        metavar="WHAT",
        help="Write down what holds a step up that lasts too long and say so (report), also end the job with exit code "
        "4 (stop), or do not watch (off); see hpcpace help hang.",
        show_default="report",
    ),
    option(
        "--shared-cores/--no-shared-cores",
        default=None,
        help="Let reports look for other causes where ranks share cores; for more ranks than cores on purpose.",
        show_default="off",
    ),
    option(
        "--summary/--no-summary",
        "has_summary",
        default=None,
        help="Print the verdict on stderr, and where the step went, when the program has ended.",
        show_default="on",
    ),
    option("--config", "config_file", type=PATH, help="Read settings from this TOML file.", show_default="none"),
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="PROGRAM [ARGUMENTS]...")
def command(
    run_dir: Path | None,
    trace_dir: Path | None,
    config_file: Path | None,
    warmup_steps: int,
    samples_unit: str,
    step_from: str,
    pace: str | None,
    steps: str | None,
    detail: str | None,
    on_hang: str | None,
    shared_cores: bool | None,
    keep_last: int | None,
    has_summary: bool | None,
    program: tuple[str, ...],
) -> None:
    """Run a program and trace the training in it.

    PROGRAM is a Python script, `-m` and a module, or any command, such as a launcher: `srun hpcpace trace -- train.py
    ARGS`, `hpcpace trace -- torchrun --nproc-per-node 8 train.py ARGS`, `hpcpace trace -- bash run.sh`. Tracing starts
    where a process makes torch's process group, or trains without one; the last line says what was recorded. If a
    setting is wrong, the program runs untraced, and with HPCPACE_OPT_OUT=1 entirely without hpcpace.
    """
    from hpcpace.core.environment import change_environ
    from hpcpace.observe.launch.launch import Wishes, become_traced, become_untraced

    local_rank: list[str] = click.get_current_context().find_root().obj or []
    end = 2 if program[0] == "-m" else 1
    command_line = (*program[:end], *local_rank, *program[end:])
    if is_opted_out(process_environ()):
        become_untraced(command_line)
    if on_hang is not None:
        change_environ({ON_HANG_VARIABLE: on_hang})
    if shared_cores is not None:
        change_environ({SHARED_CORES_VARIABLE: str(int(shared_cores))})

    # Settings are read where they can be wrong on one rank alone and the script still runs.
    wishes = Wishes(
        config_file=None if config_file is None else str(config_file.absolute()),
        pace=pace,
        trace_dir=None if trace_dir is None else str(trace_dir),
        steps=steps,
        detail=detail,
        keep_last=keep_last,
        summary=has_summary,
        warmup_steps=warmup_steps,
        samples_unit=samples_unit,
        step_from=step_from,
    )
    become_traced(command_line, wishes, run_dir=run_dir)
