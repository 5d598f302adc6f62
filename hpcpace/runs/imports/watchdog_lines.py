"""Lines in logs of torch's watchdog, of torch's own checks and of gloo, as what each says of ranks that wait.

The words of the watchdog are those of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and TraceUtils.h from torch 1.8
on: the number of an operation came with 1.9, sizes with 2.2, the group, and what was enqueued and completed last, with
2.3. Where a rank is numbered within its group, as in `[PG ID 11 PG GUID 119 Rank 1]`, the label in front of the line
has the global rank, if torch (`[rank13]:`), torchrun or Slurm put one there.

Torch's checks say who did not come to the start or to a monitored barrier, and whose calls differ. Their messages name
other ranks than the one that prints them, so that one line may be enough. Their words are those of
torch/distributed/distributed_c10d.py and, in torch/csrc/distributed/c10d, of ProcessGroupGloo.cpp, TCPStoreBackend.cpp
and ProcessGroupWrapper.cpp (TORCH_DISTRIBUTED_DEBUG=DETAIL), from torch 1.8 on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice

from hpcpace.core.log_text import Front, front_of, year_ns
from hpcpace.core.records import dataclass
from hpcpace.core.text import parse_range


@dataclass(frozen=True)
class Label:
    """What a line has in front of a message: the global rank, that of torchrun on its node, and a task of Slurm."""

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it names nobody."""
        return self.rank is None and self.local_rank is None and self.task is None


@dataclass(frozen=True)
class GroupName:
    """A process group as a line names it: its number in the process, its name in the job, and its description."""

    number: str = ""
    name: str = ""
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Where a message comes from.

    Attributes:
        label: what is in front of it.
        member: its rank within the group, which is the global one in the default group; None where not said.
        group: None where not said.
        at_ns: when it was written, in a year of 366 days that has no number; None where not said.
        actor: the class of the Ray actor that wrote it; empty without one.
    """

    label: Label
    member: int | None = None
    group: GroupName | None = None
    at_ns: int | None = None
    actor: str = ""


@dataclass(frozen=True, kw_only=True)
class TimedOut:
    """An operation that ran out of time. `number` is None in torch 1.8, `num_elements` -1 before 2.2."""

    line: Line
    number: int | None
    op: str
    num_elements: int
    timeout_ms: int
    ran_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The last operations that a rank enqueued and completed, and the one that ran out of time; None where not said."""

    line: Line
    enqueued: int | None
    completed: int | None
    failed: int | None


@dataclass(frozen=True, kw_only=True)
class Desync:
    """What a report says of other members of its group: how far they came."""

    line: Line
    members: tuple[int, ...]
    number: int
    has_finished: bool
    op: str = ""


@dataclass(frozen=True, kw_only=True)
class Gloo:
    """A message of gloo that did not come through: how long a rank waited, or None where its peer had closed."""

    line: Line
    waited_ms: int | None
    op: str


@dataclass(frozen=True)
class WorldSize:
    """How many ranks a communicator of the job has."""

    num_ranks: int


@dataclass(frozen=True)
class Start:
    """The workers of a job are started, perhaps again."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame of the code that called an operation that ran out of time, the innermost first."""

    line: Line
    where: str


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A rank on which torch's watchdog itself stands still."""

    line: Line


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A rank that raised an exception, or tasks of Slurm that ended.

    Attributes:
        line: where an exception comes from; of tasks, nowhere.
        how: the exception with its message, or Slurm's word for it.
        tasks: those of Slurm; empty for an exception.
    """

    line: Line
    how: str
    tasks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Repeated:
    """How many messages like the one before Ray has left out, of any rank."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Joined:
    """How many processes have come to the start of a job or of a group.

    Attributes:
        key: which start that is, 0 for one that the message does not number.
        num_ranks: how many have to come; 0 where all have.
    """

    key: int
    num_joined: int
    num_ranks: int


Fact = TimedOut | Progress | Desync | Gloo | WorldSize | Start | Frame | Stuck | Ended | Repeated | Joined


_CHECK_WORDS = (b"to pass monitoredBarrier", b"ased barrier", b"CollectiveFingerPrint", b" clients joined")
"""One of these is in every line that is read here."""

START, BARRIER, COMPARED = "start", "monitored barrier", "compared"
IN_WORDS = {START: "all ranks", BARRIER: "all ranks", COMPARED: "(not named)"}
"""The groups in which torch checks something, taken for those of all ranks, and how words name them."""

