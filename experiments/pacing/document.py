"""docs/results/pacing-experiments.md: a dated section for each experiment, replaced when that experiment is run again."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from experiments.pacing.experiment import Experiment, Finding

_PROSE = Path(__file__).with_name("prose.md")


def section_of(experiment: Experiment, finding: Finding, *, duration_s: float) -> str:
    """Return the text of one section."""
    head, *rows = ([cell.replace("\n", " ") for cell in row] for row in finding.table)
    took = f"{duration_s:.0f} s" if duration_s < 100 else f"{duration_s / 60:.0f} min"
    lines = [
        f"## {experiment.title}",
        "",
        f"`python -m experiments.pacing {experiment.name} --write`, {time.strftime('%Y-%m-%d')}, {took}, "
        f"{os.cpu_count()} cores, torch {version('torch')}, Python {platform.python_version()}, Linux "
        f"{platform.release()}.",
        "",
        *(f"- {note}" for note in finding.notes),
        "",
        *_table(head, rows),
        "",
        *(f"- {claim.line()}" for claim in finding.claims),
    ]
    return "\n".join(lines)


def write_section(path: Path, experiments: Sequence[Experiment], name: str, section: str) -> None:
    """Put a section into the document, in the order of the experiments; all others stay as they are.

    Args:
        path: of the document; it is made where it is missing.
        experiments: all, in their order.
        name: of the experiment whose section it is.
        section: its text.
    """
    found = sections_in(path.read_text(), experiments) if path.exists() else {}
    found[name] = section.strip()
    ordered = [found[experiment.name] for experiment in experiments if experiment.name in found]
    path.write_text("\n\n".join([_PROSE.read_text().strip(), *ordered]) + "\n")


def sections_in(text: str, experiments: Sequence[Experiment]) -> dict[str, str]:
    """Return the sections of a document by the names of their experiments; those of no experiment are dropped."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    titles = {f"## {experiment.title}": experiment.name for experiment in experiments}
    return {titles[part.partition("\n")[0]]: part.strip() for part in parts if part.partition("\n")[0] in titles}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
