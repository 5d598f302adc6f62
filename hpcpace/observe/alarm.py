"""One rank speaks for all when a job seems to hang, at its start or in a step.

Ranks agree on nothing and wait for nobody. Each leaves a notice in the run; the lowest one whose notice says that it is
still held up reads those of the others, asks for the verdict, and leaves it next to them, where the others find it.
Ranks believe files of their own user alone: whoever else can write into the run neither ends the job nor silences it.

While torch's process group is not made, no attempt exists: the notices are in the run directory that the job will take,
and the lowest rank says which ranks have come and which are missing.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from hpcpace.core.codec import read_json
from hpcpace.core.detail import MAX_RANKS
from hpcpace.core.environment import RankInfo, host_identity
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt, json_text
from hpcpace.core.text import NS_PER_S, format_duration, rank_list, shell_word
from hpcpace.hang.notices import HangFolder, Notice, read_notices, write
from hpcpace.hang.verdict import HangWords, ask_verdict
from hpcpace.hang.views import Doing
from hpcpace.observe.hang_snapshot import thread_stacks
from hpcpace.observe.settings import HangConfig
from hpcpace.trace.schema import NO_STEP
from hpcpace.world.deadline import in_time

FILES_TIMEOUT_S = 10.0
"""How long files of the run may take; a file system that does not answer may be why a job hangs."""
PAUSE_S = 3.0
"""How long ranks have to write their notices once the first of them has."""
_VERDICT_TIMEOUT_S = 60.0
# A rank that should speak, and does not, may have been stopped since: the next one takes its place after this.
_PATIENCE_S = 30.0
_MAX_PAUSE_S = 30.0
_CONFIRMED = 3
_LATE_S = 60.0
# Notices of an earlier start in the same run directory are older than two timeouts and this.
_MARGIN_S = 60.0
# A rank without a notice may only be late with it; one that never writes it, being stopped, delays the end by a look.
_LOOKS_WITHOUT_OTHERS = 3
_ASKS = "a verdict is asked for"
_NOBODY_WAITS = "no rank is known to wait for another"
_MAX_BYTES = 1 << 16
_MAX_LETTERS = 2000


class Alarm:
    """What one rank does about a hang beyond its own notice.

    Args:
        attempt: whose folder takes notices and the verdict.
        rank: this rank.
        num_ranks: how many ranks should write notices of a step in which all wait for one.
        stops: whether this rank ends when the verdict says so.
        tell: prints lines on stderr.
        ask: returns the verdict on the attempt; see `hpcpace.hang.verdict.ask_verdict`.
        pause_s: seconds that the others have to write their notices.
    """

    def __init__(
        self,
        attempt: Attempt,
        rank: int,
        *,
        num_ranks: int,
        stops: bool,
        tell: Callable[[str], None],
        ask: Callable[[Attempt, float], HangWords | None] = ask_verdict,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._attempt, self._rank, self._num_ranks = attempt, rank, num_ranks
        self._stops, self._tell, self._ask = stops, tell, ask
        self._folder = HangFolder(attempt, owner=os.geteuid())
        self._first_pause_s = self._pause_s = pause_s
        self._spoken_step: int | None = None
        self._asked_at = (-1, 0)
        self._may_have_ended = False
        self._since_ns = self._last_ns = 0

    @classmethod
    def of(cls, attempt: Attempt, world: RankInfo, settings: HangConfig, *, tell: Callable[[str], None]) -> Alarm:
        """Return the alarm of a rank by the settings of its job."""
        stops, pause_s = settings.on_hang == "stop", min(PAUSE_S, settings.least_s)
        return cls(attempt, world.rank, num_ranks=world.world_size, stops=stops, tell=tell, pause_s=pause_s)

    def raised(self, now_ns: int) -> None:
        """Begin to watch the notices of the others: this rank has just written its own."""
        self._since_ns = self._last_ns = now_ns
        self._pause_s, self._may_have_ended = self._first_pause_s, False

    def consider(
        self, now_ns: int, notice: Notice, *, may_end_job: bool, is_held: Callable[[], bool] = lambda: True
    ) -> str | None:
        """Speak if it is this rank's turn; return the verdict by which this rank is to end now, None to go on.

        Args:
            now_ns: the time.
            notice: of this rank.
            may_end_job: whether the step has lasted so long that the job may be ended for it.
            is_held: returns whether this rank is still where its notice was written; a verdict takes seconds.
        """
        may_end_job = may_end_job and self._stops
        if may_end_job and not self._may_have_ended:
            self._may_have_ended, self._since_ns = True, now_ns  # the lowest rank comes first here again
        pause_s = self._first_pause_s if may_end_job else self._pause_s
        if now_ns < self._last_ns + pause_s * NS_PER_S:
            return None
        self._last_ns, self._pause_s = now_ns, min(2 * self._pause_s, _MAX_PAUSE_S)
        try:
            decide = partial(self._consider, now_ns, notice, may_end_job, is_held)
            return in_time(decide, _VERDICT_TIMEOUT_S + 2 * FILES_TIMEOUT_S, "its verdict")
        except (OSError, TimeoutError) as error:
            if self._spoken_step != notice.step and not notice.excuse:  # say what this rank knows by itself
                self._spoken_step = notice.step
                self._tell(f"rank {self._rank}: {self._line(notice, None, str(error), ends=False)}")
            return None

    def missed(self, step: int) -> str | None:
        """Return the verdict by which this rank is to end that the others found without it; None if there is none.

        Args:
            step: of this rank.
        """
        try:
            decided = in_time(self._decision, FILES_TIMEOUT_S, "its file system") if self._stops else None
        except (OSError, TimeoutError):
            return None
        is_of_now = decided is not None and not decided.is_stale and not _is_other_step(decided.step, step)
        return decided.words if decided is not None and decided.stops and is_of_now else None

    def _consider(self, now_ns: int, notice: Notice, may_end_job: bool, is_held: Callable[[], bool]) -> str | None:
        decided = self._decision()
        if decided is not None and (_is_other_step(decided.step, notice.step) or decided.is_stale):
            decided = None
        if decided is not None and decided.stops and self._stops:
            return decided.words
        has_asked = self._asked_at == (notice.step, notice.num_looks)
        if notice.excuse or has_asked or not (may_end_job or (decided is None and self._spoken_step != notice.step)):
            return None
        noticed = read_notices(self._attempt, owner=self._folder.owner, num_ranks=self._num_ranks).values()
        notices = [other for other in noticed if not _is_other_step(other.step, notice.step)]
        held = [other for other in notices if not other.ended]
        num_before = sum(other.rank < self._rank for other in held)
        if any(map(_is_reason, notices)) or now_ns - self._since_ns < num_before * _PATIENCE_S * NS_PER_S:
            return None
        is_heard = len(notices) >= self._num_ranks or notice.num_looks >= _LOOKS_WITHOUT_OTHERS
        may_end_job = may_end_job and is_heard and all(other.has_moved is False for other in held)
        if decided is not None and not may_end_job:
            return None
        self._asked_at = (notice.step, notice.num_looks)
        if decided is None:
            self._decide(notice.step, _ASKS, stops=False)
        words, problem = None, ""
        try:
            words = self._ask(self._attempt, _VERDICT_TIMEOUT_S)
        except RuntimeError as error:
            problem = str(error)
        ends = may_end_job and words is not None and is_held()
        if decided is not None and not ends:
            return None
        line = self._line(notice, words, problem, ends=ends)
        self._decide(notice.step, line, stops=ends)
        self._spoken_step = notice.step
        reasons = () if words is None else tuple(f"  {reason}" for reason in words.why)
        self._tell("\n".join(("what holds the job up:" if ends else line, *reasons)))
        if ends:
            self._tell(line)
        return line if ends else None

    def _line(self, notice: Notice, words: HangWords | None, problem: str, *, ends: bool) -> str:
        usual = f" (usual: {format_duration(notice.usual_step_ns)})" if notice.usual_step_ns else ""
        lasts = f"step {notice.step} has lasted {format_duration(notice.step_age_ns)}{usual}"
        known = f"{words.headline}; {lasts}" if words is not None else f"{lasts}: {problem or _NOBODY_WAITS}"
        then = "; the job ends here" if ends else ""
        return f"{known}{then}: hpcpace hang {shell_word(str(self._attempt.path.parent))}"

    def _decision(self) -> _Decision | None:
        """Return what another rank, or this one, has said last."""
        made_of = partial(msgspec.convert, type=_Decision)
        return read_json(self._folder, self._folder.verdict_name, made_of, [], most_bytes=_MAX_BYTES)

    def _decide(self, step: int, line: str, *, stops: bool) -> None:
        content = {"step": step, "rank": self._rank, "unix_ns": time.time_ns(), "line": line, "stops": stops}
        self._folder.write(self._folder.verdict_name, json_text(content))


def _is_other_step(step: int, own_step: int) -> bool:
    """Return whether a step is not the one that hangs; ranks that wait for each other may be one step apart."""
    return abs(step - own_step) > 1


def _is_reason(notice: Notice) -> bool:
    """Return whether a notice is a reason for all ranks to wait on.

    Its rank has one, and has confirmed it, which is due once in each `limit_ns`; or it has gone on a short while ago.
    """
    age_ns = time.time_ns() - notice.unix_ns
    if notice.ended:
        return age_ns < notice.limit_ns
    return bool(notice.excuse) and age_ns < _CONFIRMED * notice.limit_ns


class _Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank that speaks has said: about which step, in what words, when, and whether the job ends."""

    step: int
    line: str
    unix_ns: int
    stops: bool

    @property
    def words(self) -> str:
        """The line, as far as it is shown."""
        return self.line[:_MAX_LETTERS]

    @property
    def is_stale(self) -> bool:
        """Whether this counts no longer: who has asked for a verdict must have gone since, or an end was long ago."""
        most_s = _LATE_S if self.stops else 2 * _VERDICT_TIMEOUT_S if self.line == _ASKS else math.inf
        return time.time_ns() - self.unix_ns >= most_s * NS_PER_S


