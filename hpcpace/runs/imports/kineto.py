"""Profiles of torch.profiler (Kineto) as a run: which rank each file is, and how their clocks go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from hpcpace.errors import TraceError
from hpcpace.metrics.clocks.collective_bounds import ClockBounds, collective_bounds
from hpcpace.metrics.operations.dependence import synchronises
from hpcpace.runs.imports.imported_run import UNKNOWN_GROUP, Import, ImportedRank, Rows, Source, date_of, rows_of
from hpcpace.runs.imports.kineto_profile import Profile, read_profile, unnamed_note
from hpcpace.runs.imports.kineto_rows import ProfileRows, first_ns, rows_of_profile, shift_times
from hpcpace.runs.imports.opened import size_of
from hpcpace.trace.schema import DEVICE_TABLES, TraceHeader
from hpcpace.units import NS_PER_S, format_duration
from hpcpace.wording import rank_list

TOOL = "torch.profiler (Kineto)"
UNKNOWN_HOST = "unknown"
_MOST_FILES = 16_384
_SUFFIXES = (".json", ".json.gz")
_ENDS = (("steps", "end_ns"), ("phases", "end_ns"), ("collectives", "exit_ns"))


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A profile, its rows, and its clock."""

    profile: Profile
    rows: ProfileRows
    clock: ClockBounds | None = None
    reference: int = 0


def import_kineto(paths: Sequence[Path], *, told: Callable[[int, int], None] = lambda *_: None) -> Import:
    """Read profiles, one a rank.

    Args:
        paths: folders, and files.
        told: takes how many bytes are read, of how many.

    Raises:
        TraceError: there is no profile, two are of one rank, or it cannot be said which rank one is.
    """
    files = list(_files(paths))
    problems: list[str] = []
    profiles: dict[int, Profile] = {}
    world_sizes: dict[int, Path] = {}
    total, before = sum(size_of(path) for path in files), 0
    for path in files:
        try:
            profile = read_profile(path, partial(_told_of_all, told, before, total))
        except TraceError as error:
            problems.append(f"{error}; it is left out")
            continue
        finally:
            before += size_of(path)
        problems += [profile.problem] if profile.problem else []
        rank = _rank_of(profile, is_only=len(files) == 1)
        if rank in profiles:
            raise TraceError(
                f"{path} and {profiles[rank].path} are both of rank {rank}: name one file of each rank"
                " (a schedule that repeats writes one a cycle)"
            )
        profiles[rank] = profile
        if profile.world_size is not None:
            world_sizes.setdefault(profile.world_size, path)
    if not profiles:
        raise TraceError(f"no profile can be used: {'; '.join(problems[:3])}")
    if len(world_sizes) > 1:
        said = ", ".join(f"{size} ranks in {path.name}" for size, path in sorted(world_sizes.items()))
        raise TraceError(f"profiles of different jobs ({said}): name the files of one run")
    world_size = next(iter(world_sizes), max(profiles) + 1)
    if max(profiles) >= world_size:
        raise TraceError(f"rank {max(profiles)} is not one of {world_size} ranks: name the files of one run")
    return _import(profiles, world_size, is_world_known=bool(world_sizes), problems=problems)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    num_files = 0
    for path in paths:
        found = [path]
        if path.is_dir():
            found = sorted(one for one in path.iterdir() if one.name.endswith(_SUFFIXES) and one.is_file())
            if not found:
                raise TraceError(f"{path} holds no {' or '.join(_SUFFIXES)}: name a folder of profiles")
        num_files += len(found)
        if num_files > _MOST_FILES:
            raise TraceError(f"more than {_MOST_FILES} profiles: name those of fewer ranks")
        yield from found


