"""Notices that torch's process group is not made for a long time, in a job that `hpcpace trace` follows.

No attempt exists yet. Each rank that waits leaves a notice in the run directory that the job will take, and the lowest
of them says who has come and who is missing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpcpace.core.environment import HostIdentity, host_identity
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import NS_PER_S, format_duration, rank_list
from hpcpace.hang.notices import Notice, read_notices, write
from hpcpace.hang.views import Doing
from hpcpace.observe.alarm import FILES_TIMEOUT_S
from hpcpace.observe.hang_snapshot import thread_stacks
from hpcpace.trace.schema import MAX_RANKS, NO_STEP
from hpcpace.world.deadline import in_time

# Ranks that wait write their notices within seconds of each other.
_PAUSE_S = 3.0
# Notices of an earlier start in the same run directory are older than two timeouts and this.
_MARGIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A rank that waits for the process group.

    Attributes:
        run: the run directory that the job will take.
        rank, world_size: its place; -1 where unknown.
        timeout_s: how long the group may take.
        tell: prints a line on stderr.
    """

    run: Path
    rank: int
    world_size: int
    timeout_s: float
    tell: Callable[[str], None]

    @property
    def place(self) -> Attempt:
        """What has the folder of notices: the run itself, as no attempt exists yet."""
        return Attempt(self.run)


@contextmanager
def watched_start(waiting: Waiting, *, pause_s: float = _PAUSE_S) -> Iterator[None]:
    """Watch a block that makes the process group, in the thread that calls this."""
    ended = threading.Event()
    watch = _StartWatch(waiting, ended, threading.get_ident(), pause_s)
    threading.Thread(target=watch.run, name="hpcpace-start-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class _StartWatch:
    """Waits in a thread until the block has ended, or has lasted too long."""

    def __init__(self, waiting: Waiting, ended: threading.Event, thread: int, pause_s: float) -> None:
        self._waiting, self._ended, self._thread, self._pause_s = waiting, ended, thread, pause_s
        self._begin_ns = time.monotonic_ns()

    def run(self) -> None:
        """Watch. The boundary to somebody else's job: what fails here is left out."""
        if self._ended.wait(self._waiting.timeout_s):
            return
        notice = self._notice(host_identity())
        with suppress(Exception):
            self._write(notice)
        if not self._ended.wait(self._pause_s):
            self._speak(notice)
            self._ended.wait()
        with suppress(Exception):
            now_ns = time.monotonic_ns()
            self._write(replace(notice, ended="resumed", ended_ns=now_ns))

    def _speak(self, notice: Notice) -> None:
        waiting = self._waiting
        try:
            come = in_time(self._ranks, FILES_TIMEOUT_S, "its file system")
        except (OSError, TimeoutError):
            come = []
        if not come or min(come) == waiting.rank:
            waiting.tell(start_words(notice, come, waiting.world_size))

    def _ranks(self) -> list[int]:
        """Return the ranks that wait for the group."""
        least_ns = time.time_ns() - int((2 * self._waiting.timeout_s + _MARGIN_S) * NS_PER_S)
        world_size = self._waiting.world_size
        num_ranks = world_size if world_size > 0 else MAX_RANKS
        notices = read_notices(self._waiting.place, owner=os.geteuid(), num_ranks=num_ranks).values()
        return [notice.rank for notice in notices if not notice.ended and notice.unix_ns > least_ns]

    def _write(self, notice: Notice) -> None:
        if notice.rank >= 0:
            in_time(partial(write, self._waiting.place, notice), FILES_TIMEOUT_S, "its file system")

    def _notice(self, identity: HostIdentity) -> Notice:
        now_ns = time.monotonic_ns()
        return Notice(
            rank=self._waiting.rank,
            host=identity.host,
            pid=os.getpid(),
            host_key=identity.host_key,
            time_ns=now_ns,
            unix_ns=time.time_ns(),
            first_time_ns=now_ns,
            num_looks=1,
            step=NO_STEP,
            step_age_ns=now_ns - self._begin_ns,
            limit_ns=int(self._waiting.timeout_s * NS_PER_S),
            usual_step_ns=0,
            is_first_step=True,
            doing=Doing.STARTING,
            doing_since_ns=self._begin_ns,
            stacks=thread_stacks(self._thread),
        )


def start_words(notice: Notice, come: list[int], world_size: int) -> str:
    """Return what is known of a process group that is not made.

    Args:
        notice: of the rank that speaks.
        come: the ranks that are known to wait, ascending; empty where that is unknown.
        world_size: number of ranks; -1 where unknown.
    """
    who = f"rank {notice.rank}" if notice.rank >= 0 else f"process {notice.pid}"
    missing = sorted(set(range(world_size)) - set(come)) if come else []
    if missing:
        waits = "waits" if len(come) == 1 else "wait"
        known = f"{rank_list(come)} of {world_size} {waits} for it, but not {rank_list(missing)}"
    else:
        known = f"all {world_size} ranks wait for it" if come else "which ranks wait is unknown"
    where = f"; {who} is in {notice.stack[-1]}" if notice.stack else ""
    return f"init_process_group has lasted {format_duration(notice.step_age_ns)}: {known}{where}"
