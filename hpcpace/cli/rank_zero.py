"""A command that all ranks of a job run, of which only rank 0 reports wrong options."""

from __future__ import annotations

import click

from hpcpace.cli.commands import Command
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.core.errors import HpcpaceError
from hpcpace.world.mpi import let_rank_zero_speak


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
                let_rank_zero_speak(info)
                ctx.exit(error.exit_code)
            raise
