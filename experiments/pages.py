"""Pages under docs/results/ and tables in Markdown: every figure of a page comes from the run that writes it.

A page is a template of experiments/templates, in which the text is, with figures and tables put in. It says with which
command it was written, when, and on what machine.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import jinja2

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
_TEMPLATES = Path(__file__).with_name("templates")
MAX_FAILED = 50
"""Failures that a page lists: enough to see what they have in common."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(row(cells) for cells in rows)])


def row(cells: Iterable[object]) -> str:
    """Return one row of a table; line breaks within its cells become spaces."""
    return f"| {' | '.join(str(cell).replace(chr(10), ' ') for cell in cells)} |"


def share(count: int, total: int) -> str:
    """Return a share in percent; a dash if there is nothing to share."""
    return f"{100 * count / total:.1f} %" if total else "-"


def counted(flags: Iterable[object]) -> str:
    """Return how many of some things hold, like `3 of 5`."""
    found = [bool(flag) for flag in flags]
    return f"{sum(found)} of {len(found)}"


def percent(share: float, digits: int = 1) -> str:
    """Return a change as in `+12.3 %`."""
    return f"{100 * share:+.{digits}f} %"


def listed(lines: Iterable[str]) -> str:
    """Return a list with bullets."""
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def failures(lines: Iterable[str]) -> str:
    """Return a list of failures under a heading; nothing if there are none."""
    found = [line[:400] for line in lines]
    return f"What did not hold:\n\n{listed(found[:MAX_FAILED])}" if found else ""


def command(module: str) -> str:
    """Return the command that is running, to be put into a page."""
    return " ".join([f"python -m {module}", *sys.argv[1:]])


def today() -> str:
    """Return the date, like `2026-11-27`."""
    return time.strftime("%Y-%m-%d")


def minutes(duration_s: float) -> str:
    """Return a duration in whole minutes, below 100 s in seconds."""
    return f"{duration_s:.0f} s" if duration_s < 100 else f"{duration_s / 60:.0f} min"


def machine(*packages: str, slurm: bool = False) -> str:
    """Return what figures depend on: versions of hpcpace, of some packages and of Slurm, Python, Linux, cores."""
    found = [f"{name} {version(name)}" for name in ("hpcpace", *packages)]
    if slurm:
        done = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=False)
        found.insert(1, done.stdout.strip() or "no Slurm")
    return ", ".join(
        [*found, f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores"]
    )


_IN_TEMPLATES = {"table": table, "machine": machine, "today": today, "command": command, "percent": percent}


def page(name: str, **values: Any) -> str:
    """Return a page from its template; `table`, `machine` and `today` are at hand in all of them.

    Raises:
        jinja2.UndefinedError: the template needs a value that is not given.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(f"{name}.md").render({**_IN_TEMPLATES, **values})
    return re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"


def write_page(name: str, path: Path | None = None, *, others: Iterable[str] = (), **values: Any) -> None:
    """Write a page, by default under docs/results/.

    Args:
        others: headings of sections that are written by other commands, and kept.
    """
    path = path or RESULTS / f"{name}.md"
    text, before = page(name, **values), path.read_text() if path.exists() else ""
    for heading in others:
        _, found, rest = before.partition(f"\n## {heading}\n")
        if found:
            text = with_section(text, f"## {heading}\n" + rest.partition("\n## ")[0])
    path.write_text(text)
    print(f"written: {path}")


def with_marked(text: str, mark: str, content: str) -> str:
    """Return a document with what is between `<!-- mark -->` and `<!-- end -->` replaced."""
    return re.sub(
        rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- end -->)",
        lambda place: f"{place[1]}{content}\n{place[2]}",
        text,
        flags=re.DOTALL,
    )


def with_section(text: str, section: str) -> str:
    """Return a document with the section of the same heading replaced; it is added at the end if there is none."""
    heading = section.strip().splitlines()[0]
    before, found, rest = f"{text.rstrip()}\n".partition(f"\n{heading}\n")
    if not found:
        return f"{before.rstrip()}\n\n{section.strip()}\n"
    _, following, after = rest.partition("\n## ")
    return f"{before.rstrip()}\n\n{section.strip()}\n{following}{after}"


def write_section(name: str, section: str, path: Path | None = None, *, title: str = "") -> None:
    """Put a section into a page, by default under docs/results/, which begins with the title where it is not there."""
    path = path or RESULTS / f"{name}.md"
    path.write_text(with_section(path.read_text() if path.exists() or not title else title, section))
    print(f"written: {path}")


Case = TypeVar("Case")


def read_toml(module: str, name: str = "") -> dict[str, Any]:
    """Return what a TOML file beside a module has.

    Args:
        module: the module's `__file__`.
        name: of the file, without its ending; that of the module if empty.
    """
    path = Path(module).with_suffix(".toml")
    return tomllib.loads((path.with_stem(name) if name else path).read_text(encoding="utf-8"))


def cases_of(kind: type[Case], rows: Iterable[Mapping[str, Any]]) -> tuple[Case, ...]:
    """Return rows as instances of a dataclass, whose fields have tuples where TOML has lists."""
    return tuple(kind(**{name: as_tuples(value) for name, value in row.items()}) for row in rows)


def as_tuples(value: Any) -> Any:
    """Return a value with tuples in place of lists, at any depth."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
