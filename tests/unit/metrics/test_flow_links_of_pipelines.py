"""Links named by the connections of a pipeline of four stages: most pass the same hosts, and some send little."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_S
from hpcpace.metrics.flow_figures import FlowFindings, LinkCause, flow_figures
from hpcpace.metrics.flows import Connections, Flows
from hpcpace.metrics.topology import topology_of
from tests.simulated_links import locate_by_flows

TOPOLOGY = topology_of(
    ranks=range(4),
    nodes=range(4),
    hosts=[f"n{stage + 1}" for stage in range(4)],
    addresses=[f"spine.leaf{stage // 2 + 1}.n{stage + 1}" for stage in range(4)],
)
SOURCE = np.array([0, 1, 1, 2, 2, 3, 0, 3])
DESTINATION = np.array([1, 0, 2, 1, 3, 2, 3, 0])
IS_SMALL = np.arange(8) >= 6
"""The last two carry the gradients of the embedding, which the first and the last stage share."""
RATE, NUM_S, MESSAGES_PER_S = 25e6, 40, 4


def through(host: str) -> NDArray[np.bool_]:
    """Return which connections pass the link of a host, (8,)."""
    stage = int(host[1:]) - 1
    return (stage == SOURCE) | (stage == DESTINATION)


def pipeline(
    *,
    message_bytes: float,
    seed: int = 0,
    rate_factor: NDArray[np.float64] | None = None,
    repeat_share: NDArray[np.float64] | None = None,
    stall_s: NDArray[np.float64] | None = None,
) -> Flows:
    """Return what stages count once a second; the last acknowledgement of each message takes up to 20 ms longer.

    Args:
        message_bytes: size of a message.
        seed: of which connections have their acknowledgements delayed, and of the noise.
        rate_factor: of each connection, (8,).
        repeat_share: which share of its payload it sends again, (8,).
        stall_s: how long it stands still in each second, (8, NUM_S).
    """
    random = np.random.default_rng(seed)
    factor = np.ones(8) if rate_factor is None else rate_factor
    num_bytes = MESSAGES_PER_S * message_bytes * np.where(IS_SMALL, 0.06, 1.0)
    wire_s = num_bytes / (RATE * factor)
    busy_s = (wire_s + MESSAGES_PER_S * random.uniform(0, 0.02, 8))[:, None] * random.uniform(0.95, 1.05, (8, NUM_S))
    busy_s = busy_s + (0 if stall_s is None else stall_s)
    acked = np.repeat(num_bytes, NUM_S).astype(np.int64)
    again = acked * np.repeat(np.zeros(8) if repeat_share is None else repeat_share, NUM_S)
    queue_s = np.repeat(wire_s / MESSAGES_PER_S / 2, NUM_S)
    begin_ns, none = np.tile(np.arange(NUM_S), 8) * NS_PER_S, np.zeros(8 * NUM_S, np.int64)
    return Flows(
        connections=Connections(
            rank=SOURCE,
            peer_rank=DESTINATION,
            node=SOURCE,
            peer_node=DESTINATION,
            local=tuple(f"10.0.0.{stage + 1}:4000" for stage in SOURCE),
            remote=tuple(f"10.0.0.{stage + 1}:5000" for stage in DESTINATION),
        ),
        connection=np.repeat(np.arange(8), NUM_S),
        begin_ns=begin_ns,
        end_ns=begin_ns + NS_PER_S,
        sent_bytes=acked,
        acked_bytes=acked,
        received_bytes=none,
        retransmitted_bytes=again.astype(np.int64),
        busy_ns=(busy_s.ravel() * NS_PER_S).astype(np.int64),
        receiver_limited_ns=none,
        sender_limited_ns=none,
        rtt_ns=(queue_s * NS_PER_S).astype(np.int64) + 10_000,
        least_rtt_ns=none + 10_000,
        unsent_bytes=none,
    )


def located(flows: Flows, message_bytes: float) -> FlowFindings:
    figures = flow_figures(flows, TOPOLOGY, begin_ns=0, end_ns=NUM_S * NS_PER_S, message_bytes=message_bytes)
    nothing = np.full((len(TOPOLOGY.links), 2), np.nan)
    return locate_by_flows(figures, TOPOLOGY, foreign_bytes_per_s=nothing)


def named(found: FlowFindings) -> list[tuple[LinkCause, tuple[str, ...]]]:
    return [(fault.cause, fault.ids) for fault in found.faults]


@each_case("host", ["n1", "n2", "n3", "n4"])
@each_case("seed", range(5))
def test_a_slow_link_is_named_by_long_messages(host: str, seed: int) -> None:
    flows = pipeline(message_bytes=1 << 20, seed=seed, rate_factor=np.where(through(host), 0.25, 1.0))
    found = located(flows, 1 << 20)
    assert named(found) == [(LinkCause.SLOW, (host,))]
    assert 1.0 < found.faults[0].effect.value < 4.5


def test_short_messages_that_pass_a_slow_link_at_once_do_not_clear_it() -> None:
    factor = np.where(through("n4"), 0.25, 1.0)
    factor[IS_SMALL] = 4.0
    found = located(pipeline(message_bytes=1 << 22, rate_factor=factor), 1 << 22)
    assert [(fault.cause, "n4" in fault.ids) for fault in found.faults] == [(LinkCause.SLOW, True)]


@each_case("message_bytes", [1 << 14, 1 << 18, 1 << 20, 1 << 23])
@each_case("seed", range(10))
def test_delayed_acknowledgements_accuse_no_link(message_bytes: int, seed: int) -> None:
    found = located(pipeline(message_bytes=message_bytes, seed=seed), message_bytes)
    assert named(found) == []


def test_of_short_messages_a_slow_link_cannot_be_told_and_that_is_said() -> None:
    size = 1 << 16
    found = located(pipeline(message_bytes=size, rate_factor=np.where(through("n2"), 0.4, 1.0)), size)
    assert (named(found), found.is_compared) == ([], False)
    assert "messages are so short" in found.reason
    assert located(pipeline(message_bytes=1 << 22), 1 << 22).is_compared


def test_a_slow_uplink_is_named_with_the_other_one_that_the_same_connections_pass() -> None:
    crosses = SOURCE // 2 != DESTINATION // 2
    flows = pipeline(message_bytes=1 << 20, rate_factor=np.where(crosses, 0.2, 1.0))
    assert named(located(flows, 1 << 20)) == [(LinkCause.UPLINK, ("leaf1 uplink", "leaf2 uplink"))]


@each_case("host", ["n1", "n2", "n3", "n4"])
def test_a_link_that_loses_packets_is_named_though_most_connections_pass_its_host(host: str) -> None:
    size = 1 << 20
    flows = pipeline(message_bytes=size, repeat_share=np.where(through(host), 0.01, 0.0))
    assert named(located(flows, size)) == [(LinkCause.LOSSY, (host,))]


def test_what_a_slow_link_loses_with_its_queue_full_is_no_fault_of_its_own() -> None:
    size = 1 << 20
    slow = through("n2")
    flows = pipeline(message_bytes=size, rate_factor=np.where(slow, 0.25, 1.0), repeat_share=np.where(slow, 0.004, 0.0))
    assert named(located(flows, size)) == [(LinkCause.SLOW, ("n2",))]
    crosses = SOURCE // 2 != DESTINATION // 2
    flows = pipeline(
        message_bytes=size, rate_factor=np.where(crosses, 0.4, 1.0), repeat_share=np.where(crosses, 0.004, 0.0)
    )
    assert named(located(flows, size)) == []


@pytest.mark.parametrize("host", ["n1", "n4"])
def test_a_connection_that_sends_little_does_not_clear_a_link_that_is_down_now_and_then(host: str) -> None:
    size = 1 << 20
    stall_s = np.zeros((8, NUM_S))
    stall_s[np.ix_(np.flatnonzero(through(host) & ~IS_SMALL), np.arange(2, NUM_S, 4))] = 0.4
    assert named(located(pipeline(message_bytes=size, stall_s=stall_s), size)) == [(LinkCause.FLAPPING, (host,))]


@pytest.mark.parametrize(("core_wait", "is_named"), [(0.1, True), (0.6, False)])
def test_a_host_that_waits_for_cores_longer_than_its_link_holds_it_up_has_no_slow_link(
    core_wait: float, is_named: bool
) -> None:
    size = 1 << 20
    flows = pipeline(message_bytes=size, rate_factor=np.where(through("n2"), 0.25, 1.0))
    waits = np.array([0.0, core_wait, 0.0, 0.0])
    figures = flow_figures(flows, TOPOLOGY, begin_ns=0, end_ns=NUM_S * NS_PER_S, message_bytes=size, core_wait=waits)
    nothing = np.full((len(TOPOLOGY.links), 2), np.nan)
    assert bool(locate_by_flows(figures, TOPOLOGY, foreign_bytes_per_s=nothing).faults) == is_named


@each_case("host", ["n1", "n2", "n3", "n4"])
@each_case("way", ["up", "down"])
def test_a_link_that_is_slow_in_one_direction_is_named_with_it(host: str, way: str) -> None:
    size, stage = 1 << 20, int(host[1:]) - 1
    hit = (SOURCE if way == "up" else DESTINATION) == stage
    for seed in range(5):
        found = located(pipeline(message_bytes=size, seed=seed, rate_factor=np.where(hit, 0.25, 1.0)), size)
        assert [(fault.ids, fault.direction) for fault in found.faults] == [((host,), way)]


@each_case("host", ["n1", "n2", "n3", "n4"])
@each_case("factor", [0.25, 0.5])
def test_delayed_acknowledgements_make_no_direction_of_a_slow_link(host: str, factor: float) -> None:
    size = 1 << 20
    for seed in range(10):
        found = located(pipeline(message_bytes=size, seed=seed, rate_factor=np.where(through(host), factor, 1.0)), size)
        assert {fault.direction for fault in found.faults} <= {""}
