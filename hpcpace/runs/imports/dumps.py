"""The dumps of one job: which file is of which rank, and which do not belong together.

A dump names its rank nowhere. The groups of a process say which ranks it can be; where they leave a choice, the number
in the name of the file decides, whatever else the name is made of.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcpace.errors import CannotTell, TraceError, with_reasons
from hpcpace.parallel import map_processes
from hpcpace.quoting import printable
from hpcpace.runs.imports.flight_recorder import MOST_RANKS, Dump, read_dump
from hpcpace.wording import listed, plural, rank_list

_NAMED_RANK = re.compile(r"rank[_\-.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,7})(?!\d)")
_MOST_FILES = 1 << 17
_MOST_SHOWN = 4
_FEW_FILES = 16
_APART_NS = 24 * 3600 * 10**9
_BESIDE = frozenset({".log", ".md", ".txt", ".sh", ".py", ".yaml", ".yml", ".toml", ".out", ".err"})


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
    files = sorted({file for path in paths for file in _files(path)})
    if not files:
        raise TraceError(f"no file in {_names(paths)}; name the folder of TORCH_FR_DUMP_TEMP_FILE")
    outcomes = map_processes(_read, files) if len(files) > _FEW_FILES else map(_read, files)
    found, problems = [], []
    for file, outcome in zip(files, outcomes, strict=True):
        if isinstance(outcome, Dump):
            found.append(outcome)
        elif file.suffix.lower() not in _BESIDE:
            problems.append(f"{printable(file.name)} was left out: {outcome}")
    if not found:
        raise TraceError(with_reasons(f"no Flight Recorder dump in {_names(paths)}", problems or ["no file is one"]))
    _check_one_job(found)
    return _with_ranks(found, problems)


def _files(path: Path) -> Iterator[Path]:
    try:
        if not path.is_dir():
            path.stat()
            yield path
            return
        with os.scandir(path) as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST_FILES:
                    raise TraceError(f"{path} has more than {_MOST_FILES} files; name a folder of dumps alone")
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


def _check_one_job(dumps: Sequence[Dump]) -> None:
    """Refuse dumps that no single job can have left.

    Raises:
        TraceError: their groups or their times do not fit together.
    """
    jobs: list[tuple[dict[str, set[frozenset[int]]], list[Dump]]] = []
    for dump in dumps:
        groups = {group.name: frozenset(group.ranks) for group in dump.groups.values() if group.name and group.ranks}
        fitting = (job for job in jobs if all(_can_be_one(groups[name], job[0].get(name, ())) for name in groups))
        job = next(fitting, None)
        if job is None:
            jobs.append(job := ({}, []))
        job[1].append(dump)
        for name, ranks in groups.items():
            job[0].setdefault(name, set()).add(ranks)
    parts = [part for _, members in jobs for part in _apart_in_time(members)]
    if len(parts) > 1:
        told = "; ".join(f"job {number}: {_file_list(part)}" for number, part in enumerate(parts, start=1))
        raise TraceError(f"these dumps are of {plural(len(parts), 'job')}: {told}; name the files of one")


def _can_be_one(ranks: frozenset[int], known: Iterable[frozenset[int]]) -> bool:
    """Return whether groups of one name can be of one job: a split group has several parts, which share no rank."""
    return all(ranks == other or not ranks & other for other in known)


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


def _with_ranks(dumps: Sequence[Dump], problems: list[str]) -> Dumps:
    by_rank: dict[int, Dump] = {}
    unknown = []
    for dump in dumps:
        try:
            rank = _rank_of(dump)
        except ValueError as error:
            unknown.append(f"{printable(dump.path.name)} was left out: {error}")
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
        raise CannotTell("; ".join(unknown[:_MOST_SHOWN]))
    versions = sorted({dump.version for dump in by_rank.values()})
    libraries = sorted({dump.library for dump in by_rank.values()} - {""})
    for kind, several in (("the format has versions", versions), ("the library is", libraries)):
        if several[1:]:
            problems.append(f"ranks ran different software: {kind} {listed(several)}")
    return Dumps(by_rank=by_rank, world_size=_world_size(by_rank), problems=(*problems, *unknown))


def _rank_of(dump: Dump) -> int:
    """Return the rank whose dump it is.

    Raises:
        ValueError: neither its groups nor its name say it, or they contradict each other.
    """
    memberships = [set(group.ranks) for group in dump.groups.values() if group.ranks]
    possible = set.intersection(*memberships) if memberships else set()
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
    if rank >= MOST_RANKS:
        raise ValueError(f"its name says rank {rank}, and ranks are 0 to {MOST_RANKS - 1}")
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


def _file_list(dumps: Sequence[Dump]) -> str:
    names = [printable(dump.path.name) for dump in dumps[:_MOST_SHOWN]]
    more = len(dumps) - _MOST_SHOWN
    return listed([*names, *([plural(more, "more file")] if more > 0 else [])])


def _names(paths: Sequence[Path]) -> str:
    return listed([printable(str(path)) for path in paths[:_MOST_SHOWN]])
