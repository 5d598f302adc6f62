"""One rank speaks for all when a job seems to hang, and may end it.

Ranks agree on nothing and wait for nobody. Each leaves a notice in the run; the lowest one whose notice says that it is
still held up reads those of the others, asks for the verdict, and leaves it beside them, where the others find it.
Ranks believe files of their own user alone: whoever else can write into the run neither ends the job nor silences it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hpcpace.core.codec import json_object, read_json
from hpcpace.core.rundir import Attempt, json_text
from hpcpace.core.text import NS_PER_S, format_duration, shell_word
from hpcpace.hang.notices import HangFolder, Notice, read_notices
from hpcpace.hang.verdict import HangWords, ask_verdict
from hpcpace.world.deadline import in_time

FILES_TIMEOUT_S = 10.0
"""How long files of the run may take; a file system that does not answer may be why a job hangs."""
PAUSE_S = 3.0
"""How long ranks have to write their notices once the first of them has."""
_VERDICT_TIMEOUT_S = 60.0
# A rank that should speak, and does not, may have been stopped since: the next one takes its place after this.
_PATIENCE_S = 30.0
_LONGEST_PAUSE_S = 30.0
_CONFIRMED = 3
_LATE_S = 60.0
# A rank without a notice may only be late with it; one that never writes it, being stopped, delays the end by a look.
_LOOKS_WITHOUT_OTHERS = 3
_ASKS = "a verdict is asked for"
_NOBODY_WAITS = "no rank is known to wait for another"
_MOST_BYTES = 1 << 16
_MOST_TEXT = 2000


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
        self._last_ns, self._pause_s = now_ns, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        try:
            decide = partial(self._consider, now_ns, notice, may_end_job, is_held)
            return in_time(decide, _VERDICT_TIMEOUT_S + 2 * FILES_TIMEOUT_S, "its verdict")
        except (OSError, TimeoutError) as error:
            self._speak_alone(notice, str(error))
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
        return decided.line if decided is not None and decided.stops and is_of_now else None

    def _consider(self, now_ns: int, notice: Notice, may_end_job: bool, is_held: Callable[[], bool]) -> str | None:
        decided = self._decision()
        if decided is not None and (_is_other_step(decided.step, notice.step) or decided.is_stale):
            decided = None
        if decided is not None and decided.stops and self._stops:
            return decided.line
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
        words, problem = self._verdict()
        ends = may_end_job and words is not None and is_held()
        if decided is not None and not ends:
            return None
        line = self._line(notice, words, problem, ends=ends)
        self._decide(notice.step, line, stops=ends)
        self._spoken_step = notice.step
        reasons = () if words is None else tuple(f"  {reason}" for reason in words.why)
        if ends:
            self._tell("\n".join(("what holds the job up:", *reasons)))
        self._tell(line if ends else "\n".join((line, *reasons)))
        return line if ends else None

    def _verdict(self) -> tuple[HangWords | None, str]:
        try:
            return self._ask(self._attempt, _VERDICT_TIMEOUT_S), ""
        except RuntimeError as error:
            return None, str(error)

    def _speak_alone(self, notice: Notice, problem: str) -> None:
        """Say what this rank knows by itself, where the run cannot be read."""
        if self._spoken_step != notice.step and not notice.excuse:
            self._spoken_step = notice.step
            self._tell(f"rank {self._rank}: {self._line(notice, None, problem, ends=False)}")

    def _line(self, notice: Notice, words: HangWords | None, problem: str, *, ends: bool) -> str:
        usual = f" (usual: {format_duration(notice.usual_step_ns)})" if notice.usual_step_ns else ""
        lasts = f"step {notice.step} has lasted {format_duration(notice.step_age_ns)}{usual}"
        told = f"{words.headline}; {lasts}" if words is not None else f"{lasts}: {problem or _NOBODY_WAITS}"
        then = "; the job ends here" if ends else ""
        return f"{told}{then}: hpcpace hang {shell_word(str(self._attempt.path.parent))}"

    def _decision(self) -> _Decision | None:
        """Return what another rank, or this one, has said last."""
        return read_json(self._folder, self._folder.verdict_name, _decision_of, [], most_bytes=_MOST_BYTES)

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


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """What the rank that speaks has said: of which step, in what words, when, and whether the job ends."""

    step: int
    line: str
    unix_ns: int
    stops: bool

    @property
    def is_stale(self) -> bool:
        """Whether this counts no longer: who has asked for a verdict must have gone since, or an end was long ago."""
        most_s = _LATE_S if self.stops else 2 * _VERDICT_TIMEOUT_S if self.line == _ASKS else math.inf
        return time.time_ns() - self.unix_ns >= most_s * NS_PER_S


def _decision_of(content: object) -> _Decision:
    found = json_object(content)
    line = found["line"]
    if not isinstance(line, str):
        raise TypeError("line is no text")
    return _Decision(
        step=int(found["step"]), line=line[:_MOST_TEXT], unix_ns=int(found["unix_ns"]), stops=found["stops"] is True
    )
