"""Utilisation and foreign traffic of interfaces, from tables whose truth is made here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hpcpace.metrics.network.flow_tables import Connections, Flows, InterfaceUse
from hpcpace.metrics.network.interface_use import (
    RECEIVED,
    SENT,
    InterfaceLoads,
    cell_edges,
    interface_loads,
    interface_totals,
    spread,
    wire_bytes,
)
from hpcpace.units import NS_PER_S

S = NS_PER_S
MB = 1_000_000
GIGABIT = 10**9


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _use(sent: dict[tuple[str, str], Sequence[int]], *, nodes: Sequence[int], rates: Sequence[int]) -> InterfaceUse:
    """Return counters of interfaces, one value a second; as much is received as is sent."""
    rows = [(number, at, value) for number, values in enumerate(sent.values()) for at, value in enumerate(values)]
    number, at, value = (_ints(column) for column in zip(*rows, strict=True))
    zero = np.zeros(len(rows), np.int64)
    return InterfaceUse(
        names=tuple(sent),
        node=_ints(nodes),
        line_rate_bps=_ints(rates),
        interface=number,
        begin_ns=at * S,
        end_ns=(at + 1) * S,
        sent_bytes=value,
        received_bytes=value,
        errors=zero,
        drops=zero,
        pauses=zero,
        marks=zero,
    )


def _flows(payload: Sequence[tuple[int, Sequence[int]]], local: str = "10.0.0.1:1000") -> Flows:
    """Return one connection for each (node, bytes a second); it receives what it sends, sampled half a second late."""
    rows = [(row, at, value) for row, (_, values) in enumerate(payload) for at, value in enumerate(values)]
    connection, at, value = (_ints(column) for column in zip(*rows, strict=True))
    zero = np.zeros(len(rows), np.int64)
    ranks = np.arange(len(payload))
    return Flows(
        connections=Connections(
            rank=ranks,
            peer_rank=ranks[::-1],
            node=_ints([node for node, _ in payload]),
            peer_node=_ints([node for node, _ in payload][::-1]),
            local=(local,) * len(payload),
            remote=("10.0.0.2:2000",) * len(payload),
        ),
        connection=connection,
        begin_ns=at * S + S // 2,
        end_ns=(at + 1) * S + S // 2,
        sent_bytes=value,
        acked_bytes=value,
        received_bytes=value,
        retransmitted_bytes=zero,
        busy_ns=zero,
        receiver_limited_ns=zero,
        sender_limited_ns=zero,
        rtt_ns=zero,
        least_rtt_ns=zero,
        delivery_bytes_per_s=zero.astype(np.float64),
        is_application_limited=zero.astype(np.bool_),
        unsent_bytes=zero,
        marked_packets=zero,
    )


def _loads(use: InterfaceUse, flows: Flows | None, *, recorded: Sequence[bool] = (True, True)) -> InterfaceLoads:
    return interface_loads(use, flows, begin_ns=2 * S, end_ns=8 * S, is_recorded=np.array(recorded, np.bool_))


def test_spreads_values_evenly_over_the_cells_that_they_touch() -> None:
    edges = _ints([0, 10, 20, 30])
    assert spread(_ints([5, 20, 7]), _ints([25, 30, 7]), _ints([40, 1, 9]), edges) == pytest.approx([10, 20, 11])


def test_spreads_nothing_where_nothing_accrued() -> None:
    none = _ints([])
    assert spread(none, none, none, _ints([0, 1, 2])).tolist() == [0, 0]


def test_utilisation_is_that_of_each_second_and_direction() -> None:
    use = _use({("n1", "eth0"): [0, 0, 25 * MB, 50 * MB, 125 * MB, 0, 0, 0, 0, 0]}, nodes=[0], rates=[GIGABIT])
    loads = _loads(use, None, recorded=[False])
    assert loads.utilisation[SENT, 0] == pytest.approx([0.2, 0.4, 1.0, 0, 0, 0])
    assert interface_totals(loads).peak_bytes_per_s[RECEIVED, 0] == pytest.approx(125 * MB)
    assert interface_totals(loads).bytes_per_s[SENT, 0] == pytest.approx(200 * MB / 6)


def test_has_no_utilisation_without_a_line_rate() -> None:
    loads = _loads(_use({("n1", "veth0"): [MB] * 10}, nodes=[0], rates=[0]), None, recorded=[False])
    assert np.isnan(loads.utilisation).all()
    assert interface_totals(loads).bytes_per_s[SENT, 0] == pytest.approx(MB)


def test_does_not_know_seconds_without_samples() -> None:
    use = _use({("n1", "eth0"): [MB] * 4}, nodes=[0], rates=[GIGABIT])
    loads = _loads(use, None, recorded=[False])
    assert np.isfinite(loads.total_bytes[SENT, 0]).tolist() == [True, True, False, False, False, False]
    assert interface_totals(loads).bytes_per_s[SENT, 0] == pytest.approx(MB)


@pytest.mark.parametrize("foreign", [0, 47_500_000], ids=["none", "38 % of the line"])
def test_foreign_traffic_is_what_no_connection_carried(foreign: int) -> None:
    payload = 50 * MB
    framed = int(wire_bytes(np.full((2, 1), float(payload)), 1500)[0][SENT, 0])
    use = _use(
        {("n1", "eth0"): [framed] * 10, ("n2", "eth0"): [framed + foreign] * 10}, nodes=[0, 1], rates=[GIGABIT, GIGABIT]
    )
    loads = _loads(use, _flows([(0, [payload] * 10), (1, [payload] * 10)]))
    found = interface_totals(loads)
    assert loads.carries_job.tolist() == [True, True]
    assert found.is_foreign.tolist() == [[False, foreign > 0]] * 2
    assert loads.foreign_utilisation[SENT].mean(axis=1) == pytest.approx([0, foreign * 8 / GIGABIT], abs=1e-6)


def test_headers_that_a_virtual_link_does_not_count_are_no_foreign_traffic() -> None:
    use = _use({("n1", "veth0"): [50 * MB] * 10}, nodes=[0], rates=[GIGABIT])
    found = interface_totals(_loads(use, _flows([(0, [50 * MB] * 10)]), recorded=[True]))
    assert found.foreign_bytes_per_s[SENT, 0] == 0
    assert not found.is_foreign.any()


def test_connections_of_all_ranks_of_a_host_count_for_its_interface() -> None:
    use = _use({("n1", "eth0"): [104 * MB] * 10}, nodes=[0], rates=[GIGABIT])
    found = interface_totals(_loads(use, _flows([(0, [50 * MB] * 10), (0, [50 * MB] * 10)]), recorded=[True]))
    assert not found.is_foreign.any()


def test_what_another_interface_of_the_host_carries_is_foreign_altogether() -> None:
    use = _use({("n1", "eth0"): [52 * MB] * 10, ("n1", "eth1"): [7 * MB] * 10}, nodes=[0, 0], rates=[GIGABIT, GIGABIT])
    loads = _loads(use, _flows([(0, [50 * MB] * 10)]), recorded=[True])
    assert loads.carries_job.tolist() == [True, False]
    assert interface_totals(loads).foreign_bytes_per_s[SENT] == pytest.approx([0, 7 * MB])


@pytest.mark.parametrize(
    ("carried", "recorded"),
    [
        pytest.param({"eth0": 60, "eth1": 60}, True, id="two interfaces that both could be it"),
        pytest.param({"eth0": 30, "eth1": 30}, True, id="two rails that share it"),
        pytest.param({"mlx5_0/1": 60}, True, id="a port of an RDMA adapter"),
        pytest.param({"eth0": 60}, False, id="a rank without a table of connections"),
    ],
)
def test_does_not_know_foreign_traffic_where_the_carrier_is_not_known(carried: dict[str, int], recorded: bool) -> None:
    use = _use(
        {("n1", name): [value * MB] * 10 for name, value in carried.items()},
        nodes=[0] * len(carried),
        rates=[GIGABIT] * len(carried),
    )
    loads = _loads(use, _flows([(0, [50 * MB] * 10)]), recorded=[recorded])
    assert not loads.carries_job.any()
    assert np.isnan(interface_totals(loads).foreign_bytes_per_s).all()
    assert not interface_totals(loads).is_foreign.any()


def test_all_is_foreign_where_the_job_has_no_connections_to_other_hosts() -> None:
    use = _use({("n1", "eth0"): [MB] * 10, ("n1", "eth1"): [MB] * 10}, nodes=[0, 0], rates=[GIGABIT, GIGABIT])
    loads = _loads(use, _flows([(1, [MB] * 10)]), recorded=[True, True])
    assert interface_totals(loads).foreign_bytes_per_s[SENT] == pytest.approx([MB, MB])


def test_headers_of_ipv6_are_longer() -> None:
    payload = np.full((2, 1), 1e9)
    assert wire_bytes(payload, 1500, has_ipv6=True)[0][0, 0] > wire_bytes(payload, 1500)[0][0, 0]


def test_headers_of_large_packets_are_few() -> None:
    payload = np.full((2, 1), 1e9)
    assert wire_bytes(payload, 9000)[0][0, 0] == pytest.approx(1e9 * (1 + 66 / 8948 + 66 / 65536))


def test_cells_are_seconds_but_for_long_runs_of_many_interfaces() -> None:
    assert len(cell_edges(0, 10 * S, 4)) == 11
    hours = cell_edges(0, 24 * 3600 * S, 4000)
    assert (hours[1] - hours[0]) % S == 0
    assert 4000 * len(hours) <= 4_100_000
    assert cell_edges(7, 8, 1).tolist() == [7, 7 + S]
