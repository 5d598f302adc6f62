"""docs/reliability-input.md from what the damaged inputs came to: every figure is of the run that writes it."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.damage.campaign import Outcome

_PROSE = Path(__file__).with_name("prose")
_MOST_FAILED = 50


def write_document(path: Path, outcomes: Sequence[Outcome], *, num_fresh: int, duration_s: float) -> None:
    """Write the document.

    Args:
        path: where to.
        outcomes: of all inputs.
        num_fresh: how many of them were reported by fresh interpreters, too, with the same end.
        duration_s: what all of it took.
    """
    parts = [_prose("head"), _measured(outcomes, num_fresh, duration_s), _table(outcomes), *_failed(outcomes)]
    parts.append(_prose("limits"))
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def _measured(outcomes: Sequence[Outcome], num_fresh: int, duration_s: float) -> str:
    num_kinds = len({outcome.input.kind.name for outcome in outcomes})
    num_passed = sum(not outcome.problems for outcome in outcomes)
    return (
        f"Written by `python -m tests.damage --write` on {time.strftime('%Y-%m-%d')}: {num_passed:,} of "
        f"{len(outcomes):,} inputs of {num_kinds} kinds passed, in {duration_s / 60:.0f} minutes. {num_fresh} of them "
        "were reported by fresh interpreters, too, with the same exit code. "
        f"hpcpace {version('hpcpace')}, h5py {version('h5py')}, numpy {version('numpy')}, "
        f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores, "
        "shared with other work."
    )


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| damage | kinds | passed | exit 0 | 1 | 2 | 3 | time, median | longest | memory, largest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for group in dict.fromkeys(outcome.input.kind.group for outcome in outcomes):
        lines.append(_row(group, [outcome for outcome in outcomes if outcome.input.kind.group == group]))
    lines.append(_row("all", outcomes))
    return "\n".join(lines)


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    results = [outcome.result for outcome in outcomes]
    cells = [
        name,
        str(len({outcome.input.kind.name for outcome in outcomes})),
        f"{sum(not outcome.problems for outcome in outcomes)} of {len(outcomes)}",
        *(str(sum(result.code == code for result in results)) for code in range(4)),
        f"{statistics.median(result.wall_s for result in results):.2f} s",
        f"{max(result.wall_s for result in results):.2f} s",
        f"{max(result.memory_bytes for result in results) >> 20} MiB",
    ]
    return f"| {' | '.join(cells)} |"


def _failed(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        f"- `{outcome.input.name}`: {' '.join(problem.split())[:300]}"
        for outcome in outcomes
        for problem in outcome.problems
    ]
    return ["What did not hold:\n\n" + "\n".join(lines[:_MOST_FAILED])] if lines else []


def _prose(name: str) -> str:
    return (_PROSE / f"{name}.md").read_text()
