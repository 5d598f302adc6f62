"""Writes docs/results/reliability.md from the results of the drills: every figure and quotation comes from that run."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from experiments.drills.kinds import Drill, Outcome

_PROSE = Path(__file__).with_name("prose")


def write_document(path: Path, outcomes: Mapping[Drill, Sequence[Outcome]], *, duration_s: float) -> None:
    """Write the document.

    Args:
        path: where to.
        outcomes: of all repetitions, by drill.
        duration_s: what all of it took.
    """
    parts = [_head(duration_s), _table(outcomes)]
    parts.append(_starts(outcomes))
    parts += [_section(drill, done) for drill, done in outcomes.items()]
    parts.append(_prose("limits"))
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def _head(duration_s: float) -> str:
    slurm = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.strip()
    return (
        f"{_prose('head').strip()}\n\n"
        f"Written by `make drills` on {time.strftime('%Y-%m-%d')}, in {duration_s / 60:.0f} minutes: "
        f"hpcpace {version('hpcpace')}, {slurm}, torch {version('torch')}, Python {platform.python_version()}, "
        f"Linux {platform.release()}, {os.cpu_count()} cores for all hosts."
    )


def _table(outcomes: Mapping[Drill, Sequence[Outcome]]) -> str:
    lines = [
        "| drill | passed | what is timed | median | worst | limit | lost records, median | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for drill, done in outcomes.items():
        times_s = [outcome.time_s for outcome in done if outcome.time_s is not None]
        lost = [outcome.num_lost for outcome in done if outcome.num_lost is not None]
        cells = [
            drill.title,
            f"{sum(outcome.passed for outcome in done)} of {len(done)}",
            drill.timed,
            f"{statistics.median(times_s):.1f} s" if times_s else "unknown",
            f"{max(times_s):.1f} s" if times_s else "unknown",
            f"{drill.limit_s:g} s",
            f"{statistics.median(lost):g}" if lost else "unknown",
            f"{max(lost)}" if lost else "unknown",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _starts(outcomes: Mapping[Drill, Sequence[Outcome]]) -> str:
    num_misread = sum(outcome.num_misread for done in outcomes.values() for outcome in done)
    num_started = sum(len(done) + 1 for done in outcomes.values())
    return _prose("starts").replace("NUM_MISREAD", str(num_misread)).replace("NUM_STARTED", str(num_started))


def _section(drill: Drill, done: Sequence[Outcome]) -> str:
    said = next((outcome.said for outcome in done if outcome.said), "nothing")
    failed = [problem for outcome in done for problem in outcome.problems]
    lines = [f"## {drill.title[0].upper()}{drill.title[1:]}", "", _prose(drill.name).strip(), ""]
    lines += [f"Limit: {drill.limit}. From a log:", "", "```", said, "```"]
    if failed:
        lines += ["", "What did not hold:", "", *(f"- {' '.join(problem.split())[:400]}" for problem in failed)]
    return "\n".join(lines)


def _prose(name: str) -> str:
    return (_PROSE / f"{name}.md").read_text()
