"""Runs all traces of a campaign in several processes: make one, examine it, judge the verdict, and time it."""

from __future__ import annotations

import itertools
import pickle
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from experiments.pages import listed, minutes, page, share, table
from experiments.score.cells import CELLS, LOST_CELLS, POWER_LEVELS, POWER_SIZES, Cell, SeedSet, power_cells, seeds
from experiments.score.generator import traces_of, with_losses, write_run
from experiments.score.layout_cells import LAYOUT_CELLS, LayoutCell, LayoutScenario
from experiments.score.scenario import Scenario
from experiments.score.truth import Judgement, Truth, judge, truth_of
from hpcpace.diagnosis.analyze import examine
from hpcpace.diagnosis.summary import Mode, Verdict
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.tables import RankTrace

WRITTEN_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Task:
    """One trace; `is_written` asks for its verdict after writing and reading it, too."""

    cell: str
    seed: int
    is_written: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one trace; if the examination raised an error, `error` has it and there is no judgement.

    Attributes:
        duration_s: of the examination alone.
        is_same_from_disk: whether the verdict on the written run is the same; None where it was not written.
    """

    task: Task
    scenario: Scenario | LayoutScenario
    truth: Truth
    judgement: Judgement | None
    duration_s: float
    is_same_from_disk: bool | None = None
    error: str = ""


def tasks(cells: Sequence[Cell | LayoutCell], *, per_cell: int, of: SeedSet) -> list[Task]:
    """Return what to do: `per_cell` traces of each cell, fewer of those that cost more."""
    pairs = [(cell.name, seed) for cell in cells for seed in seeds(max(per_cell // cell.cost, 1), of)]
    written = {cell.name for cell in cells if cell not in LOST_CELLS and isinstance(cell, Cell)}
    return [
        Task(cell=name, seed=seed, is_written=number % WRITTEN_EVERY == 0 and name in written)
        for number, (name, seed) in enumerate(pairs)
    ]


def examined(task: Task, *, examination: Callable[..., Verdict] = examine) -> Outcome:
    """Return the result of one trace."""
    scenario = _CELLS[task.cell].scenario(task.seed)
    if isinstance(scenario, LayoutScenario):
        truth, traces = scenario.truth(), scenario.traces()
    else:
        truth = truth_of(scenario)
        traces = with_losses(scenario, traces_of(scenario), partial(_traces_of_another, scenario))
    begin_s = time.perf_counter()
    judgement, is_same, error = None, None, ""
    try:
        verdict = examination(traces, ())
        duration_s = time.perf_counter() - begin_s
        judgement = judge(scenario, truth, verdict)
        if task.is_written and isinstance(scenario, Scenario):
            is_same = _from_disk(scenario, examination) == verdict
    except Exception as raised:  # the boundary to what is scored: a failure is an outcome, and is counted
        duration_s, error = time.perf_counter() - begin_s, f"{type(raised).__name__}: {raised}"
    found = {"judgement": judgement, "duration_s": duration_s, "is_same_from_disk": is_same, "error": error}
    return Outcome(task=task, scenario=scenario, truth=truth, **found)


def kept(task: Task, *, folder: Path) -> Outcome:
    """Return the result of one trace, from a file of an earlier campaign of the same code if there is one."""
    path = folder / f"{task.cell}-{task.seed}{'-written' * task.is_written}.pickle"
    if not path.exists():
        whole = path.with_suffix(".part")
        whole.write_bytes(pickle.dumps(examined(task)))
        whole.replace(path)
    outcome: Outcome = pickle.loads(path.read_bytes())
    return outcome


def _traces_of_another(scenario: Scenario) -> list[RankTrace]:
    """Return traces of another run of as many ranks, in which all of them are slower."""
    other = replace(scenario, seed=scenario.seed + 1, fault="none", size=0.0, level=2 * scenario.level, data="sound")
    return traces_of(other)


def _from_disk(scenario: Scenario, examination: Callable[..., Verdict]) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        written = write_run(scenario, Path(folder) / "run")
        found = read_attempt(written.attempts()[-1])
        return examination(found.traces, found.problems)


_CELLS: dict[str, Cell | LayoutCell] = {
    cell.name: cell for cell in (*CELLS, *LOST_CELLS, *LAYOUT_CELLS, *power_cells())
}


# Tables: a column is what it says of some outcomes, and a row is of a cell

_BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_PERSISTENT = ("slow_rank", "slow_node", "slow_stage", "slow_link", "slow_switch")
_MAX_NOISE, _MIN_STEPS, _LARGE = 0.05, 200, 0.10
_WANTED = {"5 %": 0.90, "10 % and more": 0.99}
Outcomes = Sequence[Outcome]
Columns = Mapping[str, Callable[[Outcomes], str]]


def _done(outcomes: Outcomes, *, is_blamed: bool | None = None) -> list[Judgement]:
    """Return the judgements of all, or of those in which somebody, or nobody, is to blame."""
    chosen = [o for o in outcomes if is_blamed is None or bool(o.truth.culprits) == is_blamed]
    return [outcome.judgement for outcome in chosen if outcome.judgement is not None]


def _share(flags: Iterable[object], total: int | None = None) -> str:
    found = [bool(flag) for flag in flags]
    return share(sum(found), len(found) if total is None else total)


def _costs_off(outcomes: Outcomes) -> list[float]:
    """Return by how much what the right mode is said to cost differs from what it costs, percentage points."""
    return [
        100 * abs(one.judgement.loss_share - (one.truth.fault_share or one.truth.noise_share))
        for one in outcomes
        if one.judgement is not None and one.judgement.is_mode_right and one.judgement.loss_share
    ]


def _spelled(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> str:
    return f"{of(values):.1f}" if values else "-"


def _median_time(outcomes: Outcomes) -> str:
    return f"{statistics.median(o.duration_s for o in outcomes) * 1e3:.0f} ms"


_JUDGED: Columns = {
    "traces": lambda of: str(len(of)),
    "right mode": lambda of: _share((j.is_mode_right for j in _done(of)), len(of)),
    "recall": lambda of: _share(j.is_found for j in _done(of) if j.has_culprit),
    "precision": lambda of: share(sum(j.num_named_right for j in _done(of)), sum(j.num_named for j in _done(of))),
    "wrong culprit": lambda of: _share(j.is_wrong for j in _done(of, is_blamed=True)),
    "abstained": lambda of: _share(j.is_abstention for j in _done(of, is_blamed=True)),
    "false alarms": lambda of: _share(j.is_false_alarm for j in _done(of, is_blamed=False)),
}
CELL_COLUMNS: Columns = {
    **_JUDGED,
    "95 % interval holds": lambda of: _share(j.is_covered for j in _done(of) if j.is_covered is not None),
    "median time": _median_time,
}
LAYOUT_COLUMNS: Columns = {
    **_JUDGED,
    "cost off by, points": lambda of: _spelled(_costs_off(of), statistics.median),
    "at most": lambda of: _spelled(_costs_off(of), max),
}
LOST_COLUMNS: Columns = {
    "traces": lambda of: str(len(of)),
    "cannot tell": lambda of: _share((j.mode == Mode.CANNOT_TELL for j in _done(of)), len(of)),
    "certain and right": lambda of: _share((j.mode != Mode.CANNOT_TELL and j.is_right for j in _done(of)), len(of)),
    "wrong and confident": lambda of: _share((j.is_wrong_and_confident for j in _done(of)), len(of)),
    "wanted": lambda of: "0.5 %",
}


def _rows(outcomes: Outcomes, cells: Sequence[Cell | LayoutCell], columns: Columns) -> list[list[str]]:
    """Return a row for each cell that has outcomes, and one for all of them."""
    chosen = [(cell.name, [o for o in outcomes if o.task.cell == cell.name]) for cell in cells]
    chosen.append(("all", [o for _, some in chosen for o in some]))
    return [[name, *(column(some) for column in columns.values())] for name, some in chosen if some]


def cell_rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows of the cells of the score."""
    return _rows(outcomes, CELLS, CELL_COLUMNS)


