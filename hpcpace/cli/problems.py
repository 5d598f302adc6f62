"""Problems as the warnings of a command on stderr."""

from __future__ import annotations

from collections.abc import Iterable

import click

from hpcpace.core.text import folded


def warn(problems: Iterable[str], *, rest: str = "--verbose", is_verbose: bool) -> None:
    """Print problems in few lines, or one by one; arguments as of `hpcpace.core.text.folded`."""
    for line in folded(problems, rest=rest, is_verbose=is_verbose):
        click.echo(f"hpcpace: warning: {line}", err=True)
