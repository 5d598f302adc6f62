"""The campaign with an examination made by hand: what is counted, and how it is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.score.campaign import (
    Outcome,
    Task,
    cell_rows,
    confidence_rows,
    document,
    examined,
    layout_rows,
    mode_rows,
    power_rows,
    target_rows,
    tasks,
)
from experiments.score.cells import CELLS, power_cells, seeds
from experiments.score.layout_cells import LAYOUT_CELLS
from hpcpace.diagnosis.analyze import examine
from hpcpace.trace.tables import RankTrace

CELLS_BY_NAME = {cell.name: cell for cell in CELLS}


@dataclass(frozen=True)
class Said:
    mode: str = "healthy"
    variety: str = ""
    culprits: tuple[Any, ...] = ()
    confidence: float = 0.9


def _says_healthy(traces: Sequence[RankTrace], problems: Sequence[str]) -> Said:
    return Said(confidence=0.9 if len(traces) else 0.0)


def _fails(traces: Sequence[RankTrace], problems: Sequence[str]) -> Said:
    raise KeyError("share")


def _outcome(cell: str, **values: Any) -> Outcome:
    return examined(Task(cell=cell, seed=0, **values), examination=_says_healthy)


def test_seeds_to_develop_with_and_to_report_are_apart() -> None:
    assert set(seeds(50, "develop")).isdisjoint(seeds(50, "report"))
    chosen = CELLS[0]
    assert chosen.scenario(2).seed % 2 == 0 and chosen.scenario(3).seed % 2 == 1


def test_costly_cells_get_fewer_traces_and_every_cell_one() -> None:
    todo = tasks(CELLS, per_cell=5, of="develop")
    counts = {cell.name: sum(task.cell == cell.name for task in todo) for cell in CELLS}
    assert counts["healthy"] == 5 and counts["large"] == 1


def test_every_cell_makes_scenarios() -> None:
    scenarios = [cell.scenario(seed) for cell in (*CELLS, *power_cells()) for seed in range(40)]
    assert {scenario.fault for scenario in scenarios} >= {"none", "slow_link", "slow_switch", "hang", "contention"}
    assert {scenario.layout for scenario in scenarios} == {"dp", "pp", "dp x pp"}


def test_a_verdict_that_is_right_counts() -> None:
    row = cell_rows([_outcome("healthy")])[0]
    assert row[:8] == ["healthy", "1", "100.0 %", "-", "-", "-", "-", "0.0 %"]


def test_a_written_run_is_examined_again() -> None:
    assert _outcome("slow-link-global", is_written=True).is_same_from_disk


def test_an_examination_that_fails_is_an_outcome() -> None:
    outcome = examined(Task(cell="healthy", seed=0), examination=_fails)
    assert outcome.error == "KeyError: 'share'"
    assert cell_rows([outcome])[0][2] == "0.0 %"
    assert mode_rows([outcome]) == [["healthy", "(failed) 1"]]
    assert "1 examinations failed" in document([outcome], command="score", duration_s=1.0)


def test_power_is_a_table_of_size_and_noise() -> None:
    outcome = _outcome("power-0.2-0.01")
    assert power_rows([outcome]) == [["20%", "0.0 %", "-", "-", "-"]]
    assert confidence_rows([outcome]) == []


def test_a_fault_of_which_nobody_is_named_misses_the_target() -> None:
    outcomes = [
        examined(Task(cell="slow-node", seed=seed), examination=_says_healthy)
        for seed in range(12)
        if CELLS_BY_NAME["slow-node"].scenario(seed).num_ranks <= 32
    ]
    counted = [outcome.scenario.size for outcome in outcomes if outcome.scenario.num_steps == 200]
    sizes = {"5 %": sum(size < 0.1 for size in counted), "10 % and more": sum(size >= 0.1 for size in counted)}
    rows = target_rows(outcomes)
    assert {row[1]: row[2:4] for row in rows if row[0] == "all"} == {
        size: [str(number), "0.0 %"] for size, number in sizes.items() if number
    }
    assert len(counted) < len(outcomes)


def test_confidence_is_held_against_what_is_right() -> None:
    assert confidence_rows([_outcome("healthy")]) == [["0.9 to 0.95", "1", "0.90", "100.0 %"]]


def test_cells_of_layouts_draw_jobs_of_all_kinds_and_sizes_whose_truth_is_known() -> None:
    drawn = {cell.name: [cell.scenario(seed) for seed in range(60)] for cell in LAYOUT_CELLS}
    every = [scenario for scenarios in drawn.values() for scenario in scenarios]
    assert {one.job.kind for one in every} == {"ddp", "fsdp", "tensor", "experts", "pipeline"}
    assert min(one.num_ranks for one in every) == 4 and max(one.num_ranks for one in every) == 1024
    for name, scenarios in drawn.items():
        small = min(scenarios, key=lambda one: one.num_ranks * one.job.num_layers)
        truth = small.truth()
        assert truth.modes, name
        if small.right:
            assert truth.modes[0] == small.right[0] and truth.fault_share > 0, name
            assert truth.culprits or small.fault == "slow_hosts" or len(small.slow_ranks) > 1, name


def test_a_job_of_a_layout_is_examined_and_what_it_costs_is_held_against_the_truth() -> None:
    cell = next(cell for cell in LAYOUT_CELLS if cell.name == "layout-fsdp")
    seed = min(range(0, 40, 2), key=lambda number: cell.scenario(number).num_ranks)
    outcome = examined(Task(cell=cell.name, seed=seed), examination=lambda traces, problems: examine(traces))
    assert outcome.judgement is not None and outcome.judgement.is_found
    assert abs(outcome.judgement.loss_share - outcome.truth.fault_share) < 0.01
    assert layout_rows([outcome])[0][:4] == ["layout-fsdp", "1", "100.0 %", "100.0 %"]
