"""Utilisation and foreign traffic of interfaces, from tables whose truth is made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cases import each_case
from known_traffic import GIGABIT, MB, S, flows, interface_use, ints

from hpcpace.metrics.flows import Flows, InterfaceUse
from hpcpace.metrics.interface_use import (
    RECEIVED,
    SENT,
    InterfaceLoads,
    cell_edges,
    interface_loads,
    interface_totals,
    spread,
    summed_up_share,
    wire_bytes,
)


def _flows(payload: Sequence[tuple[int, Sequence[int]]]) -> Flows:
    """Return one connection for each (node, bytes a second), sampled half a second late."""
    ends = [((row, node), (99, 99), values) for row, (node, values) in enumerate(payload)]
    return flows(ends, delay_ns=S // 2)


def _loads(use: InterfaceUse, carried: Flows | None, *, recorded: Sequence[bool] = (True, True)) -> InterfaceLoads:
    return interface_loads(use, carried, begin_ns=2 * S, end_ns=8 * S, is_recorded=np.array(recorded, np.bool_))


def test_spreads_values_evenly_over_the_cells_that_they_touch() -> None:
    edges = ints([0, 10, 20, 30])
    assert spread(ints([5, 20, 7]), ints([25, 30, 7]), ints([40, 1, 9]), edges) == pytest.approx([10, 20, 11])


def test_spreads_nothing_where_nothing_accrued() -> None:
    none = ints([])
    assert spread(none, none, none, ints([0, 1, 2])).tolist() == [0, 0]


def test_what_is_carried_is_that_of_each_second_and_direction() -> None:
    use = interface_use({("n1", "eth0"): [0, 0, 25 * MB, 50 * MB, 125 * MB, 0, 0, 0, 0, 0]}, nodes=[0], rates=[GIGABIT])
    loads = _loads(use, None, recorded=[False])
    assert loads.total_bytes[SENT, 0] * 8 / GIGABIT == pytest.approx([0.2, 0.4, 1.0, 0, 0, 0])
    assert interface_totals(loads).peak_bytes_per_s[RECEIVED, 0] == pytest.approx(125 * MB)
    assert interface_totals(loads).bytes_per_s[SENT, 0] == pytest.approx(200 * MB / 6)


def test_without_a_line_rate_it_is_known_what_was_carried() -> None:
    loads = _loads(interface_use({("n1", "veth0"): [MB] * 10}, nodes=[0], rates=[0]), None, recorded=[False])
    assert interface_totals(loads).bytes_per_s[SENT, 0] == pytest.approx(MB)


def test_does_not_know_seconds_without_samples() -> None:
    use = interface_use({("n1", "eth0"): [MB] * 4}, nodes=[0], rates=[GIGABIT])
    loads = _loads(use, None, recorded=[False])
    assert np.isfinite(loads.total_bytes[SENT, 0]).tolist() == [True, True, False, False, False, False]
    assert interface_totals(loads).bytes_per_s[SENT, 0] == pytest.approx(MB)


@pytest.mark.parametrize("foreign", [0, 47_500_000], ids=["none", "38 % of the line"])
def test_foreign_traffic_is_what_no_connection_carried(foreign: int) -> None:
    payload = 50 * MB
    framed = int(wire_bytes(np.full((2, 1), float(payload)), 1500)[0][SENT, 0])
    use = interface_use(
        {("n1", "eth0"): [framed] * 10, ("n2", "eth0"): [framed + foreign] * 10}, nodes=[0, 1], rates=[GIGABIT, GIGABIT]
    )
    loads = _loads(use, _flows([(0, [payload] * 10), (1, [payload] * 10)]))
    found = interface_totals(loads)
    assert loads.carries_job.tolist() == [True, True]
    assert found.is_foreign.tolist() == [[False, foreign > 0]] * 2
    assert loads.foreign_bytes[SENT].mean(axis=1) * 8 / GIGABIT == pytest.approx([0, foreign * 8 / GIGABIT], abs=1e-6)


def test_headers_that_a_virtual_link_does_not_count_are_no_foreign_traffic() -> None:
    use = interface_use({("n1", "veth0"): [50 * MB] * 10}, nodes=[0], rates=[GIGABIT])
    found = interface_totals(_loads(use, _flows([(0, [50 * MB] * 10)]), recorded=[True]))
    assert found.foreign_bytes_per_s[SENT, 0] == 0
    assert not found.is_foreign.any()


def test_connections_of_all_ranks_of_a_host_count_for_its_interface() -> None:
    use = interface_use({("n1", "eth0"): [104 * MB] * 10}, nodes=[0], rates=[GIGABIT])
    found = interface_totals(_loads(use, _flows([(0, [50 * MB] * 10), (0, [50 * MB] * 10)]), recorded=[True]))
    assert not found.is_foreign.any()


def test_what_another_interface_of_the_host_carries_is_foreign_altogether() -> None:
    use = interface_use(
        {("n1", "eth0"): [52 * MB] * 10, ("n1", "eth1"): [7 * MB] * 10}, nodes=[0, 0], rates=[GIGABIT, GIGABIT]
    )
    loads = _loads(use, _flows([(0, [50 * MB] * 10)]), recorded=[True])
    assert loads.carries_job.tolist() == [True, False]
    assert interface_totals(loads).foreign_bytes_per_s[SENT] == pytest.approx([0, 7 * MB])


@each_case(
    ("carried", "recorded"),
    [
        pytest.param({"eth0": 60, "eth1": 60}, True, id="two interfaces that both could be it"),
        pytest.param({"eth0": 30, "eth1": 30}, True, id="two rails that share it"),
        pytest.param({"mlx5_0/1": 60}, True, id="a port of an RDMA adapter"),
        pytest.param({"eth0": 60}, False, id="a rank without a table of connections"),
    ],
)
def test_does_not_know_foreign_traffic_where_the_carrier_is_not_known(carried: dict[str, int], recorded: bool) -> None:
    use = interface_use(
        {("n1", name): [value * MB] * 10 for name, value in carried.items()},
        nodes=[0] * len(carried),
        rates=[GIGABIT] * len(carried),
    )
    loads = _loads(use, _flows([(0, [50 * MB] * 10)]), recorded=[recorded])
    assert not loads.carries_job.any()
    assert np.isnan(interface_totals(loads).foreign_bytes_per_s).all()
    assert not interface_totals(loads).is_foreign.any()


def test_all_is_foreign_where_the_job_has_no_connections_to_other_hosts() -> None:
    use = interface_use({("n1", "eth0"): [MB] * 10, ("n1", "eth1"): [MB] * 10}, nodes=[0, 0], rates=[GIGABIT, GIGABIT])
    loads = _loads(use, _flows([(1, [MB] * 10)]), recorded=[True, True])
    assert interface_totals(loads).foreign_bytes_per_s[SENT] == pytest.approx([MB, MB])


def test_connections_are_those_of_the_interface_that_has_their_address() -> None:
    use = interface_use(
        {("n1", "eth0"): [60 * MB] * 10, ("n1", "eth1"): [60 * MB] * 10}, nodes=[0, 0], rates=[GIGABIT, GIGABIT]
    )
    carried = _flows([(0, [50 * MB] * 10)])
    carried = replace(carried, connections=replace(carried.connections, interface=("eth1",)))
    loads = _loads(use, carried, recorded=[True])
    assert loads.carries_job.tolist() == [False, True]
    assert interface_totals(loads).foreign_bytes_per_s[SENT, 0] == pytest.approx(60 * MB)
    assert interface_totals(loads).foreign_bytes_per_s[SENT, 1] == pytest.approx(7.67 * MB, rel=0.01)


def test_an_interface_that_carried_less_than_its_connections_contradicts_them() -> None:
    use = interface_use({("n1", "eth0"): [MB] * 10}, nodes=[0], rates=[GIGABIT])
    carried = _flows([(0, [50 * MB] * 10)])
    carried = replace(carried, connections=replace(carried.connections, interface=("eth0",)))
    assert np.isnan(_loads(use, carried, recorded=[True]).job_bytes).all()


def test_knows_how_much_was_in_connections_that_are_summed_up() -> None:
    carried = _flows([(0, [3 * MB]), (0, [MB])])
    assert summed_up_share(replace(carried, connection=np.array([0, -1]))) == 0.25
    assert summed_up_share(replace(carried, connection=np.array([0, 1]))) == 0.0


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


def test_an_interface_with_their_address_carries_connections_of_which_its_counters_missed_a_part() -> None:
    use = interface_use({("n1", "eth0"): [42 * MB] * 10}, nodes=[0], rates=[GIGABIT])
    carried = _flows([(0, [50 * MB] * 10)])
    carried = replace(carried, connections=replace(carried.connections, interface=("eth0",)))
    loads = _loads(use, carried, recorded=[True])
    assert loads.carries_job.tolist() == [True]
    assert np.isnan(interface_totals(loads).foreign_bytes_per_s).all()
