"""What the audit's snapshots say of network interfaces: line rates, MTUs, and which ones would count bytes twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.audit.facts import Snapshot
from hpcpace.diagnosis.network_summary import RateSource
from hpcpace.metrics.network.flow_tables import InterfaceUse
from hpcpace.metrics.network.interface_use import select_interfaces

_PER_MEGA, _PER_GIGA = 10**6, 10**9
_LOOPBACK = "lo"
_NO_RATE: RateSource = ""


@dataclass(frozen=True, kw_only=True)
class InterfaceFacts:
    """One interface.

    Attributes:
        speed_bps: line rate that the device reports, 0 unknown.
        shaped_bps: rate to which a token bucket shapes what it sends, 0 without one.
        mtu: 0 unknown.
        master: bond or bridge that it is part of, which counts its bytes again; empty without one.
    """

    speed_bps: int
    shaped_bps: int
    mtu: int
    master: str


@dataclass(frozen=True, kw_only=True)
class KnownInterfaces:
    """Interfaces whose bytes count once, with what is known of them.

    Attributes:
        use: their counters, with line rates from the trace, or else the snapshot, or the rate of a token bucket below.
        rate_source: who says the line rate, (num_interfaces,).
        mtu: 0 unknown, (num_interfaces,).
    """

    use: InterfaceUse
    rate_source: tuple[RateSource, ...]
    mtu: NDArray[np.int64]


def interface_facts(snapshots: Sequence[Snapshot]) -> dict[tuple[str, str], InterfaceFacts]:
    """Return the facts of all interfaces by host and name; an RDMA port is called `mlx5_0/1`."""
    found = {}
    for snapshot in snapshots:
        for device in snapshot.net or ():
            found[snapshot.host, device.name] = InterfaceFacts(
                speed_bps=(device.speed_mbps or 0) * _PER_MEGA,
                shaped_bps=round((device.shaped_mbps or 0) * _PER_MEGA),
                mtu=device.mtu or 0,
                master=device.master,
            )
        for adapter in snapshot.rdma or ():
            for port in adapter.ports:
                speed_bps = round((port.rate_gbps or 0) * _PER_GIGA)
                name = f"{adapter.name}/{port.number}"
                found[snapshot.host, name] = InterfaceFacts(speed_bps=speed_bps, shaped_bps=0, mtu=0, master="")
    return found


def known_interfaces(use: InterfaceUse, facts: Mapping[tuple[str, str], InterfaceFacts]) -> KnownInterfaces:
    """Return the interfaces without loopbacks and parts of bonds and bridges, with their line rates.

    Args:
        use: counters of all interfaces.
        facts: what snapshots say; empty without any.
    """
    listed = set(use.names)
    is_counted = [
        name != _LOOPBACK and (host, facts[host, name].master if (host, name) in facts else "") not in listed
        for host, name in use.names
    ]
    use = select_interfaces(use, np.array(is_counted, np.bool_))
    rates = [
        _line_rate(int(rate_bps), facts.get(name)) for name, rate_bps in zip(use.names, use.line_rate_bps, strict=True)
    ]
    return KnownInterfaces(
        use=replace(use, line_rate_bps=np.array([rate_bps for rate_bps, _ in rates], np.int64)),
        rate_source=tuple(source for _, source in rates),
        mtu=np.array([facts[name].mtu if name in facts else 0 for name in use.names], np.int64),
    )


def _line_rate(recorded_bps: int, facts: InterfaceFacts | None) -> tuple[int, RateSource]:
    rate_bps = recorded_bps or (facts.speed_bps if facts else 0)
    shaped_bps = facts.shaped_bps if facts else 0
    if shaped_bps and not 0 < rate_bps <= shaped_bps:
        return shaped_bps, "tc"
    return (rate_bps, "device") if rate_bps else (0, _NO_RATE)
