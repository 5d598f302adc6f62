"""Taking the snapshot of a host, its ranks and GPUs, and gathering those of a job on rank 0, by files or by MPI.

Each field of NVML is queried separately, because drivers and GPUs differ in what they answer.

Each rank reads its own facts; the first rank of each host reads the host's as well. Only rank 0 waits, no longer than
its timeout, and it names the ranks that are missing. The folder may belong to another user; the worst that this user
can achieve is that facts of a rank are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import hpcpace
from hpcpace.audit.collect_hardware import collect_hardware, collect_net, collect_rdma, read_aer, read_counters
from hpcpace.audit.collect_host import (
    WINDOW_S,
    collect_gpus,
    collect_kernel,
    collect_load,
    collect_memory,
    collect_rank,
    collect_time_sync,
    is_busy,
    read_load,
)
from hpcpace.audit.facts import Counters, Nvml, RankFacts, RankGpu, Snapshot
from hpcpace.audit.snapshot_files import file_name, snapshot_from, snapshot_text, with_distinct_names
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.core.codec import WrongValue, convert, parse_json, plain
from hpcpace.core.environment import RankInfo, host_identity, rank_info
from hpcpace.core.errors import SnapshotError, UsageError, WorldError
from hpcpace.core.files import Folder, read_most
from hpcpace.core.hostlist import expand, short_list
from hpcpace.core.records import dataclass
from hpcpace.core.redaction import Redaction
from hpcpace.core.rundir import RunDirectory, default_run_path
from hpcpace.core.text import printable
from hpcpace.world.mpi import mpi_world

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


NUM_OURS_OF_STEP = 3
"""How many names at the end of `snapshot_folder` hpcpace has chosen, for `hpcpace.core.files.Folder.open`."""

_PART = re.compile(r"rank-(\d{5,7})\.json")
_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 0.5
_MAX_NAMED = 6
_MAX_PART_BYTES = 1 << 20
_MAX_BYTES = 1 << 28  # of all parts; those of 16,384 ranks on 2,048 hosts take half of it
_MAX_REASON = 200
# A part much older than rank 0's own, by the file server's clock, was left behind by a job that died.
_OLD_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Snapshots of all hosts that answered, and a sentence for each host or rank that did not."""

    snapshots: tuple[Snapshot, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank contributes.

    Attributes:
        host_key: distinguishes hosts.
        host: its name.
        snapshot: the host's facts as JSON text, from its first rank only.
        rank: the rank's facts.
        unreadable: why facts of the rank could not be read, by name of the fact.
    """

    host_key: str
    host: str
    snapshot: str | None
    rank: RankFacts
    unreadable: dict[str, str]


@dataclass(kw_only=True)
class _ReceivedParts:
    """The parts that have arrived so far, by rank, and why those of other ranks cannot be used."""

    parts: dict[int, tuple[RankPart, Snapshot | None]] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    num_bytes: int = 0


def own_part(
    info: RankInfo,
    environ: Mapping[str, str],
    *,
    window_s: float = 0.0,
    mpi_size: int | None = None,
) -> dict[str, Any]:
    """Return this rank's part as JSON values: its facts, and those of the host from the host's first rank.

    Args:
        info: this rank's place in the job.
        environ: its environment.
        window_s: seconds between two readings of the host's counters; 0 reads them once.
        mpi_size: size of MPI_COMM_WORLD, if MPI was checked.
    """
    facts, unreadable = take_rank(info, environ, mpi_size=mpi_size)
    host = None
    if info.local_rank <= 0:
        host = snapshot_text(take_host(Tree(), host=info.host, window_s=window_s, watched_as=info, environ=environ))
    return {
        "host_key": host_identity().host_key,
        "host": printable(info.host),
        "snapshot": host,
        "rank": plain(facts),
        "unreadable": unreadable,
    }


def gather_by_files(
    info: RankInfo,
    environ: Mapping[str, str],
    folder: Path,
    part: Mapping[str, Any],
    *,
    timeout_s: float,
    num_ours: int = 0,
) -> Gathered | None:
    """Contribute a part through a shared folder; return the gathered parts on rank 0, None on other ranks.

    Args:
        info: this rank's place in the job.
        environ: environment, with Slurm's names of the hosts.
        folder: a folder that all hosts share; parts go to a subfolder for this step and are removed.
        part: this rank's part.
        timeout_s: how long rank 0 waits.
        num_ours: how many names at the end of `folder` hpcpace has chosen, for `hpcpace.core.files.Folder.open`.

    Raises:
        UsageError: the folder is not writable.
    """
    own = _part_name(info.rank)
    try:
        with (
            Folder.open(folder, make=True, num_ours=num_ours) as shared,
            shared.make_folder(f".ranks-{file_name(f'{info.job_id}.{info.step_id}')}") as parts,
        ):
            parts.write(own, json.dumps(part, separators=(",", ":")))
            if info.rank:
                return None
            received = _ReceivedParts(parts={0: _part_from(part)})
            _wait_for(parts, info.world_size, parts.status(own), timeout_s, received)
            _remove(shared, parts)
    except OSError as error:
        raise UsageError(
            f"cannot gather the ranks' facts in {folder}: {error.strerror}; use --save with a writable folder that all "
            "hosts share, or gather with --mpi"
        ) from error
    return _join(received, info.world_size, environ, timeout_s)


def gather_by_mpi(info: RankInfo, comm: Any, part: Mapping[str, Any], environ: Mapping[str, str]) -> Gathered | None:
    """Contribute a part to one MPI gather; return the gathered parts on rank 0, None on other ranks.

    Collective: every rank of `comm` calls this.
    """
    texts = comm.gather(json.dumps(part), root=0)
    return None if texts is None else join_parts([json.loads(text) for text in texts], info.world_size, environ)


def mpi_communicator(info: RankInfo) -> tuple[Any | None, int]:
    """Return MPI_COMM_WORLD and its size; no communicator if MPI's world is not the one that the launcher started.

    The size is -1 if MPI cannot be loaded.

    Collective: every rank of the job calls this.
    """
    try:
        comm = mpi_world(info)
    except WorldError:
        loaded = sys.modules.get("mpi4py.MPI")
        return None, -1 if loaded is None else int(loaded.COMM_WORLD.Get_size())
    return comm, info.world_size if comm is None else int(comm.Get_size())


def join_parts(parts: Sequence[Any], world_size: int, environ: Mapping[str, str]) -> Gathered:
    """Return the snapshots that result from the parts, and who is missing.

    Args:
        parts: results of `own_part`, as decoded from JSON.
        world_size: number of ranks of the job.
        environ: environment, with Slurm's names of the hosts.
    """
    received = _ReceivedParts()
    for values in parts:
        try:
            made = _part_from(values)
            if received.parts.setdefault(made[0].rank.rank, made) is not made:
                raise SnapshotError(f"rank {made[0].rank.rank} has sent others already")
        except (WrongValue, SnapshotError) as error:
            received.damaged.append(f"a rank's facts are damaged: {printable(str(error))[:_MAX_REASON]}")
    return _join(received, world_size, environ, 0.0)


def _join(received: _ReceivedParts, world_size: int, environ: Mapping[str, str], timeout_s: float) -> Gathered:
    missing = [*received.damaged, *(reason for _, reason in sorted(received.left_out.items()))]
    by_host: dict[str, list[tuple[RankPart, Snapshot | None]]] = {}
    for _, made in sorted(received.parts.items()):
        by_host.setdefault(made[0].host_key, []).append(made)
    names = {key: printable(of_host[-1][0].host)[:_MAX_REASON] for key, of_host in by_host.items()}
    snapshots = []
    for key, of_host in by_host.items():
        host = next((snapshot for _, snapshot in of_host if snapshot is not None), None)
        if host is None:
            missing.append(f"the first rank of {names[key]} did not send the host's facts")
            continue
        unreadable = {name: reason for part, _ in of_host for name, reason in part.unreadable.items()}
        snapshots.append(with_ranks(host, [part.rank for part, _ in of_host], unreadable))
    present = {*received.parts, *received.left_out}
    missing += _missing(present, world_size, set(names.values()), environ, timeout_s)
    return Gathered(snapshots=tuple(with_distinct_names(snapshots)), missing=tuple(missing))


def snapshot_folder(environ: Mapping[str, str]) -> Path:
    """Return the default folder for the snapshots of this job step, in a run folder of its own."""
    run = RunDirectory(default_run_path("audit", environ))
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    # All ranks must agree on the folder, so the attempt is Slurm's restart count, not the next free number.
    return run.attempt(int(restarts) if restarts.isdigit() and len(restarts) < 6 else 0).snapshot_dir


def _wait_for(parts: Folder, world_size: int, own: os.stat_result, timeout_s: float, received: _ReceivedParts) -> None:
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while True:
        for name in parts.names():
            found = _PART.fullmatch(name)
            rank = int(found[1]) if found else world_size
            if rank < world_size and rank not in received.parts and name == _part_name(rank):
                _read_part(parts, name, rank, own, received)
        if len(received.parts) == world_size or time.monotonic() >= deadline_s:
            return
        time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


def _read_part(parts: Folder, name: str, rank: int, own: os.stat_result, received: _ReceivedParts) -> None:
    """Add a part, or note why it cannot be used; the rank may still replace a file that another user put there."""
    try:
        content = _content(parts, name, own, min(_MAX_PART_BYTES, _MAX_BYTES - received.num_bytes))
        if content is None:
            return
        made = _part_from(parse_json(content))
        if made[0].rank.rank != rank:
            raise SnapshotError(f"they belong to rank {made[0].rank.rank}")
    except (OSError, ValueError, SnapshotError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        place = printable(str(parts.path / name))
        received.left_out[rank] = f"rank {rank}'s facts cannot be used: {printable(reason)[:_MAX_REASON]} ({place})"
    else:
        received.left_out.pop(rank, None)
        received.parts[rank] = made
        received.num_bytes += len(content)


def _content(parts: Folder, name: str, own: os.stat_result, most_bytes: int) -> bytes | None:
    """Return the content of a part; None if an earlier job left it.

    Raises:
        OSError: it cannot be read, or another user has written it.
    """
    descriptor = parts.open_file(name)
    try:
        status = os.fstat(descriptor)
        if own.st_mtime - status.st_mtime >= _OLD_S:
            return None
        if status.st_uid != own.st_uid:
            raise PermissionError(errno.EPERM, f"they belong to user {status.st_uid}, not {own.st_uid}")
        return read_most(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _part_from(values: Any) -> tuple[RankPart, Snapshot | None]:
    """Return a part and the snapshot in it, from what `own_part` returned.

    Raises:
        WrongValue, SnapshotError: the values have another form.
    """
    part = convert(values, RankPart)
    snapshot = None if part.snapshot is None else snapshot_from(part.snapshot)
    if snapshot is not None and snapshot.ranks:
        raise SnapshotError("the host's facts list ranks already")
    return part, snapshot


def _missing(
    present: set[int], world_size: int, hosts: set[str], environ: Mapping[str, str], timeout_s: float
) -> list[str]:
    absent = [rank for rank in range(world_size) if rank not in present]
    if not absent:
        return []
    within = f" within {timeout_s:g} s" if timeout_s else ""
    try:
        listed = expand(environ.get("SLURM_STEP_NODELIST", ""))
    except ValueError:
        listed = []
    seen = {name.partition(".")[0] for name in hosts}
    silent = [name for name in listed if name.partition(".")[0] not in seen]
    ranks = ",".join(map(str, absent[:_MAX_NAMED])) + (" ..." if len(absent) > _MAX_NAMED else "")
    texts = [f"{short_list(silent)} did not answer{within}"] if silent else []
    return [*texts, f"{len(absent)} of {world_size} ranks did not answer{within}: {ranks}"]


def _remove(shared: Folder, parts: Folder) -> None:
    for name in parts.names():
        if _PART.fullmatch(name):
            with contextlib.suppress(OSError):  # for example, it is a folder
                os.unlink(name, dir_fd=parts.descriptor)
    with contextlib.suppress(OSError):  # a rank that was late is still writing
        os.rmdir(parts.path.name, dir_fd=shared.descriptor)


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"
