"""Gathering the facts of all ranks of a job on rank 0, through files in a shared folder or by one MPI gather.

Each rank reads its own facts; the first rank of each host reads the host's as well. Only rank 0 waits, no longer than
its timeout, and it names the ranks that are missing. The folder may belong to another user; the worst that this user
can achieve is that facts of a rank are left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcpace.audit.facts import RankFacts, Snapshot
from hpcpace.audit.snapshot import take_host, take_rank, with_ranks
from hpcpace.audit.snapshot_files import file_name, snapshot_from, snapshot_text, with_distinct_names
from hpcpace.audit.tree import Tree
from hpcpace.core.codec import WrongValue, convert, parse_json, plain
from hpcpace.core.environment import RankInfo, host_identity
from hpcpace.core.errors import SnapshotError, UsageError, WorldError
from hpcpace.core.files import Folder, read_most
from hpcpace.core.hostlist import expand, short_list
from hpcpace.core.rundir import RunDirectory, default_run_path
from hpcpace.core.text import printable
from hpcpace.world.mpi import mpi_world

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
