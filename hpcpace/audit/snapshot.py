"""Taking the snapshot of this host or of a copied tree, and of its ranks."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import hpcpace
from hpcpace.audit.collect_hardware import collect_hardware
from hpcpace.audit.collect_host import collect_gpus, collect_kernel
from hpcpace.audit.collect_network import collect_net, collect_rdma, read_aer, read_counters
from hpcpace.audit.collect_rank import collect_rank
from hpcpace.audit.facts import Counters, Nvml, RankFacts, RankGpu, Snapshot
from hpcpace.audit.nvml import NvmlAnswer, read_nvml
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.errors import UsageError, WorldError
from hpcpace.quoting import printable
from hpcpace.redaction import Redaction
from hpcpace.world.environment import RankInfo, rank_info

_MOST_PROCESSES = 512


def take_host(tree: Tree, *, host: str, window_s: float = 0.0) -> Snapshot:
    """Return the snapshot of a host, without ranks.

    Args:
        tree: where to read.
        host: its name.
        window_s: seconds between two readings of the counters; 0 reads them once.
    """
    hardware = collect_hardware(tree)
    addresses = [device.address for device in hardware.pci or () if device.kind != "bridge"]
    before, before_s = read_counters(tree) | read_aer(tree, addresses), time.monotonic()
    nvml = _nvml_facts(tree)
    partial = Snapshot(
        hpcpace_version=hpcpace.__version__,
        host=printable(host)[:200],
        boot_id=tree.fact("boot_id", tree.word, "proc/sys/kernel/random/boot_id") or "",
        taken_unix_ns=time.time_ns() if tree.is_live else 0,
        is_live=tree.is_live,
        hardware=hardware,
        rdma=collect_rdma(tree),
        net=collect_net(tree),
        gpus=collect_gpus(tree, hardware.pci, nvml),
        kernel=collect_kernel(tree),
        counters=Counters(values=before, growth=None, window_s=0.0),
    )
    counters = partial.counters
    if window_s > 0 and tree.is_live:
        time.sleep(max(0.0, before_s + window_s - time.monotonic()))
        counters = _grown(before, read_counters(tree) | read_aer(tree, addresses), window_s)
    return dataclasses.replace(partial, counters=counters, unreadable=dict(tree.unreadable))


def with_ranks(snapshot: Snapshot, ranks: Sequence[RankFacts], unreadable: Mapping[str, str]) -> Snapshot:
    """Return a snapshot with ranks added, sorted by rank."""
    return dataclasses.replace(
        snapshot,
        ranks=tuple(sorted((*snapshot.ranks, *ranks), key=lambda rank: rank.rank)),
        unreadable={**snapshot.unreadable, **unreadable},
    )


def take_rank(
    info: RankInfo,
    environ: Mapping[str, str],
    *,
    gpu: RankGpu | None = None,
    mpi_size: int | None = None,
    nccl_version: str = "",
) -> tuple[RankFacts, dict[str, str]]:
    """Return the facts of this process as a rank, and the reasons for what could not be read.

    Args:
        info: its place in the job.
        environ: its environment.
        gpu: the GPU that it uses, if that is certain.
        mpi_size: size of MPI_COMM_WORLD, if MPI was checked.
        nccl_version: version of the NCCL library that it has loaded.
    """
    tree = Tree()
    answer = _nvml(tree, with_facts=False)
    visible = answer.visible if answer else None
    facts = collect_rank(tree, info, environ, visible=visible, gpu=gpu, mpi_size=mpi_size, nccl_version=nccl_version)
    return facts, {name: reason for name, reason in tree.unreadable.items() if name.startswith("rank/")}


def take_tree(root: Path) -> Snapshot:
    """Return the snapshot of a copied tree, a folder with sys/ and proc/.

    Its ranks are the processes proc/N whose environment has a rank; if there are none, proc/self is the only rank.

    Raises:
        UsageError: the folder does not exist, or has neither sys nor proc.
    """
    if not root.is_dir():
        raise UsageError(f"no folder at {root}: --sysfs-root takes a folder that contains sys and proc")
    tree = Tree(root)
    if not tree.exists("sys") and not tree.exists("proc"):
        raise UsageError(f"{root} contains neither sys nor proc: --sysfs-root takes a copied tree")
    name = tree.fact("host", tree.word, "proc/sys/kernel/hostname")
    snapshot = take_host(tree, host=name or root.resolve().name)
    ranks = []
    for proc in _rank_folders(tree):
        environ = _environ(tree, proc)
        try:
            info = rank_info(environ, host=snapshot.host)
        except (WorldError, ValueError) as error:
            tree.unreadable[f"rank/{printable(proc)}"] = printable(Redaction.of(environ).text(str(error)))[:120]
            continue
        ranks.append(collect_rank(tree, info, environ, proc=proc))
    return with_ranks(snapshot, ranks, tree.unreadable)


def _rank_folders(tree: Tree) -> list[str]:
    try:
        names = [name for name in tree.names("proc") if re.fullmatch(r"[1-9]\d{0,9}", name)]
    except Unreadable:
        names = []
    folders = [f"proc/{name}" for name in names[:_MOST_PROCESSES]]
    ranks = [proc for proc in folders if {"SLURM_PROCID", "RANK", "PMI_RANK"} & set(_environ(tree, proc))]
    return ranks or (["proc/self"] if tree.exists("proc/self/status") else [])


def _environ(tree: Tree, proc: str) -> dict[str, str]:
    try:
        text = tree.content(f"{proc}/environ", most_bytes=1 << 18).decode("utf-8", "replace")
    except Unreadable:
        return {}
    return {name: value for name, equals, value in (item.partition("=") for item in text.split("\0")) if equals}


def _nvml_facts(tree: Tree) -> Mapping[str, Nvml]:
    answer = _nvml(tree, with_facts=True)
    return answer.facts if answer else {}


def _nvml(tree: Tree, *, with_facts: bool) -> NvmlAnswer | None:
    """Return NVML's answer if NVIDIA's driver is loaded; NVML knows this machine only, never a copied tree."""
    if not tree.exists("proc/driver/nvidia"):
        return None
    if not tree.is_live:
        tree.unreadable["nvml"] = "a copied tree has no NVML"
        return None
    return tree.fact("nvml", read_nvml, with_facts=with_facts)


def _grown(before: Mapping[str, int], after: Mapping[str, int], window_s: float) -> Counters:
    growth = {name: value - before.get(name, 0) for name, value in after.items() if value > before.get(name, 0)}
    return Counters(values=dict(after), growth=growth, window_s=window_s)
