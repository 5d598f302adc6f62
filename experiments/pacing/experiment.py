"""An experiment on pacing and its result: a table, and claims that hold or do not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from experiments.jobs import Tell
from experiments.pages import listed, machine, minutes, page, table, today


class Effort(StrEnum):
    """How long an experiment may take."""

    TRY = "try"
    """Seconds: shows that it runs; its figures mean nothing, and are not written down."""
    FULL = "full"
    """As long as its figures need."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What was expected, and whether it was found; None if the data cannot tell."""

    text: str
    holds: bool | None

    def line(self) -> str:
        word = {True: "holds", False: "DOES NOT HOLD", None: "cannot tell"}[self.holds]
        return f"{word}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of an experiment.

    Attributes:
        table: rows of cells, the head first.
        claims: what was expected of it.
        notes: how it was set up, and what else is to be known.
    """

    table: Sequence[Sequence[str]]
    claims: Sequence[Claim]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment; `run` takes an effort and a function that shows progress."""

    name: str
    title: str
    run: Callable[[Effort, Tell], Finding]
    needs_lab: bool = False


def percent(share: float, digits: int = 1) -> str:
    """Return a signed share in percent: `+3.1 %`."""
    return f"{100 * share:+.{digits}f} %"


def section_of(experiment: Experiment, finding: Finding, *, duration_s: float) -> str:
    """Return the text of one section."""
    head, *rows = finding.table
    return f"""## {experiment.title}

`python -m experiments.pacing {experiment.name} --write`, {today()}, {minutes(duration_s)}, {machine("torch")}.

{listed(finding.notes)}

{table(head, rows)}

{listed(claim.line() for claim in finding.claims)}"""


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
    path.write_text("\n\n".join([page("pacing-experiments").strip(), *ordered]) + "\n")


def sections_in(text: str, experiments: Sequence[Experiment]) -> dict[str, str]:
    """Return the sections of a document by the names of their experiments; those of no experiment are dropped."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    titles = {f"## {experiment.title}": experiment.name for experiment in experiments}
    return {titles[part.partition("\n")[0]]: part.strip() for part in parts if part.partition("\n")[0] in titles}
