"""Reports of NCCL's RAS, as JSON or as text: a second witness of a hang, or the only one.

`ncclras -f json` prints them from NCCL 2.28.7 on (src/ras/client_support.cc); `ras_text` reads what older ones print.
Up to 2.28.9 a comma is missing behind the device of a rank that does not answer; that comma alone is put in. RAS counts
ranks by communicator. Global ranks are those of a communicator of all ranks, and others are known by host and process
from there.

RAS counts what each rank has launched, by kind of operation, and not what has finished. Kinds whose counts agree on all
ranks say nothing about who is behind; the sum of the others is the place of a rank in the order of its communicator.

The text names outliers alone (src/ras/client_support.cc, `rasCountIsOutlier`): with how many operations most ranks are,
it says as a number of ranks. If it leaves one such number without names, all others are these ranks; if it leaves more,
nobody can tell who is who, and `ncclras -v` would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hpcpace.core.codec import convert
from hpcpace.core.errors import TraceError
from hpcpace.core.files import read_file
from hpcpace.core.log_text import plain_text
from hpcpace.core.records import dataclass
from hpcpace.core.text import listed, plural, printable, rank_list, shortened
from hpcpace.hang.views import Call, Channel, GroupView, JobView, RankView
from hpcpace.runs.imports.input_files import Name, WholeNumber, json_value

_JSON = re.compile(rb"\s*(\{|\[\s*[\[{\]]|\Z)")  # a log may begin with `[` as well
_MAX_BYTES = 64 << 20
MAX_RANKS = 1 << 20
_MAX_OPS = 32
"""Operations that ranks of a communicator count; NCCL has a dozen."""
_MAX_LINES = 6
_MAX_COUNTS = 4
_MISSING_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s*"status":)')
_DEAD = "dead according to NCCL RAS"


class RasProcess(msgspec.Struct, frozen=True):
    """A rank of a communicator."""

    rank: Annotated[int, Meta(ge=0, le=MAX_RANKS)]
    host: Name
    pid: Annotated[int, Meta(ge=-1, le=1 << 32)]

    @property
    def process(self) -> tuple[str, int]:
        """What is the same for one process in all communicators."""
        return self.host, self.pid


class RasRank(RasProcess, frozen=True):
    """A rank that answers, and how often it called each operation."""

    collective_counts: Annotated[dict[str, WholeNumber], Meta(max_length=_MAX_OPS)]


class RasStatus(msgspec.Struct, frozen=True):
    """Whether RAS takes a rank for dead."""

    considered_dead: bool = False


class RasMissingRank(RasProcess, frozen=True):
    """A rank that does not answer."""

    status: RasStatus


class RasCommunicator(msgspec.Struct, frozen=True):
    """A communicator with its ranks, and what a text says of it that is not said of single ranks."""

    size: Annotated[int, Meta(ge=0, le=MAX_RANKS)]
    ranks: tuple[RasRank, ...]
    missing_ranks: tuple[RasMissingRank, ...]
    hash: Name = ""
    notes: tuple[str, ...] = ()


class RasReport(msgspec.Struct, frozen=True):
    """A report of RAS by a version of NCCL. Only text has `num_gpus` of the job."""

    nccl_version: Name
    communicators: tuple[RasCommunicator, ...]
    num_gpus: int = 0

    @property
    def is_json(self) -> bool:
        """Whether it was JSON."""
        return not self.num_gpus


def read_ras(path: Path) -> RasReport:
    """Read a report of RAS.

    Raises:
        TraceError: it cannot be read, or is none.
    """
    try:
        data = read_file(path, most_bytes=_MAX_BYTES)
        is_json = _JSON.match(data) is not None
        content = json_value(_MISSING_COMMA.sub(rb"\1,\2", data)) if is_json else read_ras_text(data)
        report = convert(content, RasReport)
        for communicator in report.communicators:
            if len({op for one in communicator.ranks for op in one.collective_counts}) > _MAX_OPS:
                raise ValueError(f"a communicator has more than {_MAX_OPS} operations")
        return report
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TraceError(
            f"{path} is no report of NCCL RAS ({printable(str(error))[:160]}); write one with ncclras -f json"
        ) from error


def with_witness(job: JobView, ras: RasReport) -> tuple[JobView, tuple[str, ...]]:
    """Return what is known of a job with what RAS saw, and that in words.

    A process that RAS considers dead has gone. Its counts are shown but decide nothing: they do not say which operation
    of a communicator a rank is in.
    """
    size = len(job.ranks)
    world = next((one for one in ras.communicators if one.size == size and (one.ranks or one.missing_ranks)), None)
    if world is None:
        return job, (f"NCCL RAS has no communicator of all {size} ranks, so that its ranks are not known here",)
    dead: set[int] = set()
    silent: set[int] = set()
    lines: list[str] = []
    for communicator in ras.communicators:
        ranks_of = _global_ranks(communicator, world)
        for one in communicator.missing_ranks:
            if one.rank in ranks_of:
                (dead if one.status.considered_dead else silent).add(ranks_of[one.rank])
        lines += _behind(communicator, ranks_of)
    by = f"NCCL RAS ({shortened(ras.nccl_version, max_letters=20)})"
    ranks = {rank: _dead_view(view) if rank in dead else view for rank, view in job.ranks.items()}
    told = [
        *([f"{by} considers {rank_list(sorted(dead))} dead"] if dead else []),
        *([f"{by} gets no answer of {rank_list(sorted(silent - dead))}"] if silent - dead else []),
        *list(dict.fromkeys(lines))[:_MAX_LINES],
    ]
    if not told and not any(one.notes for one in ras.communicators) and next(unmapped(ras), None) is None:
        told = [f"{by}: all ranks answer, and have called equally many operations"]
    return replace(job, ranks=ranks), tuple(told)


def world_communicator(ras: RasReport) -> RasCommunicator | None:
    """Return the first communicator of all ranks; None where the largest one is not known to be one."""
    size = max((one.size for one in ras.communicators), default=0)
    widest = [one for one in ras.communicators if one.size == size and (one.ranks or one.missing_ranks)]
    processes = {
        each.process for one in ras.communicators for each in (*one.ranks, *one.missing_ranks) if each.pid >= 0
    }
    return widest[0] if widest and size >= max(len(processes), ras.num_gpus) else None


def _global_ranks(communicator: RasCommunicator, world: RasCommunicator) -> dict[int, int]:
    """Return the global rank of each rank of a communicator: by its process, or as it is in one of all ranks."""
    of_process = {one.process: one.rank for one in (*world.ranks, *world.missing_ranks) if one.pid >= 0}
    found = {}
    for one in (*communicator.ranks, *communicator.missing_ranks):
        if one.pid >= 0 and one.process in of_process:
            found[one.rank] = of_process[one.process]
        elif communicator.size == world.size and one.rank < world.size:
            found[one.rank] = one.rank
    return found


def _dead_view(view: RankView) -> RankView:
    """Return a rank that RAS considers dead."""
    if view.is_recorded:
        return replace(view, is_gone=True, end=view.end or _DEAD)
    return replace(view, is_recorded=True, is_complete=False, is_gone=True, end=_DEAD)


def _behind(communicator: RasCommunicator, ranks_of: Mapping[int, int]) -> Iterator[str]:
    """Yield how often ranks of a communicator have called each operation that they called differently often."""
    present = [one for one in communicator.ranks if one.rank in ranks_of]
    for op in sorted({op for one in present for op in one.collective_counts}):
        by_count: dict[int, list[int]] = {}
        for one in present:
            by_count.setdefault(one.collective_counts.get(op, 0), []).append(ranks_of[one.rank])
        if len(by_count) > 1:
            said = [f"{rank_list(sorted(ranks))} {count} times" for count, ranks in sorted(by_count.items())]
            more = [f"others up to {max(by_count)} times"] if said[_MAX_COUNTS:] else []
            yield (
                f"NCCL RAS: in a communicator of {communicator.size} ranks, {shortened(op, max_letters=40)} was called"
                f" by {listed([*said[:_MAX_COUNTS], *more])}"
            )


_SOURCE = "NCCL RAS"
_OPS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AlltoAll": "all_to_all",
    "Scatter": "scatter",
    "Gather": "gather",
}
_NOT_WHICH = "NCCL RAS reports differences, but not which ranks differ"
# Messages: their numbers differ between ranks that are all well.
_UNORDERED = frozenset({"Send", "Recv", "SendRecv", "PutSignal", "Signal", "WaitSignal"})


def ras_job(ras: RasReport) -> tuple[JobView | None, str]:
    """Return what a report alone shows of a job, and why it shows no more where it does not show who is behind.

    The job is None where global ranks are not known.
    """
    world = world_communicator(ras)
    if world is None and any(one.notes for one in ras.communicators):
        return None, _NOT_WHICH
    if world is None:
        return None, "NCCL RAS has no communicator of all ranks, so that global ranks are not known"
    views = {rank: RankView(rank=rank, is_recorded=False) for rank in range(world.size)}
    for one in (each for each in world.ranks if each.rank in views):
        views[one.rank] = RankView(rank=one.rank, host=one.host)
    groups: list[GroupView] = []
    for communicator in ras.communicators:
        of_rank = _global_ranks(communicator, world)
        if communicator.size == world.size:
            of_rank = {rank: rank for rank in range(world.size)} | of_rank
        if len(of_rank) < communicator.size:
            continue  # who is in it is not known: see `unmapped`
        members = tuple(rank for _, rank in sorted(of_rank.items()))
        groups.append(GroupView(name=communicator.hash.removeprefix("0x")[:16] or "world", members=members))
        _add(views, communicator, of_rank, Channel(len(groups) - 1))
    for lost in world.missing_ranks:
        if lost.status.considered_dead and lost.rank in views:
            views[lost.rank] = _dead_view(views[lost.rank])
    job = JobView(groups=tuple(groups), ranks=views, now_ns=0, source=_SOURCE)
    if any(call.is_open for view in views.values() for call in view.calls):
        return job, ""
    if any(one.notes for one in ras.communicators):
        return job, _NOT_WHICH
    if next(unmapped(ras), None) is not None:
        return (
            job,
            "NCCL RAS names the ranks of a communicator that differs by host and process, not by their global rank",
        )
    return job, "NCCL RAS reports the same counts for all ranks, so no rank is behind"


def _add(
    views: dict[int, RankView], communicator: RasCommunicator, of_rank: Mapping[int, int], channel: Channel
) -> None:
    """Add what the ranks of a communicator have launched."""
    counts = {of_rank[one.rank]: _ordered(one.collective_counts) for one in communicator.ranks if one.rank in of_rank}
    ops = sorted({op for counted in counts.values() for op in counted})
    least = {op: min(counted.get(op, 0) for counted in counts.values()) for op in ops}
    differing = [op for op in ops if any(counted.get(op, 0) != least[op] for counted in counts.values())]
    sums = {rank: sum(counted.get(op, 0) for op in differing) for rank, counted in counts.items()}
    lowest, highest = min(sums.values(), default=0), max(sums.values(), default=0)
    is_waited_for = bool(communicator.missing_ranks)
    for rank, counted in counts.items():
        ahead = [op for op in differing if counted.get(op, 0) > least[op]]
        is_ahead = sums[rank] > lowest or (bool(differing) and lowest == highest)
        calls = (
            [_call(channel, sums[rank], max(ahead, key=lambda op: counted[op] - least[op]) if ahead else "")]
            if is_ahead or (is_waited_for and sums[rank] == highest)
            else []
        )
        before = views[rank]
        views[rank] = RankView(
            rank=rank,
            host=before.host,
            entered={**before.entered, channel: sums[rank] + 1},
            completed={**before.completed, channel: lowest},
            calls=(*before.calls, *calls),
        )


def _ordered(counts: Mapping[str, int]) -> dict[str, int]:
    return {op: count for op, count in counts.items() if op not in _UNORDERED}


def _call(channel: Channel, number: int, op: str) -> Call:
    return Call(
        channel=channel, seq=number, op=_OPS.get(op, op.lower() or "collective"), is_open=True, is_numbered=bool(op)
    )


def notes_of(communicators: Sequence[RasCommunicator]) -> Iterator[str]:
    """Yield what a text says of communicators without naming all ranks."""
    for one in communicators:
        yield from (f"NCCL RAS: communicator {one.hash} of {plural(one.size, 'rank')}: {note}" for note in one.notes)


def unmapped(ras: RasReport) -> Iterator[str]:
    """Yield who is behind, by process and host, in communicators of which global ranks are not known."""
    world = world_communicator(ras)
    for one in ras.communicators:
        if world is not None and (one.size == world.size or len(_global_ranks(one, world)) == one.size):
            continue
        for lost in (each for each in one.missing_ranks if each.pid >= 0):
            dead = ", which it takes for dead" if lost.status.considered_dead else ""
            yield (
                f"NCCL RAS: in communicator {one.hash.removeprefix('0x')[:16]}, it has no data of rank {lost.rank}"
                f" (process {lost.pid} on {lost.host}){dead}"
            )
        counted = {each.rank: _ordered(each.collective_counts) for each in one.ranks}
        for op in sorted({op for counts in counted.values() for op in counts}):
            levels: dict[int, list[int]] = {}
            for rank, counts in counted.items():
                levels.setdefault(counts.get(op, 0), []).append(rank)
            if len(levels) > 1:
                least = min(levels)
                hosts = {each.rank: f"process {each.pid} on {each.host}" for each in one.ranks if each.pid >= 0}
                behind = levels[least]
                where = f" ({hosts[behind[0]]})" if len(behind) == 1 and behind[0] in hosts else ""
                yield (
                    f"NCCL RAS: in communicator {one.hash.removeprefix('0x')[:16]}, its {rank_list(sorted(behind))}"
                    f"{where} launched {op} {least} times, others {max(levels)} times"
                )


# memory: of one report, all listed ranks and groups; a job of 16,384 ranks with verbose output has 5 lines a rank
_MAX_TEXT_LINES = 1 << 20
_MAX_COMMUNICATORS = 1 << 12
_MAX_GROUPS = 1 << 12
_MAX_SIZE = 1 << 20
_BEGIN = re.compile(r"^(.{0,120}?)Job summary\s*$", re.MULTILINE)
_TITLE = re.compile(r"#(\d{1,6})-(\d{1,6}) \(([0-9a-f]{1,32})\) ([A-Z]+)")
_GROUP = re.compile(r"(\d{1,6}) +(\d{1,7}) +(\d{1,7}) +([\d-]{1,15}) +(\d{1,7}) +([\d-]{1,15}) +([A-Z,]+) +([A-Z,]+)")
_COUNTS = re.compile(r"Communicator ranks have different (\w{1,40}) operation counts")
_LEVEL = re.compile(r"(\d{1,7}) ranks? ha(?:ve|s) (?:launched up to operation (\d{1,18})|not launched any operations)")
_LISTED = re.compile(
    r"Rank (\d{1,7})(?: has (?:launched up to operation (\d{1,18})|not launched any operations|status \w+))? -- "
    r"(?:GPU \S+ managed by process (\d{1,10}) on node (\S{1,200})|\[process information not found\])"
)
_STATUS = re.compile(r"(?:Rank (\d{1,7}) has|(\d{1,7}) ranks have) status ([A-Z]+)")
_LOST = re.compile(r"Process (\d{1,10}) on node (\S{1,200}) managing GPU")
_MISSING = re.compile(r"The missing ranks?: ([\d, ]{1,9999})")
_VERSION = re.compile(r"NCCL version (\S{1,40})")
_TOTALS = re.compile(r"[\d -]{1,200}?(\d{1,7})$")
_NOBODY = {"host": "", "pid": -1, "collective_counts": {}}


@dataclass(kw_only=True)
class _Level:
    """Ranks that launched equally many operations: how many there are, and those of them that are listed."""

    num_ranks: int
    count: int
    listed: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Communicators of one size: how many ranks each has, how many they are, and the errors in them."""

    size: int
    num: int
    errors: str

    @property
    def notes(self) -> list[str]:
        """What is said of a communicator of which the report does not show its errors, as one that is cut off."""
        return [] if self.errors == "OK" else [f"{self.errors}; the report does not show it"]


