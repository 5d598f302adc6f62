"""The score in the lab as text: a line for each job, and docs/results/diagnosis-lab.md, with the figures of one campaign."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from experiments.score.judge import Judgement
from experiments.score.lab_cases import CASES, Case

_PROSE = Path(__file__).with_name("lab_prose.md")
COLUMNS = ("case", "jobs", "mode comes first", "mode is found", "culprit", "somebody else", "step, median", "CV")


class LabOutcome(Protocol):
    """What is read of an outcome."""

    @property
    def case(self) -> Case: ...
    @property
    def judgement(self) -> Judgement | None: ...
    @property
    def modes(self) -> tuple[str, ...]: ...
    @property
    def is_mode_found(self) -> bool: ...
    @property
    def headline(self) -> str: ...
    @property
    def step_ms(self) -> float: ...
    @property
    def cv(self) -> float: ...
    @property
    def is_same_without_lab(self) -> bool | None: ...
    @property
    def load(self) -> float: ...
    @property
    def commit(self) -> str: ...
    @property
    def error(self) -> str: ...


def line(outcome: LabOutcome) -> str:
    """Return a line on one job."""
    found = outcome.judgement
    if found is None:
        return f"{outcome.case.name}: FAILED: {' '.join(outcome.error.split())[:400]}"
    words = ["right mode" if found.is_mode_right else "right mode not first" if outcome.is_mode_found else "WRONG MODE"]
    if found.has_culprit:
        words.append("culprit found" if found.is_found else "culprit NOT found")
    if found.is_wrong:
        words.append("WRONG CULPRIT")
    return (
        f"{outcome.case.name}: {', '.join(words)}; said {' + '.join(outcome.modes)}, names "
        f"{', '.join(found.named) or 'nobody'}; step {outcome.step_ms:.0f} ms, CV {outcome.cv:.2f}"
    )


def document(outcomes: Sequence[LabOutcome], *, command: str) -> str:
    """Return docs/results/diagnosis-lab.md."""
    slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.strip()
    num_same = sum(outcome.is_same_without_lab is True for outcome in outcomes)
    loads, commits = [outcome.load for outcome in outcomes], sorted({outcome.commit for outcome in outcomes})
    parts = [
        _PROSE.read_text().strip(),
        f"Written by `{command}` on {time.strftime('%Y-%m-%d')}, with {len(outcomes)} "
        f"jobs of four ranks, hpcpace {version('hpcpace')} ({', '.join(commits)}), {slurm}, torch {version('torch')}, "
        f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores for all hosts, load "
        f"{min(loads):.1f} to {max(loads):.1f} at the end of each job.",
        table(outcomes),
        _markdown(("case", "what happens", "mode that is right"), [_title(case) for case in CASES]),
        f"{num_same} of {len(outcomes)} verdicts were the same when the report was made once more without the lab and "
        "its log of truth.",
        "## What the report said\n\n"
        + "\n".join(f"- {outcome.case.name}: {_quoted(outcome)}" for outcome in _ordered(outcomes)),
    ]
    return "\n\n".join(parts) + "\n"


def table(outcomes: Sequence[LabOutcome]) -> str:
    """Return a row for each case that has outcomes."""
    by_case = [(case, [o for o in outcomes if o.case.name == case.name]) for case in CASES]
    return _markdown(COLUMNS, [_row(case, chosen) for case, chosen in by_case if chosen])


def _row(case: Case, outcomes: Sequence[LabOutcome]) -> list[str]:
    done = [(outcome, outcome.judgement) for outcome in outcomes if outcome.judgement is not None]
    wanted = [found for _, found in done if found.has_culprit]
    return [
        case.name,
        str(len(outcomes)),
        f"{sum(found.is_mode_right for _, found in done)} of {len(outcomes)}",
        f"{sum(outcome.is_mode_found for outcome, _ in done)} of {len(outcomes)}",
        f"{sum(found.is_found for found in wanted)} of {len(wanted)}" if wanted else "none",
        f"{sum(found.is_wrong for _, found in done)} of {len(outcomes)}",
        f"{statistics.median(outcome.step_ms for outcome, _ in done):.0f} ms" if done else "-",
        f"{statistics.median(outcome.cv for outcome, _ in done):.2f}" if done else "-",
    ]


def _ordered(outcomes: Sequence[LabOutcome]) -> list[LabOutcome]:
    names = [case.name for case in CASES]
    return sorted(outcomes, key=lambda outcome: names.index(outcome.case.name))


def _title(case: Case) -> list[str]:
    return [case.name, case.title, " or ".join(case.modes)]


def _quoted(outcome: LabOutcome) -> str:
    return outcome.headline if outcome.judgement is not None else f"failed: {' '.join(outcome.error.split())[:300]}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
