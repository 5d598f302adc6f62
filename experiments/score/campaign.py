"""All traces of a campaign in several processes: make one, examine it, judge the verdict, and tell what it took."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from experiments.score.cells import CELLS, LOST_CELLS, Cell, SeedSet, power_cells, seeds
from experiments.score.generator import traces_of, write_run
from experiments.score.judge import Judgement, Verdict, judge
from experiments.score.lost import with_losses
from experiments.score.scenario import Scenario
from experiments.score.truth import Truth, truth_of
from hpcpace.diagnosis.analyze import examine
from hpcpace.trace.attempt_reader import read_attempt

WRITTEN_EVERY = 50
_CHUNK = 4


@dataclass(frozen=True, kw_only=True)
class Task:
    """One trace; `is_written` asks for its verdict after writing and reading it, too."""

    cell: str
    seed: int
    is_written: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one trace came to; `error` says what the examination raised, and there is no judgement then.

    Attributes:
        duration_s: of the examination alone.
        is_same_from_disk: whether the verdict on the written run is the same; None where it was not written.
    """

    task: Task
    scenario: Scenario
    truth: Truth
    judgement: Judgement | None
    duration_s: float
    is_same_from_disk: bool | None = None
    error: str = ""


def tasks(cells: Sequence[Cell], *, per_cell: int, of: SeedSet) -> list[Task]:
    """Return what to do: `per_cell` traces of each cell, fewer of those that cost more."""
    pairs = [(cell.name, seed) for cell in cells for seed in seeds(max(per_cell // cell.cost, 1), of)]
    written = {cell.name for cell in cells if cell not in LOST_CELLS}
    return [
        Task(cell=name, seed=seed, is_written=number % WRITTEN_EVERY == 0 and name in written)
        for number, (name, seed) in enumerate(pairs)
    ]


def run(todo: Sequence[Task], *, jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each task, in their order."""
    # A progress bar runs a thread, and a process that has threads should not fork.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(examined, todo, chunksize=_CHUNK)


def examined(task: Task, *, examination: Callable[..., Verdict] = examine) -> Outcome:
    """Return what one trace comes to."""
    scenario = _CELLS[task.cell].scenario(task.seed)
    truth = truth_of(scenario)
    traces = with_losses(scenario, traces_of(scenario), lambda: traces_of(_another_run(scenario)))
    begin_s = time.perf_counter()
    try:
        verdict = examination(traces, ())
    except Exception as error:  # the boundary to what is scored: a failure is an outcome, and is counted
        return Outcome(
            task=task,
            scenario=scenario,
            truth=truth,
            judgement=None,
            duration_s=time.perf_counter() - begin_s,
            error=f"{type(error).__name__}: {error}",
        )
    return Outcome(
        task=task,
        scenario=scenario,
        truth=truth,
        judgement=judge(scenario, truth, verdict),
        duration_s=time.perf_counter() - begin_s,
        is_same_from_disk=_from_disk(scenario, examination) == verdict if task.is_written else None,
    )


def _another_run(scenario: Scenario) -> Scenario:
    """Return a scenario of as many ranks in which all of them are slower."""
    return replace(scenario, seed=scenario.seed + 1, fault="none", size=0.0, level=2 * scenario.level, data="sound")


def _from_disk(scenario: Scenario, examination: Callable[..., Verdict]) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        written = write_run(scenario, Path(folder) / "run")
        found = read_attempt(written.attempts()[-1])
        return examination(found.traces, found.problems)


_CELLS = {cell.name: cell for cell in (*CELLS, *LOST_CELLS, *power_cells())}
