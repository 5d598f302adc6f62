"""Which network interfaces the ranks of several hosts can reach each other on, found from the hosts' addresses.

All equal interfaces are used: three cables carry three times what one does. A bridge or another virtual interface
counts only where the hosts share nothing better.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

from hpcpace.core.errors import WorldError
from hpcpace.core.records import dataclass

SYS = Path("/sys")
_INFINIBAND_TYPE = "32"  # ARPHRD_INFINIBAND of linux/if_arp.h
_USUAL_MBPS = {"infiniband": 100_000, "ethernet": 10_000, "virtual": 10_000, "bridge": 10_000}
_PREFERENCE = {"infiniband": 2, "ethernet": 2, "virtual": 1, "bridge": 0}
_MAX_STACKED = 8


@dataclass(frozen=True, kw_only=True)
class Link:
    """One network interface.

    Attributes:
        kind: `infiniband` or `ethernet` for a cable or what is stacked on one (bond, VLAN), `bridge`, or `virtual`.
        speed_mbps: its rate; 0 if unknown.
        cables: the interfaces at the bottom of what it is stacked on; itself if on none.
    """

    kind: str = "virtual"
    speed_mbps: int = 0
    cables: tuple[str, ...] = ()

    @property
    def preference(self) -> int:
        """How much rather than others it carries training, the larger the rather."""
        return _PREFERENCE[self.kind]

    @property
    def expected_mbps(self) -> int:
        """Its rate, or the usual one of its kind."""
        return self.speed_mbps if self.speed_mbps > 0 else _USUAL_MBPS[self.kind]


def read_link(name: str, speed_mbps: int, sys: Path = SYS) -> Link:
    """Return what sysfs says of an interface.

    Args:
        name: of the interface.
        speed_mbps: what the kernel says of its speed, 0 if unknown.
        sys: where sysfs is.
    """
    folder = sys / "class/net" / name
    cables = tuple(sorted(set(_cables(folder))))
    kinds = {_kind_of_cable(sys / "class/net" / cable) for cable in cables}
    if (folder / "bridge").exists():
        kind = "bridge"
    elif _text(folder / "type") == _INFINIBAND_TYPE or kinds == {"infiniband"}:
        kind = "infiniband"
    else:
        kind = "ethernet" if kinds - {"virtual"} else "virtual"
    if kind == "infiniband" and speed_mbps <= 0:
        speed_mbps = sum(_infiniband_mbps(sys / "class/net" / cable) for cable in cables)
    return Link(kind=kind, speed_mbps=speed_mbps, cables=cables)


def has_active_rdma(sys: Path = SYS) -> bool:
    """Return whether InfiniBand or RoCE is up on this host, over which NCCL then sends by itself."""
    states = (sys / "class/infiniband").glob("*/ports/*/state")
    return any(_text(state).startswith("4") for state in states)  # 4: ACTIVE


def _kind_of_cable(folder: Path) -> str:
    if _text(folder / "type") == _INFINIBAND_TYPE:
        return "infiniband"
    return "ethernet" if (folder / "device").exists() else "virtual"


def _cables(folder: Path, depth: int = 0) -> Iterator[str]:
    below = sorted(folder.glob("lower_*"))
    if not below or depth == _MAX_STACKED:
        yield folder.name
    for link in below:
        yield from _cables(folder.with_name(link.name.removeprefix("lower_")), depth + 1)


def _infiniband_mbps(folder: Path) -> int:
    """Return the rate of the adapter's port behind an interface: `200 Gb/sec (4X HDR)` is 200,000."""
    port = _text(folder / "dev_port")
    wanted = str(int(port) + 1) if port.isdecimal() else "1"
    rates = (_text(rate) for rate in (folder / "device/infiniband").glob(f"*/ports/{wanted}/rate"))
    return max((round(1000 * _number(rate)) for rate in rates), default=0)


def _number(rate: str) -> float:
    try:
        return float(rate.split()[0])
    except (IndexError, ValueError):
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class HostAddresses:
    """The interfaces of one host that are up.

    Attributes:
        host: name of the host.
        addresses: by interface, its first IPv4 address with prefix length, like `10.0.0.1/24`; an IPv6 address for an
            interface that has no IPv4 one, its link-local one only if it has no other.
        speed_mbps: by interface, its speed, 0 where unknown.
        wanted: the interfaces that the user named for this host, separated by commas; empty if none.
        links: by interface, what sysfs says of it.
        has_rdma: whether NCCL sends over InfiniBand or RoCE by itself.
    """

    host: str
    addresses: dict[str, str]
    speed_mbps: dict[str, int]
    wanted: str = ""
    links: dict[str, Link] = field(default_factory=dict)
    has_rdma: bool = False

    def link(self, interface: str) -> Link:
        """Return what is known of an interface."""
        known = self.links.get(interface)
        return known or Link(speed_mbps=max(self.speed_mbps.get(interface, 0), 0), cables=(interface,))