def layout_rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows of the cells of layouts."""
    return _rows(outcomes, LAYOUT_CELLS, LAYOUT_COLUMNS)


def mode_rows(outcomes: Outcomes, cells: Sequence[Cell | LayoutCell] = CELLS) -> list[list[str]]:
    """Return for each cell the modes that were given, the most frequent first; those that are not right in brackets."""
    rows = []
    for cell in cells:
        done = [outcome.judgement for outcome in outcomes if outcome.task.cell == cell.name]
        said = Counter("(failed)" if j is None else j.mode if j.is_mode_right else f"({j.mode})" for j in done)
        ordered = sorted(said.items(), key=lambda item: (-item[1], item[0]))
        rows += [[cell.name, ", ".join(f"{mode} {count}" for mode, count in ordered)]] if said else []
    return rows


def target_rows(outcomes: Outcomes) -> list[list[str]]:
    """Return how often the culprit of a persistent fault is named, by size and kind of fault.

    Only runs of at least 200 steps with noise of 5 % at most count, and not those of the power table.
    """
    chosen = [
        outcome
        for outcome in outcomes
        if outcome.scenario.fault in _PERSISTENT
        and outcome.scenario.level <= _MAX_NOISE
        and outcome.scenario.num_steps >= _MIN_STEPS
        and outcome.truth.culprits
        and outcome.truth.is_identifiable
        and outcome.scenario.data == "sound"
        and not outcome.task.cell.startswith(("power-", "layout-"))
    ]
    rows = []
    for size, wanted in _WANTED.items():
        for fault in (*_PERSISTENT, "all"):
            of = [one for one in chosen if (one.scenario.size >= _LARGE) == (size != "5 %")]
            of = [one for one in of if fault in (one.scenario.fault, "all")]
            done, num_failed = _done(of), len(of) - len(_done(of))
            named = _share((j.is_found for j in done), len(of))
            nobody = share(num_failed + sum(j.is_abstention for j in done), len(of))
            wrong = _share((j.is_wrong for j in done), len(of))
            row = [fault.replace("_", " "), size, str(len(of)), named, f"{wanted:.0%}", nobody, wrong]
            rows += [row] if of else []
    return rows


def power_rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the share of found culprits, a row a size and a column a level of noise."""
    found: dict[str, list[bool]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.task.cell, []).append(outcome.judgement is not None and outcome.judgement.is_found)
    by_size = {size: [found.get(f"power-{size:g}-{level:g}", []) for level in POWER_LEVELS] for size in POWER_SIZES}
    return [[f"{size:.0%}", *map(_share, cells)] for size, cells in by_size.items() if any(cells)]


