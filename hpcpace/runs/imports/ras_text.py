"""Reports of NCCL's RAS as text: what `ncclras` prints from NCCL 2.24 on, and the only form before 2.28.7.

The text names outliers alone (src/ras/client_support.cc, `rasCountIsOutlier`): with how many operations most ranks are,
it says as a number of ranks. If it leaves one such number without names, all others are these ranks; if it leaves more,
nobody can tell who is who, and `ncclras -v` would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcpace.core.log_text import plain_text
from hpcpace.core.text import plural

# memory: of one report, all listed ranks and groups; a job of 16,384 ranks with verbose output has 5 lines a rank
_MAX_LINES = 1 << 20
_MAX_COMMUNICATORS = 1 << 12
_MAX_GROUPS = 1 << 12
_MAX_SIZE = 1 << 20
_LABEL = re.compile(r" {0,6}\d{1,6}: ?")  # of `srun -l`
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
    lines = text.split("\n")
    if all(_LABEL.match(line) for line in lines if line.strip()):
        lines = [_LABEL.sub("", line) for line in lines]
    if len(lines) > _MAX_LINES:
        raise ValueError(f"it has {len(lines)} lines, more than {_MAX_LINES}")
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