@contextmanager
def watched_start(waiting: Waiting, *, pause_s: float = PAUSE_S) -> Iterator[None]:
    """Watch a block that makes the process group, in the thread that calls this.

    Args:
        waiting: this rank.
        pause_s: how long the other ranks have to write their notices.
    """
    ended, thread = threading.Event(), threading.get_ident()
    watch = partial(waiting.watch, ended, thread, pause_s)
    threading.Thread(target=watch, name="hpcpace-start-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


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

    def watch(self, ended: threading.Event, thread: int, pause_s: float) -> None:
        """Wait until the block has ended, or has lasted too long.

        The boundary to somebody else's job: what fails here is left out.

        Args:
            ended: set when the block has ended.
            thread: where it runs, as `threading.get_ident()`.
            pause_s: how long the other ranks have to write their notices.
        """
        begin_ns = time.monotonic_ns()
        if ended.wait(self.timeout_s):
            return
        notice = self._notice(begin_ns, thread)
        with suppress(Exception):
            self._write(notice)
        if not ended.wait(pause_s):
            try:
                come = in_time(self._ranks, FILES_TIMEOUT_S, "its file system")
            except (OSError, TimeoutError):
                come = []
            if not come or min(come) == self.rank:
                self.tell(start_words(notice, come, self.world_size))
            ended.wait()
        with suppress(Exception):
            self._write(replace(notice, ended="resumed", ended_ns=time.monotonic_ns()))

    def _ranks(self) -> list[int]:
        """Return the ranks that wait for the group."""
        least_ns = time.time_ns() - int((2 * self.timeout_s + _MARGIN_S) * NS_PER_S)
        num_ranks = self.world_size if self.world_size > 0 else MAX_RANKS
        # No attempt exists yet: the run itself has the folder of notices.
        notices = read_notices(Attempt(self.run), owner=os.geteuid(), num_ranks=num_ranks).values()
        return [notice.rank for notice in notices if not notice.ended and notice.unix_ns > least_ns]

    def _write(self, notice: Notice) -> None:
        if notice.rank >= 0:
            in_time(partial(write, Attempt(self.run), notice), FILES_TIMEOUT_S, "its file system")

    def _notice(self, begin_ns: int, thread: int) -> Notice:
        identity, now_ns = host_identity(), time.monotonic_ns()
        return Notice(
            rank=self.rank,
            host=identity.host,
            pid=os.getpid(),
            host_key=identity.host_key,
            time_ns=now_ns,
            unix_ns=time.time_ns(),
            first_time_ns=now_ns,
            num_looks=1,
            step=NO_STEP,
            step_age_ns=now_ns - begin_ns,
            limit_ns=int(self.timeout_s * NS_PER_S),
            usual_step_ns=0,
            is_first_step=True,
            doing=Doing.STARTING,
            doing_since_ns=begin_ns,
            stacks=thread_stacks(thread),
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
