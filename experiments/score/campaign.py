"""Runs all traces of a campaign in several processes: make one, examine it, judge the verdict, and time it."""

from __future__ import annotations

import itertools
import pickle
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
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


_BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_PERSISTENT = ("slow_rank", "slow_node", "slow_stage", "slow_link", "slow_switch")
_MAX_NOISE, _MIN_STEPS, _LARGE = 0.05, 200, 0.10
_WANTED = {"5 %": 0.90, "10 % and more": 0.99}

CONFIDENCE_COLUMNS = ("confidence", "traces", "mean confidence", "right")
TARGET_COLUMNS = (
    *("persistent fault", "size", "traces", "culprit named", "wanted", "nobody named", "somebody else named"),
)
LOST_COLUMNS = ("cell", "traces", "cannot tell", "certain and right", "wrong and confident", "wanted")
CELL_COLUMNS = (
    *("cell", "traces", "right mode", "recall", "precision", "wrong culprit", "abstained", "false alarms"),
    *("95 % interval holds", "median time"),
)


LAYOUT_COLUMNS = (*CELL_COLUMNS[:-2], "cost off by, points", "at most")


def _by_cell(
    outcomes: Sequence[Outcome], cells: Sequence[Cell | LayoutCell]
) -> list[tuple[str, list[Outcome], list[Judgement]]]:
    """Return name, outcomes and judgements of each cell that has any, and of all of them."""
    chosen = [(cell.name, [o for o in outcomes if o.task.cell == cell.name]) for cell in cells]
    chosen.append(("all", [o for _, some in chosen for o in some]))
    return [(name, some, [o.judgement for o in some if o.judgement is not None]) for name, some in chosen if some]


def cell_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a row of text for each cell that has outcomes, columns as in CELL_COLUMNS, and one for all of them."""
    return [_cell_row(*of_cell) for of_cell in _by_cell(outcomes, CELLS)]


def layout_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a row for each cell of a layout, columns as in LAYOUT_COLUMNS, and one for all of them."""
    return [
        [*_cell_row(name, chosen, done)[:-2], *_cost_columns(chosen)]
        for name, chosen, done in _by_cell(outcomes, LAYOUT_CELLS)
    ]


def _cost_columns(outcomes: Sequence[Outcome]) -> list[str]:
    """Return by how much what the right mode is said to cost differs from what it costs: median, and the most."""
    found = [
        abs(one.judgement.loss_share - (one.truth.fault_share or one.truth.noise_share))
        for one in outcomes
        if one.judgement is not None and one.judgement.is_mode_right and one.judgement.loss_share
    ]
    return [f"{100 * statistics.median(found):.1f}", f"{100 * max(found):.1f}"] if found else ["-", "-"]


def _cell_row(name: str, outcomes: Sequence[Outcome], done: Sequence[Judgement]) -> list[str]:
    wanted = [j for j in done if j.has_culprit]
    innocent, blamed = (
        [o.judgement for o in outcomes if o.judgement is not None and bool(o.truth.culprits) == is_blamed]
        for is_blamed in (False, True)
    )
    covered = [j.is_covered for j in done if j.is_covered is not None]
    return [
        *(name, str(len(outcomes)), share(sum(j.is_mode_right for j in done), len(outcomes))),
        share(sum(j.is_found for j in wanted), len(wanted)),
        share(sum(j.num_named_right for j in done), sum(j.num_named for j in done)),
        share(sum(j.is_wrong for j in blamed), len(blamed)),
        share(sum(j.is_abstention for j in blamed), len(blamed)),
        share(sum(j.is_false_alarm for j in innocent), len(innocent)),
        share(sum(covered), len(covered)),
        f"{statistics.median(o.duration_s for o in outcomes) * 1e3:.0f} ms",
    ]


