"""Tables of connections and interfaces whose truth is made here, one row a second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_S
from hpcpace.diagnosis.figures.network import KnownInterfaces, NetworkEvidence, StepWindow
from hpcpace.diagnosis.network_summary import RateSource
from hpcpace.metrics.flows import Connections, Flows, InterfaceUse
from hpcpace.metrics.interface_use import wire_bytes
from hpcpace.metrics.topology import topology_of

S = NS_PER_S
MB = 1_000_000
GIGABIT = 10**9


def ints(values: Sequence[int]) -> NDArray[np.int64]:
    """Return a column."""
    return np.array(values, np.int64)


def interface_use(
    sent: dict[tuple[str, str], Sequence[int]],
    *,
    nodes: Sequence[int],
    rates: Sequence[int],
    received: dict[tuple[str, str], Sequence[int]] | None = None,
    drops: dict[tuple[str, str], int] | None = None,
) -> InterfaceUse:
    """Return counters of interfaces by (host, interface), one value a second.

    Without `received` each receives what it sends; `drops` are those of each second.
    """
    rows = [
        (number, at, value, (received or sent)[name][at], (drops or {}).get(name, 0))
        for number, (name, values) in enumerate(sent.items())
        for at, value in enumerate(values)
    ]
    number, at, sent_bytes, received_bytes, dropped = (ints(column) for column in zip(*rows, strict=True))
    zero = np.zeros(len(rows), np.int64)
    return InterfaceUse(
        names=tuple(sent),
        node=ints(nodes),
        line_rate_bps=ints(rates),
        interface=number,
        begin_ns=at * S,
        end_ns=(at + 1) * S,
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        errors=zero,
        drops=dropped,
        pauses=zero,
        marks=zero,
    )


def flows(
    payload: Sequence[tuple[tuple[int, int], tuple[int, int], Sequence[int]]],
    *,
    received: Sequence[Sequence[int]] | None = None,
    busy_share: Sequence[float] | None = None,
    again_share: Sequence[float] | None = None,
    local: str = "10.0.0.1:1000",
    delay_ns: int = 0,
) -> Flows:
    """Return one connection for each ((rank, node), (peer rank, peer node), bytes sent in each second).

    Without `received` each receives what it sends. Rows of all connections are sampled `delay_ns` late.
    """
    got = received or [values for *_, values in payload]
    busy, again = busy_share or [1.0] * len(payload), again_share or [0.0] * len(payload)
    rows = [
        (row, at, value, got[row][at], round(busy[row] * S), round(again[row] * value))
        for row, (_, _, values) in enumerate(payload)
        for at, value in enumerate(values)
    ]
    connection, at, sent_bytes, received_bytes, busy_ns, repeated = (ints(column) for column in zip(*rows, strict=True))
    zero = np.zeros(len(rows), np.int64)
    return Flows(
        connections=Connections(
            rank=ints([own[0] for own, _, _ in payload]),
            peer_rank=ints([peer[0] for _, peer, _ in payload]),
            node=ints([own[1] for own, _, _ in payload]),
            peer_node=ints([peer[1] for _, peer, _ in payload]),
            local=(local,) * len(payload),
            remote=("10.0.0.2:2000",) * len(payload),
        ),
        connection=connection,
        begin_ns=at * S + delay_ns,
        end_ns=(at + 1) * S + delay_ns,
        sent_bytes=sent_bytes,
        acked_bytes=sent_bytes - repeated,
        received_bytes=received_bytes,
        retransmitted_bytes=repeated,
        busy_ns=busy_ns,
        receiver_limited_ns=zero,
        sender_limited_ns=zero,
        rtt_ns=zero,
        least_rtt_ns=zero,
        unsent_bytes=zero,
    )


def ring_job(
    num_hosts: int,
    *,
    payload: int = 30 * MB,
    foreign: dict[int, int] | None = None,
    drops: dict[int, int] | None = None,
    slow: dict[int, float] | None = None,
    line_rate_bps: int = GIGABIT,
    rate_source: RateSource = "device",
    num_seconds: int = 20,
    has_flows: bool = True,
    interface: str = "eth0",
) -> NetworkEvidence:
    """Return a ring all-reduce of one rank a host, `payload` bytes a second to the next host; 10 steps a second.

    Args:
        num_hosts: hosts n1, n2, ..., four a leaf.
        payload: what each rank sends in a second.
        foreign: bytes a second that a host receives from elsewhere, by its number.
        drops: of a second, by host.
        slow: for which share of the time a host's sending is busy, by host; 0.3 for the others.
        line_rate_bps, rate_source: of all interfaces.
        num_seconds: length.
        has_flows: whether connections were recorded.
        interface: its name.
    """
    hosts = [f"n{row + 1}" for row in range(num_hosts)]
    names = [(host, interface) for host in hosts]
    framed = int(wire_bytes(np.full((2, 1), float(payload)), 1500)[0][0, 0])
    more = foreign or {}
    use = interface_use(
        {name: [framed] * num_seconds for name in names},
        nodes=range(num_hosts),
        rates=[line_rate_bps] * num_hosts,
        received={name: [framed + more.get(row, 0)] * num_seconds for row, name in enumerate(names)},
        drops={names[row]: count for row, count in (drops or {}).items()},
    )
    # One connection to the next host and one to the host before, of which the first carries data.
    ends = [
        end
        for row in range(num_hosts)
        for end in (
            ((row, row), ((row + 1) % num_hosts,) * 2, [payload] * num_seconds),
            ((row, row), ((row - 1) % num_hosts,) * 2, [0] * num_seconds),
        )
    ]
    carried = flows(
        ends,
        received=[[0] * num_seconds, [payload] * num_seconds] * num_hosts,
        busy_share=[share for row in range(num_hosts) for share in ((slow or {}).get(row, 0.3), 0.0)],
    )
    known = KnownInterfaces(use=use, rate_source=(rate_source,) * num_hosts, mtu=np.full(num_hosts, 1500))
    places = topology_of(
        ranks=range(num_hosts),
        nodes=range(num_hosts),
        hosts=hosts,
        addresses=[f"spine.leaf{row // 4 + 1}.{host}" for row, host in enumerate(hosts)],
    )
    step = np.arange(10 * num_seconds)
    window = StepWindow(
        begin_ns=0, end_ns=num_seconds * S, num_steps=len(step), step=step, step_begin_ns=step * S // 10
    )
    return NetworkEvidence(
        window=window,
        places=places,
        known=known,
        flows=carried if has_flows else None,
        is_recorded=np.full(num_hosts, has_flows),
    )
