"""`hpcpace completion SHELL`: the lines with which a shell completes commands, options and their choices."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from hpcpace.cli.commands import Command

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_HPCPACE_COMPLETE"
"""By this variable the shell asks for completions."""


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of SHELL, to be read by its start-up file.

    bash 4.4 or newer, in ~/.bashrc: eval "$(hpcpace completion bash)". zsh, in ~/.zshrc: eval "$(hpcpace completion
    zsh)". fish, in ~/.config/fish/config.fish: hpcpace completion fish | source.
    """
    from hpcpace.cli import cli

    found = get_completion_class(shell)
    assert found is not None  # click has all of them
    click.echo(found(cli, {}, "hpcpace", VARIABLE).source())
