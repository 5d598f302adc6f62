"""Verdicts made by hand, against the truth."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from experiments.score.scenario import Scenario
from experiments.score.truth import Judgement, judge, truth_of

SMALL = {"seed": 1, "num_ranks": 16, "num_steps": 20, "ranks_per_node": 4, "nodes_per_leaf": 2, "level": 0.01}
SLOW_RANK = Scenario(**SMALL, fault="slow_rank", size=0.5, target=5)
SLOW_NODE = Scenario(**SMALL, fault="slow_node", size=0.5, target=1)
ONE_GROUP = Scenario(**SMALL, fault="slow_link", size=0.5, target=1)
HEALTHY = Scenario(**SMALL)
TRANSIENT = Scenario(**SMALL, fault="transient", size=1.0, target=5)
INPUT = Scenario(**SMALL, fault="input_bound", size=0.5)


@dataclass(frozen=True, kw_only=True)
class Named:
    kind: str
    id: str
    aliases: tuple[str, ...] = ()
    interval: tuple[float, float] = (0.4, 0.6)


@dataclass(frozen=True, kw_only=True)
class Said:
    mode: str
    variety: str = ""
    culprits: tuple[Named, ...] = ()
    confidence: float = 0.9


def _rank(number: int) -> Named:
    return Named(kind="rank", id=str(number), aliases=(f"rank {number}",))


def _judged(scenario: Scenario, mode: str, *culprits: Named, variety: str = "") -> Judgement:
    return judge(scenario, truth_of(scenario), Said(mode=mode, culprits=culprits, variety=variety))


def test_the_right_rank_is_found() -> None:
    found = _judged(SLOW_RANK, "persistent straggler", _rank(5))
    assert found.is_found and found.is_mode_right and found.is_covered and found.is_right
    assert (found.num_named, found.num_named_right) == (1, 1)


def test_another_rank_is_wrong() -> None:
    found = _judged(SLOW_RANK, "persistent straggler", _rank(6))
    assert found.is_wrong and not found.is_found and not found.is_right


def test_one_more_rank_is_wrong_and_the_right_one_still_found() -> None:
    found = _judged(SLOW_RANK, "persistent straggler", _rank(5), _rank(6))
    assert found.is_found and found.is_wrong
    assert (found.num_named, found.num_named_right) == (2, 1)


def test_the_node_of_a_slow_rank_is_not_the_rank() -> None:
    assert not _judged(SLOW_RANK, "persistent straggler", Named(kind="node", id="n2")).is_found


def test_an_alias_finds_the_culprit() -> None:
    named = Named(kind="leaf", id="leaf9", aliases=("leaf leaf9", "rank 5"))
    assert _judged(SLOW_RANK, "persistent straggler", named).is_found


def test_all_ranks_of_a_slow_node_are_the_node() -> None:
    assert _judged(SLOW_NODE, "persistent straggler", *map(_rank, range(4, 8))).is_found


def test_one_rank_of_a_slow_node_is_right_and_does_not_find_it() -> None:
    found = _judged(SLOW_NODE, "persistent straggler", _rank(4))
    assert not found.is_wrong and not found.is_found


def test_nobody_named_is_an_abstention() -> None:
    found = _judged(SLOW_RANK, "cannot tell")
    assert found.is_abstention and not found.is_found and not found.is_wrong


def test_anybody_named_in_a_healthy_run_is_a_false_alarm() -> None:
    assert _judged(HEALTHY, "persistent straggler", _rank(5)).is_false_alarm
    assert not _judged(HEALTHY, "healthy").is_false_alarm


def test_one_link_of_many_alike_claims_too_much() -> None:
    assert _judged(ONE_GROUP, "fabric contention", Named(kind="link", id="n2")).is_wrong


def test_all_links_that_are_alike_are_right() -> None:
    truth = truth_of(ONE_GROUP)
    found = _judged(ONE_GROUP, "fabric contention", Named(kind="link", id="n1", aliases=truth.culprits))
    assert not found.is_wrong and not found.has_culprit


def test_a_transient_straggler_must_be_called_transient() -> None:
    assert _judged(TRANSIENT, "persistent straggler", _rank(5), variety="transient").is_mode_right
    assert not _judged(TRANSIENT, "persistent straggler", _rank(5), variety="fixed rank").is_mode_right


def test_the_data_phase_may_be_named_where_input_is_slow() -> None:
    assert not _judged(INPUT, "input-bound", Named(kind="phase", id="data")).is_false_alarm


@pytest.mark.parametrize(("interval", "is_covered"), [((0.49, 0.50), True), ((0.1, 0.2), False)])
def test_an_interval_is_held_against_the_true_effect(interval: tuple[float, float], is_covered: bool) -> None:
    named = Named(kind="rank", id="5", aliases=("rank 5",), interval=interval)
    assert _judged(SLOW_RANK, "persistent straggler", named).is_covered is is_covered
