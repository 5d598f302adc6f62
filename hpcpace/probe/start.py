"""From a process group of torch to a probe: where the ranks are, and what their hosts' networks can carry.

Rates come from the facts of the audit. An operation is as fast as the host with the most to send or receive for its
rate. Which algorithm a backend uses: rings and direct messages in NCCL; in gloo a ring over ranks, a binomial tree for
broadcast, and an all_reduce of which torch keeps a part for reduce_scatter (torch, ProcessGroupGloo.cpp).
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import hpcpace
from hpcpace.audit.facts import NetDevice, PciDevice, Snapshot
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.tree import Tree
from hpcpace.core.environment import RankInfo, host_identity
from hpcpace.core.errors import WorldError
from hpcpace.core.records import dataclass
from hpcpace.core.text import printable
from hpcpace.probe.record import ProbedHost, ProbeRecord
from hpcpace.probe.world import Board, ProbeWorld
from hpcpace.world.deadline import in_time

if TYPE_CHECKING:
    import torch


RING, TREE, DIRECT, AS_ALL_REDUCE, NEIGHBOURS = "ring", "tree", "direct", "all_reduce", "neighbours"
_OF_GLOO = {"reduce_scatter": AS_ALL_REDUCE, "broadcast": TREE}
_BITS_PER_BYTE = 8
_BITS_OF_MEGABIT = 1_000_000
_BITS_OF_GIGABIT = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class NetworkRate:
    """The network of one host; attributes as of `hpcpace.probe.record.ProbedHost`."""

    interfaces: tuple[str, ...] = ()
    line_rate: float | None = None
    pcie_rate: float | None = None
    rate_words: str = ""


def network_rate(snapshot: Snapshot, interfaces: Sequence[str], *, with_rdma: bool) -> NetworkRate:
    """Return what the network of a host can carry, by the facts of the audit.

    Args:
        snapshot: of the host.
        interfaces: names of the interfaces that carry messages over sockets.
        with_rdma: whether active RDMA ports carry them instead, where there are any.
    """
    ports = [
        (f"{device.name}/{port.number}", port.rate_gbps, device.pci or "")
        for device in snapshot.rdma or ()
        for port in device.ports
        if with_rdma and (port.state or "").upper() == "ACTIVE"
    ]
    if ports:
        names = tuple(name for name, _, _ in ports)
        rates = [None if gbps is None else gbps * _BITS_OF_GIGABIT for _, gbps, _ in ports]
        return _network_rate(names, rates, _pcie_rates(snapshot, [address for _, _, address in ports]))
    devices = {device.name: device for device in snapshot.net or ()}
    used = [devices[name] for name in interfaces if name in devices and devices[name].kind != "loopback"]
    if not used:
        reason = "all ranks are on one host" if interfaces else "the interface is not known"
        return NetworkRate(interfaces=tuple(interfaces), rate_words=reason)
    names = tuple(device.name for device in used)
    return _network_rate(names, [_bits(device) for device in used], _pcie_rates(snapshot, [one.pci for one in used]))


def bus_limit(
    op: str, backend: str, node_of_rank: Sequence[int], rate_of_node: Mapping[int, float | None]
) -> float | None:
    """Return the busbw that the hosts' networks allow, bytes per second; None on one host, or for an unknown rate.

    Args:
        op: the operation.
        backend: `gloo` or `nccl`.
        node_of_rank: host of each rank of the group.
        rate_of_node: bytes per second that a host can send, and receive at the same time.
    """
    num_ranks, counts = len(node_of_rank), Counter(node_of_rank)
    rates = {node: rate_of_node.get(node) for node in counts}
    known = {node: rate for node, rate in rates.items() if rate is not None}
    if len(counts) < 2 or len(known) < len(rates):
        return None
    kind = algorithm(op, backend)
    if kind == DIRECT:
        return min((num_ranks - 1) * known[node] / (count * (num_ranks - count)) for node, count in counts.items())
    if kind == TREE:
        crossings = _crossings(node_of_rank, _tree_edges(num_ranks))
    elif backend == "nccl" and kind == RING:
        crossings = dict.fromkeys(counts, 1)  # NCCL orders its rings by host
    else:
        crossings = _crossings(node_of_rank, [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)])
    lowest = min(known[node] / crossing for node, crossing in crossings.items() if crossing)
    return lowest / 2 if kind == AS_ALL_REDUCE else lowest


def algorithm(op: str, backend: str) -> str:
    """Return how a backend performs an operation."""
    if op in ("all_to_all", "send_recv"):
        return DIRECT if op == "all_to_all" else NEIGHBOURS
    return _OF_GLOO.get(op, RING) if backend == "gloo" else RING


def _tree_edges(num_ranks: int) -> list[tuple[int, int]]:
    """Return who sends to whom in gloo's broadcast from rank 0: the parent lacks the child's highest bit."""
    return [(rank - (1 << (rank.bit_length() - 1)), rank) for rank in range(1, num_ranks)]


def _crossings(node_of_rank: Sequence[int], edges: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return how many messages of full size each host sends to, or receives from, others; the larger number."""
    sent = Counter(node_of_rank[a] for a, b in edges if node_of_rank[a] != node_of_rank[b])
    received = Counter(node_of_rank[b] for a, b in edges if node_of_rank[a] != node_of_rank[b])
    return {node: max(sent[node], received[node]) for node in set(node_of_rank)}