@dataclass(frozen=True, kw_only=True)
class Route:
    """The interfaces of one host that carry the collectives, and its address on the first.

    Attributes:
        interfaces: names, the n-th of each host in one network.
        address: where other hosts reach this one; without the scope of a link-local address, which is each host's own.
        is_left_to_nccl: whether NCCL finds its own interfaces, because all hosts have RDMA.
    """

    interfaces: tuple[str, ...]
    address: str
    is_left_to_nccl: bool = False

    @property
    def interface(self) -> str:
        """The first interface."""
        return self.interfaces[0]

    def reach(self, address: str) -> str:
        """Return another host's address as this one has to write it."""
        return f"{address}%{self.interface}" if _is_link_local6(address) else address


class _Rating(NamedTuple):
    """How well a network suits, the smallest best; equal ratings are used together."""

    disfavour: int
    level: int
    slowness_mbps: int
    is_guess: bool


class _Network(NamedTuple):
    """Interfaces of all hosts that reach each other: by host, interfaces with their addresses."""

    rating: _Rating
    members: dict[str, list[tuple[str, str]]]


def interface_of_user(environ: Mapping[str, str], interface: str | None) -> str:
    """Return the interface that the user names, by option or by the variables of gloo and NCCL; empty if none.

    NCCL's variable also takes prefixes and exclusions, which name no interface; only `=NAME` does.

    Raises:
        WorldError: option and variable name different ones.
    """
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    named = {"GLOO_SOCKET_IFNAME": gloo.split(",")[0], "NCCL_SOCKET_IFNAME": _first_exact(nccl)}
    for variable, name in named.items():
        if interface and name and name not in interface.split(","):
            raise WorldError(
                f"interface is {interface!r}, but {variable}={environ[variable]}: unset the variable or drop the option"
            )
    return interface or named["GLOO_SOCKET_IFNAME"] or named["NCCL_SOCKET_IFNAME"]


def _first_exact(nccl: str) -> str:
    return nccl[1:].split(",")[0] if nccl.startswith("=") else ""


def host_addresses(wanted: str = "", environ: Mapping[str, str] | None = None) -> HostAddresses:
    """Return the interfaces of this host that are up and have an address.

    Args:
        wanted: the interfaces that the user named for this host; empty if none.
        environ: environment, in which NCCL_IB_DISABLE=1 keeps NCCL from RDMA.
    """
    import psutil

    stats = psutil.net_if_stats()
    addresses = {
        name: _first_address(entries)
        for name, entries in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup and _first_address(entries)
    }
    return HostAddresses(
        host=socket.gethostname(),
        addresses=addresses,
        speed_mbps={name: stats[name].speed for name in addresses},
        wanted=wanted,
        links={name: read_link(name, stats[name].speed, SYS) for name in addresses},
        has_rdma=has_active_rdma(SYS) and (environ or {}).get("NCCL_IB_DISABLE", "0") != "1",
    )


def _first_address(entries: Sequence[Any]) -> str:
    """Return the address that gloo takes of an interface, with its prefix length: IPv4, then a global IPv6 one."""
    found = []
    for entry in entries:
        if entry.family == socket.AF_INET:
            found.append((0, f"{entry.address}/{entry.netmask or '255.255.255.255'}"))
        elif entry.family == socket.AF_INET6:
            address = entry.address.partition("%")[0]
            found.append((2 if _is_link_local6(address) else 1, f"{address}/{_prefix_length(entry.netmask)}"))
    return min(found, key=lambda each: each[0])[1] if found else ""


def _prefix_length(netmask: str | None) -> int:
    return bin(int(ipaddress.IPv6Address(netmask))).count("1") if netmask else 128


