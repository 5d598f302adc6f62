"""The dumps of one job: which file is of which rank, and which do not belong together.

A dump names its rank nowhere. The groups of a process say which ranks it can be; where they leave a choice, the number
in the name of the file decides, whatever else the name is made of.

PyTorch counts the operations of each group, or those of all groups together. The latter is known by its gaps: a group
lacks numbers, and the same process has them in other groups. One operation may then have several numbers, so they are
counted anew by group: from the first operation where the records of all members go back to it, and else from the last
one that all members finished, if their numbers agree before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from pathlib import Path

from hpcpace.core.errors import CannotTell, TraceError, with_reasons
from hpcpace.core.pool import map_processes
from hpcpace.core.records import dataclass
from hpcpace.core.text import first_few, listed, plural, printable, rank_list, shortened
from hpcpace.runs.imports.flight_recorder import MAX_RANKS, Dump, Entry, read_dump

_NAMED_RANK = re.compile(r"rank[_\-.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,7})(?!\d)")
_MAX_FILES = 1 << 17
_MAX_SHOWN = 4
_FEW_FILES = 16
_APART_NS = 24 * 3600 * 10**9
BESIDE = frozenset({".log", ".md", ".txt", ".sh", ".py", ".yaml", ".yml", ".toml", ".out", ".err"})


@dataclass(frozen=True, kw_only=True)
class Dumps:
    """The dumps of one job.

    Attributes:
        by_rank: what each rank left.
        world_size: how many ranks the job had, as far as the dumps show.
        problems: what was left out, and what is odd, a sentence each.
    """

    by_rank: dict[int, Dump]
    world_size: int
    problems: tuple[str, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that left no dump."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.by_rank)


def read_dumps(paths: Sequence[Path]) -> Dumps:
    """Return the dumps in files and folders.

    Raises:
        TraceError: a path cannot be read, no file is a dump, or they are of several jobs.
        CannotTell: it is not known of any dump which rank it is of.
    """
    files = sorted({file for path in paths for file in files_in(path)})
    if not files:
        raise TraceError(f"no file in {_names(paths)}; name the folder of TORCH_FR_DUMP_TEMP_FILE")
    outcomes = map_processes(_read, files) if len(files) > _FEW_FILES else map(_read, files)
    found = []
    left_out: dict[str, list[Path]] = {}
    for file, outcome in zip(files, outcomes, strict=True):
        if isinstance(outcome, Dump):
            found.append(outcome)
        elif file.suffix.lower() not in BESIDE:
            left_out.setdefault(outcome, []).append(file)
    if not found:
        reasons = _reasons(left_out) or ["no file is a pickle or JSON"]
        raise TraceError(with_reasons(f"no Flight Recorder dump in {_names(paths)}", reasons))
    _check_one_job(found)
    return _with_ranks(found, left_out)


def files_in(path: Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder.

    Raises:
        TraceError: it cannot be read, or has too many files.
    """
    try:
        if not path.is_dir():
            path.stat()
            yield path
            return
        with os.scandir(path) as entries:
            for number, entry in enumerate(entries):
                if number >= _MAX_FILES:
                    raise TraceError(f"{path} has more than {_MAX_FILES} files; name a folder of dumps alone")
                if entry.is_file() and not entry.name.startswith("."):
                    yield Path(entry.path)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error


def _read(path: Path) -> Dump | str:
    try:
        return read_dump(path)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


@dataclass(kw_only=True)
class _Job:
    """Dumps that one job can have left.

    Attributes:
        parts: of each name, the groups that have it: a split group has several parts, which share no rank.
        members: the ranks of all these parts.
    """

    dumps: list[Dump] = field(default_factory=list)
    parts: dict[str, set[frozenset[int]]] = field(default_factory=dict)
    members: dict[str, set[int]] = field(default_factory=dict)

    def fits(self, groups: Mapping[str, frozenset[int]]) -> bool:
        """Return whether groups can be of this job, too."""
        return all(
            name not in self.parts or ranks in self.parts[name] or self.members[name].isdisjoint(ranks)
            for name, ranks in groups.items()
        )

    def add(self, dump: Dump, groups: Mapping[str, frozenset[int]]) -> None:
        """Add a dump with its groups."""
        self.dumps.append(dump)
        for name, ranks in groups.items():
            if ranks not in self.parts.setdefault(name, set()):
                self.parts[name].add(ranks)
                self.members.setdefault(name, set()).update(ranks)


