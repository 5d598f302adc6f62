"""Bringing the facts of all ranks of a job to rank 0: through files in a shared folder, or by one gather over MPI.

Each rank reads its own facts; the first rank of each host reads the host's as well. Nobody waits but rank 0, and it
waits no longer than its timeout: who is missing is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcpace.audit.facts import RankFacts, RankGpu, Snapshot
from hpcpace.audit.hostnames import expand, short_list
from hpcpace.audit.quoting import printable
from hpcpace.audit.schema import decoded, plain, snapshot_from, snapshot_text
from hpcpace.audit.snapshot import take_host, take_rank, with_ranks
from hpcpace.audit.snapshot_files import file_name, with_own_names, write_whole
from hpcpace.audit.tree import Tree
from hpcpace.errors import SnapshotError, UsageError, WorldError
from hpcpace.rundir import RunDirectory, default_run_path
from hpcpace.world.environment import RankInfo, host_identity
from hpcpace.world.mpi import mpi_world

_PART = re.compile(r"rank-\d{5,7}\.json")
_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 0.5
_MOST_NAMED = 6
# A part that is much older than rank 0's own was left by a job that died; the file server's clock tells.
_OLD_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Snapshots of all hosts that answered, and a sentence for each host and rank that did not."""

    snapshots: tuple[Snapshot, ...]
    missing: tuple[str, ...]


def own_part(
    info: RankInfo,
    environ: Mapping[str, str],
    *,
    window_s: float = 0.0,
    mpi_size: int | None = None,
    gpu: RankGpu | None = None,
    nccl_version: str = "",
) -> dict[str, Any]:
    """Return what this rank hands in, as values of JSON: its facts, and those of the host if it is the first there.

    Args:
        info: its place.
        environ: its environment.
        window_s: seconds between two readings of the host's counters; 0 reads them once.
        mpi_size: size of MPI's world, where MPI was asked.
        gpu: the one that it uses, where that is known for certain, as in a training process.
        nccl_version: of the library that it has loaded.
    """
    facts, unreadable = take_rank(info, environ, gpu=gpu, mpi_size=mpi_size, nccl_version=nccl_version)
    host = None
    if info.local_rank <= 0:
        host = snapshot_text(take_host(Tree(), host=info.host, window_s=window_s))
    return {
        "host_key": host_identity().host_key,
        "host": printable(info.host),
        "snapshot": host,
        "rank": plain(facts),
        "unreadable": unreadable,
    }


def gather_by_files(
    info: RankInfo, environ: Mapping[str, str], folder: Path, part: Mapping[str, Any], *, timeout_s: float
) -> Gathered | None:
    """Hand in a part through a shared folder; return everybody's on rank 0, None on the others.

    Args:
        info: this rank's place.
        environ: environment, for the names of hosts that do not answer.
        folder: a folder that all hosts share; parts lie in a folder of this step below it and are removed at the end.
        part: of this rank.
        timeout_s: how long rank 0 waits.

    Raises:
        UsageError: the folder cannot be written.
    """
    parts = folder / f".ranks-{file_name(f'{info.job_id}.{info.step_id}')}"
    own = parts / f"rank-{info.rank:05d}.json"
    try:
        parts.mkdir(parents=True, exist_ok=True)
        write_whole(own, json.dumps(part, separators=(",", ":")))
        if info.rank:
            return None
        found = _wait_for(parts, info.world_size, own.stat().st_mtime, timeout_s)
    except OSError as error:
        raise UsageError(
            f"cannot gather the ranks' facts in {folder}: {error.strerror}; name a folder that all hosts share and you "
            "may write with --save, or gather with --mpi"
        ) from error
    try:
        return joined(found, info.world_size, environ, timeout_s)
    finally:
        _remove(parts)


def gather_by_mpi(info: RankInfo, comm: Any, part: Mapping[str, Any], environ: Mapping[str, str]) -> Gathered | None:
    """Hand in a part by one gather over MPI; return everybody's on rank 0, None on the others.

    Collective: every rank of `comm` calls this.
    """
    texts = comm.gather(json.dumps(part), root=0)
    return None if texts is None else joined([json.loads(text) for text in texts], info.world_size, environ, 0.0)


