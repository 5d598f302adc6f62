"""Help texts on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

import click
from cases import each_case
from click.testing import CliRunner

from hpcpace.cli import COMMANDS, cli


def _groups(found: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(found, click.Group):
        yield path
        context = click.Context(found)
        for name in found.list_commands(context):
            yield from _groups(found.get_command(context, name), (*path, name))


@each_case("path", list(_groups(cli)), ids=" ".join)
def test_the_list_of_commands_shows_whole_sentences(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:")[2]


def test_every_command_is_listed() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert all(f"  {name} " in shown for name in COMMANDS)
