"""Damaged runs: how a kind of damage is done to a copy of a sound run, and what must hold of a report on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

from experiments.damage.chance import random_of
from experiments.damage.child import Result, memory_limit_bytes
from experiments.damage.engine import Bounds, Kind, Made, broken, escaped, texts_of, unsaid, without_space
from experiments.damage.specimen import (
    ALL_WITH_FILES,
    FIGURES,
    FURTHER,
    Damage,
    Damaged,
    RunCopy,
    Secret,
    Shelf,
    further_views,
)
from hpcpace.core.rundir import HISTORY_INDEX

_JSON_EVERY = 5
_WITH_MEMORY, _DEFAULT_MEMORY = ("report", "dump", "compare", "history", "timeline", "pack"), "2GiB"
_CODES, _NO_REPORT = (0, 1, 2, 3), (2, 3)
_SCREENFUL, _MAX_LINES = (
    ("list", "history", "compare", "scale", "watch", "hang", "timeline", "import", "collect", "switch", "pack"),
    120,
)
"""Commands that print a screen or two, however large the run is, and how many lines that is."""


@dataclass(frozen=True, kw_only=True)
class DamageKind(Kind):
    """One kind of damage.

    Attributes:
        damage: does it to a copy, by chance.
        specimens: what it is done to.
    """

    damage: Damage
    specimens: tuple[str, ...] = ALL_WITH_FILES

    def made(self, number: int, place: Path, shelf: Shelf) -> Made:
        """Damage a copy of a specimen, which the report sees first; each fifth report is asked for as JSON."""
        (place / "runs").mkdir()
        run, damaged = _forked(self._damaged, number, shelf, place / "runs" / "run")
        moved = [path for path in run.path.iterdir() if path.name.startswith("run ")] if run.path.is_dir() else []
        folder = moved[0] if moved else run.path
        report = ["report", str(folder), *(["--json"] if number % _JSON_EVERY == _JSON_EVERY - 1 else [])]
        report += ["--memory", damaged.memory] if damaged.memory else []
        secret = [shelf.secret.path] if shelf.secret.path.exists() else []
        return Made(
            commands=(report, *damaged.views),
            problems=partial(_problems, damaged, run, folder),
            watched=(place / "runs", *secret),
            without_rights=damaged.without_rights,
        )

    def _damaged(self, number: int, shelf: Shelf, path: Path) -> tuple[RunCopy, Damaged]:
        random = random_of(self.name, number)
        run = shelf.copy(self.specimens[number % len(self.specimens)], path)
        return run, further_views(run, random, self.damage(run, random))


def kinds_of(
    group: str, damages: Mapping[str, Damage], prefix: str = "", end: str = "", *, on: str = "", weight: float = 1.0
) -> list[DamageKind]:
    """Return the kinds of a table of damages, by their names without what all of them begin or end with.

    Args:
        group: the row of the table in the document.
        damages: by name.
        prefix, end: of all names.
        on: names of the specimens with a space between; those whose files are all closed if it is empty.
        weight: of each.
    """
    more: dict[str, Any] = {"specimens": tuple(on.split())} if on else {}
    return [
        DamageKind(name=f"{prefix}{name}{end}", group=group, damage=damage, weight=weight, **more)
        for name, damage in damages.items()
    ]


def _forked(make: Callable[..., tuple[RunCopy, Damaged]], *args: Any) -> tuple[RunCopy, Damaged]:
    """Return what a function returns in a separate process.

    What a damage leaves in HDF5 and in memory would otherwise be in all reports that are forked later.
    """
    reader, writer = Pipe(duplex=False)
    process = get_context("fork").Process(target=lambda: writer.send(make(*args)))
    process.start()
    writer.close()
    try:
        made: tuple[RunCopy, Damaged] = reader.recv()
        return made
    except EOFError:
        raise RuntimeError(f"the damage could not be done: {args}") from None
    finally:
        process.join()


def _problems(damaged: Damaged, run: RunCopy, folder: Path, arguments: Sequence[str], result: Result) -> Iterator[str]:
    """Yield what does not hold of the report or of another command on the same input."""
    command, is_json = arguments[0], "--json" in arguments
    memory = damaged.memory if command in _WITH_MEMORY else _DEFAULT_MEMORY
    bounds: dict[str, Any] = {"codes": _CODES} if command == "report" else {}
    bounds |= {"lines": _MAX_LINES} if command in _SCREENFUL else {}
    found = broken(arguments, result, Bounds(memory_bytes=memory_limit_bytes(memory), **bounds))
    yield from found
    if command == "report" and not (found and (result.is_late or result.signal)):
        stdout, stderr = texts_of(result)
        if is_reported := bool(stdout.strip()):
            yield from _of_summary(stdout if is_json else _read(folder / "summary.json"), damaged, run)
        else:
            yield from _of_error(result, stderr, damaged, run)
        if not (is_json and is_reported):  # the summary has it in other words
            yield from unsaid(damaged.says, stdout + stderr)
        page = _read(folder / "report.html")
        yield from (f"has {text!r} in report.html" for text in damaged.never if text in page)
    yield from _leaks(result, run.shelf.secret, folder)


def _leaks(result: Result, secret: Secret, folder: Path) -> Iterator[str]:
    """Yield where the secret is, of all that was printed and of all that was written into the run."""
    places = {"stdout": result.stdout, "stderr": result.stderr}
    places |= {path.name: path.read_bytes() for path in _written(folder)}
    yield from (f"{found} is in {name}" for name, content in places.items() for found in secret.leaks(content))


def _written(folder: Path) -> list[Path]:
    paths = [folder / "summary.json", folder / "report.html", *sorted((folder / FIGURES).glob("*"))]
    paths += [path for one in folder.parent.glob(f"{FURTHER}*") for path in (one, *one.rglob("*"))]
    paths += [folder.parent / HISTORY_INDEX, folder / "timeline.pftrace"]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _of_summary(text: str, damaged: Damaged, run: RunCopy) -> Iterator[str]:
    """Yield what is wrong with summary.json, which other programs must be able to read: no NaN, no infinities."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        summary = json.loads(text or "null", parse_constant=refuse)
    except ValueError as error:
        yield f"summary.json: {error}"
        return
    if not isinstance(summary, dict):
        return
    sound = run.ranks - damaged.hurt
    if missing := sound - set(summary["world"]["ranks"]):
        yield f"sound ranks {sorted(missing)} are not in world.ranks"
    if missing := sound - {row["rank"] for row in summary["ranks"]}:
        yield f"sound ranks {sorted(missing)} have no figures"
    verdict = summary["verdict"]
    ranks = {int(text) for item in verdict["culprits"] for text in re.findall(r"\d+", json.dumps(item))}
    is_wrong = damaged.blamed is not None and (ranks - damaged.blamed or (verdict["culprits"] and not ranks))
    if is_wrong:
        yield f"blames {sorted(ranks)}: {verdict['headline']}"


def _of_error(result: Result, stderr: str, damaged: Damaged, run: RunCopy) -> Iterator[str]:
    """Yield what is wrong where no report is printed."""
    if result.code not in _NO_REPORT:
        yield f"ends with {result.code} and prints no report"
    if not stderr.strip():
        yield "prints nothing"
    if run.ranks - damaged.hurt:
        yield f"reports none of the sound ranks {sorted(run.ranks - damaged.hurt)}: {stderr.strip()[:300]}"
    places = [without_space(escaped(place)) for place in damaged.places]
    if places and not any(place in without_space(stderr) for place in places):
        yield f"names no place: {stderr.strip()[:300]}"


def _read(path: Path) -> str:
    return path.read_text(errors="surrogateescape") if path.is_file() else ""
