"""The audit's snapshots of the hosts of a job, taken as its sessions start."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpcpace.audit.facts import RankFacts, RankGpu, Snapshot
from hpcpace.audit.snapshot import take_host, take_rank, with_ranks
from hpcpace.audit.snapshot_files import NUM_OURS_OF_RUN, save_snapshots
from hpcpace.audit.tree import Tree
from hpcpace.core.codec import convert, plain
from hpcpace.core.environment import RankInfo
from hpcpace.observe.joined import JoinedRank
from hpcpace.world.deadline import in_time

# A file system that hangs, like that of ~/.nccl.conf, must not keep the job from training.
_SNAPSHOT_TIMEOUT_S = 5.0


def save_host_snapshots(
    joined: JoinedRank, environ: Mapping[str, str], folder: Path, *, warn: Callable[[str], None]
) -> None:
    """Save the snapshot of each host, on its first rank, as HOST.json.

    Collective: every rank of the job calls this.

    Args:
        joined: this rank.
        environ: of it, as it is now.
        folder: the target, as `Attempt.snapshot_dir`.
        warn: takes a warning about what failed.

    Raises:
        WorldError: a rank did not answer by the session's deadline.
    """
    world, host_keys, deadline = joined.world, joined.host_keys, joined.deadline
    part: dict[str, Any] = {"host": world.host, "rank": world.rank}
    host: Snapshot | None = None
    try:
        gpu, nccl_version = _own_gpu(), _nccl_version()  # here, because each thread has a current device of its own
        read = partial(_read, world, environ, gpu, nccl_version)
        timeout_s = min(_SNAPSHOT_TIMEOUT_S, deadline.left_s)
        facts, unreadable, host = in_time(read, timeout_s, "reading /sys and /proc")
        part |= {"facts": plain(facts), "unreadable": unreadable}
    except Exception as error:  # the boundary to somebody else's job, whose other ranks wait for our part
        warn(f"no snapshot for the audit: {error or type(error).__name__}")
    parts = joined.messages.allgather(part, deadline.left_s)
    if host is None:
        return
    try:
        own = [other for other, key in zip(parts, host_keys, strict=True) if key == host_keys[world.rank]]
        snapshot = _joined(_named(host, parts, host_keys, world.rank), own)
        save = partial(save_snapshots, folder, [snapshot], num_ours=NUM_OURS_OF_RUN)
        in_time(save, deadline.left_s, f"writing to {folder}")
    except Exception as error:  # the boundary to somebody else's job
        warn(f"the audit's snapshot of {world.host} is not saved: {error or type(error).__name__}")


def _read(
    world: RankInfo, environ: Mapping[str, str], gpu: RankGpu | None, nccl_version: str
) -> tuple[RankFacts, dict[str, str], Snapshot | None]:
    facts, unreadable = take_rank(world, environ, gpu=gpu, nccl_version=nccl_version)
    return facts, unreadable, take_host(Tree(), host=world.host) if world.local_rank == 0 else None


def _joined(host: Snapshot, parts: Sequence[Mapping[str, Any]]) -> Snapshot:
    """Return the snapshot of a host with those of its ranks that could read what they have."""
    made = [part for part in parts if "facts" in part]
    ranks = [convert(part["facts"], RankFacts) for part in made]
    reasons = {name: reason for part in made for name, reason in part["unreadable"].items()}
    lost = {f"rank/{part['rank']}": "it could not read what it has" for part in parts if "facts" not in part}
    return with_ranks(host, ranks, reasons | lost)


def _named(host: Snapshot, parts: Sequence[Mapping[str, Any]], host_keys: Sequence[str], rank: int) -> Snapshot:
    """Return a snapshot with a number added to its name where other hosts, as containers may, have the same."""
    namesakes = {key: None for part, key in zip(parts, host_keys, strict=True) if part["host"] == parts[rank]["host"]}
    number = list(namesakes).index(host_keys[rank])
    return dataclasses.replace(host, host=f"{host.host}#{number + 1}") if number else host


def _own_gpu() -> RankGpu | None:
    """Return the GPU that torch computes on; None where it has not begun to use any, so as not to begin it here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    of_torch = torch.cuda.get_device_properties(torch.cuda.current_device())
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(of_torch, name) for name in (*names, "uuid")):
        return None
    domain, bus, device = (int(getattr(of_torch, name)) for name in names)
    return RankGpu(address=f"{domain:04x}:{bus:02x}:{device:02x}.0", uuid=f"GPU-{of_torch.uuid}")


def _nccl_version() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else ""