@dataclass(kw_only=True)
class _Communicator:
    """What the sections of one communicator say."""

    name: str
    size: int
    levels: dict[str, list[_Level]] = field(default_factory=dict)
    processes: dict[int, tuple[str, int]] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


RAS_WORD = b"Communicators... ("
"""In every report as text."""


def is_ras_text(start: str) -> bool:
    """Return whether a text begins as a report of RAS does."""
    return "Job summary\n=====" in start or ("Communicators..." in start and "=====" in start)


def read_ras_text(data: bytes) -> dict[str, Any]:
    """Return what a report says, in the form in which `ncclras -f json` says it.

    `notes` of a communicator, and `num_gpus` of the job, are not in that one. A process that is not named has pid -1.

    Raises:
        ValueError: it is none, is too long, or is cut off before its groups of communicators.
    """
    text = plain_text(data).replace("\r", "")
    if not is_ras_text(text):
        raise ValueError("it has no summary of a job")
    front = _front(text)
    lines = [front.sub("", line) for line in text.split("\n")]
    if len(lines) > _MAX_TEXT_LINES:
        raise ValueError(f"it has {len(lines)} lines, more than {_MAX_TEXT_LINES}")
    reader = _Reader()
    for line in lines:
        reader.take(line.strip())
    if not reader.groups:
        raise ValueError("it is cut off before its groups of communicators, or has none")
    version = _VERSION.search(text)
    return {
        "nccl_version": version[1] if version else "unknown version",
        "communicators": list(reader.communicators()),
        "num_gpus": reader.num_gpus,
    }