def _check_one_job(dumps: Sequence[Dump]) -> None:
    """Refuse dumps that no single job can have left.

    Raises:
        TraceError: their groups or their times do not fit together.
    """
    jobs: list[_Job] = []
    for dump in dumps:
        groups = {group.name: frozenset(group.ranks) for group in dump.groups.values() if group.name and group.ranks}
        job = next((job for job in jobs if job.fits(groups)), None)
        if job is None:
            if len(jobs) == _MAX_SHOWN:
                raise TraceError(f"these dumps are of more than {plural(_MAX_SHOWN, 'job')}; name the files of one")
            jobs.append(job := _Job())
        job.add(dump, groups)
    parts = [part for job in jobs for part in _apart_in_time(job.dumps)]
    if len(parts) > 1:
        told = _few([f"job {number}: {_file_list(part)}" for number, part in enumerate(parts, start=1)])
        raise TraceError(f"these dumps are of {plural(len(parts), 'job')}: {told}; name the files of one")


def _apart_in_time(dumps: Sequence[Dump]) -> list[list[Dump]]:
    """Return the dumps in parts between whose last operations a day or more lies."""
    parts: list[list[Dump]] = [[dump for dump in dumps if not dump.entries]]
    for dump in sorted((dump for dump in dumps if dump.entries), key=_last_ns):
        before = parts[-1][-1] if parts[-1] else dump
        if before.entries and _last_ns(dump) - _last_ns(before) > _APART_NS:
            parts.append([])
        parts[-1].append(dump)
    return parts


def _last_ns(dump: Dump) -> int:
    return max(entry.created_ns for entry in dump.entries)


def _with_ranks(dumps: Sequence[Dump], left_out: dict[str, list[Path]]) -> Dumps:
    by_rank: dict[int, Dump] = {}
    unknown: dict[str, list[Path]] = {}
    for dump in dumps:
        try:
            rank = _rank_of(dump)
        except ValueError as error:
            unknown.setdefault(str(error), []).append(dump.path)
            continue
        other = by_rank.get(rank)
        if other is not None and not _is_same_record(other, dump):
            raise TraceError(
                f"{_file_list([other, dump])} are both of rank {rank}, and differ: the files are of several jobs, or"
                " of several dumps of one; name those of one"
            )
        # Only a pickle has the lines that called the operations.
        if other is None or any(entry.where for entry in dump.entries):
            by_rank[rank] = dump
    if not by_rank:
        raise CannotTell(_few(_reasons(unknown)))
    problems = _reasons(left_out)
    versions = sorted({dump.version for dump in by_rank.values()})
    libraries = sorted({dump.library for dump in by_rank.values()} - {""})
    for kind, several in (("the format has versions", versions), ("the library is", libraries)):
        if several[1:]:
            problems.append(f"ranks ran different software: {kind} {listed(several[:_MAX_SHOWN])}")
    by_rank, counted = _counted_by_group(by_rank)
    return Dumps(by_rank=by_rank, world_size=_world_size(by_rank), problems=(*problems, *_reasons(unknown), *counted))


def _rank_of(dump: Dump) -> int:
    """Return the rank whose dump it is.

    Raises:
        ValueError: neither its groups nor its name say it, or they contradict each other.
    """
    memberships = [group.ranks for group in dump.groups.values() if group.ranks]
    possible = set(memberships[0]).intersection(*memberships[1:]) if memberships else set()
    if memberships and not possible:
        raise ValueError("no rank is in all of its groups")
    stem = dump.path.name
    named = _NAMED_RANK.findall(stem) or _NUMBER.findall(re.sub(r"\.(json|pkl|pickle|bin)$", "", stem))
    rank = int(named[-1]) if named else None
    if len(possible) == 1:
        (only,) = possible
        return only
    if rank is None:
        raise ValueError("neither its name nor its groups say which rank it is of; put the rank into the name")
    if possible and rank not in possible:
        raise ValueError(f"its name says rank {rank}, but its groups are those of {rank_list(sorted(possible))}")
    if rank >= MAX_RANKS:
        raise ValueError(f"its name says rank {rank}, and ranks are 0 to {MAX_RANKS - 1}")
    return rank


def _is_same_record(one: Dump, other: Dump) -> bool:
    """Return whether two dumps are one record, as a pickle and as JSON."""
    return [(entry.seq, entry.created_ns) for entry in one.entries] == [
        (entry.seq, entry.created_ns) for entry in other.entries
    ] and one.enqueued == other.enqueued


def _world_size(by_rank: dict[int, Dump]) -> int:
    highest = max(by_rank)
    for dump in by_rank.values():
        for group in dump.groups.values():
            highest = max(highest, *group.ranks, 0)
    return highest + 1


