"""`hpcpace audit --show`: the machine as a picture, in the terminal or in a file.

The terminal gets 80 columns of ASCII; a file is SVG, or a HTML page that has the verdict as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from hpcpace.audit.job import AuditedJob
from hpcpace.audit.picture import pictures
from hpcpace.audit.picture_text import html_page, legend_lines, picture_lines, skipped_lines, svg
from hpcpace.audit.result import AuditResult
from hpcpace.audit.verdict import verdict_lines
from hpcpace.core.errors import UsageError
from hpcpace.core.files import write_file
from hpcpace.core.text import printable

TERMINAL = "terminal"
"""What `--show` means without a file."""

_KINDS = (".svg", ".html")


def check_show(show: str | None, *, has_one_object: bool) -> None:
    """Refuse a file of another kind, and a picture among output that a program reads.

    Raises:
        UsageError: either of them.
    """
    if show == TERMINAL and has_one_object:
        raise UsageError(
            "--show draws in the terminal: with --json, --prometheus or --prolog give it FILE.svg or .html"
        )
    if show is not None and show != TERMINAL and Path(show).suffix.lower() not in _KINDS:
        raise UsageError(f"--show {printable(show)}: the name of the file must end in {' or '.join(_KINDS)}")


def shown_lines(job: AuditedJob, result: AuditResult) -> Iterator[str]:
    """Yield the picture of each kind of host, and which rules did not apply."""
    drawn, num_left = pictures(job)
    for picture in drawn:
        yield from picture_lines(picture)
    if drawn:
        yield from legend_lines()
    if num_left:
        yield f"{num_left} more kinds of hosts are not drawn: choose hosts with --from"
    yield from skipped_lines(result.skipped)


def write_picture(path: Path, job: AuditedJob, result: AuditResult) -> None:
    """Write the pictures into a file, as SVG or HTML by its name.

    Raises:
        UsageError: the file cannot be written.
    """
    drawn, num_left = pictures(job)
    is_page = path.suffix.lower() == ".html"
    text = html_page(drawn, verdict_lines(result), result.skipped, num_left) if is_page else svg(drawn)
    try:
        write_file(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UsageError(f"--show {path}: {error.strerror}") from None
    click.echo(f"hpcpace: the picture is in {printable(str(path))}", err=True)
