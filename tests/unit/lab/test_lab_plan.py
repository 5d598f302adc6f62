"""What follows from the settings of a lab."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import UsageError
from hpcpace.lab.plan import CONTROLLER_ADDRESS, LabHost, LabPlan, Link
from hpcpace.lab.settings import LabConfig


def plan_of(**settings: object) -> LabPlan:
    return LabPlan(LabConfig(**settings))


def test_every_host_has_a_name_an_address_a_leaf_and_a_clock():
    assert plan_of(hosts=3, leaves=2, clock_step_s=70).hosts == (
        LabHost(name="n1", address="10.77.0.1", leaf="leaf1", clock_offset_s=70),
        LabHost(name="n2", address="10.77.0.2", leaf="leaf1", clock_offset_s=140),
        LabHost(name="n3", address="10.77.0.3", leaf="leaf2", clock_offset_s=210),
    )


@each_case(
    ("hosts", "leaves", "blocks"),
    [
        (4, 2, [2, 2]),
        (4, 1, [4]),
        (4, 4, [1, 1, 1, 1]),
        (5, 2, [3, 2]),
        (7, 3, [3, 2, 2]),
        (8, 3, [3, 3, 2]),
        (250, 4, [63, 62, 63, 62]),
    ],
)
def test_hosts_are_dealt_out_to_leaves_in_blocks(hosts, leaves, blocks):
    placed = [host.leaf for host in plan_of(hosts=hosts, leaves=leaves).hosts]
    assert placed == sorted(placed, key=lambda leaf: int(leaf[4:]))
    assert list(Counter(placed).values()) == blocks


def test_addresses_are_different_in_the_largest_lab():
    addresses = [host.address for host in plan_of(hosts=250).hosts]
    assert len({*addresses, CONTROLLER_ADDRESS}) == 251
    assert addresses[-1] == "10.77.0.250"


def test_links_of_hosts_come_before_uplinks():
    links = plan_of(hosts=2, leaves=1, link="10Gbit", uplink="1.5gbit").links
    assert links == {
        "n1": Link(name="n1", upper="n1", lower="eth0", rate_bps=10_000_000_000),
        "n2": Link(name="n2", upper="n2", lower="eth0", rate_bps=10_000_000_000),
        "leaf1": Link(name="leaf1", upper="spine-leaf1", lower="leaf1-up", rate_bps=1_500_000_000),
    }
    assert list(links) == ["n1", "n2", "leaf1"]


def test_names_of_network_devices_fit_the_kernel():
    longest = 15  # IFNAMSIZ - 1
    links = plan_of(hosts=250, leaves=250).links.values()
    assert max(len(end) for link in links for end in (link.upper, link.lower)) <= longest


@pytest.mark.parametrize(("cpus_per_host", "num_cores"), [(1, 4), (1, 64)])
def test_nothing_is_said_of_speed_where_each_claimed_cpu_is_a_core(monkeypatch, cpus_per_host, num_cores):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    assert plan_of(hosts=4, cpus_per_host=cpus_per_host).emulation == ""


def test_says_where_ranks_share_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert plan_of(hosts=3, cpus_per_host=4).emulation == (
        "the hosts claim 12 CPUs and this machine has 2: ranks share cores, so the speed of computation means nothing"
    )


def test_finds_hosts_and_links_by_name():
    plan = plan_of()
    assert plan.host("n3") is plan.hosts[2]
    assert plan.link("n3").upper == "n3"
    assert plan.link("leaf2").upper == "spine-leaf2"


@each_case("name", ["n5", "n0", "leaf1", "login", "", "N1"])
def test_refuses_a_host_that_is_not_there_and_names_those_that_are(name):
    with pytest.raises(UsageError) as caught:
        plan_of().host(name)
    assert str(caught.value) == f"no host {name!r} in this lab: the hosts are n1 to n4"


@each_case("name", ["n5", "leaf3", "spine", "eth0"])
def test_refuses_a_link_that_is_not_there_and_names_those_that_are(name):
    with pytest.raises(UsageError) as caught:
        plan_of().link(name)
    assert str(caught.value) == (
        f"no link {name!r} in this lab: a host's link is named after the host (n1 to n4), an uplink after its leaf "
        "(leaf1, leaf2)"
    )


@each_case(
    ("folder", "seen"), [("/work/a", True), ("/tmp", False), ("/tmp/a", False), ("/tmp/b", True), ("/tmp/b/c", True)]
)
def test_hosts_see_all_folders_but_those_below_tmp_that_are_not_shared(folder, seen):
    assert LabPlan(LabConfig(share=("/tmp/b",))).hosts_see(Path(folder)) == seen
