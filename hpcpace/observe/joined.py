"""A rank that has joined the others: its settings, and what all agree on beforehand.

They agree on the run directory; rank 0 writes run.json into it. Of the environment, run.json keeps the variables below
and nothing secret (`hpcpace.core.redaction`); docs/recorded-data.md lists every field. The first rank of each host
saves the audit's snapshot of it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpcpace import __version__
from hpcpace.audit.facts import RankFacts, RankGpu, Snapshot
from hpcpace.audit.snapshot import take_host, take_rank, with_ranks
from hpcpace.audit.snapshot_files import NUM_OURS_OF_RUN, save_snapshots
from hpcpace.audit.tree import Tree
from hpcpace.core.codec import convert, plain
from hpcpace.core.config import Config
from hpcpace.core.environment import HostIdentity, RankInfo, process_environ, rank_info, rank_info_of_group
from hpcpace.core.files import other_writers
from hpcpace.core.records import dataclass
from hpcpace.core.redaction import Redaction
from hpcpace.core.rundir import Attempt, RunDirectory, default_run_path
from hpcpace.core.setting_values import setting_variables
from hpcpace.core.settings import REQUESTED, load_config
from hpcpace.observe.host.counters import usable_cpus
from hpcpace.observe.host.network import find_network_counters
from hpcpace.observe.settings import ClockConfig
from hpcpace.trace.schema import TraceHeader
from hpcpace.world.clock import ClockSync
from hpcpace.world.deadline import Deadline, in_time
from hpcpace.world.messages import Messages, NoMessages

_PACKAGES = ("torch", "numpy", "h5py", "mpi4py", "mpich")
KEPT_VARIABLES = frozenset(
    (
        *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HPCPACE_LAB_NAME", "HPCPACE_LAB_EMULATION"),
        *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"),
        *("SLURM_JOB_CPUS_PER_NODE", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
        *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_RESTART_COUNT"),
    )
)
"""Environment variables that run.json keeps, along with those of hpcpace's own settings."""

KEPT_PREFIXES = ("NCCL_", "GLOO_")
"""Beginnings of further ones."""


