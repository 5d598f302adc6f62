"""Writes docs/results/hang-matrix.md from outcomes: per cell how often the kind and the rank were right, and how soon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from textwrap import fill

from experiments.hangs.cells import CELLS
from experiments.hangs.healthy import HEALTHY
from experiments.hangs.judge import HANG_S, NAMED_WITHIN_S, Outcome

_PROSE = Path(__file__).with_name("prose.md")


def write_document(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the document."""
    hangs = [outcome for outcome in outcomes if outcome.cell in {cell.key for cell in CELLS}]
    healthy = [outcome for outcome in outcomes if outcome.cell in {job.name for job in HEALTHY}]
    text = _PROSE.read_text()
    parts = {
        "SUMMARY": _summary(hangs, healthy),
        "MATRIX": "\n".join(_matrix(hangs)),
        "HEALTHY": "\n".join(_healthy(healthy)),
        "HANG_S": f"{HANG_S:.0f}",
        "WITHIN_S": f"{NAMED_WITHIN_S:.0f}",
    }
    for name, part in parts.items():
        text = text.replace(f"[{name}]", part)
    path.write_text(text)


def _summary(hangs: Sequence[Outcome], healthy: Sequence[Outcome]) -> str:
    kinds, ranks = sum(one.is_kind_right for one in hangs), sum(one.are_ranks_right for one in hangs)
    soon, wrong = sum(one.is_in_time for one in hangs), sum(bool(one.wrong) for one in hangs)
    named = sum(not one.are_ranks_right for one in healthy)
    return fill(
        f"Of {len(hangs)} jobs that hang, the kind is right in {kinds}, the rank is right in {ranks}, and {soon} are "
        f"found in time; {wrong} have a wrong name. Of {len(healthy)} healthy jobs, {named} are said to hang.",
        width=120,
    )


def _matrix(hangs: Sequence[Outcome]) -> list[str]:
    lines = [
        "| hang | layout | ranks | runs | right kind | right rank | in time | wrong names | found after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        own = [outcome for outcome in hangs if outcome.cell == cell.key]
        if not own:
            continue
        kinds, ranks = sum(one.is_kind_right for one in own), sum(one.are_ranks_right for one in own)
        soon, wrong = sum(one.is_in_time for one in own), sum(bool(one.wrong) for one in own)
        after = [one.after_s for one in own if one.after_s is not None]
        took = f"{median(after):.1f} s" if after else "-"
        cells = [cell.name, cell.program, cell.num_ranks, len(own), kinds, ranks, soon, wrong, took]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _healthy(healthy: Sequence[Outcome]) -> list[str]:
    lines = ["| unusual | jobs | said to hang |", "|---|---|---|"]
    for job in HEALTHY:
        own = [outcome for outcome in healthy if outcome.cell == job.name]
        lines.append(f"| {job.name} | {len(own)} | {sum(not one.are_ranks_right for one in own)} |")
    return lines