def confidence_rows(outcomes: Outcomes) -> list[list[str]]:
    """Return how often verdicts of each range of confidence are right: mode, and whom they name, if anybody."""
    done = _done([o for o in outcomes if not o.task.cell.startswith("power-")])
    rows = []
    for low, high in itertools.pairwise(_BINS):
        chosen = [j for j in done if low <= j.confidence < high or (high == _BINS[-1] and j.confidence >= high)]
        if chosen:
            mean = statistics.mean(j.confidence for j in chosen)
            right = _share(j.is_right for j in chosen)
            rows.append([f"{low:g} to {high:g}", str(len(chosen)), f"{mean:.2f}", right])
    return rows


def tables(outcomes: Outcomes) -> dict[str, str]:
    """Return all tables that have rows, by their names in the document; the others are without rows there."""
    modes = ("cell", "modes")
    found = {
        "cells": (("cell", *CELL_COLUMNS), cell_rows(outcomes)),
        "modes": (modes, mode_rows(outcomes)),
        "lost": (("cell", *LOST_COLUMNS), _rows(outcomes, LOST_CELLS, LOST_COLUMNS)),
        "lost_modes": (modes, mode_rows(outcomes, LOST_CELLS)),
        "layouts": (("cell", *LAYOUT_COLUMNS), layout_rows(outcomes)),
        "layout_modes": (modes, mode_rows(outcomes, LAYOUT_CELLS)),
        "targets": (_TARGET_HEAD, target_rows(outcomes)),
        "confidence": (("confidence", "traces", "mean confidence", "right"), confidence_rows(outcomes)),
        "power": (("slower by", *(f"noise {level:.0%}" for level in POWER_LEVELS)), power_rows(outcomes)),
    }
    return {name: table(*given) for name, given in found.items()}


_TARGET_HEAD = ("persistent fault", "size", "traces", "culprit named", "wanted", "nobody named", "somebody else named")


def document(outcomes: Outcomes, *, command: str, duration_s: float | None) -> str:
    """Return docs/results/diagnosis-score.md, or a document like it on some of the cells.

    Args:
        outcomes: of all traces.
        command: that made them.
        duration_s: how long that took; None where some are of an earlier call.
    """
    names = {outcome.task.cell for outcome in outcomes}
    written = [outcome for outcome in outcomes if outcome.is_same_from_disk is not None]
    failed = [f"{one.task.cell}, seed {one.task.seed}: {one.error}" for one in outcomes if one.error]
    found = tables(outcomes)
    if not names - {cell.name for cell in (*CELLS, *LOST_CELLS, *LAYOUT_CELLS)}:
        found["power"] = ""

    def titles(cells: Sequence[Cell | LayoutCell]) -> str:
        rows = [(cell.name, cell.title) for cell in cells if cell.name in names]
        return table(("cell", "what happens in it"), rows)

    return page(
        "diagnosis-score",
        command=command,
        duration="in parts" if duration_s is None else f"in {minutes(duration_s)}",
        num_traces=len(outcomes),
        titles=titles(CELLS),
        lost_titles=titles(LOST_CELLS),
        layout_titles=titles(LAYOUT_CELLS),
        num_written=len(written),
        num_same=sum(bool(outcome.is_same_from_disk) for outcome in written),
        num_failed=len(failed),
        failed=listed(failed[:20]),
        **found,
    )