def lost_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a row for each cell whose data cannot carry a verdict, columns as in LOST_COLUMNS, and one for all."""
    rows = []
    for name, chosen, done in _by_cell(outcomes, LOST_CELLS):
        num_told = sum(j.mode != Mode.CANNOT_TELL and j.is_right for j in done)
        counts = (sum(j.mode == Mode.CANNOT_TELL for j in done), num_told, sum(j.is_wrong_and_confident for j in done))
        rows.append([name, str(len(chosen)), *(share(number, len(chosen)) for number in counts), "0.5 %"])
    return rows


def target_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return how often the culprit of a persistent fault is named, by size and kind of fault, columns TARGET_COLUMNS.

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
        of_size = [outcome for outcome in chosen if (outcome.scenario.size >= _LARGE) == (size != "5 %")]
        for fault in (*_PERSISTENT, "all"):
            of_fault = [outcome for outcome in of_size if fault in (outcome.scenario.fault, "all")]
            done = [outcome.judgement for outcome in of_fault if outcome.judgement is not None]
            if of_fault:
                named = share(sum(j.is_found for j in done), len(of_fault))
                nobody = share(len(of_fault) - len(done) + sum(j.is_abstention for j in done), len(of_fault))
                wrong = share(sum(j.is_wrong for j in done), len(of_fault))
                row = [fault.replace("_", " "), size, str(len(of_fault)), named, f"{wanted:.0%}", nobody, wrong]
                rows.append(row)
    return rows


def mode_rows(outcomes: Sequence[Outcome], cells: Sequence[Cell | LayoutCell] = CELLS) -> list[list[str]]:
    """Return for each cell the modes that were given, the most frequent first; those that are not right in brackets."""
    rows = []
    for cell in cells:
        done = [outcome.judgement for outcome in outcomes if outcome.task.cell == cell.name]
        said = Counter("(failed)" if j is None else j.mode if j.is_mode_right else f"({j.mode})" for j in done)
        if said:
            ordered = sorted(said.items(), key=lambda item: (-item[1], item[0]))
            rows.append([cell.name, ", ".join(f"{mode} {count}" for mode, count in ordered)])
    return rows


def power_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the share of found culprits, a row a size and a column a level of noise."""
    found: dict[str, list[bool]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.task.cell, []).append(outcome.judgement is not None and outcome.judgement.is_found)
    rows = []
    for size in POWER_SIZES:
        cells = [found.get(f"power-{size:g}-{level:g}", []) for level in POWER_LEVELS]
        if any(cells):
            rows.append([f"{size:.0%}", *(share(sum(cell), len(cell)) for cell in cells)])
    return rows


def confidence_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return how often verdicts of each range of confidence are right: mode, and whom they name, if anybody."""
    done = [o.judgement for o in outcomes if o.judgement is not None and not o.task.cell.startswith("power-")]
    rows = []
    for low, high in itertools.pairwise(_BINS):
        chosen = [j for j in done if low <= j.confidence < high or (high == _BINS[-1] and j.confidence >= high)]
        if chosen:
            mean = statistics.mean(j.confidence for j in chosen)
            right = share(sum(j.is_right for j in chosen), len(chosen))
            rows.append([f"{low:g} to {high:g}", str(len(chosen)), f"{mean:.2f}", right])
    return rows


def document(outcomes: Sequence[Outcome], *, command: str, duration_s: float | None) -> str:
    """Return docs/results/diagnosis-score.md, or a document like it on some of the cells.

    Args:
        outcomes: of all traces.
        command: that made them.
        duration_s: how long that took; None where some are of an earlier call.
    """
    names = {outcome.task.cell for outcome in outcomes}
    written = [outcome for outcome in outcomes if outcome.is_same_from_disk is not None]
    failed = [f"{one.task.cell}, seed {one.task.seed}: {one.error}" for one in outcomes if one.error]
    has_power = bool(names - {cell.name for cell in (*CELLS, *LOST_CELLS, *LAYOUT_CELLS)})
    power = table(("slower by", *(f"noise {level:.0%}" for level in POWER_LEVELS)), power_rows(outcomes))

    def titles(cells: Sequence[Cell | LayoutCell]) -> str:
        rows = [(cell.name, cell.title) for cell in cells if cell.name in names]
        return table(("cell", "what happens in it"), rows)

    return page(
        "diagnosis-score",
        command=command,
        duration="in parts" if duration_s is None else f"in {minutes(duration_s)}",
        num_traces=len(outcomes),
        cells=table(CELL_COLUMNS, cell_rows(outcomes)),
        titles=titles(CELLS),
        modes=table(("cell", "modes"), mode_rows(outcomes)),
        targets=table(TARGET_COLUMNS, target_rows(outcomes)),
        lost=table(LOST_COLUMNS, lost_rows(outcomes)),
        lost_titles=titles(LOST_CELLS),
        lost_modes=table(("cell", "modes"), mode_rows(outcomes, LOST_CELLS)),
        layouts=table(LAYOUT_COLUMNS, layout_rows(outcomes)),
        layout_titles=titles(LAYOUT_CELLS),
        layout_modes=table(("cell", "modes"), mode_rows(outcomes, LAYOUT_CELLS)),
        power=power if has_power else "",
        confidence=table(CONFIDENCE_COLUMNS, confidence_rows(outcomes)),
        num_written=len(written),
        num_same=sum(bool(outcome.is_same_from_disk) for outcome in written),
        num_failed=len(failed),
        failed=listed(failed[:20]),
    )
