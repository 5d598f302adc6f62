"""The documents name everything that the program has, and nothing that it does not have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click
import pytest

from hpcpace.cli import cli
from hpcpace.config import Config

ROOT = Path(__file__).parents[2]
CLI_DOC = (ROOT / "docs" / "cli.md").read_text()


def _commands(command: click.Command, path: str = "") -> list[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    found: list[tuple[str, click.Command]] = []
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        found += _commands(child, f"{path} {name}".strip())
    return found


COMMANDS = _commands(cli)


def _section(path: str) -> str:
    match = re.search(rf"^## `hpcpace {path}[^`]*`$(.*?)(?=^## |\Z)", CLI_DOC, re.MULTILINE | re.DOTALL)
    assert match, f"docs/cli.md has no section `## `hpcpace {path} ...``"
    return match[1]


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_every_option_of_a_command_is_documented(path: str, command: click.Command) -> None:
    section = _section(path)
    options = [option for p in command.params if isinstance(p, click.Option) for option in (*p.opts, *p.secondary_opts)]
    assert [option for option in options if f"`{option}" not in section] == []


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_no_option_is_documented_that_a_command_does_not_have(path: str, command: click.Command) -> None:
    options = {o for p in command.params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)}
    table = [line for line in _section(path).splitlines() if line.startswith("| `--")]
    named = {name for line in table for name in re.findall(r"`(--[a-z-]+)", line.split("|")[1])}
    assert named - options == set()


def test_every_setting_is_documented() -> None:
    missing = [
        f"{section.name}.{key.name}"
        for section in dataclasses.fields(Config)
        for key in dataclasses.fields(section.default_factory)
        if f"`{key.name}`" not in CLI_DOC
    ]
    assert missing == []


@pytest.mark.parametrize("path", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []
