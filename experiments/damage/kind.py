"""What a kind of damage is, and what one damaged input expects of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.damage.specimen import RunCopy

Random = np.random.Generator
ALL_WITH_FILES = ("plain", "hosts", "pipeline", "single")
"""Specimens whose files are all closed."""
FIGURES = "figures"
"""The folder in a run for the files of scripts."""
FURTHER = "further"
"""How the files begin that commands are told to write beside the run."""
SCRIPT = Path(__file__).parents[2] / "analysis" / "bottleneck_timeline.py"
"""One of the scripts that write figures."""


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """What was done to a run.

    Attributes:
        hurt: ranks that the report may leave out.
        places: what an error has to name, one of them at least.
        says: what the report or the error has to say, all of it, whatever its line breaks.
        never: what must not occur in any output or file of the report.
        without_rights: whether the report runs without root's rights to pass by the modes of files.
        blamed: ranks that the verdict may blame; whom it likes where it is None.
        memory: value of `--memory` for the report, which it must respect; empty: its default.
        views: further commands that are run on the input, each as arguments of `hpcpace`, or a script and its own.
    """

    hurt: frozenset[int] = frozenset()
    places: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    without_rights: bool = False
    blamed: frozenset[int] | None = None
    memory: str = ""
    views: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of damage.

    Attributes:
        name: of the kind, unique.
        group: the row of the table in the document.
        damage: does it to a copy, by chance.
        specimens: what it is done to.
        weight: how many inputs it gets relative to others.
    """

    name: str
    group: str
    damage: Callable[[RunCopy, Random], Damaged]
    specimens: tuple[str, ...] = ALL_WITH_FILES
    weight: float = 1.0


def some_rank(run: RunCopy, random: Random) -> int:
    """Return a rank of the run by chance."""
    return int(random.integers(run.num_ranks))


def of_rank(run: RunCopy, rank: int, *says: str) -> Damaged:
    """Return the expectation where one rank's files are damaged."""
    places = (f"rank-{rank:05d}", f"rank {rank}", str(run.attempt.path))
    return Damaged(hurt=frozenset({rank}), places=places, says=says)


def seen_by_all(run: RunCopy, random: Random, damaged: Damaged) -> Damaged:
    """Return the expectation where every program that reads a run is led to read the damage as well.

    Besides the report these are `dump` of a rank that was hurt, `audit`, and for one input in four a script of figures.
    """
    rank = min(damaged.hurt or run.ranks)
    memory = ("--memory", damaged.memory) if damaged.memory else ()
    dump = ("dump", str(run.file(rank)), "--limit", "50", *memory)
    audit = ("audit", "--from", str(run.path))
    script = (str(SCRIPT), str(run.path), "--out", str(run.path / FIGURES))
    views = (dump, (*dump, "--json"), audit, (*audit, "--json"), *([script] if random.random() < 0.25 else []))
    return replace(damaged, views=views)


def further_views(run: RunCopy, random: Random, damaged: Damaged) -> Damaged:
    """Return the expectation where some of the other commands that open runs see the damage as well, by chance.

    These are four for damage that all programs are led to read, and one for other damage. `pack` and `switch` write
    into the run, and come last.
    """
    memory = ("--memory", damaged.memory) if damaged.memory else ()
    path, folder = str(run.path), str(run.path.parent)
    out = run.path.with_name(FURTHER)
    sound = str(run.shelf.kept("plain"))
    views = (
        ("list", folder),
        ("list", folder, "--json"),
        ("history", folder, *memory),
        ("history", folder, "--html", f"{out}.html", *memory),
        ("compare", sound, path, *memory),
        ("compare", path, sound, "--html", f"{out}.html", *memory),
        ("scale", sound, path),
        ("scale", sound, path, "--csv", f"{out}.csv"),
        ("watch", path, "--once"),
        ("hang", path),
        ("hang", path, "--json"),
        ("timeline", path, *memory),
        ("timeline", path, "-o", f"{out}.pftrace", *memory),
        ("import", "kineto", path, "--run-dir", f"{out}-kineto"),
        ("import", "flight-recorder", path),
        ("collect", path, "--trace-dir", str(run.path / "attempt-0")),
        ("switch", path, "on"),
        ("pack", path, "--ended", *memory),
    )
    chosen = sorted(random.choice(len(views), 4 if damaged.views else 1, replace=False))
    return replace(damaged, views=(*damaged.views, *(views[number] for number in chosen)))


def of_ranks(run: RunCopy, ranks: frozenset[int], *says: str) -> Damaged:
    """Return the expectation where several ranks' files are damaged."""
    places = [name for rank in sorted(ranks) for name in (f"rank-{rank:05d}", f"rank {rank}")]
    return Damaged(hurt=ranks, places=(*places, str(run.attempt.path)), says=says)
