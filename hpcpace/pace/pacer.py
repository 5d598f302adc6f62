"""The pacing of one rank, first step to last: it searches for the pacing point, paces, and records the trial.

The observers call `arrive` where the rank is about to be blocked and `leave` where it is released; the session says
where steps begin and end. Any error in here ends pacing on all ranks with one warning, never the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, field, replace
from typing import Any

from hpcpace.core.codec import convert, plain
from hpcpace.core.records import dataclass
from hpcpace.pace.choice import (
    CollectionCount,
    CollectionSchedule,
    CollectionWatch,
    PacingChoice,
    PacingPoint,
    PointSearch,
    RankProfile,
    RankReport,
    choose,
    crowding,
)
from hpcpace.pace.rounds import (
    Answer,
    Arrival,
    Exchange,
    PacerClocks,
    PacingTrace,
    PreciseSleep,
    Rounds,
    most_waited_s,
)
from hpcpace.pace.settings import MIN_PAIRS, PaceSettings
from hpcpace.pace.trial import Interval, TrialOutcome, TrialResult
from hpcpace.trace.schema import StepFlag

# timing: ranks of a job that ends in order get here one after the other.
_END_WAIT_S = 1.0


class Pacer:
    """Paces one rank. Collective: all ranks make one and end their steps equally often.

    Args:
        settings: how; the policy is not `none`.
        rank: this rank.
        exchange: to the other ranks; None in a world of one.
        profile: what is known of this rank beforehand.
        first_step: number of the first step in which to search for the pacing point.
        trace: takes rows and delays.
        warn: takes a warning.
        clocks, precise_sleep: replaced in tests.
    """

    def __init__(
        self,
        settings: PaceSettings,
        *,
        rank: int,
        exchange: Exchange | None,
        profile: RankProfile,
        first_step: int,
        trace: PacingTrace,
        warn: Callable[[str], None],
        clocks: PacerClocks | None = None,
        precise_sleep: PreciseSleep | None = None,
    ) -> None:
        self._settings, self._rank, self._exchange = settings, rank, exchange
        self._trace, self._warn = trace, warn
        self._clocks = clocks or PacerClocks()
        self._precise_sleep = precise_sleep or PreciseSleep(clock=self._clocks.monotonic)
        self._search = PointSearch(
            first_step=first_step,
            num_steps=settings.find_steps,
            profile=profile,
            thread_clock=self._clocks.thread,
        )
        self._counts: dict[str, int] = defaultdict(int)
        self._watch = CollectionWatch()
        self._schedule = CollectionSchedule()
        self._reports: Answer[list[Any]] | None = None
        self._reports_due = 0  # the step after which they have arrived
        self._active: Rounds | None = None
        self._record = PacingRecord(policy=settings.policy)
        self._is_over = exchange is None
        self._has_failed = False
        if exchange is None:
            self._record.reason = "a single rank has nobody to wait for"

    def start(self) -> None:
        """Start to count garbage collections."""
        self._watch.start()

    def arrive(self, kind: str, *, on_device: bool = False) -> Arrival | None:
        """Delay this rank if its policy wants it, just before it is blocked.

        Args:
            kind: of operation, like `all_reduce`; each of a step's operations of a kind is a candidate by itself.
            on_device: whether only a GPU waits, and not the host.

        Returns:
            What to pass to `leave`; None where this operation does not matter.
        """
        if self._is_over or (not self._search.is_open and (self._active is None or self._active.point is None)):
            return None
        with self._boundary(self._withdraw):
            return self._arrive(kind, on_device=on_device)
        return None

    def leave(self, arrival: Arrival | None, ranks: tuple[int, ...], size_bytes: int = 0) -> None:
        """Note that the rank is released.

        Args:
            arrival: what `arrive` returned.
            ranks: global ranks of those who met here; empty if unknown.
            size_bytes: of the message; where it changes, all ranks start to learn afresh.
        """
        if arrival is not None and not self._is_over:
            with self._boundary(self._withdraw):
                self._leave(arrival, ranks, size_bytes)

    def begin_step(self) -> StepFlag:
        """Collect garbage if that is due; return the flag of such a step."""
        if self._active is not None and not self._is_over:
            with self._boundary(self._withdraw):
                return self._active.begin_step()
        return StepFlag.NONE

    def end_step(self, step: int, duration_ns: int, flags: int) -> None:
        """Take a step that has ended, between it and the next; no other rank is waited for longer than a step."""
        if self._is_over or self._exchange is None:
            return
        with self._boundary(self._fail):
            self._counts.clear()
            self._watch.end_step(is_scheduled=self._schedule.is_on)
            if self._active is not None:
                self._active.end_step(step, duration_ns, flags)
                if self._active.is_over:
                    self._end(self._active.reason)
            elif self._reports is None:
                if self._search.end_step(step, duration_ns, self._watch.counts[False].time_ns):
                    self._reports = self._exchange.allgather(plain(self._search.report(self._clocks.unix())))
                    self._reports_due = step + self._settings.window_steps
            elif step >= self._reports_due:
                reports = self._reports.result(most_waited_s(duration_ns))
                self._activate([convert(report, RankReport) for report in reports], self._exchange)

    def close(self, *, in_order: bool) -> PacingRecord:
        """End pacing and return its record. Collective if `in_order`: waits for the exchange in flight."""
        active = self._active
        with self._boundary(self._fail):
            if not self._is_over and in_order:
                self._take_last()
            if active is not None:
                active.record_rest()
        self._is_over = True
        self._watch.stop()
        self._schedule.turn_off()
        # Closing needs all ranks, over MPI at least.
        if self._exchange is not None and in_order and not self._has_failed:
            with suppress(Exception):  # nobody needs it any more
                self._exchange.close()
        if active is not None:
            self._record.reason = self._record.reason or active.reason
            self._record.trial = active.trial_result
            self._record.num_harms = getattr(active.policy, "num_harms", 0)
        self._record.collections = {"off": asdict(self._watch.counts[False]), "on": asdict(self._watch.counts[True])}
        return self._record

    def _take_last(self) -> None:
        try:
            if self._active is not None:
                self._active.finish(_END_WAIT_S)
            elif self._reports is not None:
                self._reports.result(_END_WAIT_S)
        except TimeoutError:  # another rank ends later: the last window is worth no longer wait
            self._has_failed = True

    @contextmanager
    def _boundary(self, end: Callable[[Exception], None]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary to somebody else's job, which goes on unpaced
            end(error)

    def _arrive(self, kind: str, *, on_device: bool) -> Arrival | None:
        index = self._counts[kind]
        self._counts[kind] = index + 1
        name = f"{kind} {index}"
        if on_device:
            self._search.profile = replace(self._search.profile, waits_on_device=True)
            return None
        if self._active is not None:
            return self._active.arrive(name) if name == self._active.point else None
        ready_ns = self._clocks.monotonic()
        return Arrival(name, ready_ns, ready_ns, self._clocks.thread())

    def _leave(self, arrival: Arrival, ranks: tuple[int, ...], size_bytes: int) -> None:
        exit_ns = self._clocks.monotonic()
        if self._active is not None:
            self._active.leave(arrival, exit_ns, size_bytes)
        elif self._search.is_open:
            own_ns = exit_ns - arrival.ready_ns
            self._search.note_wait(arrival.name, ranks, own_ns=own_ns, thread_ns=arrival.thread_ns)

    def _activate(self, reports: Sequence[RankReport], exchange: Exchange) -> None:
        """Choose point and policy, the same on all ranks, and start to pace."""
        choice = choose(self._settings, reports)
        self._record.begin(choice)
        if choice.obstacle:
            self._end(choice.obstacle)
            return
        self._watch.counts[False] = CollectionCount()  # the first steps of a job are not like the others
        self._active = Rounds(
            choice,
            rank=self._rank,
            exchange=exchange,
            trace=self._trace,
            watch=self._watch,
            schedule=self._schedule,
            clocks=self._clocks,
            precise_sleep=self._precise_sleep,
        )

    def _end(self, reason: str = "") -> None:
        self._is_over = True
        self._record.reason = self._record.reason or reason
        self._schedule.turn_off()

    def _withdraw(self, error: Exception) -> None:
        """Delay this rank no longer, and let the others know with the next exchange."""
        if self._active is not None:
            self._active.withdraw()
        self._search.forget()
        self._warn(f"pacing ends: {error or type(error).__name__}; this rank is not delayed any more")

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._end(f"given up: {error or type(error).__name__}")
        self._warn(f"pacing ends: {error or type(error).__name__}; the job runs on unpaced")


SCHEMA = "hpcpace-trial/1"


@dataclass(kw_only=True)
class PacingRecord:
    """One attempt's pacing, filled while the job runs.

    Attributes:
        policy: what was asked for.
        tried: the policy that was tried; empty before the pacing point is chosen.
        reason: why nothing was tried or pacing ended early; empty otherwise.
        points: where ranks are paced.
        mechanisms: what could make pacing pay here.
        facts: what the first steps have shown.
        seed: of the order of blocks.
        trial: its results so far; None without one.
        num_harms: how often this rank's policy found that it did harm.
        collections: this rank's full garbage collections, without and with a schedule.
    """

    policy: str
    tried: str = ""
    reason: str = ""
    points: list[PacingPoint] = field(default_factory=list)
    mechanisms: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    trial: TrialResult | None = None
    num_harms: int = 0
    collections: dict[str, Any] = field(default_factory=dict)

    def begin(self, choice: PacingChoice) -> None:
        """Take what the ranks have agreed on after the search."""
        self.tried, self.points = choice.policy, choice.points
        self.mechanisms, self.seed = choice.mechanisms, choice.seed
        self.facts = {
            "polling_share": max(profile.polling_share for profile in choice.profiles),
            "gc_share": max(profile.gc_share for profile in choice.profiles),
            "ranks_per_core": crowding(choice.profiles),
            "waits_on_device": any(profile.waits_on_device for profile in choice.profiles),
        }

    @property
    def is_on(self) -> bool:
        """Whether ranks were paced at the end."""
        if self.trial is not None:
            return self.trial.is_on
        return bool(self.tried) and self.tried != "observe" and not self.reason

    def to_json(self) -> dict[str, Any]:
        """Return the content of trial.json."""
        return {
            "schema": SCHEMA,
            "policy": self.policy,
            "tried": self.tried,
            "is_on": self.is_on,
            "sentence": self.sentence(),
            "reason": self.reason,
            "points": [point.facts() for point in self.points],
            "mechanisms": self.mechanisms,
            "facts": self.facts,
            "seed": self.seed,
            "trial": None if self.trial is None else self.trial.to_json(),
            "num_harms": self.num_harms,
            "collections": self.collections,
        }

    def sentence(self) -> str:
        """Return the result in one line, without a full stop."""
        return f"pacing {'on' if self.is_on else 'off'}: {self._why()}"

    def _why(self) -> str:
        waiting_only = "" if self.mechanisms else "waiting only, "
        if self.reason:
            is_nothing = (
                self.policy == "auto" and self.trial is not None and self.trial.outcome == TrialOutcome.NO_EFFECT
            )
            return f"waiting only, nothing to gain ({self.reason})" if is_nothing else self.reason
        if not self.tried:
            return "the job ended before a pacing point was found"
        if self.trial is None:
            return "observed only" if self.tried == "observe" else f"{self.tried} without a trial"
        trial, effect = self.trial, self.trial.effect
        if trial.outcome == TrialOutcome.NO_CLAIM:
            return f"no claim: blocks without pacing differed ({_interval(trial.aa_effect)})"
        if trial.outcome == TrialOutcome.HARM_AT_ONCE:
            return f"{self.tried} stopped at once: steps of one block took {100 * trial.worst_block:.1f} % longer"
        if trial.outcome == TrialOutcome.GAIN:
            return f"{self.tried} is faster ({_interval(effect)})"
        if trial.outcome == TrialOutcome.HARM:
            return f"{waiting_only}{self.tried} does harm ({_interval(effect)})"
        if trial.outcome == TrialOutcome.NO_EFFECT:
            return f"{waiting_only}nothing to gain ({_interval(effect)}, {_detectable(effect)})"
        seen = f" ({_interval(effect)}, {_detectable(effect)})" if trial.num_pairs >= MIN_PAIRS else ""
        return f"undecided, the job ended after {trial.num_pairs} of {MIN_PAIRS} or more pairs of blocks{seen}"


def _interval(effect: Interval | None) -> str:
    if effect is None:
        return "not measured"
    return f"{100 * effect.mean:+.1f} % +- {100 * effect.halfwidth:.1f} %"


def _detectable(effect: Interval | None) -> str:
    return "no effect measured" if effect is None else f"could have seen {100 * effect.detectable:.1f} %"
