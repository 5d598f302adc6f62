"""What a rank writes of itself when a step lasts too long: open operations, stacks, and what it was doing.

One file per rank, RUN/attempt-k/hang/rank-00003.json, replaced at each further look; RUN/hang/rank-00003.json where
torch's process group is not made, before there is an attempt. A reader takes nothing in it for granted: the run may
belong to somebody else. The ranks of a job believe files of their own user alone, which nobody else can write to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcpace.core.codec import json_object, read_json
from hpcpace.core.files import Folder
from hpcpace.core.rundir import Attempt, json_text
from hpcpace.core.text import shown
from hpcpace.hang.rank_ranges import rank_ranges
from hpcpace.hang.views import Doing
from hpcpace.trace.header import MOST_RANKS

SCHEMA = 1
MOST_BYTES = 1 << 18
"""Of one notice: what does not fit is left out, other threads first."""
_MOST_BYTES_READ = 4 * MOST_BYTES  # JSON of many small values is refused below that, see `hpcpace.core.codec`
MAX_BYTES_OF_ALL = 1 << 28
"""Of all notices of an attempt: they take up to four times that in memory. 16,384 ranks may have 16 kB each."""
_MOST_TEXT = 500
_MOST_GROUPS, _MOST_OPEN, _MOST_ENTERED = 256, 256, 1024
_MOST_THREADS, _MOST_FRAMES, _MOST_FRAMES_KEPT = 128, 512, 64
_NUMBERS = (
    *("pid", "time_ns", "unix_ns", "first_time_ns", "num_looks", "step", "step_age_ns", "limit_ns"),
    *("usual_step_ns", "doing_since_ns", "ended_ns"),
)
_NAME = re.compile(r"rank-(\d{5,7})\.json")
_MODE = 0o644  # a umask of 002, as on file systems of groups, would let the group write what ends a job


@dataclass(frozen=True, kw_only=True)
class NoticedGroup:
    """A process group that the rank has used: torch's name of it, and its global ranks in the order of the group."""

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NoticedCall:
    """An operation that the rank has entered and not finished.

    Attributes:
        group: name of its process group.
        op: its kind in lower case, as in `hpcpace.hang.views.Call`.
        seq: place in the order of its channel, from 0.
        size_bytes: of the message.
        peer: global rank of the peer or the root; -1 where it has none.
        entered_ns: when the rank called it, on its CLOCK_MONOTONIC.
        step: in which it was called.
    """

    group: str
    op: str
    seq: int
    size_bytes: int
    peer: int
    entered_ns: int
    step: int


