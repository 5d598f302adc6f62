"""The results of jobs in the lab, kept in a folder: a campaign of hours is run in stretches, and written down once."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.score.judge import Judgement
from experiments.score.lab_cases import CASES, Case

_FOLDER = "outcomes"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one job; `error` says why there is no judgement.

    Attributes:
        is_mode_found: whether a right mode is among the findings, or the verdict is right without any.
        step_ms, cv: median step time and its coefficient of variation.
        is_same_without_lab: whether the run's verdict is the same once the lab and its log of truth are gone; None
            where that was not tried.
        load: of the machine while the job ran, of the last minute.
        commit: of the code.
    """

    case: Case
    judgement: Judgement | None = None
    modes: tuple[str, ...] = ()
    is_mode_found: bool = False
    headline: str = ""
    step_ms: float = 0.0
    cv: float = 0.0
    run: Path | None = None
    verdict: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_same_without_lab: bool | None = None
    load: float = 0.0
    commit: str = ""
    error: str = ""


def keep(outcome: Outcome, folder: Path) -> None:
    """Add an outcome to those in a folder; of several threads, one at a time."""
    place = folder / _FOLDER
    place.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.stem) for path in place.glob("*.json")), default=0)
    _write(outcome, place / f"{number:04d}.json")


def kept(folder: Path) -> list[Outcome]:
    """Return the outcomes in a folder, in the order in which they were added."""
    return [_outcome(json.loads(path.read_text())) for path in _files(folder)]


def change(folder: Path, changed: Callable[[Outcome], Outcome]) -> None:
    """Replace the outcomes in a folder by what a function makes of them."""
    for path, outcome in zip(_files(folder), kept(folder), strict=True):
        _write(changed(outcome), path)


def missing(cases: Sequence[Case], outcomes: Sequence[Outcome], repetitions: int) -> list[Case]:
    """Return the cases that jobs are still to be run of, one of each in turn."""
    counts = Counter(outcome.case.name for outcome in outcomes)
    return [case for round_ in range(repetitions) for case in cases if counts[case.name] <= round_]


def this_commit() -> str:
    """Return the commit of the code, with a + where files differ from it; empty outside of a repository."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _files(folder: Path) -> list[Path]:
    return sorted((folder / _FOLDER).glob("*.json"))


def _write(outcome: Outcome, path: Path) -> None:
    judgement = None if outcome.judgement is None else dataclasses.asdict(outcome.judgement)
    values = {item.name: getattr(outcome, item.name) for item in dataclasses.fields(outcome)}
    values |= {"case": outcome.case.name, "judgement": judgement, "run": outcome.run and str(outcome.run)}
    path.write_text(json.dumps(values, indent=1))


def _outcome(values: dict[str, Any]) -> Outcome:
    case = next(case for case in CASES if case.name == values["case"])
    found = values["judgement"]
    judgement = None if found is None else Judgement(**{**found, "named": tuple(found["named"])})
    run = Path(values["run"]) if values["run"] else None
    return Outcome(**{**values, "case": case, "judgement": judgement, "run": run, "modes": tuple(values["modes"])})
