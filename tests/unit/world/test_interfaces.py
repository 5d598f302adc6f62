from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.core.codec import convert, plain
from hpcpace.core.errors import WorldError
from hpcpace.world.interfaces import HostAddresses, choose_route, host_addresses, interface_of_user


def hosts(wanted="", speeds=None, **addresses):
    return {
        name: HostAddresses(host=name, addresses=own, speed_mbps=speeds or dict.fromkeys(own, 0), wanted=wanted)
        for name, own in addresses.items()
    }


LO = {"lo": "127.0.0.1/8"}


@each_case(
    ("addresses", "interfaces"),
    [
        ({"a": LO | {"eth0": "10.0.0.1/24"}}, ["lo"]),
        ({"a": {"eth0": "10.0.0.1/24"}}, ["eth0"]),
        ({"a": LO | {"eth0": "10.0.0.1/24"}, "b": LO | {"eth0": "10.0.0.2/24"}}, ["eth0", "eth0"]),
        ({"a": LO | {"eno1": "10.0.0.1/24"}, "b": LO | {"eth0": "10.0.0.2/24"}}, ["eno1", "eth0"]),
        (
            {
                "a": {"docker0": "172.17.0.1/16", "eth0": "10.0.0.1/24"},
                "b": {"docker0": "172.17.0.1/16", "eth0": "10.0.0.2/24"},
            },
            ["eth0", "eth0"],
        ),
        ({"a": {"eth0": "10.0.0.1/32"}, "b": {"eth0": "10.0.0.2/32"}}, ["eth0", "eth0"]),
        (
            {
                "a": {"adm": "10.0.0.1/24", "only": "10.1.0.1/24"},
                "b": {"adm": "10.0.0.2/24", "other": "10.2.0.1/24"},
            },
            ["adm", "adm"],
        ),
    ],
)
def test_chooses_an_interface_that_all_hosts_share(addresses, interfaces):
    routes = choose_route(hosts(**addresses))
    assert [route.interface for route in routes.values()] == interfaces
    assert all(addresses[name][route.interface].startswith(route.address + "/") for name, route in routes.items())


def test_prefers_the_faster_of_two_shared_networks():
    both = hosts(
        speeds={"eth0": 1000, "ib0": 100000},
        a={"eth0": "10.0.0.1/24", "ib0": "10.1.0.1/24"},
        b={"eth0": "10.0.0.2/24", "ib0": "10.1.0.2/24"},
    )
    assert {route.interface for route in choose_route(both).values()} == {"ib0"}


def test_takes_the_interface_that_the_user_named():
    routes = choose_route(hosts(wanted="eth0", a=LO | {"eth0": "10.0.0.1/24"}))
    assert routes["a"].address == "10.0.0.1"


@each_case(
    ("found", "message"),
    [
        (hosts(wanted="ib0", a=LO), r"'ib0' is not up.*on a, which has lo 127\.0\.0\.1/8"),
        (hosts(a={"eth0": "10.0.0.1/24"}, b={"eno1": "10.1.0.1/24"}), "share no network interface.*--interface"),
        (hosts(a={"eth0": "169.254.0.1/16"}, b={"eth0": "169.254.0.2/16"}), "share no network interface"),
        (hosts(a={}), "ip link set lo up"),
    ],
)
def test_refuses_networks_without_a_way(found, message):
    with pytest.raises(WorldError, match=message):
        choose_route(found)


@each_case(
    ("environ", "interface", "named"),
    [
        ({}, None, ""),
        ({}, "eth0", "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth1,eth2"}, None, "eth1"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, None, "eth1"),
        ({"NCCL_SOCKET_IFNAME": "^docker0,lo"}, None, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "eth0", "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0", "eth0"),
    ],
)
def test_reads_what_the_user_named(environ, interface, named):
    assert interface_of_user(environ, interface) == named


def test_refuses_an_option_against_a_variable():
    with pytest.raises(WorldError, match="interface is 'ib0', but GLOO_SOCKET_IFNAME=eth0"):
        interface_of_user({"GLOO_SOCKET_IFNAME": "eth0"}, "ib0")


def test_sees_the_loopback_of_this_host_and_survives_json():
    found = host_addresses("lo")
    assert convert(plain(found), HostAddresses) == found
    assert choose_route({found.host: found})[found.host].address == "127.0.0.1"
