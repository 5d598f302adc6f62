"""A rank that has joined the others: its settings, and what all agree on beforehand.

They agree on the run directory; rank 0 writes run.json into it. Of the environment, run.json keeps the variables below
and nothing secret (`hpcpace.core.redaction`); docs/recorded-data.md lists every field. The first rank of each host
saves the audit's snapshot of it.

First comes a roll call over MPI, else over torch: whether all ranks take part, before any of them waits for another. A
rank with wrong settings says so at once, and if a rank does not come, the others wait no longer than the timeout. In
both cases no rank records, and the job runs as if there were no session. Over torch the ranks meet at the store of the
default group, over MPI at rank 0 by messages: neither is a collective, which would leave the others out of step if a
rank never comes. Every exchange after that has a timeout.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import timedelta
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
from hpcpace.core.errors import WorldError
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
from hpcpace.world.messages import GlooMessages, Messages, MpiMessages, NoMessages, own_store
from hpcpace.world.mpi import may_call_mpi

_POLL_INTERVAL_S = 0.001
# How much longer the other ranks wait for the decision than the rank that decides.
_GRACE_S = 2.0
_MAX_NAMED = 8
_MAX_ASKED = 4096
# Of an MPI communicator that is the job's: below the least upper bound of tags, and no number that a person takes.
_TAG = 32_611
_MESSAGE_BYTES = 8192
_MAX_REASON = 600


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """The answer of a rank at the roll call.

    Attributes:
        problem: why it cannot take part; empty if it can.
        settings: those that must be the same on all ranks, by name.
    """

    problem: str
    settings: dict[str, Any]

    @property
    def settings_text(self) -> str:
        """The settings as one text; equal settings give equal texts."""
        return json.dumps(self.settings, sort_keys=True)


class NotEveryRank(WorldError):
    """A rank does not take part, so no rank does.

    Attributes:
        is_told: whether another rank warns the user.
    """

    def __init__(self, message: str, *, is_told: bool) -> None:
        super().__init__(message)
        self.is_told = is_told


def call_over_store(rank: int, num_ranks: int, attendance: Attendance, timeout_s: float) -> Any:
    """Meet at the store of torch's default group; return a connection of our own to it, or None.

    Every rank calls this; if one does not, the others wait no longer than the timeout.

    Args:
        rank: this rank.
        num_ranks: number of ranks of the job.
        attendance: its answer.
        timeout_s: how long a rank waits for the others.

    Raises:
        NotEveryRank: a rank cannot take part, or did not come; all ranks that came raise alike.
    """
    try:
        decision, store = in_time(
            lambda: _decided_at_store(rank, num_ranks, attendance, timeout_s),
            timeout_s + _GRACE_S,
            "the store of torch's process group",
        )
    except (RuntimeError, OSError) as error:  # its host has died, or was stopped
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotEveryRank(f"torch's store does not answer ({reason})", is_told=rank > 1) from error
    _check(decision, rank)
    return store


def _decided_at_store(
    rank: int, num_ranks: int, attendance: Attendance, timeout_s: float
) -> tuple[dict[str, Any], Any]:
    import torch.distributed as dist

    store, is_ours = own_store(timeout_s + _GRACE_S)
    call = dist.PrefixStore(f"roll-call/{store.add(f'roll-call/{rank}', 1)}", store)
    problem = attendance.problem
    if not problem:
        problem = _differing(attendance, call.compare_set("settings", "", attendance.settings_text).decode())
    if problem:
        call.compare_set("decision", "", _decision(rank, problem))
    else:
        call.set(f"here/{rank}", "1")
        if call.add("num-here", 1) == num_ranks:
            call.compare_set("decision", "", _decision(rank, ""))
        try:
            call.wait(["decision"], timedelta(seconds=timeout_s))
        except RuntimeError:
            absent = [other for other in range(min(num_ranks, _MAX_ASKED)) if not call.check([f"here/{other}"])]
            call.compare_set("decision", "", _decision(rank, _absent(absent, timeout_s)))
    return json.loads(call.get("decision")), store if is_ours else None


def call_over_mpi(comm: Any, attendance: Attendance, timeout_s: float) -> None:
    """Meet at rank 0 of a communicator; else as `call_over_store`."""
    from mpi4py import MPI

    try:
        if comm.Get_rank() == 0:
            decision = _decide_over_mpi(comm, attendance, timeout_s)
        else:
            decision = _ask_over_mpi(comm, attendance, timeout_s + _GRACE_S)
    except MPI.Exception as error:
        raise NotEveryRank(f"MPI cannot reach the other ranks ({error})", is_told=False) from error
    _check(json.loads(decision), comm.Get_rank())


def _decide_over_mpi(comm: Any, attendance: Attendance, timeout_s: float) -> str:
    """Return the decision, and send it to every rank that has come: at once where one cannot take part.

    Whatever the decision, each message is received and each answered: one that stays where it is could be taken for a
    message of the job, which may receive from any rank and of any tag.
    """
    others = range(1, comm.Get_size())
    buffers = {other: bytearray(_MESSAGE_BYTES) for other in others}
    requests = {other: comm.Irecv(buffers[other], source=other, tag=_TAG) for other in others}
    waiting, unanswered, sent = set(others), list[int](), list[Any]()
    decision = _decision(0, attendance.problem) if attendance.problem else ""
    deadline = Deadline(timeout_s)
    while True:
        for other in [other for other in sorted(waiting) if requests[other].Test()]:
            waiting.discard(other)
            unanswered.append(other)
            said = json.loads(bytes(buffers[other]).rstrip(b"\0"))
            problem = said["problem"] or _differing(attendance, said["settings"])
            decision = decision or (_decision(other, problem) if problem else "")
        if not waiting:
            decision = decision or _decision(0, "")
        elif deadline.is_over:
            decision = decision or _decision(0, _absent(sorted(waiting), timeout_s))
        if decision:
            sent += [comm.Isend(_message(decision), dest=other, tag=_TAG) for other in unanswered]
            unanswered.clear()
            if not waiting or deadline.is_over:
                break
        time.sleep(_POLL_INTERVAL_S)
    for other in waiting:
        requests[other].Cancel()
        requests[other].Wait()
    grace = Deadline(_GRACE_S)
    while not all(request.Test() for request in sent) and not grace.is_over:
        time.sleep(_POLL_INTERVAL_S)
    return decision


def _ask_over_mpi(comm: Any, attendance: Attendance, timeout_s: float) -> str:
    said = json.dumps({"problem": attendance.problem[:_MAX_REASON], "settings": attendance.settings_text})
    buffer = bytearray(_MESSAGE_BYTES)
    answer = comm.Irecv(buffer, source=0, tag=_TAG)
    sent = comm.Isend(_message(said), dest=0, tag=_TAG)
    deadline = Deadline(timeout_s)
    while not (answer.Test() and sent.Test()):
        if deadline.is_over:
            answer.Cancel()
            answer.Wait()
            return _decision(1, _absent([0], timeout_s))  # one of those that wait for rank 0 reports it
        time.sleep(_POLL_INTERVAL_S)
    return bytes(buffer).rstrip(b"\0").decode()


def _message(text: str) -> bytes:
    return text.encode().ljust(_MESSAGE_BYTES, b"\0")


def _decision(speaker: int, problem: str) -> str:
    return json.dumps({"speaker": speaker, "problem": problem[:_MAX_REASON]})


def _check(decision: dict[str, Any], rank: int) -> None:
    if decision["problem"]:
        raise NotEveryRank(decision["problem"], is_told=decision["speaker"] != rank)


def _differing(attendance: Attendance, others_text: str) -> str:
    """Return what differs between settings; empty where nothing does."""
    others = json.loads(others_text)
    names = [name for name, value in attendance.settings.items() if others.get(name) != value]
    if not names:
        return ""
    return f"settings differ between ranks: {', '.join(names)}; use the same on all ranks"


def _absent(ranks: Sequence[int], timeout_s: float) -> str:
    names = ", ".join(map(str, ranks[:_MAX_NAMED])) + (", ..." if len(ranks) > _MAX_NAMED else "")
    who = f"rank{'s' if len(ranks) > 1 else ''} {names}" if ranks else "a rank"
    return (
        f"{who} did not enter the session within {timeout_s:g} s "
        "(trace.start_timeout_s): every rank must enter it; check that none has died"
    )


def coordinate(world: RankInfo | None, comm: Any, attendance: Attendance, *, timeout_s: float) -> Messages | NoMessages:
    """Return messages between this job's ranks. Every rank calls this, even one that cannot take part.

    Args:
        world: this rank's place; None if its environment does not give it.
        comm: an MPI communicator of all ranks, or None.
        attendance: whether this rank can take part, and its settings.
        timeout_s: how long it waits for the others to come, and again to make the connection.

    Raises:
        NotEveryRank: a rank cannot take part, or did not come.
        WorldError: there are several ranks and neither MPI nor torch connects them yet.
    """
    if comm is not None and comm.Get_size() > 1:
        if not may_call_mpi(comm):
            told = "MPI was started below THREAD_MULTIPLE, and in another thread than this one"
            raise WorldError(f"{told}: enter the session in that thread, or leave comm out")
        call_over_mpi(comm, attendance, timeout_s)
        return MpiMessages(comm, timeout_s)
    if world is not None and world.world_size == 1:
        return NoMessages()
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        if world is not None and dist.get_world_size() != world.world_size:
            told = f"{world.launcher} started {world.world_size} ranks, and torch connects {dist.get_world_size()}"
            attendance = Attendance(problem=attendance.problem or told, settings=attendance.settings)
        store = call_over_store(dist.get_rank(), dist.get_world_size(), attendance, timeout_s)
        return GlooMessages("session", timeout_s, store)
    if world is None:
        raise WorldError("this rank's place in the job is unknown, and neither MPI nor torch connects it to others")
    raise WorldError(
        f"{world.world_size} ranks started by {world.launcher} are not connected yet: enter the session after "
        "torch.distributed.init_process_group, or pass an MPI communicator as comm"
    )


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