def _told_of_all(told: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    """Tell how much of all files is read, from what is read of one and what was before it."""
    told(before + done, total)


def _rank_of(profile: Profile, *, is_only: bool) -> int:
    if profile.rank is not None:
        return profile.rank
    if is_only:
        return 0
    raise TraceError(
        f"{profile.path} does not say which rank it is: it has no distributedInfo, and its name no rank-N;"
        " rename the files, or profile after init_process_group"
    )


def _import(profiles: dict[int, Profile], world_size: int, *, is_world_known: bool, problems: list[str]) -> Import:
    profiles = dict(sorted(profiles.items()))
    rebased = _with_bases(profiles)
    ranks = {rank: _Rank(profile=one, rows=rows_of_profile(one)) for rank, one in profiles.items()}
    undated = _undated(ranks)
    for rank in undated:
        problems.append(f"{ranks.pop(rank).profile.path} does not say what its times count from; it is left out")
    origin_ns = min((begin for begin, _ in _spans(ranks).values()), default=0)
    for one in ranks.values():  # from the begin of the run on, for a trace has no times of day
        shift_times(one.rows.tables, NS_PER_S - origin_ns)
    notes = list(_notes(ranks, world_size, is_world_known=is_world_known))
    if rebased:
        notes.append(f"{rank_list(rebased)}: times count from where those of other files do, for the file does not say")
    ranks, said = _with_clocks(ranks)
    notes += said
    num_ungrouped = sum(one.rows.num_ungrouped for one in ranks.values())
    if num_ungrouped:
        notes.append(f"{num_ungrouped} collectives match no other rank's: no file says of which process group they are")
    hosts = {host: place for place, host in enumerate(dict.fromkeys(_host(one.profile) for one in ranks.values()))}
    made = [_imported(rank, one, world_size, hosts, ranks) for rank, one in ranks.items()]
    files = [(one.profile.path.name, size_of(one.profile.path)) for one in ranks.values()]
    source = Source(tool=TOOL, files=files, unknown=_unknown(ranks), notes=notes, begun_unix_ns=date_of(origin_ns))
    return Import(source=source, ranks=made, problems=problems)


def _with_bases(profiles: dict[int, Profile]) -> list[int]:
    """Give profiles that do not say what their times count from the base of their host, else of any; return which."""
    bases = {one.host: one.base_ns for one in reversed(profiles.values()) if one.base_ns}
    any_base_ns = next((one.base_ns for one in profiles.values() if one.base_ns), 0)
    given = []
    for rank, one in profiles.items():
        if any_base_ns and not one.base_ns and not _has_dates(one):
            one.base_ns = bases.get(one.host, any_base_ns)
            given.append(rank)
    return given


def _has_dates(profile: Profile) -> bool:
    """Return whether a profile's times count from 1970, as those of old versions do."""
    first = [begin for _, begin, _ in (*profile.steps[:1], *profile.marks[:1])]
    columns = (profile.backward[0], profile.kernels[0], profile.nccl.begin_ns, profile.gloo.begin_ns)
    return any(date_of(begin) for begin in (*first, *(column[0] for column in columns if column)))


def _spans(ranks: dict[int, _Rank]) -> dict[int, tuple[int, int]]:
    """Return the first and the last time of each rank that has any rows."""
    spans = {}
    for rank, one in ranks.items():
        tables = one.rows.tables
        lasts = [tables[table][name].max() for table, name in _ENDS if len(tables[table])]
        if lasts:
            spans[rank] = (first_ns(tables), int(max(lasts)))
    return spans


def _undated(ranks: dict[int, _Rank]) -> list[int]:
    """Return ranks whose times are no dates where those of others are: nothing says how long before these they were."""
    is_date = {rank: bool(date_of(begin)) for rank, (begin, _) in _spans(ranks).items()}
    return [rank for rank, is_one in is_date.items() if not is_one] if any(is_date.values()) else []


def _imported(rank: int, one: _Rank, world_size: int, hosts: dict[str, int], ranks: dict[int, _Rank]) -> ImportedRank:
    host = _host(one.profile)
    of_host = [other for other, that in ranks.items() if _host(that.profile) == host]
    header = TraceHeader(
        run_id="",
        attempt=0,
        rank=rank,
        world_size=world_size,
        local_rank=of_host.index(rank),
        local_size=len(of_host),
        node=hosts[host],
        host=host,
        host_key=_host_key(rank, one.profile),
    )
    groups = [
        rows_of(
            "groups", id=place, rank=list(one.profile.groups[name]), name=name.encode(), backend=_backend(one.profile)
        )
        for place, name in enumerate(one.rows.groups)
    ]
    tables = {**one.rows.tables, "groups": np.concatenate([rows_of("groups", id=np.zeros(0)), *groups])}
    if one.clock is not None:
        tables["clock"] = _clock_rows(one)
    device = frozenset(DEVICE_TABLES) if one.profile.has_device else frozenset()
    return ImportedRank(header=header, tables=tables, device_tables=device)


def _clock_rows(one: _Rank) -> Rows:
    clock = one.clock
    assert clock is not None
    return rows_of(
        "clock",
        ref_rank=one.reference,
        local_ns=clock.local_ns,
        offset_ns=clock.offset_ns,
        halfwidth_ns=clock.halfwidth_ns,
        count=clock.num_operations,
    )


def _host(profile: Profile) -> str:
    return profile.host or UNKNOWN_HOST


def _host_key(rank: int, profile: Profile) -> str:
    """Return what is equal on ranks with one clock: those of a host that count from the same time."""
    return f"{profile.host} {profile.base_ns}" if profile.host else f"rank {rank}"


def _backend(profile: Profile) -> bytes:
    return (profile.backend or ("nccl" if profile.has_device else "unknown")).encode()[:16]


def _with_clocks(ranks: dict[int, _Rank]) -> tuple[dict[int, _Rank], list[str]]:
    """Return ranks with their clocks against that of the lowest one, from the collectives that they have in common."""
    first = min(ranks)
    keys = {rank: _host_key(rank, one.profile) for rank, one in ranks.items()}
    if len(set(keys.values())) == 1:
        alone = len(ranks) == 1
        return ranks, [] if alone else ["all ranks are on one host and count from the same time: their clocks are one"]
    numbered = {rank: _numbered(one) for rank, one in ranks.items()}
    found, said = dict(ranks), []
    zero = np.zeros(1, np.int64)
    for rank, one in ranks.items():
        if keys[rank] == keys[first]:
            times = one.rows.tables["collectives"]["enter_ns"]
            local_ns = times[:1] if len(times) else zero
            clock = ClockBounds(
                local_ns=local_ns, offset_ns=zero, halfwidth_ns=zero, contradiction_ns=0, num_operations=zero
            )
            found[rank] = replace(one, clock=clock, reference=first)
            continue
        shared, own, of_first = np.intersect1d(
            numbered[rank][0], numbered[first][0], assume_unique=True, return_indices=True
        )
        mine, theirs = (numbered[each][1][at] for each, at in ((rank, own), (first, of_first)))
        bounds = collective_bounds(mine[:, 0], mine[:, 1], theirs[:, 0], theirs[:, 1]) if len(shared) else None
        found[rank] = replace(one, clock=bounds, reference=first)
    others = [one.clock for rank, one in found.items() if rank != first and one.clock is not None]
    widths = [int(np.median(clock.halfwidth_ns)) for clock in others]
    if widths:
        said.append(
            f"clocks are aligned by collectives, none of which a rank leaves before the last has entered:"
            f" to within {format_duration(min(widths))} to {format_duration(max(widths))}"
        )
    worst = max((clock.contradiction_ns for clock in others), default=0)
    if worst:
        said.append(
            f"collectives contradict each other by up to {format_duration(worst)}:"
            " clocks drift, or a file is of another run"
        )
    lost = [rank for rank, one in found.items() if one.clock is None]
    if lost:
        said.append(
            f"{rank_list(lost)} shares no collective with rank {first}: times there are not compared with others"
        )
    return found, said


def _numbered(one: _Rank) -> tuple[np.ndarray, np.ndarray]:
    """Return the synchronising operations of a rank: an array of keys, unique, and their enters and exits, (n, 2)."""
    rows = one.rows.tables["collectives"]
    rows = rows[synchronises(rows["op"]) & (rows["group"] != UNKNOWN_GROUP)]
    names = np.array([str(name) for name in one.rows.groups] or [""])
    keys = np.empty(len(rows), np.dtype([("group", "U64"), ("op", "u1"), ("seq", "i8")]))
    keys["group"], keys["op"], keys["seq"] = names[rows["group"]], rows["op"], rows["seq"]
    unique, first = np.unique(keys, return_index=True)
    return unique, np.stack([rows["enter_ns"], rows["exit_ns"]], axis=1)[first]


def _unknown(ranks: dict[int, _Rank]) -> list[str]:
    profiles = [one.profile for one in ranks.values()]
    phases = {int(phase) for one in ranks.values() for phase in one.rows.tables["phases"]["phase"]}
    names = {0: "waits for data", 1: "forward", 2: "backward", 4: "optimizer"}
    missing = [name for code, name in names.items() if code not in phases]
    return [
        *([] if all(profile.host for profile in profiles) else ["hosts"]),
        *([] if all(profile.shows_device for profile in profiles if profile.has_device) else ["what devices did"]),
        "network",
        "samples",
        *(
            []
            if any(one.rows.tables["collectives"]["bytes"].any() for one in ranks.values())
            else ["bytes of operations"]
        ),
        "what the profiler itself costs",
        *(f"phase {name}" if name != "waits for data" else name for name in missing),
    ]


def _notes(ranks: dict[int, _Rank], world_size: int, *, is_world_known: bool) -> Iterator[str]:
    named = [rank for rank, one in ranks.items() if one.profile.is_rank_named]
    if named:
        yield f"{rank_list(named)}: the rank is that of the file's name, no distributedInfo says it"
    if not is_world_known:
        yield f"no file says how many ranks the job had: taken as {world_size}"
    for source in dict.fromkeys(one.rows.step_source for one in ranks.values()):
        yield f"steps: {source}"
    if any(one.profile.shows_device for one in ranks.values()):
        yield "on devices a phase ends when all kernels launched in it have ended"
    if any(one.profile.nccl.op for one in ranks.values()):
        yield "a collective holds the device for as long before its end as nothing else runs there"
    if unnamed := unnamed_note(sum(one.profile.num_unnamed for one in ranks.values())):
        yield unnamed
    if any(one.profile.gloo.op for one in ranks.values()):
        yield "collectives of gloo begin with the call of c10d, and end by the next optimizer step at the latest"
