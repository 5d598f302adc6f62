"""Profiles of torch.profiler (Kineto) as a run: the rank of each file, its steps and clock, and names for kernels.

RCCL has one kernel for all operations, so only the call, `record_param_comms`, says what it does. PyTorch gives a call
and all that it launches the same number; without one, a kernel is of the only call during which it was launched. What
was launched before the profile began has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.errors import TraceError, with_reasons
from hpcpace.core.text import NS_PER_S, format_duration, plural, rank_list
from hpcpace.metrics.clock_suspects import ClockBounds, collective_bounds
from hpcpace.metrics.operations import synchronises
from hpcpace.runs.imports.imported_run import (
    UNKNOWN_GROUP,
    UNKNOWN_HOST,
    Import,
    ImportedRank,
    Source,
    date_of,
    group_rows,
    headers_of,
    rows_of,
)
from hpcpace.runs.imports.input_files import InputFile
from hpcpace.runs.imports.kineto_profile import FREE_BYTES, Events, Profile, device_notes, read_profile
from hpcpace.runs.imports.kineto_rows import ProfileRows, first_ns, rows_of_profile, shift_times
from hpcpace.trace.schema import DEVICE_TABLES, NO_STEP, NUMBER_BITS, Op, TraceHeader

Int64Array = NDArray[np.int64]
_UNKNOWN = -1


def name_by_host(profile: Profile) -> None:
    """Make operations of the kernels of `unnamed` whose call is known, in place; kernels of one call are one operation.

    The others stay.
    """
    kernels, calls = profile.unnamed.rows.copy(), profile.comms.rows
    if not len(kernels) or not len(calls):
        return
    call = _by_number(kernels["external"], calls["external"])
    is_left = call == _UNKNOWN
    call[is_left] = _by_time(_launch_times(profile, kernels["link"][is_left]), calls)
    profile.unnamed = Events("begin_ns", "end_ns", "link", "external")
    for row in kernels[call == _UNKNOWN].tolist():
        profile.unnamed.add(*row)
    for number in np.unique(call[call != _UNKNOWN]).tolist():
        own, said = kernels[call == number], calls[number]
        first = own[own["begin_ns"].argmin()]
        group = profile.comms.group[number]
        profile.nccl.add_call(
            Op(int(said["op"])),
            int(first["begin_ns"]),
            int(own["end_ns"].max()),
            group=profile.nccl.group_name(group),
            seq=int(said["seq"]),
            size_bytes=int(said["size_bytes"]),
            link=int(first["link"]),
            peer=int(said["peer"]),
        )


def _by_number(of_kernels: Int64Array, of_calls: Int64Array) -> Int64Array:
    """Return the call with the number of each kernel, (num_kernels,); -1 where there is none, or several."""
    numbers, first, counts = np.unique(of_calls, return_index=True, return_counts=True)
    at = np.minimum(np.searchsorted(numbers, of_kernels), len(numbers) - 1)
    is_known = (numbers[at] == of_kernels) & (of_kernels != 0) & (counts[at] == 1)
    return np.where(is_known, first[at], _UNKNOWN)


def _by_time(launched_ns: Int64Array, calls: NDArray[Any]) -> Int64Array:
    """Return the only call that was going on at each time, (num_times,); -1 where there is none, or several."""
    order = np.argsort(calls["begin_ns"], kind="stable")
    begins, ends = calls["begin_ns"][order], np.sort(calls["end_ns"])
    num_begun = np.searchsorted(begins, launched_ns, side="right")
    num_open = num_begun - np.searchsorted(ends, launched_ns, side="left")
    last = order[np.maximum(num_begun - 1, 0)]
    is_known = (num_open == 1) & (calls["end_ns"][last] >= launched_ns)
    return np.where(is_known, last, _UNKNOWN)


def _launch_times(profile: Profile, link: Int64Array) -> Int64Array:
    """Return when the kernels with some correlations were launched; -1 where no launch is in the profile."""
    launches = profile.launches.rows
    if not len(launches):
        return np.full(len(link), -1)
    order = np.argsort(launches["link"], kind="stable")
    at = order[np.minimum(np.searchsorted(launches["link"][order], link), len(order) - 1)]
    return np.where((launches["link"][at] == link) & (link != 0), launches["time_ns"][at], -1)


TOOL = "torch.profiler (Kineto)"
_MAX_FILES = 16_384
# In sound profiles, an event has 20 bytes or more in gzip, and half of all events are kept, in 128 bytes each.
_MAX_GROWTH = 4
_SUFFIXES = (".json", ".json.gz")
_MAX_APART_NS = 60 * NS_PER_S
# Differences of differences of times, doubled, have to fit into 64 bits.
_MAX_SPAN_NS = 1 << 60
_MAX_NAMED = 3
_ENDS = (("steps", "end_ns"), ("phases", "end_ns"), ("collectives", "exit_ns"))


def import_kineto(paths: Sequence[Path], *, progress: Callable[[int, int], None] = lambda *_: None) -> Import:
    """Read profiles, one a rank.

    Args:
        paths: folders, and files.
        progress: takes how many bytes are read, of how many.

    Raises:
        TraceError: there is no profile, two are of one rank, or it cannot be said which rank one is.
    """
    files = _files(paths)
    problems: list[str] = []
    profiles: dict[int, Profile] = {}
    world_sizes: dict[int, Path] = {}
    total, before = sum(file.size_bytes for file in files), 0
    max_bytes = FREE_BYTES + _MAX_GROWTH * total
    for file in files:
        try:
            profile = read_profile(file, partial(_progress_of_all, progress, before, total), max_bytes=max_bytes)
        except TraceError as error:
            problems.append(f"{error}; it is left out")
            continue
        finally:
            before += file.size_bytes
        name_by_host(profile)
        problems += [profile.problem] if profile.problem else []
        rank = _rank_of(profile, is_only=len(files) == 1)
        if rank in profiles:
            raise TraceError(
                f"{file.path} and {profiles[rank].path} are both of rank {rank}: name one file of each rank"
                " (a schedule that repeats writes one a cycle)"
            )
        profiles[rank] = profile
        max_bytes -= profile.memory_bytes
        if profile.world_size is not None:
            world_sizes.setdefault(profile.world_size, file.path)
    if not profiles:
        raise TraceError(with_reasons("no profile can be used", problems))
    if len(world_sizes) > 1:
        said = [f"{size} ranks in {path.name}" for size, path in sorted(world_sizes.items())[:_MAX_NAMED]]
        more = ", ..." if len(world_sizes) > _MAX_NAMED else ""
        raise TraceError(f"profiles of different jobs ({', '.join(said)}{more}): name the files of one run")
    last_members = (max(members) for one in profiles.values() for members in one.groups.values())
    world_size = next(iter(world_sizes), max(*profiles, max(last_members, default=0), 0) + 1)
    if max(profiles) >= world_size:
        raise TraceError(f"rank {max(profiles)} is not one of {world_size} ranks: name the files of one run")
    sizes = {file.path: file.size_bytes for file in files}
    return _import(profiles, sizes, world_size, is_world_known=bool(world_sizes), problems=problems)


def _files(paths: Sequence[Path]) -> list[InputFile]:
    found: list[InputFile] = []
    for path in paths:
        before = len(found)
        found += InputFile.all_in(path, _SUFFIXES, max_files=_MAX_FILES) if path.is_dir() else [InputFile.at(path)]
        if len(found) == before:
            raise TraceError(f"{path} holds no {' or '.join(_SUFFIXES)}: name a folder of profiles")
        if len(found) > _MAX_FILES:
            raise TraceError(f"more than {_MAX_FILES} profiles: name those of fewer ranks")
    return found


def _progress_of_all(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    """Tell how much of all files is read, from what is read of one and what was before it."""
    progress(before + done, total)


def _rank_of(profile: Profile, *, is_only: bool) -> int:
    if profile.rank is not None:
        return profile.rank
    if is_only:
        return 0
    raise TraceError(
        f"{profile.path} does not say which rank it is: it has no distributedInfo, and its name no rank-N;"
        " rename the files, or profile after init_process_group"
    )


def _import(
    profiles: dict[int, Profile], sizes: dict[Path, int], world_size: int, *, is_world_known: bool, problems: list[str]
) -> Import:
    profiles = dict(sorted(profiles.items()))
    rebased = _with_bases(profiles)
    ranks = {}
    for rank, profile in profiles.items():
        try:
            ranks[rank] = rows_of_profile(profile)
        except TraceError as error:
            problems.append(f"{profile.path}: {error}; it is left out")
    if not ranks:
        raise TraceError(with_reasons("no profile can be used", problems))
    undated = _undated(ranks)
    for rank in undated:
        problems.append(f"{ranks.pop(rank).profile.path} does not say what its times count from; it is left out")
    _check_one_job(ranks)
    origin_ns = min((begin for begin, _ in _spans(ranks).values()), default=0)
    for one in ranks.values():  # from the begin of the run on, for a trace has no times of day
        shift_times(one.tables, NS_PER_S - origin_ns)
    notes = list(_notes(ranks, world_size, is_world_known=is_world_known))
    if rebased:
        notes.append(f"{rank_list(rebased)}: times count from where those of other files do, for the file does not say")
    numbered, unmatched = with_common_steps(ranks)
    ranks, aligned, contradicted = with_clocks(ranks)
    notes += [*numbered, *aligned]
    problems += [*unmatched, *contradicted]
    num_ungrouped = sum(one.num_ungrouped for one in ranks.values())
    if num_ungrouped:
        notes.append(f"{num_ungrouped} collectives match no other rank's: of which process group they are is not known")
    clocks = {rank: (one.profile.host or UNKNOWN_HOST, host_key(rank, one.profile)) for rank, one in ranks.items()}
    made = [_imported(header, ranks[header.rank]) for header in headers_of(clocks, world_size)]
    files = [(one.profile.path.name, sizes[one.profile.path]) for one in ranks.values()]
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
    for events in (profile.backward, profile.kernels, profile.nccl, profile.gloo):
        first += events.rows["begin_ns"][:1].tolist()
    return any(map(date_of, first))


def _spans(ranks: dict[int, ProfileRows]) -> dict[int, tuple[int, int]]:
    """Return the first and the last time of each rank that has any rows."""
    return {
        rank: (first_ns(one.tables), int(max(one.tables[table][name].max(initial=0) for table, name in _ENDS)))
        for rank, one in ranks.items()
        if any(len(one.tables[table]) for table, _ in _ENDS)
    }


def _undated(ranks: dict[int, ProfileRows]) -> list[int]:
    """Return ranks whose times are no dates where those of others are: nothing says how long before these they were."""
    is_date = {rank: bool(date_of(begin)) for rank, (begin, _) in _spans(ranks).items()}
    return [rank for rank in is_date if not is_date[rank] and any(is_date.values())]


def _check_one_job(ranks: dict[int, ProfileRows]) -> None:
    """Refuse ranks that ran at another time than the first one, where times are dates.

    Raises:
        TraceError: there is one.
    """
    spans = _spans(ranks)
    if not spans:
        return
    begin_ns, end_ns = min(begin for begin, _ in spans.values()), max(end for _, end in spans.values())
    if end_ns - begin_ns > _MAX_SPAN_NS:
        raise TraceError(
            f"the profiles have times that are {format_duration(end_ns - begin_ns)} apart: name the files of one run"
        )
    first = next(iter(spans))
    for rank, (begin_ns, end_ns) in spans.items():
        apart_ns = max(begin_ns - spans[first][1], spans[first][0] - end_ns)
        if date_of(begin_ns) and apart_ns > _MAX_APART_NS:
            raise TraceError(
                f"profiles of different jobs, or of hosts whose clocks are wrong: {ranks[rank].profile.path} and"
                f" {ranks[first].profile.path} are {format_duration(apart_ns)} apart; name the files of one run"
            )


def _imported(header: TraceHeader, one: ProfileRows) -> ImportedRank:
    profile, clock = one.profile, one.clock
    backend = profile.backend or ("nccl" if profile.has_device else "unknown")
    tables = {**one.tables, "groups": group_rows([(name, profile.groups[name]) for name in one.groups], backend)}
    if clock is not None:
        tables["clock"] = rows_of(
            "clock",
            ref_rank=one.reference,
            local_ns=clock.local_ns,
            offset_ns=clock.offset_ns,
            halfwidth_ns=clock.halfwidth_ns,
            count=clock.num_operations,
        )
    device = frozenset(DEVICE_TABLES) if profile.has_device else frozenset()
    return ImportedRank(header=header, tables=tables, device_tables=device)


_PHASE_WORDS = {0: "waits for data", 1: "phase forward", 2: "phase backward", 4: "phase optimizer"}


def _unknown(ranks: dict[int, ProfileRows]) -> list[str]:
    profiles = [one.profile for one in ranks.values()]
    phases = {int(phase) for one in ranks.values() for phase in one.tables["phases"]["phase"]}
    num_untimed, lost = sum(one.num_untimed for one in profiles), without_clock(ranks)
    is_known = {
        "hosts": all(profile.host for profile in profiles),
        "what devices did": all(one.shows_device for one in ranks.values() if one.profile.has_device),
        "network": False,
        "samples": False,
        "bytes of operations": any(one.tables["collectives"]["bytes"].any() for one in ranks.values()),
        "what the profiler itself costs": False,
        f"durations of {plural(num_untimed, 'event')}": not num_untimed,
        f"clocks of {rank_list(lost)}": not lost,
        **{words: code in phases for code, words in _PHASE_WORDS.items()},
    }
    return [what for what, is_one in is_known.items() if not is_one]


def _notes(ranks: dict[int, ProfileRows], world_size: int, *, is_world_known: bool) -> Iterator[str]:
    named = [rank for rank, one in ranks.items() if one.profile.is_rank_named]
    if named:
        yield f"{rank_list(named)}: the rank is that of the file's name, no distributedInfo says it"
    if not is_world_known:
        yield f"no file says how many ranks the job had: taken as {world_size}"
    for source in dict.fromkeys(one.step_source for one in ranks.values()):
        yield f"steps: {source}"
    if any(one.shows_device for one in ranks.values()):
        yield "on devices a phase ends when all kernels launched in it have ended"
    if any(one.profile.nccl for one in ranks.values()):
        yield "a collective holds the device for as long before its end as nothing else runs there"
    yield from device_notes([one.profile for one in ranks.values()])
    if any(one.profile.gloo for one in ranks.values()):
        yield "collectives of gloo begin with the call of c10d, and end by the next optimizer step at the latest"


Array = NDArray[Any]

_MAX_CONTRADICTION = 0.5  # of the half-width
_MAX_DRIFT = 0.01  # of a step
_MIN_OVERLAP, _MIN_OVERLAP_MOVED = 0.5, 0.9
_MAX_TRIED = 8
_MAX_STEP = (1 << 31) - 1


def host_key(rank: int, profile: Profile) -> str:
    """Return what is equal on ranks with one clock: those of a host that count from the same time."""
    return f"{profile.host} {profile.base_ns}" if profile.host else f"rank {rank}"


class _Numbered(NamedTuple):
    """The synchronising operations of a rank.

    Attributes:
        keys: group (a number that is the same on all ranks), operation and number, unique, (num_operations,).
        times_ns: enters and exits, (num_operations, 2).
        steps: the step of each, (num_operations,).
        has_numbers: whether numbers are recorded ones, which are of the whole job, and not of steps.
    """

    keys: Array
    times_ns: Array
    steps: Array
    has_numbers: bool


def with_common_steps(ranks: dict[int, ProfileRows]) -> tuple[list[str], list[str]]:
    """Number the steps of ranks with one clock alike, in place: those in which the same collectives took place.

    Returns:
        Which steps were numbered anew, and which collectives are of no step of the others.
    """
    numbered = _numbered_ranks(ranks)
    more: dict[int, int] = {}
    first_with: dict[tuple[str, int], int] = {}
    notes, problems = [], []
    for rank, one in ranks.items():
        host = host_key(rank, one.profile)
        places = [(host, group) for group in np.unique(numbered[rank].keys["group"]).tolist()]
        reference = min((first_with[place] for place in places if place in first_with), default=rank)
        is_apart = reference != rank and _are_apart(numbered[rank], numbered[reference])
        by = 0 if reference == rank or is_apart else _steps_apart(numbered[rank], numbered[reference])
        if is_apart:
            problems.append(
                f"{one.profile.path}: rank {rank} was recorded while rank {reference} was not, and shares none of its"
                " collectives; the two are not compared: name files of the same cycle of a schedule"
            )
        if by is None:
            _match_nothing(one)
            problems.append(
                f"{one.profile.path}: collectives of rank {rank} and rank {reference} do not overlap in time, whichever"
                " step is taken for which; nothing there is compared with others"
            )
            continue
        for place in places:
            first_with.setdefault(place, rank)
        more[rank] = by + more.get(reference, 0)
        if by:
            notes.append(
                f"steps of rank {rank} are numbered as those of rank {reference}, whose collectives took place at the"
                f" same times: by {abs(by)} {'higher' if by > 0 else 'lower'}"
            )
    steps = {rank: ranks[rank].tables["steps"]["step"] for rank in more}
    lowest = min((int(of_rank.min()) + more[rank] for rank, of_rank in steps.items() if len(of_rank)), default=0)
    highest = max((int(of_rank.max()) + more[rank] for rank, of_rank in steps.items() if len(of_rank)), default=0)
    if highest - min(lowest, 0) > _MAX_STEP:
        raise TraceError(
            f"the steps of the profiles would be numbered {min(lowest, 0)} to {highest}, and a trace has at most"
            f" {_MAX_STEP}: name the files of one run"
        )
    for rank, one in ranks.items():  # no number may be negative
        _add_to_steps(one, more.get(rank, 0) - min(lowest, 0))
    return notes, problems


def _are_apart(one: _Numbered, other: _Numbered) -> bool:
    """Return whether all collectives of one rank were over before those of another began, and none is one of them."""
    is_before = one.times_ns.max() < other.times_ns.min() or other.times_ns.max() < one.times_ns.min()
    return bool(is_before) and not len(_shared(one, other)[0])


def _steps_apart(one: _Numbered, other: _Numbered) -> int | None:
    """Return by how many steps the numbers of one must grow for its collectives to be another's.

    None where they share numbers, but not times: no rank leaves a collective before all have entered it, so what does
    not overlap is not one.
    """
    mine, theirs = _shared(one, other)
    if not one.has_numbers and not other.has_numbers:
        for by in (0, *_likely_steps_apart(one, other)):
            keys = one.keys.copy()
            keys["seq"] += by << NUMBER_BITS
            moved, at = _shared(one._replace(keys=keys), other)
            if len(moved) and _overlaps(one, other, moved, at).mean() >= (_MIN_OVERLAP_MOVED if by else _MIN_OVERLAP):
                return by
    elif len(mine) and _overlaps(one, other, mine, theirs).mean() >= _MIN_OVERLAP:
        has_steps = (one.steps[mine] != NO_STEP) & (other.steps[theirs] != NO_STEP)
        return next(iter(_most_frequent((other.steps[theirs] - one.steps[mine])[has_steps])), 0)
    return None if len(mine) else 0


def _overlaps(one: _Numbered, other: _Numbered, mine: Array, theirs: Array) -> Array:
    """Return which pairs of operations were under way at once."""
    own_ns, others_ns = one.times_ns[mine], other.times_ns[theirs]
    return (own_ns[:, 0] <= others_ns[:, 1]) & (others_ns[:, 0] <= own_ns[:, 1])


def _likely_steps_apart(one: _Numbered, other: _Numbered) -> list[int]:
    """Return by how many steps collectives of a kind differ that ended next to each other, the most frequent first."""
    apart = [np.zeros(0, np.int64)]
    of_one, of_other = _by_kind(one), _by_kind(other)
    for kind in of_one.keys() & of_other.keys():
        mine, theirs = of_one[kind], of_other[kind]
        ends = other.times_ns[theirs, 1]
        at = np.searchsorted(ends[:-1] + np.diff(ends) // 2, one.times_ns[mine, 1])
        apart.append((other.keys["seq"][theirs[at]] >> NUMBER_BITS) - (one.keys["seq"][mine] >> NUMBER_BITS))
    return [by for by in _most_frequent(np.concatenate(apart))[:_MAX_TRIED] if by]


def _by_kind(numbered: _Numbered) -> dict[tuple[int, int], Array]:
    """Return the indices of the operations of each group and kind, in the order of their ends."""
    group, op = numbered.keys["group"], numbered.keys["op"]
    order = np.lexsort((numbered.times_ns[:, 1], op, group))
    is_new = (np.diff(group[order]) != 0) | (np.diff(op[order]) != 0)
    parts = np.split(order, np.flatnonzero(is_new) + 1) if len(order) else []
    return {(int(group[part[0]]), int(op[part[0]])): part for part in parts}


def _most_frequent(values: Array) -> list[int]:
    """Return the different values, the most frequent first."""
    found, count = np.unique(values, return_counts=True)
    ordered: list[int] = found[np.argsort(-count, kind="stable")].tolist()
    return ordered


def _add_to_steps(rows: ProfileRows, by: int) -> None:
    """Add to numbers of steps, in place, and to those of operations that are numbered in them."""
    if not by:
        return
    for table in rows.tables.values():
        table["step"] = np.where(table["step"] != NO_STEP, table["step"] + by, NO_STEP)
    if not rows.has_numbers:
        rows.tables["collectives"]["seq"] += by << NUMBER_BITS


def with_clocks(ranks: dict[int, ProfileRows]) -> tuple[dict[int, ProfileRows], list[str], list[str]]:
    """Align ranks with the lowest one, by the collectives that they have in common.

    Returns:
        The ranks with their clocks, how these were aligned, and what is wrong with them.
    """
    first = min(ranks)
    keys = {rank: host_key(rank, one.profile) for rank, one in ranks.items()}
    if len(set(keys.values())) == 1:
        alone = len(ranks) == 1
        notes = [] if alone else ["all ranks are on one host and count from the same time: their clocks are one"]
        return ranks, notes, []
    numbered = _numbered_ranks(ranks)
    shortest = _shortest(list(numbered.values()))
    zero = np.zeros(1, np.int64)
    clocks: dict[int, ClockBounds | None] = {}
    for rank, one in ranks.items():
        if keys[rank] == keys[first]:
            times = one.tables["collectives"]["enter_ns"]
            local_ns = times[:1] if len(times) else zero
            clocks[rank] = ClockBounds(
                local_ns=local_ns, offset_ns=zero, halfwidth_ns=zero, contradiction_ns=0, num_operations=zero
            )
        else:
            own, others = _shared(numbered[rank], numbered[first])
            mine, theirs = numbered[rank].times_ns[own], numbered[first].times_ns[others]
            transfer_ns = shortest[1][np.searchsorted(shortest[0], numbered[rank].keys[own])]
            clocks[rank] = collective_bounds(mine[:, 0], mine[:, 1], theirs[:, 0], theirs[:, 1], transfer_ns)
    most_ns = _most_contradiction_ns(ranks[first])
    wrong = {rank: clock for rank, clock in clocks.items() if clock is not None and _is_wrong(clock, most_ns)}
    found = {
        rank: replace(one, clock=None if rank in wrong else clocks[rank], reference=first)
        for rank, one in ranks.items()
    }
    for rank in wrong:
        _match_nothing(ranks[rank])
    notes = list(_clock_notes([one.clock for rank, one in found.items() if keys[rank] != keys[first]]))
    if lost := [rank for rank, clock in clocks.items() if clock is None]:
        notes.append(
            f"{rank_list(lost)} shares no collective with rank {first}: times there are not compared with others"
        )
    problems = [
        f"{ranks[rank].profile.path}: collectives of rank {rank} and rank {first} contradict each other by"
        f" {format_duration(clock.contradiction_ns)}; nothing there is compared with others, for the file is of another"
        " run, or its clock drifts"
        for rank, clock in wrong.items()
    ]
    return found, notes, problems


def without_clock(ranks: dict[int, ProfileRows]) -> list[int]:
    """Return the ranks whose clock nothing says."""
    has_clocks = any(one.clock is not None for one in ranks.values())
    return [rank for rank, one in ranks.items() if has_clocks and one.clock is None]


def _most_contradiction_ns(one: ProfileRows) -> float:
    """Return by how much bounds may contradict each other by drift that matters to no step."""
    steps = one.tables["steps"]
    return _MAX_DRIFT * float(np.median(steps["end_ns"] - steps["begin_ns"])) if len(steps) else 0.0


def _match_nothing(one: ProfileRows) -> None:
    """Take the operations of a rank as those of an unknown group, in place: they are not those of other ranks."""
    one.tables["collectives"]["group"] = UNKNOWN_GROUP


def _is_wrong(clock: ClockBounds, least_ns: float) -> bool:
    return clock.contradiction_ns > max(least_ns, _MAX_CONTRADICTION * float(np.median(clock.halfwidth_ns)))


def _clock_notes(clocks: Sequence[ClockBounds | None]) -> Iterator[str]:
    known = [clock for clock in clocks if clock is not None]
    if not known:
        return
    widths = [int(np.median(clock.halfwidth_ns)) for clock in known]
    span = [format_duration(width) for width in (min(widths), max(widths))]
    yield (
        "clocks are aligned by collectives, which ranks leave together, and none before the last has entered:"
        f" to within {' to '.join(dict.fromkeys(span))}"
    )
    worst = max(clock.contradiction_ns for clock in known)
    if worst:
        yield f"collectives contradict each other by up to {format_duration(worst)}: clocks drift"


def _shared(one: _Numbered, other: _Numbered) -> tuple[Array, Array]:
    """Return the indices, (n,) each, of the operations that two ranks have in common."""
    _, own, others = np.intersect1d(one.keys, other.keys, assume_unique=True, return_indices=True)
    return own, others


def _shortest(ranks: Sequence[_Numbered]) -> tuple[Array, Array]:
    """Return the keys of the operations of all ranks, unique, and the shortest time that a rank was in each."""
    keys, inverse = np.unique(np.concatenate([one.keys for one in ranks]), return_inverse=True)
    shortest = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(shortest, inverse, np.concatenate([one.times_ns[:, 1] - one.times_ns[:, 0] for one in ranks]))
    return keys, shortest


def _numbered_ranks(ranks: dict[int, ProfileRows]) -> dict[int, _Numbered]:
    numbers: dict[tuple[str, int, int], int] = {}
    return {rank: _numbered(one, numbers) for rank, one in ranks.items()}


def _numbered(one: ProfileRows, numbers: dict[tuple[str, int, int], int]) -> _Numbered:
    """Return the operations of a rank; `numbers` has those of the groups of all ranks, and takes new ones."""
    rows = one.tables["collectives"]
    rows = rows[synchronises(rows["op"]) & (rows["group"] != UNKNOWN_GROUP)]
    groups = one.profile.groups  # of which those of the same name may be others on other ranks
    facts = [(name, min(groups[name]), len(groups[name])) for name in one.groups]
    number = np.array([numbers.setdefault(group, len(numbers)) for group in facts] or [0], np.int64)
    keys = np.empty(len(rows), np.dtype([("group", "i8"), ("op", "u1"), ("seq", "i8")]))
    keys["group"], keys["op"], keys["seq"] = number[rows["group"]], rows["op"], rows["seq"]
    unique, first = np.unique(keys, return_index=True)
    times_ns = np.stack([rows["enter_ns"], rows["exit_ns"]], axis=1)[first]
    steps = rows["step"].astype(np.int64)[first]
    return _Numbered(keys=unique, times_ns=times_ns, steps=steps, has_numbers=one.has_numbers)
