"""From a process group of torch to a probe: where the ranks are, and what their hosts' networks can carry."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import hpcpace
from hpcpace.audit.snapshot import take_host
from hpcpace.audit.tree import Tree
from hpcpace.core.environment import RankInfo, host_identity
from hpcpace.core.errors import WorldError
from hpcpace.core.text import printable
from hpcpace.probe.limits import NetworkRate, network_rate
from hpcpace.probe.record import ProbedHost, ProbeRecord
from hpcpace.probe.world import Board, ProbeWorld
from hpcpace.world.deadline import in_time

if TYPE_CHECKING:
    import torch

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
        world.board.post(f"network/{world.rank}", dataclasses.asdict(rate))
    leaders = [world.leader_of(node) for node in range(len(world.hosts))]
    found = world.board.gather("network", leaders, 2 * _READ_TIMEOUT_S) if world.is_first else {}
    hosts = []
    for number, name in enumerate(world.hosts):
        facts = found.get(leaders[number], {"interfaces": [], "line_rate": None, "pcie_rate": None, "rate_words": ""})
        hosts.append(
            ProbedHost(
                name=name,
                topology_addr=world.topology_addrs[number],
                ranks=tuple(world.ranks_of([number])),
                **{**facts, "interfaces": tuple(facts["interfaces"])},
            )
        )
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
        return NetworkRate(interfaces=tuple(interfaces), line_rate=None, pcie_rate=None, rate_words=reason)
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
