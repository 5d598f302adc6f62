"""Counters of one host against those of the others."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from known_traffic import GIGABIT, MB, S, flows, interface_use, ints

from hpcpace.metrics.flows import interface_events, is_raised, retransmitted, usual_rate


def test_events_are_those_of_the_time_asked_for() -> None:
    eth0 = ("n1", "eth0")
    use = interface_use({eth0: [0] * 10}, nodes=[0], rates=[GIGABIT], drops={eth0: 3})
    assert interface_events(use, begin_ns=2 * S, end_ns=6 * S).tolist() == [[0], [12], [0], [0]]


def test_retransmissions_are_those_of_all_connections_of_a_node() -> None:
    both = flows([((0, 0), (2, 1), [MB]), ((1, 0), (2, 1), [MB])], again_share=[0.01, 0.03])
    sent, again = retransmitted(both, 2, begin_ns=0, end_ns=S)
    assert (sent.tolist(), again.tolist()) == ([2 * MB, 0], [40_000, 0])


@each_case(
    ("counts", "raised"),
    [
        pytest.param([0, 0, 132, 0], [False, False, True, False], id="one host has some, the others none"),
        pytest.param([900, 1000, 1100, 1050], [False] * 4, id="all have many"),
        pytest.param([0, 0, 9, 0], [False] * 4, id="a few are chance"),
        pytest.param([100, 100, 299, 100], [False] * 4, id="less than three times as many"),
        pytest.param([100, 100, 400, 100], [False, False, True, False], id="four times as many"),
        pytest.param([0, 500], [False, True], id="of two hosts one has them"),
        pytest.param([500], [False], id="a single host has no others"),
    ],
)
def test_a_host_stands_out_against_the_others(counts: list[int], raised: list[bool]) -> None:
    assert is_raised(ints(counts), np.full(len(counts), 10.0)).tolist() == raised


def test_rates_are_compared_not_counts() -> None:
    assert not is_raised(ints([100, 100, 1000]), np.array([1.0, 1.0, 10.0])).any()


def test_hosts_that_were_not_observed_have_no_usual_rate() -> None:
    assert np.isnan(usual_rate(ints([1, 2, 3]), np.array([1.0, 1.0, 0.0]))).tolist() == [False, False, True]