def _network_rate(names: tuple[str, ...], bits: Sequence[float | None], pcie: Sequence[float | None]) -> NetworkRate:
    known = [rate for rate in bits if rate is not None]
    if len(known) < len(bits):
        silent = ", ".join(name for name, rate in zip(names, bits, strict=True) if rate is None)
        return NetworkRate(interfaces=names, rate_words=f"{silent} reports no speed")
    links = [rate for rate in pcie if rate is not None]
    return NetworkRate(
        interfaces=names,
        line_rate=sum(known) / _BITS_PER_BYTE,
        pcie_rate=sum(links) if links and len(links) == len(pcie) else None,
        rate_words=" + ".join(_rate_words(known)),
    )


def _rate_words(bits: Sequence[float]) -> Iterator[str]:
    for rate, count in Counter(bits).items():
        words = f"{rate / _BITS_OF_GIGABIT:g} Gb/s" if rate >= _BITS_OF_GIGABIT else f"{rate / _BITS_OF_MEGABIT:g} Mb/s"
        yield words if count == 1 else f"{count} x {words}"


def _bits(device: NetDevice) -> float | None:
    """Return the rate of an interface, or the one to which a token bucket shapes it if that is lower."""
    rates = [mbps for mbps in (device.speed_mbps, device.shaped_mbps) if mbps is not None and mbps > 0]
    return min(rates) * _BITS_OF_MEGABIT if rates else None


def _pcie_rates(snapshot: Snapshot, addresses: Sequence[str]) -> list[float | None]:
    devices = {device.address: device for device in snapshot.hardware.pci or ()}
    # Ports of one adapter share its link.
    return [pcie_rate(devices[address]) if address in devices else None for address in dict.fromkeys(addresses)]


def pcie_rate(device: PciDevice) -> float | None:
    """Return the bytes per second of a PCIe link, after its line code: 8b/10b up to 5 GT/s, then 128b/130b."""
    if device.speed_gts is None or not device.width:
        return None
    code = 8 / 10 if device.speed_gts <= 5 else 128 / 130
    return device.speed_gts * 1e9 * device.width * code / _BITS_PER_BYTE


_READ_TIMEOUT_S = 5.0


