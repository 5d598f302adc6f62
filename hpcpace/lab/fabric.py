"""The lab's network: bridges as switches, connected by veth pairs shaped at both ends.

All of it is in the lab's own network namespace. A token bucket (tc-tbf) limits each rate, and its counters show what
went over the wire. Unlike the device's counters, they include the headers of every segment, because a packet that the
kernel has not segmented yet is charged as its segments (qdisc_pkt_len in the kernel's net/core/dev.c).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.plan import CONTROLLER_ADDRESS, PREFIX_LENGTH, SPINE, LabHost, LabPlan, Link, hardware_address

Way = Literal["up", "down"]
"""A direction of a link: towards the spine, and back."""
WAYS: tuple[Way, ...] = get_args(Way)

_MIN_BURST_BYTES = 128 << 10
_QUEUE_LATENCY_MS = 50
_LARGEST_MTU = 65535
_MAX_SEGMENTS = 65535
"""The kernel's default of gso_max_segs (GSO_MAX_SEGS in include/linux/netdevice.h)."""


@dataclass(frozen=True, kw_only=True)
class LinkCounters:
    """Traffic over a link since the lab came up, including Ethernet, IP and TCP headers.

    Attributes:
        name: name of the link.
        rate_bps: current rate in each direction, in bits per second.
        is_up: whether it has a carrier.
        tx_bytes: sent upwards, by the host or by the leaf.
        rx_bytes: sent downwards.
        dropped: packets that the full queues of both ends dropped.
    """

    name: str
    rate_bps: int
    is_up: bool
    tx_bytes: int
    rx_bytes: int
    dropped: int


