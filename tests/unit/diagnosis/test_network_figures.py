"""The figures of the network of jobs whose traffic is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import each_case
from known_traffic import GIGABIT, MB, interface_use, ring_job

from hpcpace.diagnosis.figures.network import (
    InterfaceFacts,
    NetworkEvidence,
    known_interfaces,
    network_figures,
    network_plots,
)
from hpcpace.diagnosis.network_summary import InterfaceRow, NetworkFigures
from hpcpace.metrics.topology import topology_of


def of_job(evidence: NetworkEvidence) -> NetworkFigures:
    """Return the figures of a job that has some."""
    figures = network_figures(evidence)
    assert figures is not None
    return figures


def of_host(figures: NetworkFigures, host: str) -> InterfaceRow:
    """Return the row of a host with one interface."""
    return next(row for row in figures.interfaces if row.host == host)


def test_foreign_traffic_is_a_share_of_the_line_rate() -> None:
    figures = of_job(ring_job(4, foreign={3: 47_500_000}))
    worst = figures.interfaces[0]
    assert worst.host == "n4"
    assert worst.received.is_foreign
    assert worst.received.foreign_utilisation == pytest.approx(0.38, abs=1e-3)
    assert worst.received.foreign_bps == pytest.approx(380e6, rel=1e-3)
    assert not any(use.is_foreign for row in figures.interfaces[1:] for use in (row.sent, row.received))


def test_bytes_a_step_are_those_of_the_time_of_the_steps() -> None:
    evidence = ring_job(4)
    row = of_host(of_job(evidence), "n1")
    assert row.sent.bytes_per_step == pytest.approx(evidence.known.use.sent_bytes[0] / 10)


def test_without_a_line_rate_there_is_no_utilisation_and_foreign_traffic_is_a_share_of_the_bytes() -> None:
    row = of_host(of_job(ring_job(2, line_rate_bps=0, rate_source="", foreign={1: 20 * MB})), "n2")
    assert (row.line_rate_bps, row.received.utilisation, row.received.foreign_utilisation) == (None, None, None)
    assert row.received.is_foreign
    assert row.received.foreign_share == pytest.approx(20 / (20 + 31.4), rel=0.01)


def test_traces_without_connections_have_interfaces_and_say_why_nothing_is_called_foreign() -> None:
    figures = of_job(ring_job(4, has_flows=False))
    assert {row.why_unknown for row in figures.interfaces} == {"the traces have no connections"}
    assert figures.interfaces[0].received.foreign_share is None
    assert (figures.pairs, figures.retransmissions) == ((), ())


def test_a_port_of_rdma_has_utilisation_and_no_foreign_traffic() -> None:
    figures = of_job(ring_job(4, interface="mlx5_0/1", line_rate_bps=200 * GIGABIT))
    assert figures.interfaces[0].sent.utilisation is not None
    assert {row.why_unknown for row in figures.interfaces} == {"counters of RDMA do not say whose bytes they count"}


def test_a_host_whose_ranks_did_not_all_record_has_no_foreign_traffic() -> None:
    job = ring_job(4)
    with_gap = replace(job, is_recorded=np.array([True, False, True, True]))
    with_gap.loads.job_bytes[:, 1] = np.nan
    row = of_host(of_job(with_gap), "n2")
    assert row.why_unknown == "not all ranks of the host recorded their connections"


def test_pairs_have_bytes_rate_and_how_long_they_sent() -> None:
    figures = of_job(ring_job(4, slow={1: 0.95}))
    slow = figures.pairs[0]
    assert (slow.source, slow.destination, slow.source_host, slow.destination_host) == (1, 2, "n2", "n3")
    assert slow.busy_share == pytest.approx(0.95)
    assert slow.rate_bps == pytest.approx(30 * MB * 8 / 0.95)
    assert slow.bytes_per_step == pytest.approx(3 * MB)
    assert figures.median_rate_bps == pytest.approx(30 * MB * 8 / 0.3)
    assert figures.num_pairs == 4


def test_a_counter_is_raised_on_the_host_that_has_far_more() -> None:
    figures = of_job(ring_job(4, drops={1: 13}))
    assert {row.host: row.raised for row in figures.interfaces if row.raised} == {"n2": ("drops",)}


def test_a_job_on_one_host_has_no_network() -> None:
    job = ring_job(2)
    one = topology_of(ranks=range(2), nodes=[0, 0], hosts=["n1", "n1"], addresses=["", ""])
    assert network_figures(replace(job, places=one)) is None


def test_traces_without_any_counter_have_no_network() -> None:
    assert network_figures(replace(ring_job(2), known=None, flows=None)) is None


def test_plots_have_interfaces_in_the_order_of_the_figures_and_hosts_of_a_leaf_side_by_side() -> None:
    job = ring_job(8, foreign={5: 40 * MB})
    plots = network_plots(job, network_figures(job))
    assert plots is not None
    assert plots.lines[0].host == "n6"
    assert plots.lines[0].foreign_mbps[1].mean() == pytest.approx(320, rel=0.01)
    assert plots.hosts == tuple(f"n{row + 1}" for row in range(8))
    assert plots.step_mb[0, 1] == pytest.approx(3.0)
    assert np.isfinite(plots.rate_mbps).sum() == 8


def test_the_map_has_no_rate_of_hosts_that_send_next_to_nothing() -> None:
    job = ring_job(4)
    assert job.flows is not None
    back = job.flows.connection == 1  # from n1 to n4, against the ring
    little = replace(
        job.flows,
        acked_bytes=np.where(back, 1300, job.flows.acked_bytes),
        busy_ns=np.where(back, 100_000_000, job.flows.busy_ns),
    )
    plots = network_plots(replace(job, flows=little), network_figures(job))
    assert plots is not None
    assert plots.step_mb[0, 3] > 0
    assert np.isnan(plots.rate_mbps[0, 3])
    assert np.isfinite(plots.rate_mbps).sum() == 4


FACTS = {
    ("n1", "eth0"): InterfaceFacts(speed_bps=10 * GIGABIT, shaped_bps=0, mtu=9000, master=""),
    ("n1", "eth1"): InterfaceFacts(speed_bps=10 * GIGABIT, shaped_bps=0, mtu=1500, master="bond0"),
    ("n1", "bond0"): InterfaceFacts(speed_bps=20 * GIGABIT, shaped_bps=0, mtu=1500, master=""),
    ("n1", "veth0"): InterfaceFacts(speed_bps=0, shaped_bps=GIGABIT, mtu=1500, master="elsewhere"),
    ("n1", "eth2"): InterfaceFacts(speed_bps=GIGABIT, shaped_bps=10 * GIGABIT, mtu=1500, master=""),
    ("n1", "eth3"): InterfaceFacts(speed_bps=10 * GIGABIT, shaped_bps=GIGABIT, mtu=1500, master=""),
}


@each_case(
    ("interface", "recorded", "rate", "source"),
    [
        pytest.param("eth0", 0, 10 * GIGABIT, "device", id="the device's rate by the snapshot"),
        pytest.param("eth0", 25 * GIGABIT, 25 * GIGABIT, "device", id="the trace before the snapshot"),
        pytest.param("veth0", 0, GIGABIT, "tc", id="a virtual interface shaped by tc"),
        pytest.param("eth2", 0, GIGABIT, "device", id="tc above the line rate shapes nothing"),
        pytest.param("eth3", 0, GIGABIT, "tc", id="tc below the line rate"),
        pytest.param("unheard", 0, 0, "", id="an interface that nobody knows"),
    ],
)
def test_the_line_rate_is_what_limits_an_interface(interface: str, recorded: int, rate: int, source: str) -> None:
    known = known_interfaces(interface_use({("n1", interface): [MB]}, nodes=[0], rates=[recorded]), FACTS)
    assert (known.use.line_rate_bps.tolist(), known.rate_source) == ([rate], (source,))


def test_loopbacks_and_members_of_bonds_do_not_count_bytes_twice() -> None:
    names = [("n1", name) for name in ("lo", "eth0", "eth1", "bond0", "veth0")]
    known = known_interfaces(interface_use({name: [MB] for name in names}, nodes=[0] * 5, rates=[0] * 5), FACTS)
    assert [name for _, name in known.use.names] == ["eth0", "bond0", "veth0"]
    assert known.use.sent_bytes.tolist() == [MB] * 3
    assert known.use.interface.tolist() == [0, 1, 2]
    assert known.mtu.tolist() == [9000, 1500, 1500]