def _front(text: str) -> re.Pattern[str]:
    """Return what `srun -l`, a logger or the journal writes in front of each line, with any numbers for its own.

    Blanks at its end may be missing, as in an empty line.
    """
    begin = _BEGIN.search(text)
    front = re.sub(r"\d+", "0", begin[1]) if begin else ""
    parts = (re.escape(part) for part in re.split(r"( +|0)", front.rstrip()))
    pattern = "".join(r" +" if part.startswith("\\ ") else r" *\d+" if part == "0" else part for part in parts)
    return re.compile(f"^{pattern} ?")


class _Reader:
    """Takes a report line by line."""

    def __init__(self) -> None:
        self.groups: dict[int, _Group] = {}
        self.num_gpus = 0
        self._found: dict[tuple[int, int], _Communicator] = {}
        self._here: _Communicator | None = None
        self._levels: list[_Level] | None = None
        self._section = ""
        self._dead: set[tuple[str, int]] = set()
        self._lost: set[tuple[str, int]] = set()
        self._is_after_totals = False

    def take(self, line: str) -> None:
        """Take one line without the blanks at its ends."""
        if not line:
            return
        if line in ("DEAD", "INCOMPLETE", "TIMEOUT"):
            self._here, self._section = None, line
        elif title := _TITLE.match(line):
            self._begin(int(title[1]), int(title[2]), title[3], title[4])
        elif self._here is not None:
            self._take_of(self._here, line)
        elif (group := _GROUP.match(line)) and self._section == "":
            if len(self.groups) >= _MAX_GROUPS:
                raise ValueError(f"it has more than {_MAX_GROUPS} groups of communicators")
            size = min(int(group[5]), _MAX_SIZE)
            self.groups[int(group[1])] = _Group(size=size, num=int(group[2]), errors=group[8])
        elif lost := _LOST.match(line):
            self._take_lost((lost[2], int(lost[1])))
        elif self._is_after_totals and (gpus := _TOTALS.match(line)):
            self.num_gpus = int(gpus[1])
        self._is_after_totals = line.startswith("(total)")

    def _take_lost(self, process: tuple[str, int]) -> None:
        (self._dead if self._section == "DEAD" else self._lost).add(process)

    def _begin(self, group: int, number: int, name: str, section: str) -> None:
        self._section, self._levels = section, None
        key = (group, number)
        if key not in self._found and len(self._found) >= _MAX_COMMUNICATORS:
            raise ValueError(f"it has more than {_MAX_COMMUNICATORS} communicators with errors")
        size = self.groups[group].size if group in self.groups else 0
        self._here = self._found.setdefault(key, _Communicator(name=name, size=size))

    def _take_of(self, here: _Communicator, line: str) -> None:
        if counts := _COUNTS.match(line):
            # Up to NCCL 2.25 all kinds of operations are counted together, as `collective`.
            self._levels = here.levels.setdefault(counts[1], [])
        elif line.startswith("Communicator ranks have different status"):
            self._levels = None
        elif status := _STATUS.match(line):
            who = f"rank {status[1]}" if status[1] else f"{status[2]} ranks"
            here.notes.append(f"{who}: status {status[3]}")
        elif (level := _LEVEL.match(line)) and self._levels is not None:
            self._levels.append(_Level(num_ranks=int(level[1]), count=int(level[2] or 0)))
        elif missing := _MISSING.match(line):
            here.missing.update(int(number) for number in re.findall(r"\d{1,7}", missing[1]))
        elif listed := _LISTED.match(line):
            self._take_listed(here, listed)

    def _take_listed(self, here: _Communicator, listed: re.Match[str]) -> None:
        rank = int(listed[1])
        if listed[3]:
            here.processes[rank] = (listed[4], int(listed[3]))
        if self._section == "INCOMPLETE":
            here.missing.add(rank)
        elif self._levels is not None:
            if " has " in listed[0]:
                self._levels.append(_Level(num_ranks=1, count=int(listed[2] or 0), listed={rank}))
            elif self._levels:
                self._levels[-1].listed.add(rank)

    def communicators(self) -> Iterator[dict[str, Any]]:
        """Yield the communicators, those of which all is well without ranks."""
        for (number, _), found in self._found.items():
            group = self.groups.get(number, _Group(size=0, num=0, errors="OK"))
            if not (found.levels or found.missing or found.notes):
                found.notes += group.notes
            yield self._communicator(found, is_of_all=group.num == 1)
        for number, group in self.groups.items():
            num_found = sum(key[0] == number for key in self._found)
            if group.num > num_found:
                is_of_all = group.size == self.num_gpus and group.num == 1
                ranks = [{**_NOBODY, "rank": rank} for rank in range(group.size if is_of_all else 0)]
                notes = group.notes if num_found == 0 else []
                yield {
                    "size": group.size,
                    "hash": f"#{number}",
                    "ranks": ranks,
                    "missing_ranks": [],
                    "notes": notes,
                }

    def _communicator(self, found: _Communicator, *, is_of_all: bool) -> dict[str, Any]:
        present = [rank for rank in range(found.size) if rank not in found.missing]
        counts: dict[int, dict[str, int]] = {rank: {} for rank in present}
        notes = list(found.notes)
        for op, levels in found.levels.items():
            of_rank = _counts(levels, present)
            if of_rank is None:
                told = [f"{plural(level.num_ranks, 'rank')} up to {op} {level.count}" for level in levels]
                notes.append(f"{'; '.join(told)}; it does not say which ranks: use ncclras -v")
                counts = {}
                break
            for rank, count in of_rank.items():
                counts[rank][op] = count
        # Up to 2.25 the missing ranks have no process; they are the dead ones if nobody else is missing.
        all_dead = is_of_all and self._lost <= self._dead and len(self._dead) == len(found.missing)
        unknown = ("", -1)
        ranks = [
            {"rank": rank, "host": host, "pid": pid, "collective_counts": counted}
            for rank, counted in counts.items()
            for host, pid in [found.processes.get(rank, unknown)]
        ]
        missing = [
            {"rank": rank, "host": host, "pid": pid, "status": {"considered_dead": is_dead}}
            for rank in sorted(found.missing)
            for host, pid in [found.processes.get(rank, unknown)]
            for is_dead in [(host, pid) in self._dead or (all_dead and pid < 0)]
        ]
        return {"size": found.size, "hash": found.name, "ranks": ranks, "missing_ranks": missing, "notes": notes}


def _counts(levels: Sequence[_Level], present: Sequence[int]) -> dict[int, int] | None:
    """Return how many operations each rank has launched; None where the listing does not say it."""
    counts = {rank: level.count for level in levels for rank in level.listed}
    if any(level.listed and len(level.listed) != level.num_ranks for level in levels):
        return None  # cut off
    rest = [rank for rank in present if rank not in counts]
    unlisted = [level for level in levels if not level.listed]
    if not counts.keys() <= set(present) or len(unlisted) > 1 or sum(one.num_ranks for one in unlisted) != len(rest):
        return None
    return counts | {rank: level.count for level in unlisted for rank in rest}
