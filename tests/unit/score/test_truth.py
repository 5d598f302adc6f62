"""The truth about synthetic runs: names that mean the same, and modes that are right."""

from __future__ import annotations

import pytest
from cases import each_case

from experiments.score.scenario import EVERYWHERE, Scenario
from experiments.score.truth import Truth, truth_of

SMALL = {"num_ranks": 16, "num_steps": 20, "ranks_per_node": 4, "nodes_per_leaf": 2, "level": 0.01}


def _truth(**values: object) -> Truth:
    return truth_of(Scenario(**{"seed": 1, **SMALL, **values}))


@each_case(
    ("values", "names"),
    [
        ({"fault": "slow_rank", "target": 5}, {"rank 5"}),
        ({"fault": "slow_rank", "target": 5, "ranks_per_node": 1}, {"rank 5", "node n6"}),
        ({"fault": "slow_node", "target": 1}, {"node n2"}),
        ({"fault": "slow_node", "target": 1, "nodes_per_leaf": 1}, {"node n2", "leaf leaf2"}),
        ({"fault": "slow_stage", "target": 2, "num_stages": 4}, {"slot pp2"}),
        (
            {"fault": "slow_stage", "target": 2, "num_stages": 8, "num_ranks": 8, "ranks_per_node": 1},
            {"slot pp2", "rank 2", "node n3"},
        ),
        ({"fault": "hang", "target": 3}, {"rank 3"}),
        ({"fault": "periodic_service", "target": 1}, {"node n2"}),
        ({"fault": "periodic_service", "target": EVERYWHERE}, set()),
        ({"fault": "rotating"}, set()),
        ({"fault": "none"}, set()),
    ],
)
def test_a_culprit_has_every_name_of_the_same_ranks(values: dict[str, object], names: set[str]) -> None:
    assert set(_truth(size=0.2, **values).culprits) == names


def test_one_all_reduce_of_all_ranks_cannot_tell_links_apart() -> None:
    truth = _truth(fault="slow_link", size=0.5, target=1)
    assert not truth.is_identifiable
    assert {"link n1", "link n4", "link leaf1 uplink"} <= set(truth.culprits)


def test_several_groups_tell_links_apart() -> None:
    truth = _truth(fault="slow_link", size=0.5, target=1, num_stages=4, ranks_per_node=2)
    assert (truth.is_identifiable, truth.culprits) == (True, ("link n2",))


def test_several_groups_tell_uplinks_apart() -> None:
    values = {"num_ranks": 64, "num_stages": 8, "ranks_per_node": 2, "fault": "slow_switch", "size": 0.5}
    assert _truth(target=1, **values).culprits == ("link leaf2 uplink",)


def test_little_jitter_is_healthy_and_nothing_else() -> None:
    assert _truth().modes == ("healthy",)


def test_much_jitter_is_amplification_and_nothing_else() -> None:
    assert _truth(level=0.10).modes == ("synchronisation amplification",)


def test_jitter_that_all_ranks_share_is_healthy() -> None:
    assert _truth(level=0.05, noise="common_mode").modes[-1] == "healthy"


@each_case(
    ("fault", "mode"),
    [
        ("slow_rank", "persistent straggler"),
        ("slow_node", "persistent straggler"),
        ("rotating", "synchronisation amplification"),
        ("contention", "fabric contention"),
        ("input_bound", "input-bound"),
        ("communication_bound", "communication-bound"),
        ("hang", "hang"),
    ],
)
def test_a_large_fault_has_its_own_mode(fault: str, mode: str) -> None:
    truth = _truth(fault=fault, size=0.5)
    assert truth.modes[0] == mode
    assert "healthy" not in truth.modes


def test_jitter_that_costs_more_than_the_fault_may_be_named_alone() -> None:
    truth = _truth(fault="slow_rank", size=0.02, level=0.10)
    assert truth.modes == ("synchronisation amplification",)


def test_the_cost_of_a_slow_rank_is_what_it_adds_to_the_step() -> None:
    truth = _truth(fault="slow_rank", size=0.5, level=0.0)
    assert truth.noise_share == pytest.approx(0.0, abs=1e-6)
    assert truth.fault_share == pytest.approx(0.5 * 103 / (0.5 * 103 + 111.5), rel=0.01)
