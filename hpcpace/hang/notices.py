"""What a rank writes when a step lasts too long, or answers when asked: open operations, stacks, what it does.

One file per rank, RUN/attempt-k/hang/rank-00003.json, replaced at each further look; RUN/hang/rank-00003.json where
torch's process group is not made, before there is an attempt. A reader takes nothing in it for granted: the run may
belong to somebody else. The ranks of a job believe files of their own user alone, which nobody else can write to.

Each rank listens on a socket in Linux's abstract namespace, named after the folder of its attempt, and answers with
what its notice of a hang would have; see `hpcpace.observe.watchdog`. Both sides let the kernel say who is at the other
end: whoever asks and whoever answers must be the same user. A job without such a socket is not disturbed.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from hpcpace.core.codec import FOREIGN_ERRORS, Text, convert, json_object, parse_json, read_json
from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, json_text
from hpcpace.core.text import shown
from hpcpace.hang.views import Doing

SCHEMA = 1
MAX_BYTES = 1 << 18
"""Of one notice: what does not fit is left out, other threads first."""
_MAX_BYTES_READ = 4 * MAX_BYTES  # JSON of many small values is refused below that, see `hpcpace.core.codec`
MAX_BYTES_OF_ALL = 1 << 28
"""Of all notices of an attempt: they take up to four times that in memory. 16,384 ranks may have 16 kB each."""
_MAX_GROUPS, _MAX_OPEN, _MAX_ENTERED = 256, 256, 1024
_MAX_THREADS, _MAX_FRAMES, _MAX_FRAMES_KEPT = 128, 512, 64
_NAME = re.compile(r"rank-(\d{5,7})\.json")
_Number = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
_Frames = Annotated[tuple[Text, ...], Meta(max_length=_MAX_FRAMES)]
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

    group: Text
    op: Text
    seq: _Number
    size_bytes: _Number
    peer: _Number
    entered_ns: _Number
    step: _Number


@dataclass(frozen=True, kw_only=True)
class NoticedCount:
    """How many operations the rank has entered in one channel, as `Call.seq` counts them.

    Attributes:
        group: name of the process group.
        source, destination: ranks of a message, see `hpcpace.hang.views.Channel`; both -1 for collectives.
        num_entered: operations called so far.
    """

    group: Text
    source: _Number
    destination: _Number
    num_entered: _Number


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    """Where a thread is: frames as `file:line in function`, the innermost last."""

    name: Text
    is_training: bool
    frames: _Frames


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

    rank: _Number
    host: Text
    pid: _Number
    host_key: Text
    time_ns: _Number
    unix_ns: _Number
    first_time_ns: _Number
    num_looks: _Number
    step: _Number
    step_age_ns: _Number
    limit_ns: _Number
    usual_step_ns: _Number
    is_first_step: bool
    doing: Doing = Doing.UNKNOWN
    doing_since_ns: _Number = 0
    excuse: Text = ""
    groups: tuple[NoticedGroup, ...] = ()
    calls: Annotated[tuple[NoticedCall, ...], Meta(max_length=_MAX_OPEN)] = ()
    entered: Annotated[tuple[NoticedCount, ...], Meta(max_length=_MAX_ENTERED)] = ()
    is_complete: bool = False
    stacks: Annotated[tuple[ThreadStack, ...], Meta(max_length=_MAX_THREADS)] = ()
    earlier_stack: _Frames = ()
    ended: Text = ""
    ended_ns: _Number = 0

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
                return min(folder.size_bytes(name), _MAX_BYTES_READ)
        except OSError:
            return 0

    def ranks(self, num_ranks: int = MAX_RANKS) -> list[int]:
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
    HangFolder(attempt).write(attempt.hang_file(notice.rank).name, notice_text(notice))


def read_notices(
    attempt: Attempt, problems: list[str] | None = None, *, owner: int | None = None, num_ranks: int = MAX_RANKS
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
        notice = read_json(folder, name, partial(notice_of, rank=rank), told, most_bytes=_MAX_BYTES_READ)
        if notice is not None:
            found[rank] = notice
    return found


def notice_text(notice: Notice) -> str:
    """Return a notice as JSON within `MAX_BYTES`, if need be without other threads, or with its last frames only."""
    own = tuple(stack for stack in notice.stacks if stack.is_training)
    short = tuple(replace(stack, frames=stack.frames[-_MAX_FRAMES_KEPT:]) for stack in own)
    bounded = replace(notice, groups=notice.groups[:_MAX_GROUPS], calls=notice.calls[:_MAX_OPEN])
    for stacks in (notice.stacks[:_MAX_THREADS], own, short):
        text = json_text(_content(replace(bounded, stacks=stacks, earlier_stack=_last(notice.earlier_stack))))
        if len(text.encode()) <= MAX_BYTES:
            return text
    return json_text(_content(replace(bounded, groups=(), calls=(), entered=(), is_complete=False, stacks=())))


def _last(frames: Sequence[str]) -> tuple[str, ...]:
    return tuple(frames[-_MAX_FRAMES:])


def _content(notice: Notice) -> dict[str, Any]:
    content = {"schema": SCHEMA, **asdict(notice)}
    content["groups"] = [{"name": group.name, "members": rank_ranges(group.members)} for group in notice.groups]
    content["stacks"] = [
        {"name": stack.name, "is_training": stack.is_training, "frames": list(_last(stack.frames))}
        for stack in notice.stacks
    ]
    content["entered"] = content["entered"][:_MAX_ENTERED]
    content["is_complete"] = notice.is_complete and len(notice.entered) <= _MAX_ENTERED
    return content


def notice_of(content: Any, rank: int) -> Notice:
    """Return the notice of a rank from the content of its file; what is not as it should be raises."""
    content = json_object(content)
    if content["schema"] != SCHEMA:
        raise ValueError(f"its schema is {shown(content['schema'])}; this release reads {SCHEMA}")
    if content["rank"] != rank:
        raise ValueError(f"it is of rank {shown(content['rank'])}")
    return convert({**content, "groups": []}, Notice)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as ranges, `first-last` or `first-last:distance`, in the order given."""
    parts, index = [], 0
    while index < len(ranks):
        distance = ranks[index + 1] - ranks[index] if index + 1 < len(ranks) else 0
        end = index + 1
        while distance > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == distance:
            end += 1
        if end - index < 3:  # two alone may each begin another range
            end = index + 1
        parts.append(_range(ranks[index], ranks[end - 1], distance))
        index = end
    return ",".join(parts)


