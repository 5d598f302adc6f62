"""The launcher's environment variables, read into one RankInfo, and the identity of a host.

torchrun comes first, then an MPI launcher, the Slurm step, PMI, and a single process. This is the only module
that touches os.environ; everything else takes a mapping. Launchers that contradict each other are refused, because
a rank that takes itself for rank 0 by mistake overwrites what rank 0 writes.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcpace.core.errors import WorldError
from hpcpace.core.records import dataclass
from hpcpace.core.redaction import Redaction

UNKNOWN = -1

_PMI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
# mpiexec of MPICH and mpirun of Open MPI set these for their ranks; Slurm's own PMI plugins do not.
_MPI_LAUNCHER_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE")
# What a rank starts inherits the variables that made it a rank; by this one it can tell that it is none.
_RANK_PID = "HPCPACE_RANK_PID"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The place of one process in its job.

    Attributes:
        rank: number among all ranks, from 0.
        world_size: number of ranks.
        local_rank: number among the ranks of the host, or -1 if the launcher does not give it.
        local_size: number of ranks on the host, or -1.
        node: index of the host, from 0, or -1.
        num_nodes: number of hosts, or -1.
        launcher: `torchrun`, `slurm`, `pmi`, `single`, or `torch` if only torch's process group knows the ranks.
        rank_variable: environment variable that gave the rank; empty for a single process.
        size_variable: environment variable that gave the world size; empty for a single process.
        topology_addr: Slurm's address of the node in the network, like `spine.leaf1.n1`; empty if unknown.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node: int
    num_nodes: int
    launcher: str
    rank_variable: str = ""
    size_variable: str = ""
    host: str = ""
    job_id: str = ""
    step_id: str = ""
    topology_addr: str = ""


@dataclass(frozen=True, kw_only=True)
class HostIdentity:
    """The identity of a host and its clock: equal host_key means one host and one CLOCK_MONOTONIC."""

    host: str
    boot_id: str
    host_key: str


def process_environ() -> Mapping[str, str]:
    """Return the environment of this process, a live view."""
    return os.environ


def process_redaction() -> Redaction:
    """Return a redaction that knows the secrets of this process's environment and command line."""
    return Redaction.of(process_environ(), sys.argv)


def set_environ_default(name: str, value: str) -> None:
    """Set a variable for this process and the libraries in it, unless the user has set it."""
    os.environ.setdefault(name, value)


def change_environ(changes: Mapping[str, str | None]) -> None:
    """Set variables for this process and those that it starts; remove those that are None."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def mark_rank() -> None:
    """Let the processes that this rank starts know that they are no ranks, whatever launcher's variables they see."""
    os.environ[_RANK_PID] = str(os.getpid())


