"""Which network interface the ranks of several hosts can reach each other on, found from the hosts' addresses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpcpace.errors import WorldError


@dataclass(frozen=True, kw_only=True)
class HostAddresses:
    """The interfaces of one host that are up.

    Attributes:
        host: name of the host.
        addresses: by interface, its first IPv4 address with prefix length, like `10.0.0.1/24`.
        speed_mbps: by interface, its speed, 0 where unknown.
        wanted: the interface that the user named for this host; empty if none.
    """

    host: str
    addresses: dict[str, str]
    speed_mbps: dict[str, int]
    wanted: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> HostAddresses:
        """Return what to_json made plain."""
        return cls(**content)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The interface of one host and its address there."""

    interface: str
    address: str


def interface_of_user(environ: Mapping[str, str], interface: str | None) -> str:
    """Return the interface that the user names, by option or by the variables of gloo and NCCL; empty if none.

    NCCL's variable also takes prefixes and exclusions, which name no interface; only `=NAME` does.

    Raises:
        WorldError: option and variable name different ones.
    """
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    named = {"GLOO_SOCKET_IFNAME": gloo.split(",")[0], "NCCL_SOCKET_IFNAME": nccl[1:] if nccl.startswith("=") else ""}
    for variable, name in named.items():
        if interface and name and name != interface:
            raise WorldError(
                f"interface is {interface!r}, but {variable}={environ[variable]}: unset the variable or drop the option"
            )
    return interface or named["GLOO_SOCKET_IFNAME"] or named["NCCL_SOCKET_IFNAME"]


def host_addresses(wanted: str = "") -> HostAddresses:
    """Return the interfaces of this host that are up and have an IPv4 address.

    Args:
        wanted: the interface that the user named for this host; empty if none.
    """
    import psutil

    stats = psutil.net_if_stats()
    addresses = {
        name: f"{entry.address}/{entry.netmask or '255.255.255.255'}"
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries[::-1]
        if entry.family == socket.AF_INET and name in stats and stats[name].isup
    }
    return HostAddresses(
        host=socket.gethostname(),
        addresses=addresses,
        speed_mbps={name: stats[name].speed for name in addresses},
        wanted=wanted,
    )


def choose_route(hosts: Mapping[str, HostAddresses]) -> dict[str, Route]:
    """Return for each host the interface to use and its address there.

    What the user named for each host counts. Otherwise one host uses its loopback, and several use the subnet, or
    else the interface name (clouds give addresses without a subnet), that all have with an address of their own;
    bridges of containers have the same address everywhere and so drop out. Of several the fastest counts, then the
    first by name.

    Args:
        hosts: the interfaces of each host, by its name.

    Raises:
        WorldError: no interface fits, or one that the user named is not up.
    """
    for host in hosts.values():
        if host.wanted and host.wanted not in host.addresses:
            raise WorldError(
                f"interface {host.wanted!r} is not up with an IPv4 address on {host.host}, which has {_listed(host)}"
            )
    if all(host.wanted for host in hosts.values()):
        return {name: _route(host, host.wanted) for name, host in hosts.items()}
    if len(hosts) == 1:
        return {name: _route(host, _loopback(host)) for name, host in hosts.items()}
    candidates = _shared(hosts, by_subnet=True) or _shared(hosts, by_subnet=False)
    if not candidates:
        seen = "; ".join(f"{name}: {_listed(host)}" for name, host in hosts.items())
        raise WorldError(f"the hosts share no network interface or IPv4 subnet ({seen}): name one with --interface")
    return min(candidates, key=lambda routes: _preference(hosts, routes))


def _shared(hosts: Mapping[str, HostAddresses], *, by_subnet: bool) -> list[dict[str, Route]]:
    """Return the routes of each subnet, or interface name, in which every host has an address of its own."""
    found: dict[str, dict[str, Route]] = {}
    for name, host in hosts.items():
        for interface, text in host.addresses.items():
            address = ipaddress.IPv4Interface(text)
            if not (address.is_loopback or address.is_link_local):
                found.setdefault(str(address.network) if by_subnet else interface, {})[name] = _route(host, interface)
    return [
        routes
        for routes in found.values()
        if len(routes) == len(hosts) == len({route.address for route in routes.values()})
    ]


def _preference(hosts: Mapping[str, HostAddresses], routes: Mapping[str, Route]) -> tuple[int, list[str]]:
    slowest_mbps = min(hosts[name].speed_mbps.get(route.interface, 0) for name, route in routes.items())
    return -slowest_mbps, sorted(route.interface for route in routes.values())


def _loopback(host: HostAddresses) -> str:
    for interface, text in host.addresses.items():
        if ipaddress.IPv4Interface(text).is_loopback:
            return interface
    if not host.addresses:
        raise WorldError(f"{host.host} has no network interface that is up, not even lo: run `ip link set lo up`")
    return min(host.addresses)


def _route(host: HostAddresses, interface: str) -> Route:
    return Route(interface=interface, address=host.addresses[interface].split("/")[0])


def _listed(host: HostAddresses) -> str:
    return ", ".join(f"{interface} {text}" for interface, text in sorted(host.addresses.items())) or "none"
