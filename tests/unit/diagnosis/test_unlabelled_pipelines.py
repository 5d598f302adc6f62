"""A pipeline whose script tells nothing of its layout is judged by stages found from its traffic, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Verdict
from hpcpace.metrics.roles import Stage
from hpcpace.trace.attempt_reader import read_attempt


def _verdict(scenario: Scenario, folder: Path, **changes: Any) -> Verdict:
    """Return the verdict on a run whose headers do not say where ranks are in a mesh, with other changes to these."""
    run = write_run(scenario, folder)
    found = read_attempt(run.attempt(0), most_rows=0)
    changes |= {"dp": -1, "pp": -1, "tp": -1}
    traces = tuple(replace(trace, header=replace(trace.header, **changes)) for trace in found.traces)
    return analyze_traces(run, run.attempt(0), replace(found, traces=traces), Selection()).summary.verdict


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_slow_stage_is_named_with_what_it_takes_longer_for(tmp_path: Path, num_ranks: int) -> None:
    verdict = _verdict(
        Scenario(seed=3, num_ranks=num_ranks, num_stages=4, num_steps=60, fault="slow_stage", size=0.5, target=2),
        tmp_path / "run",
    )
    assert verdict.mode == "pipeline imbalance"
    assert verdict.culprits[0].id == "pp2"
    assert [found and found.stages for found in verdict.findings[0].stages] == [(Stage.COMPUTE,)]
    assert verdict.headline.endswith("of the step time by computation")
    assert "move layers" in verdict.next[0]
    assert any(sentence.startswith("backward of pipeline stage 2: ") for sentence in verdict.why)


def test_stages_that_work_alike_are_healthy(tmp_path: Path) -> None:
    verdict = _verdict(Scenario(seed=3, num_ranks=4, num_stages=4, num_steps=60), tmp_path / "run")
    assert verdict.mode == "healthy"
    assert "stages were compared" in verdict.why[0]


def test_a_rank_that_stalls_again_and_again_is_named_beside_stages_on_its_host(tmp_path: Path) -> None:
    stalls = Scenario(
        seed=1, num_ranks=4, ranks_per_node=1, num_stages=4, num_steps=120, fault="periodic_service", size=3.0, target=2
    )
    verdict = _verdict(stalls, tmp_path / "run", node=0, host="n0")
    assert verdict.mode == "runtime and control plane"
    assert [(culprit.kind, culprit.id) for culprit in verdict.culprits] == [("rank", "2")]
    assert "recurs every" in verdict.headline


def test_a_slow_replica_of_a_stage_is_named(tmp_path: Path) -> None:
    slow = Scenario(seed=3, num_ranks=8, num_stages=4, num_steps=60, fault="slow_rank", size=0.5, target=5)
    verdict = _verdict(slow, tmp_path / "run")
    assert verdict.mode == "persistent straggler"
    assert [(culprit.kind, culprit.id) for culprit in verdict.culprits] == [("rank", "5")]
