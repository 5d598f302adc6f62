"""Bytes and rates between ranks and nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from known_traffic import MB, S, flows

from hpcpace.metrics.flows import node_pairs, rank_pairs


def test_a_rate_is_bytes_over_the_time_in_which_data_was_outstanding() -> None:
    found = rank_pairs(flows([((0, 0), (1, 1), [MB] * 4)], busy_share=[0.25]), begin_ns=0, end_ns=4 * S)
    assert (found.source.tolist(), found.destination.tolist()) == ([0, 1], [1, 0])
    assert found.acked_bytes.tolist() == [4 * MB, 4 * MB]
    assert found.bytes_per_s[0] == pytest.approx(4 * MB)


def test_what_only_the_receiver_has_recorded_has_bytes_and_no_rate() -> None:
    found = rank_pairs(flows([((0, 0), (1, 1), [MB])], received=[[2 * MB]]), begin_ns=0, end_ns=S)
    assert (found.source.tolist(), found.acked_bytes.tolist()) == ([1, 0], [2 * MB, MB])
    assert np.isnan(found.bytes_per_s[0])


def test_both_ends_of_a_connection_count_once() -> None:
    found = rank_pairs(flows([((0, 0), (1, 1), [MB]), ((1, 1), (0, 0), [3 * MB])]), begin_ns=0, end_ns=S)
    assert found.acked_bytes.tolist() == [3 * MB, MB]


def test_connections_at_a_time_are_as_long_busy_as_the_busiest() -> None:
    pair = ((0, 0), (1, 1), [MB, MB])
    found = rank_pairs(flows([pair, pair], busy_share=[0.5, 0.25]), begin_ns=0, end_ns=2 * S)
    assert found.busy_ns[0] == S
    assert found.bytes_per_s[0] == pytest.approx(4 * MB)


def test_nodes_have_the_traffic_of_all_their_ranks() -> None:
    both = flows([((0, 0), (2, 1), [MB]), ((1, 0), (3, 1), [MB]), ((2, 1), (0, 0), [0]), ((3, 1), (1, 0), [0])])
    found = node_pairs(both, begin_ns=0, end_ns=S)
    assert (found.source.tolist(), found.destination.tolist()) == ([0, 1], [1, 0])
    assert found.acked_bytes.tolist() == [2 * MB, 0]


@pytest.mark.parametrize(
    ("peer", "connection"),
    [pytest.param((-1, -1), 0, id="an unknown peer"), pytest.param((1, 1), -1, id="connections that are summed up")],
)
def test_leaves_out_what_has_no_known_ends(peer: tuple[int, int], connection: int) -> None:
    found = flows([((0, 0), peer, [MB])])
    found = replace(found, connection=np.full(len(found.connection), connection))
    assert len(rank_pairs(found, begin_ns=0, end_ns=S).source) == 0


def test_uses_the_intervals_within_the_time_asked_for() -> None:
    found = rank_pairs(flows([((0, 0), (1, 1), [MB, 2 * MB, 4 * MB])]), begin_ns=S, end_ns=2 * S)
    assert found.acked_bytes[0] == 2 * MB


def test_retransmitted_bytes_are_those_of_the_sender() -> None:
    found = rank_pairs(flows([((0, 0), (1, 1), [MB])], again_share=[0.02]), begin_ns=0, end_ns=S)
    assert dict(zip(found.source.tolist(), found.retransmitted_bytes.tolist(), strict=True)) == {0: 20_000, 1: 0}