def choose_route(hosts: Mapping[str, HostAddresses]) -> dict[str, Route]:
    """Return for each host the interfaces to use and its address there.

    What the user named for each host counts. Otherwise one host uses its loopback, and several use the subnets, or
    else the interface names (clouds give addresses without a subnet), that all have with addresses of their own;
    bridges of containers have the same address everywhere and so drop out. Cables come before what is virtual, then
    the fastest count, and all that are equal.

    Args:
        hosts: the interfaces of each host, by what distinguishes it.

    Raises:
        WorldError: no interface fits, or one that the user named is not up.
    """
    for host in hosts.values():
        for name in filter(None, host.wanted.split(",")):
            if name not in host.addresses:
                raise WorldError(
                    f"interface {name!r} is not up with an address on {host.host}, which has {_listed(host)}"
                )
    if all(host.wanted for host in hosts.values()):
        return {name: _route(host, host.wanted.split(","), hosts) for name, host in hosts.items()}
    if len(hosts) == 1:
        return {name: _route(host, [_loopback(host)], {}) for name, host in hosts.items()}
    networks = sorted(_networks(hosts), key=lambda each: (each.rating, str(sorted(each.members.items()))))
    if not networks:
        seen = "; ".join(f"{host.host}: {_listed(host)}" for host in hosts.values())
        raise WorldError(f"the hosts share no network interface or subnet ({seen}): name one with --interface")
    chosen = _without_shared_cables(hosts, [each for each in networks if each.rating == networks[0].rating])
    return {
        name: _route(host, [interface for each in chosen for interface, _ in each.members[name]], hosts)
        for name, host in hosts.items()
    }


def _networks(hosts: Mapping[str, HostAddresses]) -> Iterator[_Network]:
    """Yield the networks in which every host has addresses of its own: by subnet, then by name."""
    found: dict[tuple[int, str], dict[str, list[tuple[str, str]]]] = {}
    for host_name, host in hosts.items():
        for interface, text in host.addresses.items():
            address = ipaddress.ip_interface(text)
            if address.is_loopback or (address.version == 4 and address.is_link_local):
                continue
            member = (interface, str(address.ip))
            by_family = 2 * (address.version == 6)
            # All links have the same link-local subnet, which therefore proves nothing.
            by_network = [] if address.is_link_local else [(by_family, str(address.network))]
            for place in (*by_network, (by_family + 1, interface)):
                found.setdefault(place, {}).setdefault(host_name, []).append(member)
    for (level, _), members in found.items():
        addresses = [address for each in members.values() for _, address in each]
        if len(members) == len(hosts) and len(addresses) == len(set(addresses)):
            yield _rated(hosts, level, members)


def _rated(hosts: Mapping[str, HostAddresses], level: int, members: dict[str, list[tuple[str, str]]]) -> _Network:
    """Return a network with the best interfaces of each host, equally many."""

    def rating(host: str, member: tuple[str, str]) -> _Rating:
        link = hosts[host].link(member[0])
        return _Rating(-link.preference, level, -link.expected_mbps, link.speed_mbps <= 0)

    best = {host: min(rating(host, each) for each in own) for host, own in members.items()}
    equal = {host: sorted(each for each in own if rating(host, each) == best[host]) for host, own in members.items()}
    number = min(len(own) for own in equal.values())
    return _Network(max(best.values()), {host: own[:number] for host, own in equal.items()})


def _without_shared_cables(hosts: Mapping[str, HostAddresses], networks: Sequence[_Network]) -> list[_Network]:
    """Return the networks that have cables of their own: a VLAN adds nothing to the interface that it is on."""
    chosen, taken = [], set[tuple[str, str]]()
    for network in networks:
        cables = {
            (host, cable)
            for host, members in network.members.items()
            for interface, _ in members
            for cable in hosts[host].link(interface).cables
        }
        if not cables & taken:
            chosen.append(network)
            taken |= cables
    return chosen


def _loopback(host: HostAddresses) -> str:
    for interface, text in host.addresses.items():
        if ipaddress.ip_interface(text).is_loopback:
            return interface
    if not host.addresses:
        raise WorldError(f"{host.host} has no network interface that is up, not even lo: run `ip link set lo up`")
    return min(host.addresses)


def _route(host: HostAddresses, interfaces: Sequence[str], hosts: Mapping[str, HostAddresses]) -> Route:
    has_rdma = bool(hosts) and all(each.has_rdma for each in hosts.values())
    address = host.addresses[interfaces[0]].split("/")[0]
    return Route(interfaces=tuple(interfaces), address=address, is_left_to_nccl=has_rdma and not host.wanted)


def _is_link_local6(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return parsed.version == 6 and parsed.is_link_local


def _listed(host: HostAddresses) -> str:
    return ", ".join(f"{interface} {text}" for interface, text in sorted(host.addresses.items())) or "none"
