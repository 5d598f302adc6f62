"""What logs say of each process of a job: whose a line is, and which attempt of a job it is of.

A label of torch has the rank, a message has it where its group is the default one, and a name of a file has it as a
last resort. A job that was restarted writes into the same log: an operation that began after a rank's watchdog had
already given up is of a later attempt. A line that reports an operation has no group. The one behind it has, and so may
the lines of other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from pathlib import Path

from hpcpace.core.errors import TraceError
from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_MS, NS_PER_S, plural, rank_list, shortened
from hpcpace.runs.imports.flight_recorder import MAX_RANKS
from hpcpace.runs.imports.watchdog_lines import (
    IN_WORDS,
    START,
    Desync,
    Ended,
    Fact,
    Frame,
    Gloo,
    GroupName,
    Joined,
    Line,
    Progress,
    Repeated,
    Start,
    Stuck,
    TimedOut,
    WorldSize,
)

_NAMED_RANK = re.compile(r"(?:rank|task|proc)[_\-.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_MAX_DIGITS = 6  # format: of a rank
# memory: of one rank in one attempt; torch has some dozens of groups, and old releases report some operations of each
_MAX_GROUPS, _MAX_TIMED_OUT, _MAX_ATTEMPTS = 64, 64, 64
_MAX_DESYNCS = 1 << 14  # memory: that differ; all ranks report nearly the same
# timing: clocks of the hosts, and the rounding of what torch prints
_SLACK_NS = 2 * NS_PER_S
DEFAULT = "default_pg"
UNNAMED = ""
OF_ALL = (DEFAULT, UNNAMED, *IN_WORDS)
"""Groups whose members have the ranks of the job."""


class Source(StrEnum):
    """From where the rank of a line is known."""

    LABEL = "torch's label"
    CONTENT = "the message"
    TASK = "Slurm's label"
    FILE = "the name of the file"
    LOCAL = "torchrun's label, which counts on each node"


@dataclass(kw_only=True)
class GroupState:
    """What is known of one process in one group.

    Attributes:
        member: its rank within the group; None where not said.
        timed_out: the operations that ran out of time, by number.
        enqueued, completed: the last operations; None where unknown, -1 for none yet.
        failed: the operation that ran out of time, as the line of these counters names it; None where not said.
    """

    member: int | None = None
    timed_out: dict[int, TimedOut] = field(default_factory=dict)
    enqueued: int | None = None
    completed: int | None = None
    failed: int | None = None

    @property
    def first(self) -> TimedOut | None:
        """The operation in which the process is: the first of those that ran out of time."""
        return self.timed_out[min(self.timed_out)] if self.timed_out else None


@dataclass(kw_only=True)
class Attempt:
    """What is known of one process in one attempt of a job.

    Attributes:
        groups: by name, `DEFAULT` and `UNNAMED` among them.
        begun_ns: when the first operation began that ran out of time.
        reported_ns: when the last message was written.
        where: what called the operation that ran out of time.
    """

    groups: dict[str, GroupState] = field(default_factory=dict)
    gloo: Gloo | None = None
    begun_ns: int | None = None
    reported_ns: int | None = None
    where: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether nothing was said of an operation."""
        return not self.groups and self.gloo is None


_Said = tuple[str, tuple[int, ...], int, bool, str]