def run_record(
    *,
    name: str,
    config: Config,
    environ: Mapping[str, str],
    hosts: Iterable[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of run.json.

    Args:
        hosts: one entry a rank: rank, host, node.
        facts: what the caller knows beyond that, such as model, data, mesh and launcher.
    """
    names = KEPT_VARIABLES | setting_variables()
    kept = sorted(name for name in environ if name in names or name.startswith(KEPT_PREFIXES))
    record = {
        "schema": "hpcpace-run/1",
        "name": name,
        "created_unix_ns": time.time_ns(),
        "command": sys.argv,
        "config": config.to_json(),
        "ranks": list(hosts),
        "versions": {"hpcpace": __version__, "python": platform.python_version(), **_versions()},
        "kernel": platform.release(),
        "git_commit": _git_commit(),
        "environment": {name: environ[name] for name in kept},
        **facts,
    }
    # A value whose name marks it as a secret here is removed everywhere else as well.
    redacted: dict[str, Any] = Redaction.of(environ, sys.argv).content(record)
    return redacted


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:  # loading it here would start MPI
        found["mpi"] = " ".join(mpi.Get_library_version().splitlines()[0].rstrip("\0").split())
    return found


def _git_commit() -> str:
    """Return the commit of the working directory, which is usually that of the training script; empty without one."""
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()


@dataclass(kw_only=True, eq=False, repr=False)
class SessionSettings:
    """What a session is given, see `Session`, and `environ`, the environment that it found."""

    name: str = "train"
    run_dir: str | os.PathLike[str] | None = None
    config: Config | None = None
    config_file: str | os.PathLike[str] | None = None
    mesh: Mapping[str, int] | None = None
    coords: Mapping[str, int] | None = None
    samples_unit: str = "samples"
    warmup_steps: int = 1
    first_step: int = 0
    record: Mapping[str, Any] | None = None
    world: RankInfo | None = None
    comm: Any = None
    step_from: str | None = None
    pace: str | None = None
    trace_dir: str | os.PathLike[str] | None = None
    steps: str | None = None
    detail: str | None = None
    keep_last: int | None = None
    summary: bool | None = None
    environ: Mapping[str, str] = field(init=False, default_factory=process_environ)


def resolved_config(settings: SessionSettings) -> Config:
    """Return the configuration that applies.

    Raises:
        ConfigError: a file or variable has a setting that is unknown or out of range.
    """
    file = None if settings.config_file is None else Path(settings.config_file)
    config = settings.config or load_config(file=file, environ=settings.environ, requested=REQUESTED)
    given = {
        "trace_dir": None if settings.trace_dir is None else Path(settings.trace_dir),
        "detail_steps": settings.steps,
        "detail": settings.detail,
        "keep_last": settings.keep_last,
        "summary": settings.summary,
    }
    trace = {name: value for name, value in given.items() if value is not None}
    return config.updated(trace=trace, pace={} if settings.pace is None else {"policy": settings.pace})


def find_rank(settings: SessionSettings) -> RankInfo:
    """Return this rank's place in the job: in torch's default group where there is one, which connects the ranks.

    Variables of a launcher count without it. Ranks that a script or framework starts by itself have none, or some
    of them (Lightning sets WORLD_SIZE without RANK), or those of the one process that started them.

    Raises:
        WorldError: there is no group, and the environment contradicts itself.
    """
    if settings.world is not None:
        return settings.world
    groups = sys.modules.get("torch.distributed")
    if settings.comm is not None or groups is None or not (groups.is_available() and groups.is_initialized()):
        return rank_info(settings.environ)
    return rank_info_of_group(groups.get_rank(), groups.get_world_size(), settings.environ)


_SHARED = (
    *("trace.enabled", "trace.snapshot", "trace.detail_steps", "trace.detail", "trace.keep_last"),
    *("clock.enabled", "clock.num_pings", "pace.policy"),
)


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide which messages ranks exchange, and so have to be the same on all of them."""
    return {name: config[name] for name in _SHARED}


@dataclass(frozen=True, kw_only=True)
class JoinedRank:
    """A rank in a job of which all ranks take part in the session.

    Attributes:
        settings: of the session.
        config: the configuration that applies.
        messages: to and from the other ranks.
        identity: of this host.
        host_keys: of all ranks, in order; equal on ranks of one host.
        world: this rank's place.
        deadline: by when the session must have started.
    """

    settings: SessionSettings
    config: Config
    messages: Messages | NoMessages
    identity: HostIdentity
    host_keys: list[str]
    world: RankInfo
    deadline: Deadline

    def make_attempt(self, warn: Callable[[str], None]) -> Attempt | None:
        """Let rank 0 make the folder of this attempt; return it on all ranks, or None if that failed.

        Collective: every rank calls this.
        """
        hosts = self.messages.allgather(
            {"rank": self.world.rank, "host": self.world.host, "node": self.world.node}, self.deadline.left_s
        )
        made = {"path": "", "problem": ""}
        writers = ""
        if self.world.rank == 0:
            place = self.settings.run_dir or default_run_path(self.settings.name, self.settings.environ)
            try:
                run = RunDirectory(Path(place))
                # A file system that hangs must not keep the job from training.
                make = partial(self._new_attempt, run, hosts)
                made["path"], writers = in_time(make, self.deadline.left_s / 2, "its file system")
            except Exception as error:  # whatever it is, the other ranks wait for an answer
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                made["problem"] = f"cannot make the run directory {place}: {reason}"
        made = self.messages.allgather(made, self.deadline.left_s)[0]
        if made["problem"]:
            if self.world.rank == 0:
                warn(f"nothing is recorded: {made['problem']}; choose another run directory")
            return None
        attempt = Attempt(Path(made["path"]))
        if writers:
            advice = "choose another run directory, or chmod go-w this one if it is yours"
            warn(f"the run directory {attempt.path.parent} {writers}: others can change what is recorded; {advice}")
        return attempt

    def make_clock_sync(self) -> ClockSync | None:
        """Return what compares the clocks; None where that is switched off. Collective: every rank calls this."""
        settings = self.config.of(ClockConfig)
        if not settings.enabled:
            return None
        return ClockSync(
            self.messages.another("clock", self.deadline.left_s),
            self.world.rank,
            self.host_keys,
            num_pings=settings.num_pings,
            interval_s=settings.interval_s,
            timeout_s=settings.timeout_s,
        )

    def make_header(self, attempt: Attempt) -> TraceHeader:
        """Return the header of this rank's trace."""
        world, settings, coords = self.world, self.settings, self.settings.coords or {}
        return TraceHeader(
            run_id=attempt.path.parent.name,
            attempt=attempt.number,
            rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            local_size=world.local_size,
            node=world.node,
            host=self.identity.host,
            topology_addr=world.topology_addr,
            job_id=world.job_id,
            boot_id=self.identity.boot_id,
            host_key=self.identity.host_key,
            cpus=usable_cpus(),
            mesh=",".join(f"{name}={size}" for name, size in (settings.mesh or {}).items()),
            dp=coords.get("dp", -1),
            pp=coords.get("pp", -1),
            tp=coords.get("tp", -1),
            samples_unit=settings.samples_unit,
            interfaces=find_network_counters().interfaces,
            created_unix_ns=time.time_ns(),
            hpcpace_version=__version__,
        )

    def _new_attempt(self, run: RunDirectory, hosts: list[Mapping[str, Any]]) -> tuple[str, str]:
        """Make the folder of this attempt; return its path, and who else can write to the run directory."""
        run = RunDirectory(run.path.absolute())
        was_there = run.path.exists()
        made = run.new_attempt()
        settings = self.settings
        facts = {
            "launcher": self.world.launcher,
            "world_size": self.world.world_size,
            "mesh": dict(settings.mesh or {}),
            "samples_unit": settings.samples_unit,
            "coordinated_over": self.messages.name,
            **(settings.record or {}),
        }
        record = run_record(name=settings.name, config=self.config, environ=settings.environ, hosts=hosts, facts=facts)
        made.write_json(made.run_json, record)
        with run.open() as folder:
            found = os.fstat(folder.descriptor)
        # One that this job has made has the mode that its user's umask left.
        is_own = not was_there and found.st_uid == os.geteuid()
        return str(made.path), "" if is_own else other_writers(found)


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
    return replace(host, host=f"{host.host}#{number + 1}") if number else host


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