def shape(rate_bps: int) -> str:
    """Return the tc arguments that limit a rate: queues of 50 ms, bursts of at least a millisecond."""
    burst = max(_MIN_BURST_BYTES, rate_bps // 8 // 1000)
    return f"tbf rate {rate_bps}bit burst {burst}b latency {_QUEUE_LATENCY_MS}ms"


def build_switches(plan: LabPlan) -> None:
    """Create leaves, spine, uplinks and the controller's address in the caller's network namespace."""
    mtu = plan.config.mtu
    # A bridge takes the lowest address of its ports unless it has its own. The leaves share this namespace with the
    # controller and would answer for it: hosts would then lose the controller when a neighbour dies.
    links = ["link set lo up", f"link add {SPINE} address {hardware_address(CONTROLLER_ADDRESS)} type bridge"]
    links += [f"link add {leaf} type bridge" for leaf in plan.leaves]
    links += [f"link set {leaf} arp off" for leaf in plan.leaves]
    links += [f"link set {bridge} mtu {mtu} up" for bridge in (SPINE, *plan.leaves)]
    for leaf in plan.leaves:
        uplink = plan.links[leaf]
        links += [
            f"link add {uplink.lower} mtu {mtu} type veth peer name {uplink.upper} mtu {mtu}",
            f"link set {uplink.lower} master {leaf} up",
            f"link set {uplink.upper} master {SPINE} up",
        ]
    links.append(f"addr add {CONTROLLER_ADDRESS}/{PREFIX_LENGTH} dev {SPINE}")
    _batch("ip", links)
    uplinks = [plan.links[leaf] for leaf in plan.leaves]
    _batch("tc", (f"qdisc add dev {end} root {shape(up.rate_bps)}" for up in uplinks for end in (up.lower, up.upper)))


def connect(plan: LabPlan, hosts: Sequence[LabHost], pids: Sequence[int]) -> None:
    """Give each host its eth0 and connect the other end to its leaf; `pids` are the hosts' first processes."""
    mtu = plan.config.mtu
    links = []
    for host, pid in zip(hosts, pids, strict=True):
        link = plan.links[host.name]
        links += [
            f"link add {link.upper} mtu {mtu} type veth "
            f"peer name {link.lower} mtu {mtu} address {host.hardware_address} netns {pid}",
            f"link set {link.upper} master {host.leaf} up",
        ]
    _batch("ip", links)
    rates = ((plan.links[host.name].upper, plan.links[host.name].rate_bps) for host in hosts)
    _batch("tc", (f"qdisc add dev {upper} root {shape(rate_bps)}" for upper, rate_bps in rates))


def set_rate(link: Link, rate_bps: int, *, ways: Collection[Way] = WAYS, host_pid: int | None) -> None:
    """Change the rate of a link in some directions; `host_pid` is the first process of the host below it, if any."""
    for way, end, pid in (("up", link.lower, host_pid), ("down", link.upper, None)):
        if way in ways:
            _batch("tc", [f"qdisc change dev {end} root {shape(rate_bps)}"], host_pid=pid)


def set_up(link: Link, is_up: bool) -> None:
    """Bring a link up or down at the switch above it."""
    _batch("ip", [f"link set {link.upper} {'up' if is_up else 'down'}"])


def unplug(link: Link) -> None:
    """Remove a host's link; `connect` creates it again."""
    _batch("ip", [f"link delete {link.upper}"])


def set_mtu(host_pid: int, mtu: int) -> None:
    """Change the MTU of a host's eth0."""
    _batch("ip", [f"link set eth0 mtu {mtu}"], host_pid=host_pid)


def detour_devices(link: Link) -> tuple[str, str]:
    """Return the devices between which packets of a link on a detour are forwarded: below, and above."""
    return link.upper, f"{link.name}-out"


def detour(link: Link, switch: str) -> None:
    """Take a link off its switch, and connect a new device pair there: nothing passes until somebody forwards."""
    below, above = detour_devices(link)
    inside = f"{link.name}-in"
    if _has_device(above):
        raise HpcpaceError(f"{link.name} is on a detour already: undo the latency or reordering that it has")
    _batch(
        "ip",
        [
            f"link add {inside} type veth peer name {above}",
            # This namespace has the controller's address, for which nobody else must answer.
            *(f"link set {end} arp off addrgenmode none" for end in (inside, above, below)),
            f"link set {above} mtu {_LARGEST_MTU} up",
            f"link set {inside} mtu {_LARGEST_MTU} up",
            f"link set {below} nomaster",
            f"link set {inside} master {switch}",
        ],
    )


def end_detour(link: Link, switch: str) -> None:
    """Connect a link with its switch again, and remove the pair; also what a detour that failed halfway has left."""
    below, above = detour_devices(link)
    if _has_device(above):
        _batch("ip", [f"link delete {above}"])
    _batch("ip", [f"link set {below} master {switch}", f"link set {below} arp on"])


def lose_packets(link: Link, share: float, *, ways: Collection[Way] = WAYS, host_pid: int | None) -> None:
    """Lose a share of the packets that arrive at the ends of a link, at random; 0 loses none.

    Sent packets are cut to the MTU first (gso_max_segs): else the kernel would pass on up to 64 KiB as one packet, and
    a lost one would be a burst.

    Args:
        link: the link.
        share: from 0 to 1, in steps of 1/10,000.
        ways: directions in which packets are lost.
        host_pid: first process of the host below it, if any.
    """
    for way, end, pid in (("up", link.upper, None), ("down", link.lower, host_pid)):
        if way not in ways:
            continue
        table = f"hpcpace-loss-{end}"
        rules = [f"add table netdev {table}", f"delete table netdev {table}"]
        if share:
            hook = f"type filter hook ingress device {end} priority 0;"
            drop = f"numgen random mod 10000 < {max(1, round(share * 10000))} counter drop"
            rules += [f"add table netdev {table}", f"add chain netdev {table} arriving {{ {hook} }}"]
            rules += [f"add rule netdev {table} arriving {drop}"]
        _run([*_inside(pid), "nft", "-f", "-"], text="\n".join(rules) + "\n")
    cut_packets(link, bool(share), ways=ways, host_pid=host_pid)


def cut_packets(link: Link, is_on: bool, *, ways: Collection[Way] = WAYS, host_pid: int | None) -> None:
    """Cut what enters a link to its MTU, or let the kernel pass on up to 64 KiB as one packet again."""
    for way, end, pid in (("up", link.lower, host_pid), ("down", link.upper, None)):
        if way in ways:
            _batch("ip", [f"link set {end} gso_max_segs {1 if is_on else _MAX_SEGMENTS}"], host_pid=pid)


def read_counters(plan: LabPlan, pids: dict[str, int]) -> dict[str, LinkCounters]:
    """Return the counters of all links by name; `pids` are the first processes of the hosts that are alive."""
    shaped = _shapers(None)
    carrier = {device["ifname"]: device.get("operstate") for device in _json("ip", "link", "show")}
    counters = {}
    for link in plan.links.values():
        upper = shaped.get(link.upper)
        lower = _shapers(pids[link.name]).get("eth0") if link.name in pids else shaped.get(link.lower)
        ends = [end for end in (upper, lower) if end is not None]
        counters[link.name] = LinkCounters(
            name=link.name,
            rate_bps=min((int(end["options"]["rate"]) * 8 for end in ends), default=0),
            is_up=carrier.get(link.upper) == "UP",
            tx_bytes=int(lower["bytes"]) if lower else 0,
            rx_bytes=int(upper["bytes"]) if upper else 0,
            dropped=sum(int(end["drops"]) for end in ends),
        )
    return counters


def _shapers(host_pid: int | None) -> dict[str, Any]:
    queues = _json("tc", "-s", "qdisc", "show", host_pid=host_pid)
    return {queue["dev"]: queue for queue in queues if queue["kind"] == "tbf"}


def _has_device(name: str) -> bool:
    return any(device["ifname"] == name for device in _json("ip", "link", "show"))


def _json(tool: str, *arguments: str, host_pid: int | None = None) -> Any:
    return json.loads(_run([*_inside(host_pid), tool, "-j", *arguments]) or "[]")


def _batch(tool: str, lines: Iterable[str], *, host_pid: int | None = None) -> None:
    _run([*_inside(host_pid), tool, "-batch", "-"], text="\n".join(lines) + "\n")


def _inside(host_pid: int | None) -> list[str]:
    return [] if host_pid is None else ["nsenter", "--target", str(host_pid), "--net", "--"]


def _run(command: Sequence[str], *, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise HpcpaceError(f"{' '.join(command)} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