def _range(first: int, last: int, distance: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" if distance == 1 else f"{first}-{last}:{distance}"


MAX_ASKED = 9
"""display: as many ranks as a verdict has words for, and one of those that wait."""
TIMEOUT_S = 3.0
"""timing: a rank whose Python lock is held in C does not answer; all are waited for together."""
_CREDENTIALS = struct.Struct("3i")
_PIECE = 1 << 16


def address(attempt: Attempt, rank: int) -> str:
    """Return the name of the socket on which a rank answers.

    Raises:
        OSError: the folder of the attempt cannot be looked at.
    """
    status = attempt.path.stat()
    return f"\0hpcpace-asked-{status.st_dev:x}-{status.st_ino:x}-{rank}"


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket is of this user."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(content)
    return bool(user == os.geteuid())


def ask_ranks(attempt: Attempt, ranks: Iterable[int], *, timeout_s: float = TIMEOUT_S) -> dict[int, Notice]:
    """Return what ranks on this host say of themselves; those that do not answer in time, or at all, are left out."""
    until_s = time.monotonic() + timeout_s
    answers: dict[int, Notice] = {}
    with ExitStack() as opened:
        asked: dict[int, socket.socket] = {}
        for rank in ranks:
            connection = opened.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(timeout_s)
            with suppress(OSError):
                connection.connect(address(attempt, rank))
                if is_own_user(connection):
                    asked[rank] = connection
        for rank, connection in asked.items():
            with suppress(OSError, *FOREIGN_ERRORS):
                answers[rank] = notice_of(parse_json(_read(connection, until_s)), rank)
    return answers


def _read(connection: socket.socket, until_s: float) -> bytes:
    """Return all that the other end sends.

    Raises:
        OSError: it takes too long, or sends too much.
    """
    content = b""
    while len(content) <= MAX_BYTES:
        connection.settimeout(max(until_s - time.monotonic(), 1e-3))
        piece = connection.recv(_PIECE)
        if not piece:
            return content
        content += piece
    raise OSError("the answer is too long")
