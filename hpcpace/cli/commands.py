"""The kind of all commands: headings and examples in the help, mistakes in one error, and limits of memory.

Libraries (HDF5, OpenBLAS) crash or wait for ever where they get no memory. So a command does not start without room for
itself and its libraries, and it runs in a child process: its death is reported as a lack of memory. Without a
limit, Linux grants addresses that it does not have, and nothing here applies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import click

from hpcpace.core.environment import process_environ, process_redaction, rank_info, set_environ_default
from hpcpace.core.errors import EXIT_USAGE, HpcpaceError, NotEnoughMemory

_OTHER = "Other"


class Command(click.Command):
    """A command whose options stand under headings, and that reports every wrong option and argument at once."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one list below each heading."""
        by_heading: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                by_heading.setdefault(getattr(param, "heading", ""), []).append(record)
        for heading, records in by_heading.items():
            with formatter.section(heading or (_OTHER if len(by_heading) > 1 else "Options")):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write two examples, each in a line, to be copied."""
        with formatter.section("Examples"):
            for example in examples()[ctx.command_path.partition(" ")[2]]:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises:
            click.UsageError: with all mistakes in it.
        """
        given = list(args)
        if not given and isinstance(self, click.Group) and self.no_args_is_help and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(EXIT_USAGE)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            mistakes = self._mistakes(ctx, given)
            if len(mistakes) < 2:
                raise click.UsageError(_without_secrets(error.format_message()), error.ctx) from None
            lines = "".join(f"\n  {_without_secrets(mistake.format_message())}" for mistake in mistakes)
            raise click.UsageError(f"{len(mistakes)} mistakes:{lines}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of hpcpace learns how much of it the user wants to see."""
        try:
            return super().invoke(ctx)
        except HpcpaceError as error:
            if error.is_verbose is None:
                error.is_verbose = ctx.params.get("is_verbose")
            raise

    def _mistakes(self, ctx: click.Context, args: list[str]) -> list[click.UsageError]:
        """Return what is wrong with a command line: unknown options first, then values."""
        mistakes: list[click.UsageError] = []
        values: Mapping[str, Any] | None = None
        rest: list[str] = []
        while values is None:
            try:
                values, rest, _ = self.make_parser(ctx).parse_args(list(args))
            except (click.NoSuchOption, click.BadOptionUsage) as error:
                mistakes.append(error)
                others = [word for word in args if word.partition("=")[0] != error.option_name]
                if len(others) == len(args):
                    return mistakes
                args = others
        is_shifted = bool(mistakes)  # the value of an unknown option now passes for an argument
        for param in self.get_params(ctx):
            if param.is_eager or (is_shifted and isinstance(param, click.Argument)):
                continue
            try:
                param.handle_parse_result(ctx, values, [])
            except click.UsageError as error:
                mistakes.append(error)
        if rest and not is_shifted and not ctx.allow_extra_args:
            mistakes.append(click.UsageError(f"Got unexpected extra arguments ({' '.join(rest)})", ctx))
        return mistakes


class Group(Command, click.Group):
    """A group that lists its commands in the order in which they are used."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, and the others."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(_without_secrets(error.format_message()), ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options and the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def _without_secrets(message: str) -> str:
    return process_redaction().text(message)


class RankZeroCommand(Command):
    """A command of which only rank 0 reports wrong options, because every rank has the same ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options; ranks other than 0 exit without a message."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            try:
                info = rank_info(process_environ())
            except HpcpaceError:
                raise error from None
            if info.rank > 0:
                from hpcpace.world.mpi import let_rank_zero_speak

                let_rank_zero_speak(info)
                ctx.exit(error.exit_code)
            raise


@cache
def examples() -> dict[str, list[str]]:
    """Return two examples of each command, by the words that name it after `hpcpace`."""
    return tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))


# Python, its libraries and a small report take 0.6 GiB of addresses with two threads: `ulimit -v` in steps, by hand.
_MIN_FREE_BYTES = 1 << 30
# How a library dies of a call for memory that it did not check.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def limit_bytes() -> int | None:
    """Return the limit on this process's addresses in bytes, None for none."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def go_on_in_child() -> None:
    """Return in a child process, for which this one waits, and ends as it does; report a crash as a lack of memory.

    Raises:
        NotEnoughMemory: the limit leaves too little for any report.
    """
    limit = limit_bytes()
    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if limit is not None and limit - own_bytes < _MIN_FREE_BYTES:
        raise NotEnoughMemory(
            f"not enough memory: the limit of {limit >> 20} MiB on addresses leaves {max(limit - own_bytes, 0) >> 20} "
            f"MiB, and reading traces takes at least {_MIN_FREE_BYTES >> 20} MiB: allow more (ulimit -v)"
        )
    set_environ_default("OPENBLAS_NUM_THREADS", "1")  # each thread takes addresses of its own
    sys.stdout.flush()
    sys.stderr.flush()
    if (child := os.fork()) != 0:
        _end_like(child)
    sys.excepthook = _without_hdf5
    sys.unraisablehook = lambda _: None


def leave_child() -> NoReturn:
    """End this process with the exit code of bad input, without the libraries' own ends: they free what is damaged."""
    with contextlib.suppress(OSError, MemoryError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_USAGE)


def _end_like(child: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        os._exit(code)
    if -code in _CRASHES:
        os.write(2, _crash_line(signal.Signals(-code)).encode())
        os._exit(EXIT_USAGE)
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _crash_line(number: signal.Signals) -> str:
    limit = limit_bytes()
    room = "" if limit is None else f" with a limit of {limit >> 20} MiB on addresses"
    return f"hpcpace: not enough memory ({number.name} in a library{room}): allow more (ulimit -v, --mem of the job)\n"


def _without_hdf5(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback, unless HDF5 could not close an object: that it has lost it is said once, as lack of memory."""
    last = traceback
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or Path(last.tb_frame.f_code.co_filename).parts[:1] != ("h5py",):
        sys.__excepthook__(kind, error, traceback)
