"""Writes docs/results/reliability-input.md from the results of a run: every figure comes from that run."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from experiments.damage.bombs import Measured
from experiments.damage.campaign import Outcome
from experiments.damage.hostile.campaign import Outcome as HostileOutcome
from experiments.damage.races import RaceOutcome

_PROSE = Path(__file__).with_name("prose")
_MOST_FAILED = 50


def write_document(
    path: Path,
    outcomes: Sequence[Outcome],
    *,
    races: Sequence[RaceOutcome],
    measured: Sequence[Measured],
    hostile: Sequence[HostileOutcome],
    num_fresh: int,
    duration_s: float,
) -> None:
    """Write the document.

    Args:
        path: where to.
        outcomes: of all inputs.
        races: the result of each race.
        measured: what bombs took in memory.
        hostile: of all hostile files.
        num_fresh: how many of them were reported by fresh interpreters, too, with the same end.
        duration_s: what all of it took.
    """
    parts = [_prose("head"), _measured(outcomes, num_fresh, duration_s), _table(outcomes), *_failed(outcomes)]
    parts += _hostile_section(hostile)
    parts += [_prose("races"), _races(races), *_lost(races), _prose("memory"), _memory(measured), _prose("limits")]
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def write_hostile(path: Path, hostile: Sequence[HostileOutcome]) -> None:
    """Write the section on hostile files anew, and leave the others as they are."""
    section = "\n\n".join(part.strip() for part in _hostile_section(hostile))
    begin = section.splitlines()[0]
    before, _, rest = path.read_text().partition(f"\n{begin}\n")
    _, heading, after = rest.partition("\n## ")
    path.write_text(f"{before}\n{section}\n{heading}{after}")


def _hostile_section(hostile: Sequence[HostileOutcome]) -> list[str]:
    num_passed = sum(not outcome.problems for outcome in hostile)
    written = (
        f"Written by `python -m experiments.damage --hostile "
        f"{max((outcome.number for outcome in hostile), default=0) + 1} --write` on {time.strftime('%Y-%m-%d')}: "
        f"{num_passed:,} of {len(hostile):,} files of {len({outcome.kind.name for outcome in hostile})} kinds passed."
    )
    return [_prose("hostile"), written, _hostile(hostile), *_failed_hostile(hostile)]


def _measured(outcomes: Sequence[Outcome], num_fresh: int, duration_s: float) -> str:
    num_kinds = len({outcome.input.kind.name for outcome in outcomes})
    num_passed = sum(not outcome.problems for outcome in outcomes)
    return (
        f"Written by `python -m experiments.damage --write` on {time.strftime('%Y-%m-%d')}: {num_passed:,} of "
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
        f"{max(outcome.memory_bytes for outcome in outcomes) >> 20} MiB",
    ]
    return f"| {' | '.join(cells)} |"


def _hostile(outcomes: Sequence[HostileOutcome]) -> str:
    lines = [
        "| format | kinds | passed | exit 0 | 1 | 2 | 3 | 4 | s/MB | memory, largest | bound |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for format_ in dict.fromkeys(outcome.kind.format for outcome in outcomes):
        lines.append(_hostile_row(format_, [outcome for outcome in outcomes if outcome.kind.format == format_]))
    lines.append(_hostile_row("all", outcomes))
    return "\n".join(lines)


def _hostile_row(name: str, outcomes: Sequence[HostileOutcome]) -> str:
    kinds = {outcome.kind.name: outcome.kind for outcome in outcomes}
    most_s = max(kind.most_cpu_s_per_mb for kind in kinds.values())
    most_bytes = max(kind.most_memory_bytes for kind in kinds.values())
    cells = [
        name,
        str(len(kinds)),
        f"{sum(not outcome.problems for outcome in outcomes)} of {len(outcomes)}",
        *(str(sum(outcome.result.code == code for outcome in outcomes)) for code in range(5)),
        f"{max(outcome.cpu_s_per_mb for outcome in outcomes):.2f}",
        f"{max(outcome.result.memory_bytes for outcome in outcomes) >> 20} MiB",
        f"{most_s:g} s/MB, {most_bytes >> 20} MiB",
    ]
    return f"| {' | '.join(cells)} |"


def _failed_hostile(outcomes: Sequence[HostileOutcome]) -> list[str]:
    lines = [
        f"- `{outcome.kind.name}#{outcome.number}`: {' '.join(problem.split())[:300]}"
        for outcome in outcomes
        for problem in outcome.problems
    ]
    return ["What did not hold:\n\n" + "\n".join(lines[:_MOST_FAILED])] if lines else []


def _races(races: Sequence[RaceOutcome]) -> str:
    lines = [
        "| program | exchanged | rounds | hit | exchanges | exit codes | wrong | longest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for race in races:
        codes = ", ".join(f"{code}: {count}" for code, count in race.codes.items())
        wrong = f"caught in round {race.num_rounds}" if race.is_naive and race.problems else str(len(race.problems))
        cells = [race.program, race.swapper, str(race.num_rounds), str(race.num_hit), f"{race.num_exchanged:,}"]
        lines.append(f"| {' | '.join([*cells, codes, wrong, f'{race.longest_s:.1f} s'])} |")
    return "\n".join(lines)


def _lost(races: Sequence[RaceOutcome]) -> list[str]:
    lines = [
        f"- {race.program}, {race.swapper}: {problem[:300]}"
        for race in races
        for problem in race.problems
        if not race.is_naive
    ]
    return ["What did not hold:\n\n" + "\n".join(lines[:_MOST_FAILED])] if lines else []


def _memory(measured: Sequence[Measured]) -> str:
    lines = ["| run | command | `--memory` | peak | limit | exit |", "|---|---|---|---|---|---|"]
    for one in measured:
        peak = f"{one.most_bytes >> 20} MiB{'' if one.is_kept else ': too much'}"
        cells = [one.what, one.command, one.memory, peak, f"{one.limit_bytes >> 20} MiB", str(one.code)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _failed(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        f"- `{outcome.input.name}`: {' '.join(problem.split())[:300]}"
        for outcome in outcomes
        for problem in outcome.problems
    ]
    return ["What did not hold:\n\n" + "\n".join(lines[:_MOST_FAILED])] if lines else []


def _prose(name: str) -> str:
    return (_PROSE / f"{name}.md").read_text()