def _reasons(left_out: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return for each reason a sentence with the files that were left out for it."""
    return [
        f"{_path_list(paths)} {'was' if len(paths) == 1 else 'were'} left out: {why}" for why, paths in left_out.items()
    ]


def _file_list(dumps: Sequence[Dump]) -> str:
    return _path_list([dump.path for dump in dumps])


def _path_list(paths: Sequence[Path]) -> str:
    return listed(first_few(paths, _MAX_SHOWN, words=lambda path: shortened(path.name), noun="file"))


def _few(texts: Sequence[str]) -> str:
    """Return the first of several texts, and how many others there are."""
    return "; ".join(first_few(texts, _MAX_SHOWN, before="and "))


def _names(paths: Sequence[Path]) -> str:
    return listed([printable(str(path)) for path in paths[:_MAX_SHOWN]])


_Group = tuple[str, tuple[int, ...]]


def _counted_by_group(by_rank: Mapping[int, Dump]) -> tuple[dict[int, Dump], tuple[str, ...]]:
    """Return dumps whose collectives are counted by group, and a sentence on what that cost.

    Operations of a group that cannot be counted are marked by `Dump.is_counted`.
    """
    if not _has_common_counter(by_rank.values()):
        return dict(by_rank), ()
    numbers: dict[int, dict[tuple[str, int], int]] = {rank: {} for rank in by_rank}
    uncounted: set[int] = set()
    for (name, _), called in _by_group(by_rank).items():
        places = _places(called, are_whole=all(by_rank[rank].is_from_start for rank in called))
        if places is None:
            uncounted |= called.keys()
            continue
        for rank, place_of in places.items():
            numbers[rank] |= {(name, seq): place for seq, place in place_of.items()}
    counted = {
        rank: replace(
            dump, entries=_renumbered(dump.entries, numbers[rank]), enqueued={}, is_counted=rank not in uncounted
        )
        for rank, dump in by_rank.items()
    }
    problem = "the dumps count the operations of all groups together; here they are counted by group"
    if uncounted:
        who = rank_list(sorted(uncounted))
        problem += f", but not those of {who}, whose records begin too late: raise TORCH_FR_BUFFER_SIZE"
    return counted, (problem,)


def _has_common_counter(dumps: Iterable[Dump]) -> bool:
    """Return whether dumps show a counter of all groups, and none shows one of each group."""
    found = False
    for dump in dumps:
        of_number: dict[int, str] = {}
        of_group: dict[str, list[int]] = {}
        for entry in dump.entries:
            if entry.is_p2p:
                continue
            if of_number.setdefault(entry.seq, entry.group) != entry.group:
                return False  # one number in two groups of a process
            of_group.setdefault(entry.group, []).append(entry.seq)
        gaps = [pair for numbers in of_group.values() for pair in pairwise(numbers) if pair[1] > pair[0] + 1]
        if gaps and all(number in of_number for number in range(min(of_number), max(of_number) + 1)):
            found = True
    return found


def _by_group(by_rank: Mapping[int, Dump]) -> dict[_Group, dict[int, dict[int, bool]]]:
    """Return the numbers of each group in order, by the rank that called them, and whether that finished."""
    found: dict[_Group, dict[int, dict[int, bool]]] = {}
    for rank, dump in by_rank.items():
        own: dict[str, dict[int, bool]] = {}
        for entry in dump.entries:
            if not entry.is_p2p:
                called = own.setdefault(entry.group, {})
                called[entry.seq] = called.get(entry.seq, True) and not entry.is_open
        for name, called in own.items():
            members = dump.groups[name].ranks if name in dump.groups else ()
            found.setdefault((name, members), {})[rank] = called
    return found


def _places(called: Mapping[int, Mapping[int, bool]], *, are_whole: bool) -> dict[int, dict[int, int]] | None:
    """Return the place in the group for each number of each rank; None where the records do not show it."""
    if are_whole:
        return {rank: {seq: place for place, seq in enumerate(numbers)} for rank, numbers in called.items()}
    finished = {rank: [seq for seq, is_over in numbers.items() if is_over] for rank, numbers in called.items()}
    if not all(finished.values()):
        return None
    begin, end = max(numbers[0] for numbers in finished.values()), min(numbers[-1] for numbers in finished.values())
    common = {tuple(seq for seq in numbers if begin <= seq <= end) for numbers in finished.values()}
    if len(common) > 1 or not (shared := common.pop()):
        return None
    places = {}
    for rank, numbers in called.items():
        index = list(numbers).index(shared[-1])
        places[rank] = {seq: shared[-1] + place - index for place, seq in enumerate(numbers)}
    return places


def _renumbered(entries: Sequence[Entry], numbers: Mapping[tuple[str, int], int]) -> tuple[Entry, ...]:
    return tuple(
        entry if entry.is_p2p else replace(entry, seq=numbers.get((entry.group, entry.seq), entry.seq))
        for entry in entries
    )
