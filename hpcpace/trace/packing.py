"""Pack the traces of an attempt: a few verified files in place of one per rank.

Whatever interrupts it, every rank can be read: a pack gets its name when it is written, synced and verified, and only
then the files of its ranks go, the journal before the file. The next call removes what an interrupted one left.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.core.pool import map_processes
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, rank_list
from hpcpace.trace.hdf5_files import is_marked_open
from hpcpace.trace.pack_index import (
    COUNTED,
    MAX_PACKED_RANKS,
    OF_RANKS,
    OPEN,
    GroupPart,
    PackIndex,
    index_pack,
    is_unfinished_pack,
    pack_name,
)
from hpcpace.trace.pack_reader import has_own_file, open_pack, own_name
from hpcpace.trace.pack_writer import (
    Original,
    PackWriter,
    blocks_of,
    check_pack,
    digest_of,
    digests_of,
    names_of,
    read_original,
    state_of,
)
from hpcpace.trace.reader import DEFAULT_MEMORY_BYTES, read_rank
from hpcpace.trace.tables import Table

DEFAULT_SIZE_BYTES = 1 << 30
DEFAULT_RANKS = 512
QUIET_S = 300.0
"""A rank that has not closed its trace is taken for killed when it has written nothing for this long."""
# The small tables of a pack: a report that has too little memory leaves out whole packs.
_MAX_TABLE_BYTES = 1 << 28
# Of the memory allowed: the files that are read at once, a single rank, and the blocks of the ranks of a pack.
_SHARE_OF_BATCH, _SHARE_OF_RANK, _SHARE_OF_BLOCKS = 16, 2, 4
_MAX_AT_ONCE = 256
_LOCK_S = 1.0
"""The processes of a call that was killed keep its lock until they have noticed that."""

Tell = Callable[[int, int], None]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class PackPlan:
    """How to pack.

    Attributes:
        size_bytes: begin another pack when the files of its ranks have this size together.
        most_ranks: and when it has this many.
        keep: whether the files of the ranks stay.
        has_ended: whether ranks that have not closed their trace are known to have ended.
        memory_bytes: memory to use, about.
    """

    size_bytes: int = DEFAULT_SIZE_BYTES
    most_ranks: int = DEFAULT_RANKS
    keep: bool = False
    has_ended: bool = False
    memory_bytes: int = DEFAULT_MEMORY_BYTES


@dataclass(kw_only=True)
class PackResult:
    """What packing has done.

    Attributes:
        packs: names of the new packs.
        num_ranks: ranks in them.
        removed: ranks whose own files were removed.
        kept: why others stay as they are, one sentence each.
        files_before, files_after: files of traces.
        bytes_before, bytes_after: their size.
    """

    packs: list[str] = field(default_factory=list)
    num_ranks: int = 0
    removed: list[int] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def pack_attempt(attempt: Attempt, plan: PackPlan, *, begin_stage: Callable[[str], Tell]) -> PackResult:
    """Pack the traces of an attempt that has ended.

    Args:
        attempt: names the files.
        plan: how.
        begin_stage: begins a stage of the progress.

    Raises:
        TraceError: it is still being written, is being packed by another program, or belongs to somebody else; or the
            disk is full or broken. Every rank can be read as before.
    """
    result = PackResult()
    try:
        with attempt.open() as outer, outer.folder(attempt.trace_dir.name) as folder, _locked(folder):
            result.files_before, result.bytes_before = _count(attempt, folder)
            for name in filter(is_unfinished_pack, folder.names()):
                folder.remove(name)
            packed = _finish(attempt, folder, plan, result)
            files = {rank: path.name for rank, path in attempt.trace_files().items() if rank not in packed}
            _check_owner(folder, files)
            if not plan.has_ended:
                _check_ended(folder, files)
            show, num_done = begin_stage("pack"), 0
            for group in _groups(folder, files, plan, result):
                _write_pack(folder, group, plan, result)
                num_done += len(group)
                show(num_done, len(files))
            result.files_after, result.bytes_after = _count(attempt, folder)
    except OSError as error:
        raise TraceError(
            f"{attempt.trace_dir} cannot be packed ({error.strerror or error}); every rank can be read as before"
        ) from error
    return result


def _is_locked(folder: Folder) -> bool:
    """Lock a folder, and return whether no other program has; where there are no locks, nobody has."""
    try:
        fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


@contextmanager
def _locked(folder: Folder) -> Iterator[None]:
    """Keep other programs from packing the same folder; on file systems without locks it is their unique names."""
    deadline_s = time.monotonic() + _LOCK_S
    while not _is_locked(folder):
        if time.monotonic() > deadline_s:
            raise TraceError(f"another hpcpace pack is at work in {folder.path}: wait until it has ended")
        time.sleep(_LOCK_S / 10)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(folder.descriptor, fcntl.LOCK_UN)


def _count(attempt: Attempt, folder: Folder) -> tuple[int, int]:
    """Return the number of files of traces, and their size."""
    own = [name for path in attempt.trace_files().values() for name in names_of(path.name) if folder.has(name)]
    names = [*own, *(path.name for path in attempt.packs())]
    return len(names), sum(map(folder.size_bytes, names))


def _check_owner(folder: Folder, files: dict[int, str]) -> None:
    """Refuse files of somebody else, who could not read packs that belong to this user.

    Raises:
        TraceError: there are some.
    """
    user = os.geteuid()
    for name in (name for file in files.values() for name in names_of(file) if folder.has(name)):
        owner = folder.status(name).st_uid
        if owner != user and user != 0:
            raise TraceError(f"{folder.path / name} belongs to another user (uid {owner}): pack the run as that user")


def _check_ended(folder: Folder, files: dict[int, str]) -> None:
    """Refuse an attempt whose ranks may still be writing.

    Raises:
        TraceError: a rank has not closed its trace, and wrote to it a short time ago.
    """
    for rank, file in files.items():
        states = [state_of(folder, name) for name in names_of(file)]
        if states[1] is None and not _is_open(folder, file):
            continue
        quiet_s = time.time() - max(state[2] for state in states if state) / NS_PER_S
        if quiet_s < QUIET_S:
            raise TraceError(
                f"rank {rank} has not closed {folder.path / file} and wrote to it {max(quiet_s, 0):.0f} s ago: "
                "pack the run when its job has ended; if it has, --ended says so"
            )


def _is_open(folder: Folder, file: str) -> bool:
    try:
        descriptor = folder.open_file(file)
    except OSError:
        return False
    with closing_descriptor(descriptor):
        return is_marked_open(descriptor)


def _finish(attempt: Attempt, folder: Folder, plan: PackPlan, result: PackResult) -> set[int]:
    """Return the ranks that are in packs already, and remove their own files if an interrupted call left them."""
    packed: set[int] = set()
    own = attempt.trace_files()
    for path in attempt.packs():
        try:
            descriptor, pack = open_pack(path.name, folder)
        except TraceError as error:
            result.kept.append(str(error))
            continue
        try:
            both = [place for place, rank in enumerate(pack.numbers) if rank in own and rank not in packed]
            differing = [pack.numbers[place] for place in both if has_own_file(pack, place, folder)]
            if differing:
                result.kept.append(f"{path} has other contents than the files of {rank_list(sorted(differing))}")
            left = [place for place in both if pack.numbers[place] not in differing]
            if left and not plan.keep:
                _remove_left(folder, pack, descriptor, left, result)
        except TraceError as error:
            result.kept.append(f"{error}; the files of its ranks stay: remove the pack and pack them again")
        finally:
            packed |= set(pack.numbers)
            os.close(descriptor)
    return packed


def _remove_left(folder: Folder, pack: PackIndex, descriptor: int, places: Sequence[int], result: PackResult) -> None:
    """Remove the own files of ranks that the pack holds, too.

    Raises:
        TraceError: the pack is damaged.
    """
    digests = digests_of(pack, descriptor)
    for place in places:
        rank = pack.numbers[place]
        file = own_name(rank)
        states = [state_of(folder, name) for name in names_of(file)]
        sizes = [state[1] if state else 0 for state in states]
        expected = bytes(pack.ranks["digest"][place])
        if sizes == [pack.ranks["trace_bytes"][place], pack.ranks["journal_bytes"][place]]:
            try:
                expected, _, _ = digest_of(read_rank(file, folder, most_rows=-1))
            except TraceError as error:
                result.kept.append(f"{error}; its file stays beside the pack")
                continue
        # Else one of two is gone already, which happens only to ranks whose pack was verified.
        if digests[rank] != expected:
            result.kept.append(f"{pack.path} does not hold what the file of rank {rank} holds: both stay")
            continue
        _remove(folder, file, states, result, rank)


def _remove(folder: Folder, file: str, states: Sequence[object], result: PackResult, rank: int) -> None:
    """Remove the files of a rank, the journal first: without it, what is left is known to be in the pack."""
    for name, state in list(zip(names_of(file), states, strict=True))[::-1]:
        if state is None:
            continue
        if state_of(folder, name) != state:
            result.kept.append(f"{folder.path / name} has changed since it was packed; it stays")
            return
        folder.remove(name)
    result.removed.append(rank)


def _groups(folder: Folder, files: dict[int, str], plan: PackPlan, result: PackResult) -> Iterator[list[Original]]:
    """Yield the ranks of each pack, ascending; those that cannot be packed are named."""
    most_blocks_bytes = plan.memory_bytes / _SHARE_OF_BLOCKS
    most = (min(plan.most_ranks, MAX_PACKED_RANKS), plan.size_bytes, _MAX_TABLE_BYTES, most_blocks_bytes)
    for _, alike in itertools.groupby(_originals(folder, files, plan, result), key=lambda one: one.kind):
        yield from _batches(
            alike,
            lambda one: (1, one.trace_bytes + one.journal_bytes, one.stream.trace.size_bytes, one.block_bytes),
            most,
        )


def _batches(items: Iterable[_T], needs: Callable[[_T], Sequence[float]], most: Sequence[float]) -> Iterator[list[_T]]:
    """Yield consecutive items that together need no more than the most there is of anything; at least one of them."""
    batch: list[_T] = []
    sums = np.zeros(len(most))
    for item in items:
        sums = sums + needs(item)
        if batch and (sums > most).any():
            yield batch
            batch, sums = [], np.array(needs(item))
        batch.append(item)
    if batch:
        yield batch


def _originals(folder: Folder, files: dict[int, str], plan: PackPlan, result: PackResult) -> Iterator[Original]:
    """Yield the traces that can be packed; no more are read at once than fit into a part of the memory."""
    read = partial(_read_task, folder=folder, most_bytes=plan.memory_bytes / _SHARE_OF_RANK)

    def needs(task: tuple[int, str]) -> tuple[int, int]:
        return 1, sum(map(folder.size_bytes, names_of(task[1])))

    for batch in _batches(files.items(), needs, (_MAX_AT_ONCE, plan.memory_bytes / _SHARE_OF_BATCH)):
        for found in list(map_processes(read, batch)):
            if isinstance(found, str):
                result.kept.append(found)
            else:
                yield found


def _read_task(task: tuple[int, str], *, folder: Folder, most_bytes: float) -> Original | str:
    rank, file = task
    return read_original(file, rank=rank, folder=folder, most_bytes=most_bytes)


def _write_pack(folder: Folder, group: Sequence[Original], plan: PackPlan, result: PackResult) -> None:
    """Write, sync and verify a pack, give it its name, and remove the files of its ranks.

    Raises:
        TraceError: a file changed meanwhile, or the pack does not hold what it should.
        OSError: the disk is full or broken.
    """
    name = pack_name(group[0].rank, secrets.token_hex(4))
    with folder.replacing(name, mode=0o600) as descriptor:
        _fill(descriptor, group)
        _take_owner(folder, descriptor, group)
        os.fsync(descriptor)
        check_pack(index_pack(descriptor, folder.path / name), descriptor, {one.rank: one.digest for one in group})
        for original in group:
            if original.states != tuple(state_of(folder, file) for file in names_of(own_name(original.rank))):
                raise TraceError(
                    f"rank {original.rank} wrote to its trace while it was packed: wait for its job to end"
                )
    os.fsync(folder.descriptor)
    result.packs.append(name)
    result.num_ranks += len(group)
    for original in () if plan.keep else group:
        _remove(folder, own_name(original.rank), original.states, result, original.rank)


def _take_owner(folder: Folder, descriptor: int, group: Sequence[Original]) -> None:
    """Give a pack the permissions that all the files of its ranks have, and their owner if root packs them."""
    names = [name for one in group for name in names_of(own_name(one.rank)) if folder.has(name)]
    found = [folder.status(name) for name in names]
    mode = np.bitwise_and.reduce([status.st_mode & 0o777 for status in found])
    groups, owners = {status.st_gid for status in found}, {status.st_uid for status in found}
    own = os.fstat(descriptor)
    if (groups, owners) != ({own.st_gid}, {own.st_uid}):
        try:
            os.fchown(descriptor, owners.pop() if len(owners) == 1 else -1, groups.pop() if len(groups) == 1 else -1)
        except PermissionError:  # a group that this user is not in
            mode &= 0o707
    os.fchmod(descriptor, int(mode) | 0o600)


def _fill(descriptor: int, group: Sequence[Original]) -> None:
    writer = PackWriter(descriptor, device_tables=group[0].kind[2])
    try:
        _write_tables(writer, group)
        with_rows = [one for one in group if one.first_step <= one.last_step and one.stream.num_collectives]
        first = min((one.first_step for one in with_rows), default=0)
        last = max((one.last_step for one in with_rows), default=0)
        for rows, num_rows, last_steps in blocks_of([one.stream for one in group], first, last):
            writer.append("collectives", rows)
            writer.append("blocks", {"num_rows": num_rows, "last_step": last_steps})
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _write_tables(writer: PackWriter, group: Sequence[Original]) -> None:
    parts: dict[GroupPart, int] = {}
    counts = {name: np.zeros(len(group), np.int64) for name in COUNTED}
    for place, original in enumerate(group):
        trace = original.stream.trace
        tables: dict[str, Table] = {name: trace.tables[name] for name in OF_RANKS} | {OPEN: trace.open_collectives}
        for name, rows in tables.items():
            writer.append(name, rows)
            counts[name][place] = len(rows)
        for part in original.groups:
            if part not in parts:
                parts[part] = len(parts)
                writer.append("groups", rows := part.rows())
                writer.append("group_parts", {"num_rows": np.array([len(rows)], np.int32)})
        writer.append("memberships", {"part": np.array([parts[part] for part in original.groups], np.int32)})
        counts["memberships"][place] = len(original.groups)
        counts["collectives"][place] = original.stream.num_collectives
        writer.append("headers", {"text": np.frombuffer(original.header, np.uint8)})
    columns: dict[str, NDArray[Any]] = {
        "rank": np.array([one.rank for one in group], np.int32),
        "closed": np.array([one.stream.trace.closed_cleanly for one in group], np.uint8),
        "header_bytes": np.array([len(one.header) for one in group], np.int32),
        "trace_bytes": np.array([one.trace_bytes for one in group], np.int64),
        "journal_bytes": np.array([one.journal_bytes for one in group], np.int64),
        "digest": np.array([one.digest for one in group], "S32"),
    }
    writer.append("ranks", columns | {f"num_{name}": values for name, values in counts.items()})