def mpi_communicator(info: RankInfo) -> tuple[Any | None, int]:
    """Return MPI's world and its size; no communicator where MPI sees another world than the launcher started.

    The size is -1 where MPI cannot be loaded.

    Collective: every rank of the job calls this.
    """
    try:
        comm = mpi_world(info)
    except WorldError:
        loaded = sys.modules.get("mpi4py.MPI")
        return None, -1 if loaded is None else int(loaded.COMM_WORLD.Get_size())
    return comm, info.world_size if comm is None else int(comm.Get_size())


def joined(parts: Sequence[Any], world_size: int, environ: Mapping[str, str], timeout_s: float) -> Gathered:
    """Return the snapshots that some parts make, and who is missing.

    Args:
        parts: what `own_part` made, after a way through JSON.
        world_size: ranks of the job.
        environ: environment, with Slurm's names of hosts.
        timeout_s: how long was waited.
    """
    hosts: dict[str, Snapshot] = {}
    ranks: dict[str, list[RankFacts]] = {}
    unreadable: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    missing: list[str] = []
    for part in parts:
        try:
            key = str(part["host_key"])
            facts: RankFacts = decoded(RankFacts, part["rank"])
            snapshot = snapshot_from(part["snapshot"]) if part["snapshot"] is not None else None
            reasons = {str(name): str(reason) for name, reason in part["unreadable"].items()}
            names[key] = str(part["host"])
        except (KeyError, TypeError, AttributeError, SnapshotError) as error:
            missing.append(f"a rank's facts are damaged: {printable(str(error))[:100]}")
            continue
        ranks.setdefault(key, []).append(facts)
        unreadable.setdefault(key, {}).update(reasons)
        if snapshot is not None:
            hosts.setdefault(key, snapshot)
    lonely = [names[key] for key in ranks if key not in hosts]
    missing += [f"the first rank of {name} did not hand in the host's facts" for name in lonely]
    present = {facts.rank for own in ranks.values() for facts in own}
    missing += _missing(present, world_size, set(names.values()), environ, timeout_s)
    snapshots = [with_ranks(snapshot, ranks[key], unreadable[key]) for key, snapshot in hosts.items()]
    return Gathered(snapshots=tuple(with_own_names(snapshots)), missing=tuple(missing))


def snapshot_folder(environ: Mapping[str, str]) -> Path:
    """Return where the snapshots of this job step go when the user names no folder: into a run of its own."""
    run = RunDirectory(default_run_path("audit", environ))
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    # All ranks must come to the same folder, so the attempt is Slurm's number and not the next free one.
    return run.attempt(int(restarts) if restarts.isdigit() and len(restarts) < 6 else 0).snapshot_dir


def _wait_for(parts: Path, world_size: int, own_time_s: float, timeout_s: float) -> list[Any]:
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_POLL_S
    while True:
        files = [entry for entry in os.scandir(parts) if _PART.fullmatch(entry.name)]
        if len(files) >= world_size or time.monotonic() >= deadline_s:
            break
        time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    read = []
    for entry in sorted(files, key=lambda entry: entry.name):
        if own_time_s - entry.stat().st_mtime < _OLD_S:
            read.append(_read_part(Path(entry.path)))
    return read


def _read_part(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"error": printable(str(error))}


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
    ranks = ",".join(map(str, absent[:_MOST_NAMED])) + (" ..." if len(absent) > _MOST_NAMED else "")
    texts = [f"{short_list(silent)} did not answer{within}"] if silent else []
    return [*texts, f"{len(absent)} of {world_size} ranks did not answer{within}: {ranks}"]


def _remove(parts: Path) -> None:
    for entry in list(os.scandir(parts)):
        if _PART.fullmatch(entry.name):
            os.unlink(entry.path)
    with contextlib.suppress(OSError):  # a rank that came after the timeout is still writing
        parts.rmdir()
