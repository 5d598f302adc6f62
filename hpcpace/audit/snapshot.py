"""Taking the snapshot of this host or of a copied tree, of its ranks, and of its GPUs by NVML.

Each field of NVML is queried separately, because drivers and GPUs differ in what they answer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcpace
from hpcpace.audit.collect_hardware import collect_hardware
from hpcpace.audit.collect_host import collect_gpus, collect_kernel, collect_rank
from hpcpace.audit.collect_load import (
    WINDOW_S,
    collect_load,
    collect_memory,
    collect_time_sync,
    is_busy,
    read_load,
)
from hpcpace.audit.collect_network import collect_net, collect_rdma, read_aer, read_counters
from hpcpace.audit.facts import Counters, Nvml, RankFacts, RankGpu, Snapshot
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core.environment import RankInfo, rank_info
from hpcpace.core.errors import UsageError, WorldError
from hpcpace.core.redaction import Redaction
from hpcpace.core.text import printable

_MAX_LINKS = 18
_FABRIC_STATES = {0: "none", 1: "not started", 2: "in progress", 3: "completed"}


@dataclass(frozen=True, kw_only=True)
class NvmlAnswer:
    """The GPUs in the library's order, and the facts of each by its PCI address."""

    visible: tuple[RankGpu, ...]
    facts: dict[str, Nvml]


def read_nvml(*, with_facts: bool) -> NvmlAnswer:
    """Return what the library says.

    Args:
        with_facts: whether to ask for more than which GPUs there are.

    Raises:
        Unreadable: the library is not installed, or does not start.
    """
    try:
        import pynvml
    except ImportError:
        raise Unreadable("nvidia-ml-py is not installed: pip install 'hpcpace[gpu]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unreadable(f"NVML does not start: {printable(str(error))[:60]}") from None
    try:
        return _read(pynvml, with_facts=with_facts)
    except pynvml.NVMLError as error:
        raise Unreadable(f"NVML fails: {printable(str(error))[:60]}") from None
    finally:
        pynvml.nvmlShutdown()


def kernel_address(text: str) -> str:
    """Return NVML's `00000000:17:00.0` as the kernel writes it, `0000:17:00.0`."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _read(pynvml: Any, *, with_facts: bool) -> NvmlAnswer:
    visible, facts = [], {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        address = kernel_address(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        visible.append(RankGpu(address=address, uuid=_text(pynvml.nvmlDeviceGetUUID(handle))))
        if with_facts:
            facts[address] = _facts(pynvml, handle)
    return NvmlAnswer(visible=tuple(visible), facts=facts)


def _facts(pynvml: Any, handle: Any) -> Nvml:
    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(handle, *arguments)
        except (AttributeError, pynvml.NVMLError):
            return None

    ecc, mig = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode")
    power, power_default = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    utilization, persistence = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPersistenceMode")
    active, inactive = _links(ask)
    return Nvml(
        links_active=active,
        links_inactive=inactive,
        replays=ask("nvmlDeviceGetPcieReplayCounter"),
        throttle_reasons=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        power_limit_w=None if power is None else power / 1000,
        power_default_w=None if power_default is None else power_default / 1000,
        sm_clock_limit_mhz=ask("nvmlDeviceGetApplicationsClock", getattr(pynvml, "NVML_CLOCK_SM", 1)),
        sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", getattr(pynvml, "NVML_CLOCK_SM", 1)),
        utilization_percent=None if utilization is None else int(utilization.gpu),
        is_ecc_pending=None if ecc is None else ecc[0] != ecc[1],
        is_persistent=None if persistence is None else bool(persistence),
        is_mig=None if mig is None else bool(mig[0]),
        fabric=_fabric(ask),
        links_to=_links_to(ask) if active else None,
    )


def _links(ask: Callable[..., Any]) -> tuple[int | None, int | None]:
    states = [ask("nvmlDeviceGetNvLinkState", link) for link in range(_MAX_LINKS)]
    known = [bool(state) for state in states if state is not None]
    return (sum(known), len(known) - sum(known)) if known else (None, None)


def _links_to(ask: Callable[..., Any]) -> dict[str, int] | None:
    """Return the number of active NVLinks by the address at their other end; None if NVML does not name one of them."""
    found: dict[str, int] = {}
    for link in range(_MAX_LINKS):
        if ask("nvmlDeviceGetNvLinkState", link):
            remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", link)
            address = (
                re.fullmatch(r"[0-9a-f]{4,8}(:[0-9a-f]{2}){2}\.[0-7]", _text(remote.busId).lower()) if remote else None
            )
            if not address:
                return None
            name = kernel_address(address[0])
            found[name] = found.get(name, 0) + 1
    return found


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of nvml.h; some versions of pynvml have another, wrong layout."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
    )


def _fabric(ask: Callable[..., Any]) -> str | None:
    info = _FabricInfo(state=255)
    ask("nvmlDeviceGetGpuFabricInfo", ctypes.byref(info))
    state = _FABRIC_STATES.get(info.state)
    # The status means something only once registration is over.
    return f"failed {info.status}" if state == "completed" and info.status else state


def _text(value: Any) -> str:
    # Older versions of the library return bytes.
    return printable(value.decode("ascii", "replace") if isinstance(value, bytes) else str(value))[:60]


_MAX_PROCESSES = 512


def take_host(
    tree: Tree,
    *,
    host: str,
    window_s: float = 0.0,
    watched_as: RankInfo | None = None,
    environ: Mapping[str, str] | None = None,
) -> Snapshot:
    """Return the snapshot of a host, without ranks.

    Args:
        tree: where to read.
        host: its name.
        window_s: seconds between two readings of the counters; 0 reads them once.
        watched_as: this process's place in the job, to watch the load of others for a second if the host is busy.
        environ: its environment.
    """
    is_watched = watched_as is not None and tree.is_live and is_busy(tree)
    load_before = read_load(tree, with_processes=True) if is_watched else None
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
    if tree.is_live:
        wait_s = max(window_s, WINDOW_S if load_before else 0.0)
        time.sleep(max(0.0, before_s + wait_s - time.monotonic()) if wait_s else 0.0)
    if window_s > 0 and tree.is_live:
        counters = _grown(before, read_counters(tree) | read_aer(tree, addresses), window_s)
    load_after = read_load(tree, with_processes=True) if load_before else None
    has_siblings = watched_as is not None and watched_as.world_size > 1
    return dataclasses.replace(
        partial,
        counters=counters,
        load=collect_load(tree, load_before, load_after, environ or {}, has_siblings=has_siblings),
        memory=collect_memory(tree, load_before, load_after),
        time_sync=collect_time_sync(tree),
        unreadable=dict(tree.unreadable),
    )


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
    folders = [f"proc/{name}" for name in names[:_MAX_PROCESSES]]
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