_BARRIER = re.compile(r"\[Rank (\d{1,6})\]: Ranks? ([\d, ]{1,9999}) failed to pass monitoredBarrier in (\d{1,12}) ms")
_WAITING = re.compile(
    r"tore.based barrier .{0,160}?rank:? ?(\d{1,6}), (?:for )?key: [^\s:]{1,80}:(\S{1,80}) "
    r"\(world_size=(\d{1,7}), (?:worker_count|num_workers_joined)=(\d{1,7})"
)
_PASSED = re.compile(r"Completed store.based barrier for key:[^\s:]{1,80}:(\S{1,80})")
_CALLED = re.compile(
    r"Rank (\d{1,6}) is running (?:inconsistent )?collective: (?:CollectiveFingerPrint\()?"
    r"(?:SequenceNumber=\d{1,20}(?:, )?)?(?:OpType=)?([A-Z_]{2,40})(?:, TensorShape=\[([\d, ]{0,200})\])?"
)
_CLIENTS = re.compile(r"waiting for clients\. (\d{1,7})/(\d{1,7}) clients joined")


def checks(text: str, line_of: Callable[[str], Line]) -> Iterator[TimedOut | Desync | WorldSize | Joined]:
    """Yield what one line says.

    Args:
        text: the line.
        line_of: takes what precedes a message, and returns where it comes from.
    """
    if barrier := _BARRIER.search(text):
        yield from _barrier(barrier, line_of(text[: barrier.start()]))
    elif waiting := _WAITING.search(text):
        key, num_ranks = _key(waiting[2]), int(waiting[3])
        yield WorldSize(num_ranks)
        yield Joined(key=key, num_joined=int(waiting[4]), num_ranks=num_ranks)
        op = "INIT_PROCESS_GROUP" if key < 2 else "NEW_GROUP"
        yield _of_check(Line(label=Label(rank=int(waiting[1]))), START, op, number=key)
    elif passed := _PASSED.search(text):
        yield Joined(key=_key(passed[1]), num_joined=0, num_ranks=0)
    elif clients := _CLIENTS.search(text):
        yield WorldSize(int(clients[2]))
        yield Joined(key=0, num_joined=int(clients[1]), num_ranks=int(clients[2]))
    else:
        yield from _compared(list(_CALLED.finditer(text)), line_of, text)


def _key(name: str) -> int:
    """Return the number of a start, which torch counts from 1 on; 0 for a group with a name."""
    return int(name) if name.isdecimal() and len(name) < 10 else 0


def _barrier(found: re.Match[str], line: Line) -> Iterator[TimedOut | Desync]:
    """Yield who failed to come. Rank 0 asks the others in their order, so those before the last one have come."""
    reporter, failed = int(found[1]), [int(number) for number in re.findall(r"\d{1,6}", found[2])]
    if line.label.rank not in (None, reporter):  # of a smaller group, whose members are not known
        return
    line = replace(line, label=Label(rank=reporter), member=None, group=GroupName(name=BARRIER))
    come = tuple(rank for rank in range(max(failed, default=0)) if rank not in failed and rank != reporter)
    yield _of_check(line, BARRIER, "MONITORED_BARRIER", waited_ms=int(found[3]))
    yield Desync(line=line, members=tuple(failed), number=-1, has_finished=True)
    if come:
        yield Desync(line=line, members=come, number=0, has_finished=False, op="MONITORED_BARRIER")


def _compared(called: list[re.Match[str]], line_of: Callable[[str], Line], text: str) -> Iterator[TimedOut]:
    """Yield what a rank called, and what the first one did that called something else in the same place."""
    own = line_of(text[: called[0].start()]).label.rank if called else None
    if own is not None and own != int(called[0][1]):  # of a smaller group, whose members are not known
        return
    for one in called:
        numbers = re.findall(r"\d+", one[3] or "")
        size = math.prod(map(int, numbers)) if numbers else -1
        yield _of_check(Line(label=Label(rank=int(one[1]))), COMPARED, one[2], num_elements=size)


def _of_check(
    line: Line, group: str, op: str, *, number: int | None = None, num_elements: int = -1, waited_ms: int | None = None
) -> TimedOut:
    return TimedOut(
        line=replace(line, group=GroupName(name=group)),
        number=number,
        op=op,
        num_elements=num_elements,
        timeout_ms=waited_ms or 0,
        ran_ms=waited_ms,
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
    *_CHECK_WORDS,
)
"""One of these is in every line that is read here, or one of `BEHIND`."""
BEHIND = (b"] started ", b"] finished ", b" ranks:", b" from /", b"Error: ", b"Exception: ")

_CHECKS = tuple(word.decode() for word in _CHECK_WORDS)
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
            yield from checks(text, lambda before: self._line(before, text))
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