@dataclass(kw_only=True)
class LogFile:
    """What one log says.

    Attributes:
        attempts: of each rank, the oldest first.
        desyncs: what reports say of members of groups, by the name of the group, with the rank that last reported it.
        sources: from where ranks are known.
        world_size: the largest that is named; 0 for none.
        min_ranks: how many ranks the job has at least, by other files.
        num_nameless: messages of which it is not known whose they are.
        is_mixed: whether a rank reports less at a time than at the same time before, as ranks of several jobs do.
        has_report: whether it holds a report of NCCL's RAS.
        stuck: ranks on which torch's watchdog itself stands still.
        ended: how ranks ended by exceptions in the last attempt, and after how many reports.
        num_repeated: messages of other ranks that Ray has left out.
        actors: classes of the Ray actors that wrote messages; ranks of each count from 0.
        joined: how many processes have come to a start of the job or of a group, and how many have to, by its number.
    """

    path: Path
    attempts: dict[int, list[Attempt]] = field(default_factory=dict)
    desyncs: dict[_Said, tuple[int, Desync]] = field(default_factory=dict)
    sources: set[Source] = field(default_factory=set)
    world_size: int = 0
    min_ranks: int = 0
    num_nameless: int = 0
    is_mixed: bool = False
    has_report: bool = False
    stuck: set[int] = field(default_factory=set)
    ended: dict[int, tuple[str, int]] = field(default_factory=dict)
    num_repeated: int = 0
    actors: set[str] = field(default_factory=set)
    joined: dict[int, tuple[int, int]] = field(default_factory=dict)
    _tasks: dict[int, set[int]] = field(default_factory=dict)
    _num_reports: int = 0
    _ended_tasks: dict[int, str] = field(default_factory=dict)
    _is_rank_of_task: bool | None = None
    _begun_ns: int = -1
    _num_starts: int = 0
    _seen_starts: dict[int, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing of any operation."""
        return (
            not self.desyncs
            and not self.num_nameless
            and not self.joined
            and not self.stuck
            and all(attempt.is_silent for attempts in self.attempts.values() for attempt in attempts)
        )

    def take(self, facts: Iterable[Fact]) -> None:
        """Add what lines say."""
        for fact in facts:
            if isinstance(fact, WorldSize):
                self.world_size = max(self.world_size, min(fact.num_ranks, MAX_RANKS))
            elif isinstance(fact, Start):
                self._num_starts += 1
                self.ended.clear()
                self._ended_tasks.clear()
            elif isinstance(fact, Ended):
                self._take_ended(fact)
            elif isinstance(fact, Repeated):
                self.num_repeated += fact.count
            elif isinstance(fact, Joined):
                self._take_joined(fact)
            else:
                self._take(fact)

    def _take_ended(self, fact: Ended) -> None:
        """Add a rank that raised, or tasks that ended before any rank gave up waiting: others end because of that."""
        if fact.tasks and all(several[-1].is_silent for several in self.attempts.values()):
            self._ended_tasks |= dict.fromkeys(fact.tasks, fact.how)
        elif not fact.tasks and (rank := self._rank(fact.line)) is not None and len(self.ended) < MAX_RANKS:
            self.ended.setdefault(rank, (fact.how, self._num_reports))

    def all_ended(self) -> dict[int, str]:
        """Return how ranks ended, those of Slurm's tasks only where labels show that these have the same numbers."""
        raised = {rank: how for rank, (how, _) in self.ended.items()}
        return {**(self._ended_tasks if self._is_rank_of_task else {}), **raised}

    def _take_joined(self, fact: Joined) -> None:
        """Add how many processes have come to a start, or that all have."""
        if not fact.num_ranks:
            self.joined.pop(fact.key, None)
            for attempts in self.attempts.values():
                if (state := attempts[-1].groups.get(START)) is not None:
                    state.timed_out.pop(fact.key, None)
        elif len(self.joined) < _MAX_GROUPS:
            before, _ = self.joined.get(fact.key, (0, 0))
            self.joined[fact.key] = max(before, fact.num_joined), min(fact.num_ranks, MAX_RANKS)

    def _take(self, fact: TimedOut | Progress | Desync | Gloo | Frame | Stuck) -> None:
        rank = self._rank(fact.line)
        if rank is None:
            self.num_nameless += not isinstance(fact, Frame)
            return
        if isinstance(fact, Stuck):
            self.stuck.add(rank)
            return
        attempts = self.attempts.get(rank, [])
        if fact.line.actor and len(self.actors) < _MAX_GROUPS:
            self.actors.add(fact.line.actor)
        if isinstance(fact, Frame):
            if attempts and not attempts[-1].where and fact.where:
                attempts[-1].where = fact.where
            return
        if isinstance(fact, Desync):
            key = (group_name(fact.line.group), fact.members, fact.number, fact.has_finished, fact.op)
            if len(self.desyncs) < _MAX_DESYNCS:
                self.desyncs[key] = (rank, fact)
            return
        if not attempts or self._is_later(rank, attempts[-1], fact):
            if len(attempts) == self.num_attempts:  # what was raised before the last report is of an attempt before
                self.ended = {rank: end for rank, end in self.ended.items() if end[1] == self._num_reports}
            attempts.append(Attempt())
            self.attempts[rank] = attempts
            del attempts[:-_MAX_ATTEMPTS]
        self._seen_starts[rank] = self._num_starts
        self._num_reports += 1
        _add(attempts[-1], fact)

    def _is_later(self, rank: int, last: Attempt, fact: TimedOut | Progress | Gloo) -> bool:
        """Return whether a message is of a later attempt than what was read of the rank before."""
        at_ns = fact.line.at_ns
        if at_ns is not None and last.reported_ns is not None:
            if last.reported_ns < self._begun_ns <= at_ns:
                return True
            if isinstance(fact, TimedOut) and fact.ran_ms is not None:
                begun_ns = at_ns - fact.ran_ms * NS_PER_MS
                is_later = begun_ns > last.reported_ns + _SLACK_NS
                self._begun_ns = max(self._begun_ns, begun_ns) if is_later else self._begun_ns
                return is_later
        is_undated = isinstance(fact, TimedOut) and at_ns is None and last.reported_ns is None
        if is_undated and last.groups and self._seen_starts.get(rank, 0) < self._num_starts:
            return True
        if isinstance(fact, Gloo) or fact.line.group is None:
            return False
        state = last.groups.get(group_name(fact.line.group))
        if state is None or state.completed is None:
            return False
        number = fact.number if isinstance(fact, TimedOut) else fact.enqueued
        is_back = number is not None and 0 <= number < state.completed
        if is_back and at_ns is not None and last.reported_ns is not None and at_ns < last.reported_ns + _SLACK_NS:
            self.is_mixed = True
            return False
        return is_back

    def _rank(self, line: Line) -> int | None:
        """Return the global rank of a process; None where nothing says it."""
        found: list[tuple[Source, int | None]] = [
            (Source.LABEL, line.label.rank),
            (Source.CONTENT, line.member if group_name(line.group) in OF_ALL else None),
            (Source.TASK, line.label.task if line.label.local_rank is None else None),
            (Source.FILE, rank_in_name(self.path)),
            (Source.LOCAL, line.label.local_rank if line.label.local_rank is not None else local_rank_in(self.path)),
        ]
        label, member = line.label, line.member
        if label.task and label.rank is not None:
            self._is_rank_of_task = self._is_rank_of_task is not False and label.task == label.rank
        is_old = label.rank is None and line.group is None
        if is_old and label.task is not None and member is not None and len(self._tasks) < MAX_RANKS:
            self._tasks.setdefault(label.task, set()).add(member)
        for source, rank in found:
            if rank is not None and rank < MAX_RANKS:
                self.sources.add(source)
                return rank
        return None

    @property
    def has_two_ranks(self) -> bool:
        """Whether each task of Slurm calls itself by another rank in messages, as members of a smaller group do."""
        named = self._tasks.items()
        return all(len(members) == 1 for _, members in named) and any(task not in members for task, members in named)

    @property
    def num_attempts(self) -> int:
        """How many attempts of a job the file holds."""
        return max((len(attempts) for attempts in self.attempts.values()), default=0)

    def ranks(self) -> Iterator[int]:
        """Yield the ranks of which it says something."""
        yield from sorted(self.attempts)


def _add(attempt: Attempt, fact: TimedOut | Progress | Gloo) -> None:
    at_ns = fact.line.at_ns
    if at_ns is not None:
        attempt.reported_ns = max(attempt.reported_ns or 0, at_ns)
    if isinstance(fact, Gloo):
        if attempt.gloo is None or attempt.gloo.waited_ms is None:
            attempt.gloo = fact
        return
    name = group_name(fact.line.group)
    if name not in attempt.groups and len(attempt.groups) >= _MAX_GROUPS:
        return
    state = attempt.groups.setdefault(name, GroupState())
    if fact.line.member is not None:
        state.member = fact.line.member
    if isinstance(fact, Progress):
        if fact.enqueued is not None:
            state.enqueued = max(fact.enqueued, -1 if state.enqueued is None else state.enqueued)
        if fact.completed is not None:
            state.completed = max(fact.completed, -1 if state.completed is None else state.completed)
        state.failed = fact.failed if state.failed is None else state.failed
        return
    number = 0 if fact.number is None else fact.number
    known = state.timed_out.get(number)
    # What a rank says of itself is more than what another one says of it.
    is_more = known is not None and known.num_elements < 0 <= fact.num_elements
    if is_more or (known is None and len(state.timed_out) < _MAX_TIMED_OUT):
        state.timed_out[number] = fact
    if at_ns is not None and fact.ran_ms is not None:
        begun_ns = at_ns - fact.ran_ms * NS_PER_MS
        attempt.begun_ns = begun_ns if attempt.begun_ns is None else min(begun_ns, attempt.begun_ns)


def group_name(group: GroupName | None) -> str:
    """Return the name of a group that is the same on all ranks, as far as the log says it."""
    if group is None:
        return UNNAMED
    if group.description.startswith(DEFAULT) or group.name == "0" or (not group.name and group.number == "0"):
        return DEFAULT
    name = group.name or group.number
    return f"{group.description} {name}" if group.description not in ("", "undefined", name) else name


def rank_in_name(path: Path) -> int | None:
    """Return the rank that the name of a file has, as `rank_3.log` or `3.out` do; None if it has none."""
    if named := _NAMED_RANK.findall(path.name):
        return int(named[-1])
    stem = path.name.split(".")[0]
    return int(stem) if stem.isdecimal() and len(stem) <= _MAX_DIGITS else None


def local_rank_in(path: Path) -> int | None:
    """Return the rank on its node that torchrun gives a folder: `attempt_0/3/stderr.log`."""
    parent = path.parent
    if parent.name.isdecimal() and len(parent.name) <= _MAX_DIGITS and parent.parent.name.startswith("attempt_"):
        return int(parent.name)
    return None


# timing: stamps of torch are in local time; zones are quarters of an hour apart
_DAY_NS = 24 * 3600 * NS_PER_S
_YEAR_NS, _ZONE_NS, _ZONE_SLACK_NS = 366 * _DAY_NS, 900 * NS_PER_S, 10 * NS_PER_S


def last_attempts(logs: Sequence[LogFile], notes: list[str]) -> dict[int, Attempt]:
    """Return what is known of each rank in the last attempt; `notes` takes what is odd, a sentence each.

    Raises:
        TraceError: logs contradict each other as those of several jobs do.
    """
    merged: dict[int, tuple[LogFile, Attempt]] = {}
    for log in logs:
        if log.num_attempts > 1:
            notes.append(
                f"{shortened(log.path.name)} holds {plural(log.num_attempts, 'attempt')} or jobs; the last is judged"
            )
        for rank, several in log.attempts.items():
            last = several[-1]
            if rank in merged:
                other, before = merged[rank]
                last = _joined(rank, (other, before), (log, last))
            merged[rank] = (log, last)
    attempts = {rank: attempt for rank, (_, attempt) in merged.items()}
    for attempt in attempts.values():
        _name_groups(attempt)
    _name_by_others(attempts)
    old = _older(attempts, notes)
    if old:
        notes.append(f"{rank_list(old)} reported nothing since the last attempt began: taken as unknown")
    return {rank: attempt for rank, attempt in attempts.items() if rank not in set(old)}


def _older(attempts: Mapping[int, Attempt], notes: list[str]) -> list[int]:
    """Return the ranks whose last messages are of an earlier attempt than those of others.

    Stamps have neither a year nor a time zone: clocks that are whole quarters of an hour apart are of one attempt.
    """
    reported = {rank: one.reported_ns for rank, one in attempts.items() if one.reported_ns is not None}
    latest_ns = max(reported.values(), default=0)
    if latest_ns - min(reported.values(), default=0) > _YEAR_NS // 2:  # over New Year
        reported = {rank: ns + (_YEAR_NS if latest_ns - ns > _YEAR_NS // 2 else 0) for rank, ns in reported.items()}
        latest_ns = max(reported.values())
    last = [attempts[rank] for rank, ns in reported.items() if ns == latest_ns]
    length_ns = max([_usual_ns(attempts), *((one.reported_ns or 0) - one.begun_ns for one in last if one.begun_ns)])
    old = {rank: latest_ns - ns for rank, ns in reported.items() if latest_ns - ns > length_ns}
    zones = {rank for rank, ns in old.items() if (ns + _ZONE_SLACK_NS) % _ZONE_NS < 2 * _ZONE_SLACK_NS and ns < _DAY_NS}
    if zones:
        notes.append(f"the clocks of {rank_list(sorted(zones))} are in another time zone, or of an earlier attempt")
    return sorted(old.keys() - zones)


def _usual_ns(attempts: Mapping[int, Attempt]) -> int:
    """Return the longest time in which an operation ran out of time."""
    states = [state for one in attempts.values() for state in one.groups.values()]
    return max((fact.timeout_ms * NS_PER_MS for one in states for fact in one.timed_out.values()), default=0)


def _joined(rank: int, one: tuple[LogFile, Attempt], other: tuple[LogFile, Attempt]) -> Attempt:
    """Return what two logs say of one rank.

    Raises:
        TraceError: they contradict each other, and none is later.
    """
    first, second = one[1], other[1]
    if first.is_silent or second.is_silent:
        return second if first.is_silent else first
    length_ns = _usual_ns({0: first, 1: second})
    for early, late in ((first, second), (second, first)):
        begun_ns = late.begun_ns
        if begun_ns is None and late.reported_ns is not None and length_ns:
            begun_ns = late.reported_ns - length_ns - _SLACK_NS
        if begun_ns is not None and early.reported_ns is not None and early.reported_ns < begun_ns:
            return late
    for name in first.groups.keys() & second.groups.keys():
        before, after = first.groups[name].first, second.groups[name].first
        if before is not None and after is not None and (before.number, before.op) != (after.number, after.op):
            paths = " and ".join(shortened(log.path.name) for log, _ in (one, other))
            raise TraceError(
                f"{paths} are both of rank {rank}, and differ: operation {before.number} ({before.op}) and"
                f" {after.number} ({after.op}) ran out of time; the logs are of several jobs: name those of one"
            )
    for name, state in second.groups.items():
        kept = first.groups.setdefault(name, state)
        kept.timed_out = {**state.timed_out, **kept.timed_out}
        kept.enqueued = max((each for each in (kept.enqueued, state.enqueued) if each is not None), default=None)
        kept.completed = max((each for each in (kept.completed, state.completed) if each is not None), default=None)
    first.gloo = first.gloo or second.gloo
    return first


def _name_groups(attempt: Attempt) -> None:
    """Put operations of a line without a group into the group whose counters they fit.

    The line that reports an operation has no group, and the one behind it has: the number is one that the group has
    enqueued and not completed.
    """
    unnamed = attempt.groups.get(UNNAMED)
    if unnamed is None or len(attempt.groups) == 1:
        return
    for number in list(unnamed.timed_out):
        fits = [
            state
            for name, state in attempt.groups.items()
            if name != UNNAMED
            and state.enqueued is not None
            and (-1 if state.completed is None else state.completed) < number <= state.enqueued
        ]
        exact = [state for state in fits if state.completed is not None and state.completed + 1 == number]
        chosen = exact if len(exact) == 1 else fits
        if len(chosen) == 1:
            chosen[0].timed_out[number] = unnamed.timed_out.pop(number)
    if not unnamed.timed_out:
        del attempt.groups[UNNAMED]


def _name_by_others(attempts: Mapping[int, Attempt]) -> None:
    """Put operations that are in no group into the one in which other ranks report the same number, kind and size."""
    places: dict[tuple[int, str, int], set[str]] = {}
    for attempt in attempts.values():
        for name, state in attempt.groups.items():
            for number, fact in state.timed_out.items() if name != UNNAMED else ():
                places.setdefault((number, fact.op, fact.num_elements), set()).add(name)
    for rank, attempt in attempts.items():
        unnamed = attempt.groups.get(UNNAMED)
        if unnamed is None or unnamed.first is None:
            continue
        first = unnamed.first
        named = places.get((first.number or 0, first.op, first.num_elements), set())
        (name,) = named if len(named) == 1 else ("",)
        if name and not (name == DEFAULT and unnamed.member not in (None, rank)) and name not in attempt.groups:
            attempt.groups[name] = attempt.groups.pop(UNNAMED)