def probe_world(info: RankInfo, store: Any, *, device: torch.device, backend: str, timeout_s: float) -> ProbeWorld:
    """Return the ranks that probe together.

    Collective: every rank of the job calls this.

    Args:
        info: this rank's place.
        store: a store of torch that all ranks share, a connection of our own.
        device: of this rank.
        backend: `gloo` or `nccl`.
        timeout_s: time after which an operation fails that lacks a rank.

    Raises:
        WorldError: a rank did not come.
    """
    board = Board(store)
    own = {"host": info.host, "key": host_identity().host_key, "topology_addr": info.topology_addr}
    try:
        board.post(f"introduction/{info.rank}", own)
        if info.rank == 0:
            found = board.gather("introduction", range(info.world_size), timeout_s)
            board.post("ranks", [found.get(rank) for rank in range(info.world_size)])
        ranks = board.read("ranks", 2 * timeout_s)
    except (TimeoutError, RuntimeError) as error:
        raise WorldError(f"rank 0 did not begin the probe within {2 * timeout_s:g} s: check its host") from error
    missing = [rank for rank, one in enumerate(ranks) if one is None]
    if missing:
        raise WorldError(
            f"{len(missing)} of {info.world_size} ranks did not begin the probe within {timeout_s:g} s, rank "
            f"{missing[0]} first: check its host"
        )
    keys = list(dict.fromkeys(one["key"] for one in ranks))
    firsts = [next(one for one in ranks if one["key"] == key) for key in keys]
    return ProbeWorld(
        rank=info.rank,
        node_of_rank=tuple(keys.index(one["key"]) for one in ranks),
        hosts=tuple(_distinct([one["host"] for one in firsts])),
        topology_addrs=tuple(one["topology_addr"] for one in firsts),
        device=device,
        backend=backend,
        board=board,
        timeout_s=timeout_s,
    )


def begin_record(world: ProbeWorld, environ: Mapping[str, str], *, time_s: float) -> ProbeRecord:
    """Return the record of a probe before its first part.

    Collective: every rank calls this; the first rank of each host reads the facts of its host.

    Args:
        world: the ranks.
        environ: of this rank.
        time_s: the time that the probe may take.
    """
    node = world.node_of_rank[world.rank]
    if world.leader_of(node) == world.rank:
        rate = _network_of_host(world, environ)
        world.board.post(f"network/{world.rank}", rate)
    leaders = [world.leader_of(node) for node in range(len(world.hosts))]
    limit_s = 2 * _READ_TIMEOUT_S
    found = world.board.gather("network", leaders, limit_s, NetworkRate) if world.is_first else {}
    hosts = [
        ProbedHost(
            name=name,
            topology_addr=world.topology_addrs[number],
            ranks=tuple(world.ranks_of([number])),
            **vars(found.get(leaders[number], NetworkRate())),
        )
        for number, name in enumerate(world.hosts)
    ]
    return ProbeRecord(
        versions=_versions(world.device),
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        job_id=environ.get("SLURM_JOB_ID", ""),
        started_unix_ns=time.time_ns(),
        device=world.device.type,
        device_name=_device_name(world.device),
        backend=world.backend,
        time_s=time_s,
        part_s={},
        hosts=tuple(hosts),
    )


def _network_of_host(world: ProbeWorld, environ: Mapping[str, str]) -> NetworkRate:
    variable = "NCCL_SOCKET_IFNAME" if world.backend == "nccl" else "GLOO_SOCKET_IFNAME"
    interfaces = [name for name in environ.get(variable, "").lstrip("=").split(",") if name]
    host = world.hosts[world.node_of_rank[world.rank]]
    try:
        snapshot = in_time(lambda: take_host(Tree(), host=host), _READ_TIMEOUT_S, "reading /sys and /proc")
    except Exception as error:  # a host whose facts cannot be read can still be measured
        reason = f"the facts of the host cannot be read ({printable(str(error))[:100]})"
        return NetworkRate(interfaces=tuple(interfaces), rate_words=reason)
    return network_rate(snapshot, interfaces, with_rdma=world.backend == "nccl")


def _versions(device: torch.device) -> dict[str, str]:
    import torch

    found = {"hpcpace": hpcpace.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names with a number added to repeated ones: containers may share a name."""
    return [
        f"{name}#{names[:place].count(name) + 1}" if name in names[:place] else name for place, name in enumerate(names)
    ]
