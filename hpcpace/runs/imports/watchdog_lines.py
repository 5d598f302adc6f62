"""Lines of torch's watchdog and of gloo in logs, as what they say of one rank.

The words are those of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and TraceUtils.h from torch 1.8 on: the number
of an operation came with 1.9, sizes with 2.2, the group, and what was enqueued and completed last, with 2.3. Where a
rank is numbered within its group, as in `[PG ID 11 PG GUID 119 Rank 1]`, the label in front of the line has the global
rank, if torch (`[rank13]:`), torchrun or Slurm put one there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice

from hpcpace.core.log_fronts import Front, front_of, year_ns
from hpcpace.core.text import parse_range
from hpcpace.runs.imports import torch_checks
from hpcpace.runs.imports.log_facts import (
    Desync,
    Ended,
    Fact,
    Frame,
    Gloo,
    GroupName,
    Label,
    Line,
    Progress,
    Repeated,
    Start,
    Stuck,
    TimedOut,
    WorldSize,
)

_FILE = "ProcessGroupNCCL.cpp"
REPORTS = (b"Timeout(ms)=", b"ollective #", b"Traceback (most recent", _FILE.encode())
"""One of these is where a report begins, and in it or in the piece of the log before lines with words of `BEHIND`."""
WORDS = (
    *REPORTS,
    b"ast enqueued",
    b"never joined any collectives",
    b"gloo",
    b"distributed_c10d.py",
    b"nranks ",
    b"MEMBER: ",
    b"worker group",
    b"Setting OMP_NUM_THREADS",
    b"srun: error: ",
    *torch_checks.WORDS,
)
"""One of these is in every line that is read here, or one of `BEHIND`."""
BEHIND = (b"] started ", b"] finished ", b" ranks:", b" from /", b"Error: ", b"Exception: ")

_CHECKS = tuple(word.decode() for word in torch_checks.WORDS)
_DESYNC_WORDS = ("ollective #", " ranks:", "] started ", "] finished ", "never joined")
_BEFORE, _BEHIND = 400, 4000
"""format: letters of a line that are looked at around a message: labels come before, ranks of a report behind."""
_MAX_CALLED = 1 << 17  # memory: processes whose last call is remembered
_MAX_NUMBER = 10**15
"""format: torch prints counters that were never set as numbers of 17 digits and more."""

_RANK = re.compile(r"\[rank(\d{1,6})\[?\]")
_ROLE = re.compile(r"\[[A-Za-z_]{1,40}(\d{1,6})(\|\d{1,6})?\]:")
_STAMP = re.compile(r"[EWIF](\d{1,2})(\d{2}) (\d\d):(\d\d):(\d\d)\.(\d{6,9})")
_GROUP = re.compile(
    r"\[PG (?:ID )?([\w.:-]{1,80})(?: PG GUID ([^\s(\]]{1,80}))? ?(?:\(([^)\]]{0,80})\))? ?(?:Rank (\d{1,6}))?\]"
)
_MEMBER = re.compile(r"\[(?:PG [^\]]{0,200})?Rank (\d{1,6})\]")
_WORK = re.compile(
    r"Work\w{0,20}\((?:SeqNum=(\d{1,18}), )?OpType=(\w{1,40})"
    r"(?:, NumelIn=(\d{1,20}), NumelOut=(\d{1,20}))?(?:, TensorShape=\[[\d, ]{0,200}\])?, Timeout\(ms\)=(\d{1,15})\)"
    r"(?: ran for (\d{1,15}) milliseconds)?"
)
_STATUS = re.compile(
    r"(?:(?:watchdog at work(?: sequence id)?|Timeout at NCCL work): (\d{1,18})[^\[]{1,20})?"
    r"ast enqueued(?: NCCL)? work: (-?\d{1,20})(?: \(\w{0,40}\))?(?:, last started(?: NCCL)? work: -?\d{1,20}"
    r"(?: \(\w{0,40}\))?)?, last completed(?: NCCL)? work: (-?\d{1,20})"
)
_LATE = re.compile(r"\[([\d, ]{1,4000})\] (joined but didn't finish|finished) collective #(\d{1,18})")
_NEVER = re.compile(r"ranks \[([\d, ]{1,4000})\] are the lagging ranks")
_AT = re.compile(r"#(\d{1,18}) (?:started|finished) ranks:")
_STATE = re.compile(r"\[([\d, ]{1,4000})\] (started|finished) (\w{1,40})")
# The system's own words for an error may be those of another language.
_GLOO = re.compile(
    r"Timed out waiting (\d{1,12})ms for (send|recv) operation"
    r"|(Connection (?:closed|reset) by peer|(?:[Rr]ead|[Ww]rite)v? (?:error )?\[[^\]]{1,80}\]:\d{1,5})"
)
_PYTHON_OP = re.compile(r"distributed_c10d\.py\"?, line \d{1,6}, in (\w{1,40})")
_FRAME = re.compile(r"#\d{1,3} (\S{1,120}) from (\S{1,400}):(\d{1,7})")
_START = re.compile(r"Setting OMP_NUM_THREADS environment|(?:[Rr]es|S)tarting worker group|starting workers for")
_CUT = re.compile(
    r"(?:Watchdog caught(?!.{0,400}Timeout\(ms\)=\d{1,15}\))|(?:Exception \(either|failure detected|Timeout at NCCL|"
    r"Received a .{0,20}signal)(?!.{0,400}ast completed(?: NCCL)? work: -?\d)).{0,400}$"
)
_BEGINS = ("Watchdog caught", "Exception (either", "failure detected", "Timeout at NCCL", "Received a dump signal")
_RAISED = re.compile(r"((?:\w{1,80}\.){0,8}\w{0,80}(?:Error|Exception)): (.{0,200})")
# What ranks raise because another one has ended or has not come.
_OF_OTHERS = re.compile(
    r"gloo|nccl|Dist\w{0,20}Error|c10d|time.?out|timed out|connection|collective|barrier|store|socket|pipe|peer"
    r"|ChildFailed",
    re.IGNORECASE,
)
_TASKS = re.compile(
    r"srun: error: (?:\S{1,100}: )?tasks? ([\d,\-]{1,4000}): (Killed|Out Of Memory|Segmentation fault|Bus error)"
)
_STUCK = "watchdog got stuck for"
_REPEATED = re.compile(r"\[repeated (\d{1,7})x across cluster\]")
_SIZE = re.compile(r"nranks (\d{1,6})\b|MEMBER: \d{1,6}/(\d{1,6})")


def goes_on(text: str, following: str) -> bool:
    """Return whether a message that ends with its line before its numbers goes on in the following line."""
    if _FILE in following:
        return False
    end = text.rpartition("] ")[2].lstrip()
    is_begun = _FILE in text and (end[:1] == "[" or any(begin.startswith(end) for begin in _BEGINS))
    return is_begun or _CUT.search(text) is not None


class LineReader:
    """Turns lines into facts. Those of a report follow the line that has the label of the rank."""

    def __init__(self) -> None:
        self._last = Line(label=Label())
        self._snapshot = -1
        self._called: dict[Label, str] = {}
        self._has_stamps = False

    def facts(self, text: str) -> Iterator[Fact]:
        """Yield what one line says; it may hold messages of several processes that wrote at the same time."""
        for found in (*_WORK.finditer(text), *_STATUS.finditer(text)):
            window = text[max(0, found.start() - _BEFORE) : found.start()]
            line = self._line(window, text)
            if found.re is _WORK:
                yield _timed_out(line, found)
            else:
                failed = int(found[1]) if found[1] else None
                yield Progress(line=line, enqueued=_counter(found[2]), completed=_counter(found[3]), failed=failed)
            if repeated := _REPEATED.search(text, found.end()):
                yield Repeated(int(repeated[1]))
        text = text[: _BEFORE + _BEHIND]
        if any(word in text for word in _CHECKS):
            yield from torch_checks.checks(text, lambda before: self._line(before, text))
        if any(word in text for word in _DESYNC_WORDS):
            yield from self._desync(text)
        if "distributed_c10d" in text and (op := _PYTHON_OP.search(text)) and len(self._called) < _MAX_CALLED:
            self._called[_label(text)] = op[1]
        if "gloo" in text and (gloo := _GLOO.search(text)):
            line = self._line(text[: gloo.start()], text)
            waited_ms = int(gloo[1]) if gloo[1] else None
            yield Gloo(line=line, waited_ms=waited_ms, op=self._called.get(line.label, ""))
        if "Error: " in text or "Exception: " in text or "srun: error: " in text:
            yield from self._ended(text)
        if _STUCK in text:
            yield Stuck(line=self._line(text[: text.index(_STUCK)], text))
        if size := _SIZE.search(text):
            yield WorldSize(int(size[1] or size[2]))
        elif _START.search(text):
            yield Start()
        elif " from /" in text and (frame := _FRAME.search(text)):
            label = _label(text[: frame.start()])
            where = f"{frame[2].rpartition('/')[2]}:{frame[3]} in {frame[1]}"
            line = self._last if label.is_empty else Line(label=label)
            yield Frame(line=line, where="" if "/torch/" in frame[2] else where)

    def _ended(self, text: str) -> Iterator[Fact]:
        if tasks := _TASKS.search(text):
            with suppress(ValueError):  # it is cut or mixed with another line
                ranges = [parse_range(part) for part in tasks[1].split(",")]
                numbers = islice(chain.from_iterable(ranges), _MAX_CALLED)
                yield Ended(line=Line(label=Label()), how=tasks[2], tasks=tuple(numbers))
            return
        front = front_of(text)
        if (raised := _RAISED.match(front.text)) and not _OF_OTHERS.search(raised[0]):
            line = Line(label=_label(text[: len(text) - len(front.text)], front), actor=front.actor)
            yield Ended(line=line, how=raised[0].rstrip())

    def _line(self, window: str, text: str) -> Line:
        """Return where a message comes from, by what is between it and the message before."""
        front = front_of(text)
        label = _label(window, front)
        stamps = list(_STAMP.finditer(window))
        # Times in front of lines may be of another zone than those of torch.
        self._has_stamps = self._has_stamps or bool(stamps)
        groups = list(_GROUP.finditer(window))
        members = list(_MEMBER.finditer(window))
        group = GroupName(*(groups[-1][each] or "" for each in (1, 2, 3))) if groups else None
        if label.is_empty and not groups and not members:
            return Line(label=label)
        self._last = Line(
            label=label,
            member=int(members[-1][1]) if members else None,
            group=group,
            at_ns=_time_ns(stamps[-1]) if stamps else None if self._has_stamps else front.at_ns,
            actor=front.actor,
        )
        return self._last

    def _desync(self, text: str) -> Iterator[Fact]:
        label = _label(text)
        line = self._last if label.is_empty else Line(label=label, group=self._last.group)
        if never := _NEVER.search(text):
            yield Desync(line=line, members=_members(never[1]), number=-1, has_finished=True)
        for late in _LATE.finditer(text):
            has_finished = late[2] == "finished"
            yield Desync(line=line, members=_members(late[1]), number=int(late[3]), has_finished=has_finished)
        if at := _AT.search(text):
            self._snapshot = int(at[1])
        elif (state := _STATE.search(text)) and self._snapshot >= 0 and not _LATE.search(text):
            has_finished = state[2] == "finished"
            members = _members(state[1])
            yield Desync(line=line, members=members, number=self._snapshot, has_finished=has_finished, op=state[3])


def _label(text: str, front: Front | None = None) -> Label:
    """Return the labels in what precedes a message; those of Slurm and mpirun are in front of the whole line."""
    ranks = _RANK.findall(text)
    role = _ROLE.search(text)
    task = (front or front_of(text)).task
    rank = int(ranks[-1]) if ranks else None
    local = None
    if role is not None and "[rank" not in role[0]:
        if role[2]:
            rank = rank if rank is not None else int(role[1])
        else:
            local = int(role[1])
    return Label(rank=rank, local_rank=local, task=task)


def _timed_out(line: Line, found: re.Match[str]) -> TimedOut:
    sizes = [number for each in (3, 4) if found[each] and (number := int(found[each])) < _MAX_NUMBER]
    return TimedOut(
        line=line,
        number=int(found[1]) if found[1] else None,
        op=found[2],
        num_elements=max(sizes, default=-1),
        timeout_ms=int(found[5]),
        ran_ms=int(found[6]) if found[6] else None,
    )


def _counter(digits: str) -> int | None:
    """Return the last number of a counter, -1 for none yet; None for one that was never set."""
    number = int(digits)
    return number if -1 <= number < _MAX_NUMBER else None


def _members(listed: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,6}", listed))


def _time_ns(stamp: re.Match[str]) -> int | None:
    month, day, hour, minute, second = (int(stamp[each]) for each in range(1, 6))
    return year_ns(month, day, hour, minute, second, int(stamp[6].ljust(9, "0")))
