"""Reports on all cells of the score: what the verdict says, no section denies."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cases import chosen, each_case

from experiments.score.scenario import Scenario
from hpcpace.diagnosis.summary import Mode, SensitivityRow, Shares, Summary
from tests import contradictions as checks
from tests.contradictions import SCORED, analysed, contradictions, small_scenario

Fault = Callable[[Summary], Summary]


def _verdict(**changes: object) -> Fault:
    return lambda summary: replace(summary, verdict=replace(summary.verdict, **changes))


def _finding(**changes: object) -> Fault:
    """Return a fault of the first finding, which the verdict repeats."""

    def changed(summary: Summary) -> Summary:
        finding = replace(summary.verdict.findings[0], **changes)
        return _verdict(findings=(finding,), loss_share=finding.loss_share)(summary)

    return changed


def _culprit(**changes: object) -> Fault:
    return lambda summary: _finding(culprits=(replace(summary.verdict.culprits[0], **changes),))(summary)


def _gain(**changes: object) -> Fault:
    """Return a fault of what rank 2 as usual gains."""

    def changed(summary: Summary) -> Summary:
        gains = tuple(
            replace(gain, **changes) if gain.name == "work of rank 2" else gain for gain in summary.causes.gains
        )
        return replace(summary, causes=replace(summary.causes, gains=gains))

    return changed


def _healthy(**changes: object) -> Fault:
    """Return a healthy verdict on a summary with these changes, which nothing else denies."""

    def changed(summary: Summary) -> Summary:
        return _verdict(mode="healthy", findings=(), culprits=())(replace(summary, causes=None, **changes))

    return changed


def _jittery(summary: Summary) -> Summary:
    jitter = replace(summary.jitter, loss_share=0.2, amplification=1.3, persistent=1.0)
    return _healthy(jitter=jitter)(summary)


def _suspected(summary: Summary) -> Summary:
    return replace(summary, causes=replace(summary.causes, suspected_ranks=(2,)))


FAULTS: tuple[tuple[Fault, str], ...] = (
    (_verdict(mode="cannot tell"), "it cannot tell, and has findings"),
    (_verdict(mode="healthy"), "healthy, with findings"),
    (_jittery, "no amplified jitter, which costs 20.0% in the section on jitter"),
    (_verdict(mode="healthy", findings=(), culprits=()), "no straggler, while work of rank 2 as usual gains"),
    (
        _healthy(jitter=None, shares=Shares(busy=0.6, exposed_wait=0.1, transfer=0.3, other=0.0)),
        "with transfers of 30.0%",
    ),
    (_culprit(id="9"), "rank 9 is blamed, of which there is no row"),
    (_suspected, "rank 2 is blamed, whose clock is said to be wrong"),
    (_culprit(kind="node", id="n99"), "node n99 is blamed, of which there is no rank"),
    (_culprit(effect=9.0), "the effect of rank 2 is not in its interval"),
    (_verdict(loss_share=0.01), "the verdict costs something else than its first finding"),
    (_finding(loss_share=0.9), "costs 90.0%, more than the"),
    (_finding(loss_share=0.05), "costs 5.0%, and work of rank 2 gains"),
    (_gain(interval=(0.9, 0.95)), "the gain of work of rank 2 is not in its interval"),
    (
        lambda summary: replace(summary, shares=replace(summary.shares, busy=2.0)),
        "the shares add up to",
    ),
    (_finding(mode="fabric contention", variety="slow link"), "is slow, while transfers between all nodes are alike"),
)
READING: tuple[Fault, str] = (
    lambda summary: replace(summary, sensitivity=(SLOPE,)),
    "no dependence seen, with an interval of 10.0 us to 30.0 us",
)
SLOPE = SensitivityRow(
    op="all_reduce", group_size=8, size_bytes=4096, slope=0.02, interval=(0.01, 0.03), num_operations=9
)


@each_case("cell", chosen(SCORED, 5), ids=lambda cell: cell.name)
def test_no_section_of_a_report_denies_its_verdict(tmp_path: Path, cell) -> None:
    assert contradictions(analysed(small_scenario(cell), tmp_path / "run")) == []


def test_costs_of_a_host_bound_run_are_shares_of_the_whole_step(tmp_path: Path) -> None:
    (cell,) = (cell for cell in SCORED if cell.name == "host-bound")
    assert contradictions(analysed(cell.scenario(2), tmp_path / "run")) == []


def test_each_check_finds_its_fault(tmp_path: Path, monkeypatch) -> None:
    scenario = Scenario(seed=3, num_ranks=8, num_steps=50, fault="slow_rank", size=0.3, target=2)
    analysis = analysed(scenario, tmp_path / "run")
    verdict = analysis.summary.verdict
    assert verdict.mode == Mode.STRAGGLER and [one.id for one in verdict.culprits] == ["2"]
    assert contradictions(analysis) == []
    for fault, said in FAULTS:
        found = contradictions(replace(analysis, summary=fault(analysis.summary)))
        assert any(said in sentence for sentence in found), (said, found)
    fault, said = READING
    read = replace(analysis, summary=fault(analysis.summary))
    assert contradictions(read) == []
    monkeypatch.setattr("hpcpace.report.sections.communication.skew_reading", lambda row: "no dependence seen")
    assert [said in sentence for sentence in contradictions(read)] == [True]


def test_each_check_has_a_fault() -> None:
    checked = sum(isinstance(node, ast.Yield) for node in ast.walk(ast.parse(inspect.getsource(checks))))
    assert checked == len((*FAULTS, READING))
