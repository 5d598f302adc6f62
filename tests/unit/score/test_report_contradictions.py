"""Reports on all cells of the score: what the verdict says, no section denies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cases import chosen, each_case

from experiments.score.contradictions import SCORED, analysed, contradictions, small_scenario
from experiments.score.scenario import Scenario
from hpcpace.diagnosis.summary import Mode


@each_case("cell", chosen(SCORED, 16), ids=lambda cell: cell.name)
def test_no_section_of_a_report_denies_its_verdict(tmp_path: Path, cell) -> None:
    assert contradictions(analysed(small_scenario(cell), tmp_path / "run")) == []


def test_costs_of_a_host_bound_run_are_shares_of_the_whole_step(tmp_path: Path) -> None:
    (cell,) = (cell for cell in SCORED if cell.name == "host-bound")
    assert contradictions(analysed(cell.scenario(2), tmp_path / "run")) == []


def test_what_contradicts_itself_is_found(tmp_path: Path) -> None:
    scenario = Scenario(seed=3, num_ranks=8, num_steps=50, fault="slow_rank", size=0.3, target=2)
    analysis = analysed(scenario, tmp_path / "run")
    summary, verdict = analysis.summary, analysis.summary.verdict
    assert verdict.mode == Mode.STRAGGLER and not contradictions(analysis)
    culprit = verdict.culprits[0]
    healthy = replace(verdict, mode="healthy", findings=(), culprits=())
    (finding,) = verdict.findings
    for changed, said in (
        (healthy, "no straggler, while work of rank 2 as usual gains"),
        (replace(verdict, mode="cannot tell"), "it cannot tell, and has findings"),
        (replace(verdict, findings=(replace(finding, loss_share=0.9),)), "costs 90.0%, more than the"),
        (
            replace(verdict, findings=(replace(finding, culprits=(replace(culprit, id="9"),)),)),
            "rank 9 is blamed, of which there is no row",
        ),
        (
            replace(verdict, findings=(replace(finding, culprits=(replace(culprit, effect=9.0),)),)),
            "the effect of rank 2 is not in its interval",
        ),
    ):
        found = contradictions(replace(analysis, summary=replace(summary, verdict=changed)))
        assert any(said in sentence for sentence in found), (said, found)
