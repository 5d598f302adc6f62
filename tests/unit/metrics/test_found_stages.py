"""Stages of a pipeline are found from who reduces and who sends; other traffic has none."""

from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.metrics.topology import stages_of_traffic

_WORLD = tuple(range(4))
_NONE = [-1] * 4


@each_case(
    ("groups", "messages", "stages"),
    [
        pytest.param([], [(0, 1), (1, 2), (2, 3)], [0, 1, 2, 3], id="four stages"),
        pytest.param([_WORLD], [(0, 1), (1, 2), (2, 3)], [0, 1, 2, 3], id="with a reduction over all"),
        pytest.param([], [(0, 1), (1, 2), (2, 3), (3, 0)], [0, 1, 2, 3], id="interleaved stages"),
        pytest.param([(0, 1), (2, 3)], [(0, 2), (1, 3)], [0, 0, 1, 1], id="two replicas of two stages"),
        pytest.param([(0, 2), (1, 3)], [(0, 1), (2, 3)], [0, 1, 0, 1], id="the same, laid out otherwise"),
        pytest.param([(2, 3), (0, 1)], [(3, 1), (2, 0)], [0, 0, 1, 1], id="in any order"),
        pytest.param([_WORLD], [], _NONE, id="no messages"),
        pytest.param([(0, 1), (2, 3)], [(0, 1)], _NONE, id="messages inside a stage"),
        pytest.param([(0, 1)], [(0, 2), (1, 3)], _NONE, id="stages of different sizes"),
        pytest.param([], [(0, 1), (0, 2), (0, 3)], _NONE, id="a star"),
        pytest.param([], [(0, 1), (2, 3)], _NONE, id="two chains that nothing joins"),
        pytest.param([], [(0, 1), (1, 2), (2, 3), (7, 3)], [0, 1, 2, 3], id="a rank without a trace"),
        pytest.param([(0, 9)], [(0, 1), (1, 2), (2, 3)], [0, 1, 2, 3], id="a group with a rank without a trace"),
    ],
)
def test_stages(groups: list[tuple[int, ...]], messages: list[tuple[int, int]], stages: list[int]) -> None:
    assert stages_of_traffic(range(4), groups, messages).tolist() == stages


def test_ranks_need_not_begin_at_zero() -> None:
    assert stages_of_traffic([4, 5, 8], [], [(4, 5), (5, 8)]).tolist() == [0, 1, 2]