@dataclass(frozen=True, kw_only=True)
class NoticedCount:
    """How many operations the rank has entered in one channel, as `Call.seq` counts them.

    Attributes:
        group: name of the process group.
        source, destination: ranks of a message, see `hpcpace.hang.views.Channel`; both -1 for collectives.
        num_entered: operations called so far.
    """

    group: str
    source: int
    destination: int
    num_entered: int


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    """Where a thread is: frames as `file:line in function`, the innermost last."""

    name: str
    is_training: bool
    frames: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What one rank saw of a step that lasts too long. Times in ns are of its CLOCK_MONOTONIC.

    Attributes:
        rank, host, pid: who wrote it.
        host_key: equal on ranks that share a clock; see `hpcpace.core.environment.HostIdentity`.
        time_ns: time of the last look.
        unix_ns: when this was written, on the host's clock of the day.
        first_time_ns: time of the first look.
        num_looks: looks so far, 1 at first.
        step: number of the step.
        step_age_ns: how long it had lasted at the last look, without time in which the process was suspended.
        limit_ns: how long it might last.
        usual_step_ns: median of recent steps; 0 where none is known.
        is_first_step: whether it is among the first steps, which may take long.
        doing: what the rank did outside operations, and since when; 0 where unknown.
        excuse: why a step may last this long, as `it saves a checkpoint`; empty without a reason.
        groups: process groups that it has used. They are for people who look at the file: ranges of a few bytes may
            mean a million ranks, so they are not read back.
        calls, entered: its open operations, and how many it has entered.
        is_complete: whether `entered` counts every operation of the rank.
        stacks: of all threads at the last look, the one that trains first.
        earlier_stack: of the thread that trains at the look before the last; empty at the first look.
        ended: empty while the step lasts, else `resumed`, or `closed` where the session ended before the step.
        ended_ns: when; 0 while the step lasts.
    """

    rank: int
    host: str
    pid: int
    host_key: str
    time_ns: int
    unix_ns: int
    first_time_ns: int
    num_looks: int
    step: int
    step_age_ns: int
    limit_ns: int
    usual_step_ns: int
    is_first_step: bool
    doing: Doing = Doing.UNKNOWN
    doing_since_ns: int = 0
    excuse: str = ""
    groups: tuple[NoticedGroup, ...] = ()
    calls: tuple[NoticedCall, ...] = ()
    entered: tuple[NoticedCount, ...] = ()
    is_complete: bool = False
    stacks: tuple[ThreadStack, ...] = ()
    earlier_stack: tuple[str, ...] = ()
    ended: str = ""
    ended_ns: int = 0

    @property
    def stack(self) -> tuple[str, ...]:
        """The frames of the thread that trains, the innermost last; empty where unknown."""
        return next((stack.frames for stack in self.stacks if stack.is_training), ())

    @property
    def has_moved(self) -> bool | None:
        """Whether the thread that trains was elsewhere one look earlier; None after one look only."""
        return None if self.num_looks < 2 else self.stack != self.earlier_stack


@dataclass(frozen=True)
class HangFolder:
    """The folder of the notices of an attempt.

    Attributes:
        attempt: whose notices they are.
        owner: the user whose files count; None: those of anybody do.
    """

    attempt: Attempt
    owner: int | None = None

    @property
    def path(self) -> Path:
        """What messages call it."""
        return self.attempt.hang_dir

    def open(self, *, make: bool = False) -> Folder:
        """Open it.

        Raises:
            OSError: it does not exist and was not, or could not be, made.
        """
        with self.attempt.open(make=make) as folder:
            folder.owner, name = self.owner, self.path.name
            return folder.make_folder(name) if make else folder.folder(name)

    def write(self, name: str, text: str) -> None:
        """Write a file in it, to which only its owner can write.

        Raises:
            OSError: it cannot be written.
        """
        with self.open(make=True) as folder:
            folder.write(name, text, mode=_MODE)

    @property
    def verdict_name(self) -> str:
        """Name of the file in which the rank that speaks for all says what it has found."""
        return "verdict.json"

    def size_bytes(self, name: str) -> int:
        """Return the size of a file in it; no more than is read of one, and 0 without one."""
        try:
            with self.open() as folder:
                return min(folder.size_bytes(name), _MOST_BYTES_READ)
        except OSError:
            return 0

    def ranks(self, num_ranks: int = MOST_RANKS) -> list[int]:
        """Return the ranks below a number of which there is a notice, ascending."""
        try:
            with self.open() as folder:
                found = (_NAME.fullmatch(name) for name in folder.names())
                return sorted(rank for name in found if name and (rank := int(name[1])) < num_ranks)
        except OSError:
            return []


def write(attempt: Attempt, notice: Notice) -> None:
    """Write a notice, in place of an earlier one of the same rank.

    Raises:
        OSError: it cannot be written.
    """
    HangFolder(attempt).write(attempt.hang_file(notice.rank).name, _text(notice))


def read_notices(
    attempt: Attempt, problems: list[str] | None = None, *, owner: int | None = None, num_ranks: int = MOST_RANKS
) -> dict[int, Notice]:
    """Return the notices of an attempt by rank; those that cannot be used are left out.

    Args:
        attempt: whose notices to read.
        problems: takes a sentence for each notice that is left out.
        owner: the user whose notices count; None: those of anybody do.
        num_ranks: number of ranks of the job.
    """
    folder, told = HangFolder(attempt, owner), [] if problems is None else problems
    found: dict[int, Notice] = {}
    left_bytes = MAX_BYTES_OF_ALL
    for rank in folder.ranks(num_ranks):
        name = attempt.hang_file(rank).name
        left_bytes -= folder.size_bytes(name)
        if left_bytes < 0:
            told.append(f"{folder.path / name} and those of higher ranks are left out (too many bytes together)")
            break
        notice = read_json(folder, name, _Reading(rank).notice, told, most_bytes=_MOST_BYTES_READ)
        if notice is not None:
            found[rank] = notice
    return found


def _text(notice: Notice) -> str:
    """Return a notice as JSON within `MOST_BYTES`, if need be without other threads, or with its last frames only."""
    own = tuple(stack for stack in notice.stacks if stack.is_training)
    short = tuple(replace(stack, frames=stack.frames[-_MOST_FRAMES_KEPT:]) for stack in own)
    bounded = replace(notice, groups=notice.groups[:_MOST_GROUPS], calls=notice.calls[:_MOST_OPEN])
    for stacks in (notice.stacks[:_MOST_THREADS], own, short):
        text = json_text(_content(replace(bounded, stacks=stacks, earlier_stack=_last(notice.earlier_stack))))
        if len(text.encode()) <= MOST_BYTES:
            return text
    return json_text(_content(replace(bounded, groups=(), calls=(), entered=(), is_complete=False, stacks=())))


def _last(frames: Sequence[str]) -> tuple[str, ...]:
    return tuple(frames[-_MOST_FRAMES:])


def _content(notice: Notice) -> dict[str, Any]:
    content = {"schema": SCHEMA, **asdict(notice)}
    content["groups"] = [{"name": group.name, "members": rank_ranges(group.members)} for group in notice.groups]
    content["stacks"] = [
        {"name": stack.name, "is_training": stack.is_training, "frames": list(_last(stack.frames))}
        for stack in notice.stacks
    ]
    content["entered"] = content["entered"][:_MOST_ENTERED]
    content["is_complete"] = notice.is_complete and len(notice.entered) <= _MOST_ENTERED
    return content


class _Reading:
    """Reads the notice of one rank; what is not as it should be raises, as `read_json` expects it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def notice(self, content: Any) -> Notice:
        """Return the notice that the content of its file is."""
        content = json_object(content)
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {shown(content['schema'])}; this release reads {SCHEMA}")
        if content["rank"] != self._rank:
            raise ValueError(f"it is of rank {shown(content['rank'])}")
        plain: dict[str, Any] = {
            **{name: _text_of(content, name) for name in ("host", "host_key", "excuse", "ended")},
            **{name: _number(content, name) for name in _NUMBERS},
            **{name: _flag(content, name) for name in ("is_first_step", "is_complete")},
        }
        return Notice(
            rank=self._rank,
            **plain,
            doing=Doing(content["doing"]),
            calls=tuple(map(_call, _entries(content, "calls", _MOST_OPEN))),
            entered=tuple(map(_count, _entries(content, "entered", _MOST_ENTERED))),
            stacks=tuple(map(_stack, _entries(content, "stacks", _MOST_THREADS))),
            earlier_stack=_frames(content, "earlier_stack"),
        )


