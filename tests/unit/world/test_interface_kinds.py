from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.codec import convert, plain
from hpcpace.world.interfaces import HostAddresses, Link, Route, choose_route, has_active_rdma, read_link

NIC, VIRTUAL = {"type": "1", "device/vendor": "0x15b3"}, {"type": "1"}
INFINIBAND = {
    "type": "32",
    "dev_port": "0",
    "device/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
    "device/infiniband/mlx5_0/ports/2/rate": "2.5 Gb/sec (1X SDR)",
}


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    return tmp_path / "sys"


def add(sys: Path, name: str, files: dict[str, str], lower: tuple[str, ...] = ()) -> None:
    folder = sys / "class/net" / name
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text + "\n")
    for below in lower:
        (folder / f"lower_{below}").symlink_to(f"../{below}")


def test_a_nic_is_a_cable_and_a_veth_is_not(sys: Path) -> None:
    add(sys, "eth0", NIC)
    add(sys, "veth12", VIRTUAL)
    assert read_link("eth0", 25_000, sys) == Link(kind="ethernet", speed_mbps=25_000, cables=("eth0",))
    assert read_link("veth12", 10_000, sys).kind == "virtual"
    assert read_link("nosuch0", 0, sys).kind == "virtual"


def test_infiniband_tells_its_rate_by_its_port(sys: Path) -> None:
    add(sys, "ib0", INFINIBAND)
    assert read_link("ib0", 0, sys) == Link(kind="infiniband", speed_mbps=200_000, cables=("ib0",))
    add(sys, "ib1", {"type": "32"})
    assert read_link("ib1", 0, sys).expected_mbps == 100_000


def test_a_bond_and_a_vlan_on_it_are_the_cables_below(sys: Path) -> None:
    add(sys, "eth0", NIC)
    add(sys, "eth1", NIC)
    add(sys, "bond0", VIRTUAL, lower=("eth0", "eth1"))
    add(sys, "bond0.7", VIRTUAL, lower=("bond0",))
    for name in ("bond0", "bond0.7"):
        link = read_link(name, 50_000, sys)
        assert (link.kind, link.cables) == ("ethernet", ("eth0", "eth1"))


def test_a_bridge_stays_a_bridge_whatever_its_ports_are(sys: Path) -> None:
    add(sys, "eth0", NIC)
    add(sys, "virbr0", VIRTUAL | {"bridge/bridge_id": "8000"}, lower=("eth0",))
    assert read_link("virbr0", 1000, sys).kind == "bridge"


@pytest.mark.parametrize(("state", "is_active"), [("4: ACTIVE", True), ("1: DOWN", False)])
def test_rdma_is_active_where_a_port_is_up(sys: Path, state: str, is_active: bool) -> None:
    assert has_active_rdma(sys) is False
    port = sys / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    assert has_active_rdma(sys) is is_active


CABLE_1G, CABLE_25G = Link(kind="ethernet", speed_mbps=1000), Link(kind="ethernet", speed_mbps=25_000)
UNKNOWN, UNKNOWN_IB = Link(kind="ethernet"), Link(kind="infiniband")
BRIDGE, VETH = Link(kind="bridge", speed_mbps=40_000), Link(kind="virtual", speed_mbps=40_000)


def routes(links: dict[str, Link], addresses: str = "10.{net}.0.{host}/24", **options: bool) -> list[Route]:
    """Return the routes of two hosts with these interfaces, each in a network of its own."""
    hosts = {}
    for number, host in enumerate(("a", "b"), start=1):
        found = {name: addresses.format(net=net, host=number) for net, name in enumerate(links)}
        own = {name: replace(link, cables=link.cables or (name,)) for name, link in links.items()}
        hosts[host] = HostAddresses(host=host, addresses=found, speed_mbps={}, links=own, **options)
    return list(choose_route(hosts).values())


@each_case(
    ("links", "interfaces"),
    [
        ({"eth0": CABLE_25G, "eth1": CABLE_25G, "eth2": CABLE_25G}, ("eth0", "eth1", "eth2")),
        ({"eth0": CABLE_1G, "eth1": CABLE_25G, "eth2": CABLE_25G}, ("eth1", "eth2")),
        ({"eth0": CABLE_1G, "ib0": UNKNOWN_IB}, ("ib0",)),
        ({"eth0": CABLE_1G, "ens5": UNKNOWN}, ("ens5",)),
        ({"eth0": CABLE_25G, "ens5": UNKNOWN}, ("eth0",)),
        ({"eth0": CABLE_1G, "docker0": BRIDGE, "veth1": VETH}, ("eth0",)),
        ({"veth1": VETH, "cni0": BRIDGE}, ("veth1",)),
        (
            {"bond0": Link(kind="ethernet", speed_mbps=50_000, cables=("eth0", "eth1"))}
            | {"bond0.7": Link(kind="ethernet", speed_mbps=50_000, cables=("eth0", "eth1"))},
            ("bond0",),
        ),
    ],
)
@each_case("addresses", ["10.{net}.0.{host}/24", "10.{net}.0.{host}/32", "fd00:{net}::{host}/64"])
def test_all_equal_cables_are_used_and_nothing_less(
    links: dict[str, Link], interfaces: tuple[str, ...], addresses: str
) -> None:
    assert [route.interfaces for route in routes(links, addresses)] == [interfaces] * 2


def test_two_interfaces_in_one_subnet_are_both_used() -> None:
    hosts = {
        host: HostAddresses(
            host=host,
            addresses={"eth0": f"10.0.0.{number}/24", "eth1": f"10.0.0.{number + 100}/24"},
            speed_mbps={"eth0": 100, "eth1": 100},
        )
        for number, host in enumerate(("a", "b"), start=1)
    }
    assert {route.interfaces for route in choose_route(hosts).values()} == {("eth0", "eth1")}


def test_nccl_is_left_alone_where_all_hosts_have_rdma() -> None:
    assert [route.is_left_to_nccl for route in routes({"ib0": UNKNOWN_IB}, has_rdma=True)] == [True, True]
    assert [route.is_left_to_nccl for route in routes({"ib0": UNKNOWN_IB})] == [False, False]


def test_a_link_local_address_is_written_with_the_interface_of_who_connects() -> None:
    both = routes({"eth0": CABLE_1G}, "fe80::{host}/64")
    assert both[1].reach(both[0].address) == "fe80::1%eth0"
    assert both[1].reach("fd00::1") == "fd00::1"
    assert convert(plain(both[0]), Route) == both[0]
