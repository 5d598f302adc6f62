"""What a verdict says a fault costs, and what the rebuilt steps gain without it, against runs without the fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import each_case

from experiments.score.generator import traces_of
from experiments.score.scenario import Scenario
from experiments.score.truth import truth_of
from hpcpace.diagnosis.figures.causes import cause_figures
from hpcpace.diagnosis.finding import Case
from hpcpace.diagnosis.measure import Selection, measure, panels_of
from hpcpace.diagnosis.summary import Mode
from hpcpace.diagnosis.verdict import diagnose
from hpcpace.metrics.what_if import TRANSFER, Change, rebuild

PIPELINES = Scenario(
    seed=4, num_ranks=16, num_stages=4, num_microbatches=4, ranks_per_node=2, level=0.01, num_steps=24, size=0.3
)


def examined(scenario):
    measured = measure(traces_of(scenario), Selection())
    panels = panels_of(measured)
    return measured, panels, diagnose(Case(panels=panels, rebuilt=rebuild(measured.close_up.graph)))


@each_case(
    ("changed", "name", "mode"),
    [
        ({"fault": "slow_rank", "target": 5}, "work of rank 5", Mode.STRAGGLER),
        ({"fault": "slow_rank", "target": 5, "num_stages": 1}, "work of rank 5", Mode.STRAGGLER),
        ({"fault": "slow_node", "target": 1}, "work of node n2", Mode.STRAGGLER),
        ({"fault": "slow_stage", "target": 1}, "work of stage 1", Mode.IMBALANCE),
        ({"fault": "transient", "target": 5, "size": 0.5}, "work of rank 5", Mode.STRAGGLER),
        ({"fault": "input_bound"}, "phase data", Mode.INPUT),
        ({"fault": "input_bound", "num_stages": 1}, "phase data", Mode.INPUT),
    ],
)
def test_verdict_and_what_if_say_what_the_fault_costs(changed, name, mode):
    scenario = replace(PIPELINES, **changed)
    truth = truth_of(scenario).fault_share
    measured, panels, diagnosis = examined(scenario)
    gains = {gain.name: gain.gain_share for gain in cause_figures(measured, panels).gains}
    first = diagnosis.findings[0]
    assert first.mode == mode
    assert gains[name] == pytest.approx(truth, abs=0.012)
    assert first.loss_share == pytest.approx(truth, abs=0.012)


def test_jitter_costs_what_a_run_without_noise_is_shorter_by():
    scenario = replace(PIPELINES, level=0.05, num_steps=96)
    _, panels, _ = examined(scenario)
    assert panels.transient_share.value == pytest.approx(truth_of(scenario).noise_share, abs=0.012)


def test_the_interval_of_jitter_has_what_a_run_without_noise_is_shorter_by():
    for seed in (1, 2, 3):
        scenario = replace(PIPELINES, level=0.05, num_steps=96, seed=seed)
        _, panels, _ = examined(scenario)
        assert panels.transient_share.low <= truth_of(scenario).noise_share <= panels.transient_share.high


def test_slow_transfers_put_back_give_what_they_cost():
    measured, _, _ = examined(PIPELINES)
    graph = measured.close_up.graph
    late = np.arange(len(graph.step)) % 4 == 0
    of_rank = (graph.kind == TRANSFER) & (graph.rank == 6)
    weight_ns = graph.weight_ns.copy()
    weight_ns[np.ix_(of_rank, late)] *= 3
    slow = rebuild(replace(graph, weight_ns=weight_ns))
    gain = slow.gain(Change(kind="transfers", id=0, ranks=(6,), is_transfer=True))
    lost_ns = slow.base_ns.mean() - rebuild(graph).base_ns.mean()
    assert gain.share.value * slow.measured_ns == pytest.approx(lost_ns, rel=0.15)


def test_a_late_receiver_finds_its_message_there():
    measured, _, _ = examined(replace(PIPELINES, fault="slow_rank", target=5))
    rebuilt = rebuild(measured.close_up.graph)
    assert rebuilt.base_ns == pytest.approx(rebuilt.graph.measured_ns, rel=1e-3)