def _call(entry: Any) -> NoticedCall:
    return NoticedCall(
        group=_text_of(entry, "group"),
        op=_text_of(entry, "op"),
        seq=_number(entry, "seq"),
        size_bytes=_number(entry, "size_bytes"),
        peer=_number(entry, "peer"),
        entered_ns=_number(entry, "entered_ns"),
        step=_number(entry, "step"),
    )


def _count(entry: Any) -> NoticedCount:
    numbers = {name: _number(entry, name) for name in ("source", "destination", "num_entered")}
    return NoticedCount(group=_text_of(entry, "group"), **numbers)


def _stack(entry: Any) -> ThreadStack:
    return ThreadStack(
        name=_text_of(entry, "name"), is_training=_flag(entry, "is_training"), frames=_frames(entry, "frames")
    )


def _entries(content: Any, name: str, most: int) -> list[Any]:
    entries = content[name]
    if not isinstance(entries, list) or len(entries) > most:
        raise TypeError(f"{name} is no list of at most {most} entries")
    return entries


def _frames(content: Any, name: str) -> tuple[str, ...]:
    frames = _entries(content, name, _MOST_FRAMES)
    if not all(isinstance(frame, str) for frame in frames):
        raise TypeError(f"{name} holds more than texts")
    return tuple(frame[:_MOST_TEXT] for frame in frames)


def _text_of(content: Any, name: str, *, most: int = _MOST_TEXT) -> str:
    value = content[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return value[:most]


def _number(content: Any, name: str) -> int:
    value = content[name]
    if type(value) is not int or not -1 <= value < 1 << 63:
        raise TypeError(f"{name} is no whole number of 8 bytes")
    return value


def _flag(content: Any, name: str) -> bool:
    value = content[name]
    if not isinstance(value, bool):
        raise TypeError(f"{name} is neither true nor false")
    return value
