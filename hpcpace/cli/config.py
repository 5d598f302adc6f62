"""`hpcpace config` shows the settings that hold here; `hpcpace completion` completes in shells."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from hpcpace.cli.commands import Command
from hpcpace.cli.options import PATH, headed, option
from hpcpace.core.config import DECLARED_BY, Config, section_class
from hpcpace.core.environment import process_environ, process_redaction
from hpcpace.core.errors import UsageError
from hpcpace.core.settings import DEFAULT, Resolved, resolve
from hpcpace.core.text import printable
from hpcpace.core.thresholds import ThresholdValues

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_HPCPACE_COMPLETE"
"""By this variable the shell asks for completions."""


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print the completion script of SHELL, to be read by its start-up file.

    bash 4.4 or newer, in ~/.bashrc: eval "$(hpcpace completion bash)". zsh, in ~/.zshrc: eval "$(hpcpace completion
    zsh)". fish, in ~/.config/fish/config.fish: hpcpace completion fish | source.
    """
    from hpcpace.cli import cli

    found = get_completion_class(shell)
    assert found is not None  # click has all of them
    click.echo(found(cli, {}, "hpcpace", VARIABLE).source())


_WIDTH = 80
_VALUE_COLUMN, _ORIGIN_COLUMN = 24, 44
_NOT_SET = "-"
_REQUESTED_NOTE = (
    "trace.enabled is off for jobs that the site traces by itself. `hpcpace trace`, `hpcpace train` and sessions in "
    "scripts record, because their users ask for it."
)


@click.command(cls=Command)
@headed(
    "Where settings come from",
    option("--config", "config_file", type=PATH, help="Read settings from this TOML file, too.", show_default="none"),
    option(
        "--site-file",
        type=PATH,
        help="Try this file as that of the site.",
        show_default="HPCPACE_SITE_FILE, else /etc/hpcpace.toml",
    ),
)
@headed(
    "Output",
    option("--changed", is_flag=True, help="Leave out defaults."),
    option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)
@click.argument("names", metavar="[SECTION]...", nargs=-1)
def command(
    config_file: Path | None, site_file: Path | None, changed: bool, as_json: bool, names: tuple[str, ...]
) -> None:
    """Show the settings that hold here, all or those of each SECTION, and where each comes from.

    Inside a Slurm job the rules of the site's roll-out are those that hold for this job. Elsewhere, say which job is
    meant by its variables: SLURM_JOB_PARTITION=gpu SLURM_JOB_ID=7 hpcpace config trace
    """
    chosen = names or tuple(DECLARED_BY)
    for name in chosen:
        if name not in DECLARED_BY:
            raise UsageError(f"no section {name!r}: the sections are {', '.join(DECLARED_BY)}")
    if site_file is not None and not site_file.is_file():
        raise UsageError(f"no site file at {site_file}: name a TOML file")
    resolved = resolve(file=config_file, environ=process_environ(), site_file=site_file)
    content = process_redaction().content(_content(resolved, chosen, changed))
    if as_json:
        click.echo(json.dumps(content, indent=2))
    else:
        for line in _lines(content):
            click.echo(line)


def _content(resolved: Resolved, chosen: tuple[str, ...], changed: bool) -> dict[str, Any]:
    return {
        "site_file": {"path": str(resolved.site_file), "exists": resolved.site_file.exists()},
        "rollout": [
            {"rule": rule.source, "holds": not objection, "reason": objection, "sets": _plain(rule.values)}
            for rule, objection in resolved.rules
        ],
        "settings": {
            section: {
                key: {"value": _plain(value), "source": resolved.origin(section, key)}
                for key, value in _values(resolved.config, section).items()
                if not changed or resolved.origin(section, key) != DEFAULT
            }
            for section in chosen
        },
    }


def _values(config: Config, section: str) -> dict[str, Any]:
    if section == "thresholds":
        table = config.of(ThresholdValues).table()
        return {f"{topic}.{name}": value for topic, values in table.items() for name, value in values.items()}
    return dict(vars(config.of(section_class(section))))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _lines(content: dict[str, Any]) -> Iterator[str]:
    if content["rollout"]:
        yield from _wrapped(f"Roll-out of {content['site_file']['path']}", 0)
    for rule in content["rollout"]:
        number = rule["rule"].partition(" of ")[0]
        verdict = "holds for this job" if rule["holds"] else f"does not hold: {rule['reason']}"
        yield from _wrapped(f"  {number} {verdict}", 4)
    if content["rollout"]:
        yield ""
    if not any(content["settings"].values()):
        yield "all settings have their defaults"
    for section, table in content["settings"].items():
        if table:
            yield f"[{section}]"
        for key, entry in table.items():
            yield from _setting_lines(key, _shown(entry["value"]), entry["source"])
    enabled = content["settings"].get("trace", {}).get("enabled", {"value": True})
    if not enabled["value"] and enabled["source"].endswith(content["site_file"]["path"]):
        yield ""
        yield from _wrapped(_REQUESTED_NOTE, 0)


def _setting_lines(key: str, value: str, source: str) -> Iterator[str]:
    """Yield a setting in columns; a long value or source goes on in lines of its own."""
    head = f"  {key}".ljust(_VALUE_COLUMN - 1) + " " + printable(value)
    if len(head) < _ORIGIN_COLUMN and _ORIGIN_COLUMN + len(source) <= _WIDTH:
        yield head.ljust(_ORIGIN_COLUMN) + printable(source)
        return
    yield from _wrapped(head, _VALUE_COLUMN)
    yield from _wrapped(" " * _VALUE_COLUMN + source, _VALUE_COLUMN)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        printable(text), _WIDTH, subsequent_indent=" " * indent, drop_whitespace=True, break_on_hyphens=False
    )


def _shown(value: Any) -> str:
    if value is None or value in ("", []):
        return _NOT_SET
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)
