"""The kind of all commands: headings in the help, all mistakes of a call in one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from hpcpace.core.environment import process_environ, process_redaction, rank_info
from hpcpace.core.errors import HpcpaceError

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
        from hpcpace.cli.examples import EXAMPLES

        with formatter.section("Examples"):
            for example in EXAMPLES[ctx.command_path.partition(" ")[2]]:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises:
            click.UsageError: with all mistakes in it.
        """
        given = list(args)
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