def is_started_by_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank of a job, and not the job's launcher, started this process.

    A rank that hpcpace knows has marked its environment. Another one leaves the descriptor on which its launcher talks
    to it, as PMI_FD says, closed in what it starts.
    """
    if environ.get(_RANK_PID, str(os.getpid())) != str(os.getpid()):
        return True
    channel = environ.get("PMI_FD", "")
    if not channel.isdecimal():
        return False
    try:
        os.fstat(int(channel))
    except (OSError, OverflowError):
        return True
    return False


def host_identity(proc: Path = Path("/proc")) -> HostIdentity:
    """Return the identity of this host.

    Containers and network namespaces of one machine share its boot id, and a time namespace shifts the clock; so
    boot id, time namespace and host name count together.

    Raises:
        WorldError: the boot id cannot be read.
    """
    host = socket.gethostname()
    path = proc / "sys/kernel/random/boot_id"
    try:
        boot_id = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise WorldError(f"cannot read {path}: {error.strerror}; mount /proc, which identifies the host") from error
    namespace = proc / "self/ns/time"
    time_namespace = namespace.stat().st_ino if namespace.exists() else 0
    key = hashlib.sha256(f"{boot_id}/{time_namespace}/{host}".encode()).hexdigest()[:16]
    return HostIdentity(host=host, boot_id=boot_id, host_key=key)


def rank_info(environ: Mapping[str, str], *, host: str | None = None) -> RankInfo:
    """Return the place of this process according to its launcher.

    Args:
        environ: environment variables.
        host: name of this host; by default asked from the kernel.

    Raises:
        WorldError: a variable is not a number, is missing, or contradicts another one.
    """
    info = _launched(environ)
    _check_range(info, environ)
    _check_agreement(info, environ)
    return replace(
        info,
        host=socket.gethostname() if host is None else host,
        job_id=_job_id(environ),
        step_id=environ.get("SLURM_STEP_ID", ""),
        topology_addr=environ.get("SLURM_TOPOLOGY_ADDR", ""),
    )


def rank_info_of_group(rank: int, world_size: int, environ: Mapping[str, str]) -> RankInfo:
    """Return the place of this process in torch's default group, whatever its environment says.

    Where the launcher's variables name the same place, all else that they say is kept. Ranks that a script has started
    by itself have none, or those of the one process that started them.
    """
    try:
        info = rank_info(environ)
    except WorldError:
        info = replace(_single(), host=socket.gethostname(), job_id=_job_id(environ))
    if (info.rank, info.world_size) == (rank, world_size):
        return info
    unknown = {"local_rank": UNKNOWN, "local_size": UNKNOWN, "node": UNKNOWN, "num_nodes": UNKNOWN}
    group: dict[str, Any] = {"rank": rank, "world_size": world_size, "launcher": "torch", **unknown}
    return replace(info, **group, rank_variable="", size_variable="")


def locate(info: RankInfo, host_keys: Sequence[str]) -> RankInfo:
    """Return `info` with node, local_rank, local_size and num_nodes counted from the hosts of all ranks.

    Args:
        info: the place of this rank.
        host_keys: `HostIdentity.host_key` of every rank, in order of rank, (world_size,).
    """
    nodes = list(dict.fromkeys(host_keys))
    key = host_keys[info.rank]
    return replace(
        info,
        node=nodes.index(key),
        num_nodes=len(nodes),
        local_rank=list(host_keys[: info.rank]).count(key),
        local_size=list(host_keys).count(key),
    )


def _job_id(environ: Mapping[str, str]) -> str:
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    # torchrun calls a run without an id "none", and one on a single node (--standalone) by a random UUID.
    return environ.get("SLURM_JOB_ID") or ("" if run_id == "none" or _UUID.fullmatch(run_id) else run_id)


def _launched(environ: Mapping[str, str]) -> RankInfo:
    if "RANK" in environ:
        return _from_torchrun(environ)
    if any(name in environ for name in _MPI_LAUNCHER_VARIABLES):
        return _from_mpi_launcher(environ)
    if "SLURM_STEP_NUM_TASKS" in environ:
        return _from_slurm(environ)
    # A batch script outside of srun has SLURM_PROCID=0 and SLURM_NTASKS, but no SLURM_STEP_NUM_TASKS.
    if environ.get("SLURM_PROCID", "0") != "0":
        raise WorldError(
            f"SLURM_PROCID is {environ['SLURM_PROCID']} and SLURM_STEP_NUM_TASKS is not set: start the ranks with srun "
            "and pass its variables on to the process"
        )
    return _from_pmi(environ) or _single()


def _from_torchrun(environ: Mapping[str, str]) -> RankInfo:
    world_size = _number(environ, "WORLD_SIZE", needed_by="RANK")
    local_size = _optional_number(environ, "LOCAL_WORLD_SIZE")
    return RankInfo(
        rank=_number(environ, "RANK"),
        world_size=world_size,
        local_rank=_optional_number(environ, "LOCAL_RANK", 0 if world_size == 1 else UNKNOWN),
        local_size=local_size,
        node=_optional_number(environ, "GROUP_RANK", 0 if local_size == world_size else UNKNOWN),
        num_nodes=_optional_number(environ, "GROUP_WORLD_SIZE", 1 if local_size == world_size else UNKNOWN),
        launcher="torchrun",
        rank_variable="RANK",
        size_variable="WORLD_SIZE",
    )


def _from_mpi_launcher(environ: Mapping[str, str]) -> RankInfo:
    info = _from_pmi(environ)
    if info is None:
        names = " and ".join(name for name in _MPI_LAUNCHER_VARIABLES if name in environ)
        raise WorldError(f"{names} is set, PMI_RANK or OMPI_COMM_WORLD_RANK is not: pass on all variables of mpiexec")
    # mpiexec in an allocation starts one helper per host by srun, so that its ranks are inside a step of fewer tasks.
    num_tasks = _optional_number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if num_tasks > info.world_size:
        raise _contradiction(environ, info.size_variable, "SLURM_STEP_NUM_TASKS")
    return info


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    node = _optional_number(environ, "SLURM_NODEID", 0 if world_size == 1 else UNKNOWN)
    tasks = expand_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    info = RankInfo(
        rank=_number(environ, "SLURM_PROCID", needed_by="SLURM_STEP_NUM_TASKS"),
        world_size=world_size,
        local_rank=_optional_number(environ, "SLURM_LOCALID", 0 if world_size == 1 else UNKNOWN),
        local_size=tasks[node] if 0 <= node < len(tasks) else UNKNOWN,
        node=node,
        num_nodes=_optional_number(environ, "SLURM_STEP_NUM_NODES", len(tasks) or UNKNOWN),
        launcher="slurm",
        rank_variable="SLURM_PROCID",
        size_variable="SLURM_STEP_NUM_TASKS",
    )
    # srun's PMI plugins set these; where they say something else, another launcher left them behind.
    for name, value in (("PMI_SIZE", info.world_size), ("PMI_RANK", info.rank), ("PMIX_RANK", info.rank)):
        if name in environ and _number(environ, name) != value:
            raise _contradiction(environ, name, info.size_variable if name == "PMI_SIZE" else info.rank_variable)
    return info


def _from_pmi(environ: Mapping[str, str]) -> RankInfo | None:
    for rank_name, size_name, local_rank_name, local_size_name in _PMI_VARIABLES:
        if rank_name in environ:
            world_size = _number(environ, size_name, needed_by=rank_name)
            local_size = _optional_number(environ, local_size_name)
            one_host = local_size == world_size
            return RankInfo(
                rank=_number(environ, rank_name),
                world_size=world_size,
                local_rank=_optional_number(environ, local_rank_name),
                local_size=local_size,
                node=0 if one_host else UNKNOWN,
                num_nodes=1 if one_host else UNKNOWN,
                launcher="pmi",
                rank_variable=rank_name,
                size_variable=size_name,
            )
        if size_name in environ:
            _number(environ, rank_name, needed_by=size_name)
    if "PMIX_RANK" in environ:
        raise WorldError(
            f"PMIX_RANK is {environ['PMIX_RANK']} and neither SLURM_STEP_NUM_TASKS nor OMPI_COMM_WORLD_SIZE gives the "
            "number of ranks: start the ranks with srun, mpirun or torchrun"
        )
    return None


def _single() -> RankInfo:
    return RankInfo(rank=0, world_size=1, local_rank=0, local_size=1, node=0, num_nodes=1, launcher="single")


def expand_tasks_per_node(text: str) -> list[int]:
    """Return Slurm's `2(x3),1` as `[2, 2, 2, 1]`.

    Raises:
        WorldError: the text is something else.
    """
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise WorldError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}: expected counts like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _check_range(info: RankInfo, environ: Mapping[str, str]) -> None:
    if info.world_size < 1 or not 0 <= info.rank < info.world_size:
        raise _contradiction(environ, info.rank_variable, info.size_variable)
    if info.local_rank != UNKNOWN and info.local_size != UNKNOWN and info.local_rank >= info.local_size:
        raise WorldError(
            f"{info.rank_variable}={info.rank}: local rank {info.local_rank} is not below the number of ranks on this "
            f"host, {info.local_size}: pass on the variables of one launcher only"
        )


def _check_agreement(info: RankInfo, environ: Mapping[str, str]) -> None:
    """Refuse variables of torchrun that contradict another launcher, or the absence of one."""
    for name, value, variable in (
        ("WORLD_SIZE", info.world_size, info.size_variable),
        ("LOCAL_RANK", info.local_rank, info.rank_variable),
    ):
        if name in environ and value != UNKNOWN and _number(environ, name) != value:
            source = f"{variable}={environ[variable]}" if variable else "RANK is not set"
            raise WorldError(
                f"{name}={environ[name]}, but {source} (launcher: {info.launcher}): unset {name}, or start the ranks "
                "by torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK together"
            )


def _contradiction(environ: Mapping[str, str], first: str, second: str) -> WorldError:
    return WorldError(
        f"{first}={environ[first]} contradicts {second}={environ[second]}: pass on the variables of one launcher only"
    )


def _number(environ: Mapping[str, str], name: str, *, needed_by: str = "") -> int:
    value = environ.get(name)
    if value is None:
        raise WorldError(
            f"{needed_by} is {environ[needed_by]} and {name} is not set: set both (a launcher does), or neither"
        )
    if not re.fullmatch(r"\d+", value.strip()):
        raise WorldError(f"{name} is {value!r}: expected a whole number from 0; let the launcher set it")
    return int(value)


def _optional_number(environ: Mapping[str, str], name: str, default: int = UNKNOWN) -> int:
    return _number(environ, name) if name in environ else default
