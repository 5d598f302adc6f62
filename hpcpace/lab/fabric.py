"""The lab's network: leaf switches and a spine as bridges, joined by veth pairs whose both ends are shaped.

All of it stands in the lab's own network namespace. Rates are kept by a token bucket (tc-tbf), whose counters tell what
went over the wire: unlike the counters of the device they count the headers of every segment, because a packet
that the kernel has not cut yet is charged as its segments (qdisc_pkt_len in the kernel's net/core/dev.c).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcpace.errors import HpcpaceError
from hpcpace.lab.plan import CONTROLLER_ADDRESS, PREFIX_LENGTH, SPINE, LabHost, LabPlan, Link, hardware_address

_LEAST_BURST_BYTES = 128 << 10
_QUEUE_LATENCY_MS = 50


@dataclass(frozen=True, kw_only=True)
class LinkCounters:
    """What went over a link since the lab came up, headers of Ethernet, IP and TCP included.

    Attributes:
        name: of the link.
        rate_bps: bits per second in each direction, as they are now.
        is_up: whether it carries anything.
        tx_bytes: sent upwards, by the host or by the leaf.
        rx_bytes: sent downwards.
        dropped: packets that the queues of both ends had no room for.
    """

    name: str
    rate_bps: int
    is_up: bool
    tx_bytes: int
    rx_bytes: int
    dropped: int


def shape(rate_bps: int) -> str:
    """Return the arguments by which tc keeps a rate: queues of 50 ms, bursts of a millisecond at least."""
    burst = max(_LEAST_BURST_BYTES, rate_bps // 8 // 1000)
    return f"tbf rate {rate_bps}bit burst {burst}b latency {_QUEUE_LATENCY_MS}ms"


def build_switches(plan: LabPlan) -> None:
    """Make the leaves, the spine, the uplinks and the controller's address, in the namespace of the caller."""
    mtu = plan.config.mtu
    # A bridge takes over the least address of its ports unless it has one of its own, and a leaf, which shares this
    # namespace with the controller, would answer for it: hosts would lose the controller with a neighbour that dies.
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
    ends = ((end, plan.links[leaf].rate_bps) for leaf in plan.leaves for end in _ends(plan.links[leaf]))
    _batch("tc", (f"qdisc add dev {end} root {shape(rate_bps)}" for end, rate_bps in ends))


def connect(plan: LabPlan, hosts: Sequence[LabHost], pids: Sequence[int]) -> None:
    """Give each host, whose first process is given, its eth0 and plug the other end into its leaf."""
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


def set_rate(link: Link, rate_bps: int, *, host_pid: int | None) -> None:
    """Change the rate of both directions of a link; `host_pid` is of the host at its lower end, if one is there."""
    _batch("tc", [f"qdisc change dev {link.upper} root {shape(rate_bps)}"])
    _batch("tc", [f"qdisc change dev {link.lower} root {shape(rate_bps)}"], host_pid=host_pid)


def set_up(link: Link, is_up: bool) -> None:
    """Plug a link in, or out, at the switch above."""
    _batch("ip", [f"link set {link.upper} {'up' if is_up else 'down'}"])


def unplug(link: Link) -> None:
    """Remove a host's link; `connect` makes it anew."""
    _batch("ip", [f"link delete {link.upper}"])


def set_mtu(host_pid: int, mtu: int) -> None:
    """Change the largest packet of a host's eth0."""
    _batch("ip", [f"link set eth0 mtu {mtu}"], host_pid=host_pid)


def read_counters(plan: LabPlan, pids: dict[str, int]) -> dict[str, LinkCounters]:
    """Return the counters of all links by name; `pids` are the first processes of the hosts that are there."""
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


def _ends(link: Link) -> tuple[str, str]:
    return link.lower, link.upper


def _shapers(host_pid: int | None) -> dict[str, Any]:
    queues = _json("tc", "-s", "qdisc", "show", host_pid=host_pid)
    return {queue["dev"]: queue for queue in queues if queue["kind"] == "tbf"}


def _json(tool: str, *arguments: str, host_pid: int | None = None) -> Any:
    return json.loads(_run([*_inside(host_pid), tool, "-j", *arguments]) or "[]")


def _batch(tool: str, lines: Iterable[str], *, host_pid: int | None = None) -> None:
    _run([*_inside(host_pid), tool, "-batch", "-"], text="\n".join(lines) + "\n")


def _inside(host_pid: int | None) -> list[str]:
    return [] if host_pid is None else ["nsenter", "--target", str(host_pid), "--net", "--"]


def _run(command: Sequence[str], *, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise HpcpaceError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
