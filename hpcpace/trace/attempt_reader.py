"""Read the traces of all ranks of an attempt within a given amount of memory; report and skip unreadable files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hpcpace.errors import TraceError
from hpcpace.files import Folder
from hpcpace.parallel import map_processes, map_threads
from hpcpace.rundir import Attempt
from hpcpace.trace.plausible import without_implausible
from hpcpace.trace.reader import DEFAULT_MEMORY_BYTES, TooLarge, read_rank
from hpcpace.trace.same_run import of_one_run
from hpcpace.trace.schema import TABLES
from hpcpace.trace.stream import MOST_ROWS, StoredTable, TraceStream
from hpcpace.trace.tables import GroupTable, RankTrace, Table

_MOST_NAMED = 16
_LEAST_FOR_PROCESSES = 32
# Figures computed from the operations of a range of steps take several times the memory of their rows.
_COPIES_OF_ROWS = 4
# A few chunks of a rank, whatever its share.
_LEAST_STREAM_BYTES = 1 << 21


@dataclass(frozen=True)
class AttemptTraces:
    """The traces of one attempt, by rank, and what is missing or was left out."""

    traces: list[RankTrace]
    problems: tuple[str, ...]


def read_attempt(
    attempt: Attempt,
    *,
    progress: Callable[[int, int], None] | None = None,
    most_rows: int = MOST_ROWS,
    tables: Collection[str] = TABLES,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> AttemptTraces:
    """Read the traces of all ranks of an attempt.

    Args:
        attempt: names the files.
        progress: called with the number of files read and the number of files, after each.
        most_rows: collectives stay on disk if there are more than this (`hpcpace.trace.stream.StoredTable`).
        tables: names of the tables to read; the others get no rows.
        memory_bytes: memory for the tables, apart from those `most_rows`. If it is not enough, files are left out, the
            largest first.

    Raises:
        TraceError: no trace can be read.
    """
    try:
        with attempt.open() as folder, folder.folder(attempt.trace_dir.name) as trace_folder:
            traces, problems = _read_ranks(
                attempt, trace_folder, progress=progress, most_rows=most_rows, tables=tables, memory_bytes=memory_bytes
            )
    except OSError as error:
        raise TraceError(f"no trace can be read in {attempt.trace_dir} ({error.strerror})") from error
    found, others = of_one_run(traces, run_id=attempt.path.parent.name, attempt=attempt.number)
    problems += others
    if not found:
        raise TraceError("; ".join([f"no trace can be read in {attempt.trace_dir}", *problems]))
    world_size = world_size_of(found)
    problems += _world_problems(found, world_size)
    found = [trace for trace in found if trace.header.rank < world_size]
    if sum(len(trace.tables["collectives"]) for trace in found) <= most_rows:
        found = [_in_memory(trace) for trace in found]
    return AttemptTraces(found, tuple(problems))


def _read_ranks(
    attempt: Attempt,
    folder: Folder,
    *,
    progress: Callable[[int, int], None] | None,
    most_rows: int,
    tables: Collection[str],
    memory_bytes: int,
) -> tuple[list[RankTrace], list[str]]:
    """Return the trace of each rank that can be read, and what was left out."""
    files = attempt.trace_files()
    traces: dict[int, RankTrace] = {}
    problems: list[str] = []
    misnamed: list[RankTrace] = []
    found = _read_files(files, folder, most_rows, tables, memory_bytes)
    for number, (rank, trace) in enumerate(found, start=1):
        if progress is not None:
            progress(number, len(files))
        if isinstance(trace, TraceError):
            problems.append(str(trace))
        elif trace.header.rank != rank:
            misnamed.append(trace)
        else:
            traces[rank] = trace
            problems += trace.problems
    for trace in misnamed:
        says = f"{trace.path} says that it is rank {trace.header.rank}"
        if trace.header.rank in traces:
            problems.append(f"{says}, and so does {traces[trace.header.rank].path}; it is left out")
        else:
            problems += [says, *trace.problems]
            traces[trace.header.rank] = trace
    return list(traces.values()), problems


def _read_files(
    files: Mapping[int, Path],
    folder: Folder,
    most_rows: int,
    tables: Collection[str],
    memory_bytes: int,
) -> Iterator[tuple[int, RankTrace | TraceError]]:
    """Yield the trace of each file, or why there is none.

    Files that need at most an equal share of the memory come first, because together they cannot exceed it. The others
    follow, the smallest first, while memory lasts.
    """
    share = memory_bytes // max(len(files), 1)
    read = partial(
        _trace_or_error,
        folder=folder,
        most_rows=most_rows // max(len(files), 1),
        tables=tables,
        stream_bytes=max(share // _COPIES_OF_ROWS, _LEAST_STREAM_BYTES),
    )
    # With many small files most of the time goes into opening them, which HDF5 does on one core for all threads.
    found_of = map_processes if len(files) >= _LEAST_FOR_PROCESSES else map_threads
    names = [path.name for path in files.values()]
    left_bytes, groups, large = memory_bytes, dict[bytes, NDArray[Any]](), list[tuple[float, int]]()
    for rank, trace in zip(files, found_of(partial(read, most_bytes=share), names), strict=True):
        if isinstance(trace, TooLarge):
            large.append((trace.size_bytes, rank))
            continue
        left_bytes -= _new_bytes(trace, groups)
        yield rank, trace
    for _, rank in sorted(large):
        trace = read(files[rank].name, most_bytes=left_bytes)
        left_bytes -= _new_bytes(trace, groups)
        yield rank, trace


def _new_bytes(trace: RankTrace | TraceError, groups: dict[bytes, NDArray[Any]]) -> int:
    """Return the memory that a trace takes, apart from columns of groups that it shares with other ranks."""
    if isinstance(trace, TraceError):
        return 0
    table = trace.tables["groups"]
    return trace.size_bytes - table.size_bytes + (table.share(groups) if isinstance(table, GroupTable) else 0)


def _trace_or_error(
    name: str, *, folder: Folder, most_rows: int, tables: Collection[str], stream_bytes: int, most_bytes: int
) -> RankTrace | TraceError:
    try:
        stream = read_rank(name, folder, most_rows=most_rows, tables=tables, most_bytes=most_bytes)
        trace = without_implausible(stream.trace)
        trace = replace(trace, tables={**trace.tables, "groups": GroupTable(trace.tables["groups"])})
    except TraceError as error:
        return error
    if stream.chunks is None or not stream.chunks.num_rows:
        return trace
    stored = StoredTable(
        TraceStream(trace=trace, chunks=stream.chunks, identity=stream.identity, most_bytes=stream_bytes)
    )
    return replace(trace, tables={**trace.tables, "collectives": stored})


def _in_memory(trace: RankTrace) -> RankTrace:
    """Return a trace with all rows; some ranks have more collectives than others."""
    table = trace.tables["collectives"]
    if not isinstance(table, StoredTable):
        return trace
    rows = Table({name: table[name] for name in table})
    return without_implausible(replace(trace, tables={**trace.tables, "collectives": rows}))


def world_size_of(traces: Iterable[RankTrace]) -> int:
    """Return the number of ranks that most traces report, or the larger one of a tie.

    One damaged number must not turn a million ranks into missing ones.
    """
    sizes = Counter(trace.header.world_size for trace in traces)
    return max(sizes, key=lambda size: (sizes[size], size))


def _world_problems(traces: Sequence[RankTrace], world_size: int) -> list[str]:
    """Return problems that the ranks that were read reveal: sizes that disagree, ranks that are missing."""
    problems = []
    for trace in traces:
        if trace.header.world_size != world_size:
            left_out = "; it is left out" if trace.header.rank >= world_size else ""
            problems.append(
                f"{trace.path} says {trace.header.world_size} ranks, but most others say {world_size}{left_out}"
            )
    present = {trace.header.rank for trace in traces}
    missing = [rank for rank in range(world_size) if rank not in present]
    if missing:
        names = ", ".join(map(str, missing[:_MOST_NAMED]))
        more = f", ... and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        problems.append(f"{len(missing)} of {world_size} ranks have no readable trace: {names}{more}")
    return problems
