"""Read the traces of all ranks of an attempt within some memory; skip unreadable files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hpcpace.core.errors import TraceError, with_reasons
from hpcpace.core.files import Folder, closing_descriptor
from hpcpace.core.pool import map_processes, map_threads
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import first_few, rank_list
from hpcpace.trace.pack_reader import has_own_file, open_pack, read_pack
from hpcpace.trace.reader import DEFAULT_MEMORY_BYTES, TooLarge, read_rank
from hpcpace.trace.schema import TABLES
from hpcpace.trace.stream import CACHE_BYTES, MAX_ROWS, ChunkCache, StoredTable, TraceStream, read_blocks
from hpcpace.trace.tables import GroupTable, RankTrace, plausible_rows, without_implausible

Start = tuple[str, int]
"""A run and the number of its attempt."""


def of_one_run(
    traces: Sequence[RankTrace], *, run_id: str = "", attempt: int = -1, packs: Mapping[int, Path] | None = None
) -> tuple[list[RankTrace], list[str]]:
    """Return the traces that belong together, ascending by rank, and a sentence about each of the others.

    Run and attempt are the same on all ranks of a start; the majority of traces decides.

    Args:
        traces: of different ranks.
        run_id: decides if two runs have equally many traces.
        attempt: decides then, too.
        packs: the file that the trace of a rank was read from, if it is not the rank's own.

    Returns:
        No traces at all if nothing decides between two runs.
    """
    counts = Counter(trace.start for trace in traces)
    if not counts:
        return [], []
    liking = {start: (count, start[1] == attempt, start[0] == run_id) for start, count in counts.items()}
    first, *others = sorted(counts, key=lambda start: liking[start], reverse=True)
    if others and liking[others[0]] == liking[first]:
        names = " and ".join(map(_name, (first, others[0])))
        return [], [f"as many traces are of {names}: move those of one of them away"]
    kept = [trace for trace in traces if trace.start == first]
    left = [trace for trace in traces if trace.start != first]
    said = [
        f"{place} is of {_name(start)}, not of {_name(first)}; it is left out" for place, start in _places(left, packs)
    ]
    return sorted(kept, key=lambda trace: trace.header.rank), said


def _places(traces: Sequence[RankTrace], packs: Mapping[int, Path] | None) -> list[tuple[str, Start]]:
    """Return each file that traces are in, with the ranks of a pack, and what they are of."""
    places: list[tuple[str, Start]] = []
    packed: dict[tuple[Path, Start], list[int]] = {}
    for trace in traces:
        path = (packs or {}).get(trace.header.rank)
        if path is None:
            places.append((str(trace.path), trace.start))
        else:
            packed.setdefault((path, trace.start), []).append(trace.header.rank)
    return [*((f"{path} with {rank_list(sorted(ranks))}", start) for (path, start), ranks in packed.items()), *places]


def _name(start: Start) -> str:
    run_id, attempt = start
    return f"run {run_id!r}, attempt {attempt}"


_MAX_NAMED = 16
_MIN_FOR_PROCESSES = 32
# Figures computed from the operations of a range of steps take several times the memory of their rows.
_COPIES_OF_ROWS = 4
# A few chunks of a rank, whatever its share.
_MIN_STREAM_BYTES = 1 << 21
# Decoded chunks of packs take at most this part of the memory.
_SHARE_OF_CACHE = 8


@dataclass(frozen=True)
class AttemptTraces:
    """The traces of one attempt, by rank, and what is missing or was left out."""

    traces: list[RankTrace]
    problems: tuple[str, ...]


def read_attempt(
    attempt: Attempt,
    *,
    progress: Callable[[int, int], None] | None = None,
    most_rows: int = MAX_ROWS,
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
    reading = _Reading(attempt, progress or (lambda *_: None), most_rows, tables, memory_bytes)
    try:
        with attempt.open() as folder, folder.folder(attempt.trace_dir.name) as traces_folder:
            reading.read(traces_folder)
    except OSError as error:
        raise TraceError(f"no trace can be read in {attempt.trace_dir} ({error.strerror})") from error
    run_id, number = _named(attempt)
    found, others = of_one_run([*reading.traces.values()], run_id=run_id, attempt=number, packs=reading.places)
    problems = [*reading.problems, *others]
    if not found:
        raise TraceError(with_reasons(f"no trace can be read in {attempt.trace_dir}", problems))
    world_size = world_size_of(found)
    problems += _world_problems(found, world_size)
    found = [trace for trace in found if trace.header.rank < world_size]
    if sum(len(trace.tables["collectives"]) for trace in found) <= most_rows:
        on_disk, found = found, list(map(_in_memory, found))
        for trace, before in zip(found, on_disk, strict=True):
            problems += trace.problems[len(before.problems) :]
    return AttemptTraces(found, tuple(problems))


def _named(attempt: Attempt) -> Start:
    return attempt.path.parent.name, attempt.number


class _FromPack(NamedTuple):
    """The trace of a rank in a pack, and whether parts of it are damaged."""

    path: Path
    stream: TraceStream
    is_damaged: bool


@dataclass
class _Reading:
    """Reads the traces of an attempt.

    Attributes:
        left_bytes: memory for tables that is left.
        traces: the trace of each rank that could be read.
        places: the pack of those that were read from one.
        problems: what was left out.
    """

    attempt: Attempt
    progress: Callable[[int, int], None]
    most_rows: int
    tables: Collection[str]
    left_bytes: float
    traces: dict[int, RankTrace] = field(default_factory=dict)
    places: dict[int, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def read(self, folder: Folder) -> None:
        """Read all packs and files in a folder."""
        files, packs, memory_bytes = self.attempt.trace_files(), self.attempt.packs(), self.left_bytes
        self._read_packs(packs, folder, frozenset(files))
        files = {rank: path for rank, path in files.items() if rank not in self.traces}
        num_files = len(packs) + len(files)
        if packs:
            self.progress(len(packs), num_files)
        share = memory_bytes // max(len(files) + len(self.traces), 1)
        errors: dict[str, int] = {}
        misnamed: list[RankTrace] = []
        for number, (rank, trace) in enumerate(self._files(files, folder, share), start=len(packs) + 1):
            self.progress(number, num_files)
            if isinstance(trace, TraceError):
                self.problems.append(str(trace))
                errors[str(trace)] = rank
            elif trace.header.rank != rank:
                misnamed.append(trace)
            else:
                self._take(trace)
        later = [path for path in self.attempt.packs() if path not in packs]
        if later:  # some ranks have been packed since
            taken = frozenset(self.traces)
            self._read_packs(later, folder, taken, taken)
            self.problems = [problem for problem in self.problems if errors.get(problem) not in self.traces]
        for trace in misnamed:
            says = f"{trace.path} says that it is rank {trace.header.rank}"
            other = self.traces.get(trace.header.rank)
            if other is None:
                self.problems.append(says)
                self._take(trace)
            else:
                self.problems.append(f"{says}, and so does {other.path}; it is left out")

    def _take(self, trace: RankTrace) -> None:
        self.traces[trace.header.rank] = trace
        self.problems += trace.problems

    def _read_packs(
        self, packs: Sequence[Path], folder: Folder, own: frozenset[int], taken: frozenset[int] = frozenset()
    ) -> None:
        """Read the traces of the ranks in packs.

        A rank whose own file is another than the one that was packed, or is whole where the pack is damaged, is left to
        it.

        Args:
            packs: the files.
            folder: where they are.
            own: ranks with files of their own.
            taken: ranks that are read already.
        """
        memory_bytes = self.left_bytes
        cache = ChunkCache(min(CACHE_BYTES, memory_bytes / _SHARE_OF_CACHE))
        parts: list[list[_FromPack]] = []
        for path in packs:
            try:
                descriptor, pack = open_pack(path.name, folder)
            except TraceError as error:
                self.problems.append(str(error))
                continue
            with closing_descriptor(descriptor):
                left = [place for place, rank in enumerate(pack.numbers) if rank not in taken]
                places = [p for p in left if pack.numbers[p] not in own or not has_own_file(pack, p, folder)]
                part = read_pack(pack, descriptor, places, tables=self.tables, most_bytes=self.left_bytes, cache=cache)
            changed = sorted({pack.numbers[place] for place in left} - {pack.numbers[place] for place in places})
            if changed:
                read = f"the files of {rank_list(changed)}, which are read"
                self.problems.append(f"{path} has other contents than {read}")
            self.left_bytes -= part.size_bytes
            self.problems += part.problems
            kept = {rank: stream for rank, stream in part.streams.items() if rank not in own & part.damaged}
            parts.append([_FromPack(path, stream, rank in part.damaged) for rank, stream in kept.items()])
        chosen = _chosen(parts, self.problems, _named(self.attempt))
        most_bytes = max(memory_bytes / max(len(chosen), 1) / _COPIES_OF_ROWS, _MIN_STREAM_BYTES)
        for rank, one in chosen.items():
            self.places[rank] = one.path
            self._take(_with_stored(replace(one.stream, most_bytes=most_bytes)))

    def _files(
        self, files: Mapping[int, Path], folder: Folder, share: float
    ) -> Iterator[tuple[int, RankTrace | TraceError]]:
        """Yield the trace of each file, or why there is none.

        Files that need at most an equal share of the memory come first, because together they cannot exceed it. The
        others follow, the smallest first, while memory lasts.
        """
        left_bytes = self.left_bytes
        share = min(share, left_bytes / max(len(files), 1))
        read = partial(
            _trace_or_error,
            folder=folder,
            most_rows=self.most_rows // max(len(files), 1),
            tables=self.tables,
            stream_bytes=max(share // _COPIES_OF_ROWS, _MIN_STREAM_BYTES),
        )
        # With many small files most of the time goes into opening them, which HDF5 does on one core for all threads.
        found_of = map_processes if len(files) >= _MIN_FOR_PROCESSES else map_threads
        names = [path.name for path in files.values()]
        groups, large = dict[bytes, NDArray[Any]](), list[tuple[float, int]]()
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


def _chosen(parts: Sequence[Sequence[_FromPack]], problems: list[str], named: Start) -> dict[int, _FromPack]:
    """Return which of the traces in packs counts for each rank; name the packs that have others.

    That is one of the run of which most are (a pack of another run hides none), then a whole one, then the first.
    """
    counts = Counter(one.stream.trace.start for part in parts for one in part)

    def merit(one: _FromPack) -> tuple[int, bool, bool, bool]:
        run_id, attempt = one.stream.trace.start
        return counts[run_id, attempt], attempt == named[1], run_id == named[0], not one.is_damaged

    chosen: dict[int, _FromPack] = {}
    for one in (one for part in parts for one in part):
        rank = one.stream.trace.header.rank
        if rank not in chosen or merit(one) > merit(chosen[rank]):
            chosen[rank] = one
    for part in parts:
        twice = sorted(one.stream.trace.header.rank for one in part if chosen[one.stream.trace.header.rank] is not one)
        if twice:
            problems.append(f"{part[0].path}: {rank_list(twice)} is in another pack, too; left out here")
    return chosen


def _new_bytes(trace: RankTrace | TraceError, groups: dict[bytes, NDArray[Any]]) -> int:
    """Return the memory that a trace takes, apart from columns of groups that it shares with other ranks."""
    if isinstance(trace, TraceError):
        return 0
    table = trace.tables["groups"]
    return trace.size_bytes - table.size_bytes + (table.share(groups) if isinstance(table, GroupTable) else 0)


def _trace_or_error(
    name: str, *, folder: Folder, most_rows: int, tables: Collection[str], stream_bytes: float, most_bytes: float
) -> RankTrace | TraceError:
    try:
        stream = read_rank(name, folder, most_rows=most_rows, tables=tables, most_bytes=most_bytes)
        trace = without_implausible(stream.trace)
        trace = replace(trace, tables={**trace.tables, "groups": GroupTable(trace.tables["groups"])})
    except TraceError as error:
        return error
    return _with_stored(replace(stream, trace=trace, most_bytes=stream_bytes))


def _with_stored(stream: TraceStream) -> RankTrace:
    """Return the trace of a stream, with its collectives as a table that reads them when they are used."""
    if stream.chunks is None or not stream.chunks.num_rows:
        return stream.trace
    return replace(stream.trace, tables={**stream.trace.tables, "collectives": StoredTable(stream)})


def _in_memory(trace: RankTrace) -> RankTrace:
    """Return a trace with all rows; some ranks have more collectives than others."""
    table = trace.tables["collectives"]
    if not isinstance(table, StoredTable):
        return trace
    rows, problems = read_blocks(replace(table.stream, most_bytes=math.inf))
    problems = [*trace.problems, *problems]
    rows = plausible_rows(rows, "collectives", str(trace.path), problems)
    return replace(trace, tables={**trace.tables, "collectives": rows}, problems=tuple(problems))


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
        names = ", ".join(first_few(missing, _MAX_NAMED, before="... and "))
        problems.append(f"{len(missing)} of {world_size} ranks have no readable trace: {names}")
    return problems
