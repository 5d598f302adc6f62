"""What is known of a job that may hang: what each rank entered, finished, and does now.

Traces of hpcpace, Flight Recorder dumps of PyTorch and reports of NCCL are all brought into this form, and the rules of
`hpcpace.hang.rules` know no other. Times are on one clock, as well as their source can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Doing(StrEnum):
    """What a rank was last seen to do."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    COMPUTING = "computing"
    LOADING = "loading data"
    SAVING = "saving a checkpoint"
    EVALUATING = "evaluating"
    COMMUNICATING = "communicating"
    ENDED = "ended"


class ProcessState(StrEnum):
    """What the kernel says of a process, apart from what its program is at."""

    ASLEEP = "asleep"
    BLOCKED = "waiting for I/O"
    RUNNING = "computing"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class Activity:
    """How much a process did of late.

    Attributes:
        state: what that means.
        cores: processor time per time, of all its threads.
        over_ns: the time over which that was measured.
        is_now: whether it was looked at just now, and not taken from what the rank recorded.
        pid: its process on this host; None where it runs elsewhere.
        waits: what it sleeps for, like "in a write to the pipe /tmp/x"; empty where unknown.
    """

    state: ProcessState
    cores: float
    over_ns: int
    is_now: bool
    pid: int | None = None
    waits: str = ""

    def __str__(self) -> str:
        return f"waiting {self.waits}" if self.waits else str(self.state)


@dataclass(frozen=True, order=True)
class Channel:
    """What has an order of operations of its own: the collectives of a group, or the messages between two ranks of it.

    Attributes:
        group: index in `JobView.groups`.
        source, destination: ranks of a message; both -1 for the collectives of the group.
    """

    group: int
    source: int = -1
    destination: int = -1


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operation as one rank called it.

    Attributes:
        seq: place in the order of its channel, from 0 or from where the record begins; the same on all members.
        op: its kind, in lower case as torch.distributed names it: all_reduce, reduce_scatter, send, ...
        size_bytes: of the message; -1 where unknown.
        num_elements: the same for a source that does not know how large an element is; -1 where unknown.
        part_bytes: what the rank gives to an all_gather, or gets of a reduce_scatter; -1 where unknown.
        dtype: type of its elements as torch names it; empty where unknown, or where they are of several.
        root: global rank of its root or peer; -1 where it has none.
        entered_ns: when the rank called it; None where unknown.
        is_open: whether it had not finished when the record ended.
        is_aligned: whether `seq` is surely that of the same operation on other ranks.
        is_numbered: whether its source knows it by `seq`, so that words may name it so.
        step: step in which it was entered; -1 where unknown.
        where: `file:line in function` of the code that called it; empty where unknown.
        site: all frames of that code, the innermost first, without the folders that hosts may call differently; empty
            where unknown. Calls from one place of a program have equal ones.
    """

    channel: Channel
    seq: int
    op: str
    size_bytes: int = -1
    num_elements: int = -1
    part_bytes: int = -1
    dtype: str = ""
    root: int = -1
    entered_ns: int | None = None
    is_open: bool
    is_aligned: bool = True
    is_numbered: bool = True
    step: int = -1
    where: str = ""
    site: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """A process group: its name, and its members by global rank in the order of the group."""

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What is known of one rank.

    Attributes:
        is_recorded: whether there is any record of it.
        entered: how many operations it is known to have entered in each channel, counted as `Call.seq` is: those with a
            lower `seq` were entered. A channel of which its record says nothing is not in it.
        completed: how many operations of a channel are known to have finished, for records that hold a count in place
            of calls; of a channel that is not in it, whatever was entered and is no open call has finished.
        calls: its last operations, finished and open ones, the oldest first.
        is_complete: whether its record holds every operation that it entered up to `seen_ns`. Of others it is not known
            that they were never entered.
        seen_ns: the last sign of life; None where unknown.
        is_gone: whether it is known to have ended, or its host to be down; None where unknown.
        end: how it ended, such as `exit code 7` or `ValueError`; empty where unknown.
        error: where the exception that ended it was raised, and how its message begins; empty where unknown.
        doing: what it was last seen to do outside operations, and `doing_since_ns`, when that began.
        is_guess: whether `doing` is only what usually comes next, and `after`, for words, what it did last.
        activity: whether it sleeps or computes; None where unknown.
        stack: Python frames of the training thread, `file:line in function`, the innermost last; empty where unknown.
    """

    rank: int
    host: str = ""
    is_recorded: bool = True
    entered: Mapping[Channel, int] = field(default_factory=dict)
    completed: Mapping[Channel, int] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    is_complete: bool = True
    seen_ns: int | None = None
    is_gone: bool | None = None
    end: str = ""
    error: str = ""
    doing: Doing = Doing.UNKNOWN
    doing_since_ns: int | None = None
    is_guess: bool = False
    after: str = ""
    activity: Activity | None = None
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What is known of a job at one time.

    Attributes:
        groups: the process groups; `Channel.group` counts in this order.
        ranks: every rank of the job by number, with or without a record.
        now_ns: the time of the look, or of the last record.
        usual_step_ns: median step time; None where unknown.
        usual_ns: median length of checkpoints and of evaluations; without an entry where there was none.
        source: what the records are, for words: `traces`, `Flight Recorder dumps`, ...
        is_dated: whether times are Unix times, and it is not known how long after the last record the job was looked
            at: words then say when a hang began, and not how long ago.
        unplaced: ranks that are in operations of which the records do not show which ones, ascending.
    """

    groups: tuple[GroupView, ...]
    ranks: Mapping[int, RankView]
    now_ns: int
    usual_step_ns: int | None = None
    usual_ns: Mapping[Doing, int] = field(default_factory=dict)
    source: str = "traces"
    is_dated: bool = False
    unplaced: tuple[int, ...] = ()


class HangKind(StrEnum):
    """What holds a job up."""

    NEVER_CALLED = "a rank never called it"
    TOO_MANY = "a rank called an operation that the others did not call"
    TOO_FEW = "a rank left out an operation that the others called"
    MISMATCH = "ranks called different operations"
    DISORDER = "ranks called the operations of groups in different orders"
    PEERS_LEFT = "a rank waits in an operation that its peers have finished"
    OWN_WORK = "a rank is stuck in its own work"
    GONE = "a rank has ended or its host is gone"
    NETWORK = "all are inside and nothing moves"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Who holds up whom.

    Attributes:
        kind: of the cause.
        culprits: ranks that hold up the others, ascending; empty where no rank can be named.
        could_be: ranks of which at least one is to blame where the records cannot separate them; empty where `culprits`
            says it, or where nothing can be said.
        call: the operation in which the others wait; None where nobody waits in one.
        waiting: ranks that are held up, ascending.
        since_ns: since when, on the clock of the view; None where unknown.
        chain: operations that were followed from the waiting ranks to the root, the root last.
        reason: why nothing, or only a set, can be named; empty otherwise.
        sides: where a set is all that can be named because its ranks differ in what they have done: those that have
            called or finished more, and those that are behind them.
        extra: the calls in which the records of ranks begin to differ, as one of those made them that did.
        also: where `culprits` hold up others in several operations, or for several reasons, a hang for each but the
            first.
    """

    kind: HangKind
    culprits: tuple[int, ...] = ()
    could_be: tuple[int, ...] = ()
    call: Call | None = None
    waiting: tuple[int, ...] = ()
    since_ns: int | None = None
    chain: tuple[Call, ...] = ()
    reason: str = ""
    sides: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    extra: tuple[Call, ...] = ()
    also: tuple[Hang, ...] = ()


def undecided(hang: Hang, reason: str) -> Hang:
    """Return a hang whose culprit is unknown, and why."""
    return Hang(
        kind=HangKind.UNKNOWN,
        call=hang.call,
        waiting=tuple(sorted({*hang.waiting, *hang.culprits})) if hang.kind is HangKind.MISMATCH else hang.waiting,
        since_ns=hang.since_ns,
        reason=reason,
    )


@dataclass(frozen=True, kw_only=True)
class FoundHang:
    """A hang, and what was known of the job at the time of it."""

    hang: Hang
    job: JobView
