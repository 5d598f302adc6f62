"""The pacing of one rank, from its first step to its last: it finds the pacing point, then runs rounds.

Those who observe the job call `arrive` where the rank is about to be blocked and `leave` where it is released; the
session tells where steps begin and end. Whatever goes wrong in here ends pacing with one warning, on all ranks, and
never the job.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from hpcpace.pace.coschedule import CollectionCount, CollectionPlan, CollectionSchedule, CollectionWatch
from hpcpace.pace.hold import Holder
from hpcpace.pace.looking import Introduction, Look
from hpcpace.pace.mechanisms import POLLING, RankFacts, find_mechanisms, policy_for
from hpcpace.pace.message import Status
from hpcpace.pace.outcome import PacingRecord
from hpcpace.pace.passages import Passages, Ticket
from hpcpace.pace.points import Point, choose_points
from hpcpace.pace.policies import make_policy
from hpcpace.pace.rounds import Exchange, Place, Rounds
from hpcpace.pace.settings import PaceSettings
from hpcpace.pace.trial import Trial
from hpcpace.trace.schema import PaceArm, PacePolicy, StepFlag

_NOT_COUNTED = StepFlag.CHECKPOINT | StepFlag.EVAL | StepFlag.WARMUP
_LEAST_GC_SHARE = 0.002


class Gathering(Exchange, Protocol):
    """An exchange that can also gather objects. Collective: every rank calls each method."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank.

        Raises:
            RuntimeError: not every rank came in time.
        """

    def close(self) -> None:
        """Free what was opened."""


class Pacer:
    """Paces one rank. Collective: all ranks make one and end their steps equally often.

    Args:
        settings: how; the policy is not `none`.
        rank: this rank.
        exchange: to the other ranks; None in a world of one.
        facts: what this rank knows of itself.
        first_step: number of the step that comes first.
        num_warmup: steps from there in which nothing is looked at.
        add_row: takes the columns of the trace's `pacing` table.
        add_phase: takes begin and end of a delay.
        warn: takes a warning.
        clock, thread_clock, unix_clock: replaced in tests.
    """

    def __init__(
        self,
        settings: PaceSettings,
        *,
        rank: int,
        exchange: Gathering | None,
        facts: RankFacts,
        first_step: int,
        num_warmup: int,
        add_row: Callable[..., Any],
        add_phase: Callable[[int, int], Any],
        warn: Callable[[str], None],
        clock: Callable[[], int] = time.monotonic_ns,
        thread_clock: Callable[[], int] = time.thread_time_ns,
        unix_clock: Callable[[], int] = time.time_ns,
        holder: Holder | None = None,
    ) -> None:
        self._settings, self._rank, self._exchange = settings, rank, exchange
        self._add_row, self._add_phase, self._warn = add_row, add_phase, warn
        self._clock, self._thread_clock, self._unix_clock = clock, thread_clock, unix_clock
        self._holder = holder or Holder(clock=clock)
        self._look = Look(
            begin_step=first_step + max(num_warmup, 1),
            num_steps=settings.find_steps,
            facts=facts,
            thread_clock=thread_clock,
        )
        self._counts: dict[str, int] = defaultdict(int)
        self._name: str | None = None
        self._size_bytes = -1
        self._passages = Passages()
        self._watch = CollectionWatch()
        self._schedule = CollectionSchedule()
        self._policy_name = settings.policy
        self._policy: Any = None
        self._trial: Trial | None = None
        self._rounds: Rounds | None = None
        self._record = PacingRecord(policy=settings.policy)
        self._is_over = exchange is None
        self._is_given_up = False
        if exchange is None:
            self._record.reason = "one rank waits for nobody"

    def start(self) -> None:
        """Begin to count garbage collections."""
        self._watch.start()

    def arrive(self, kind: str, *, on_device: bool = False) -> Ticket | None:
        """Hold this rank back if it is to be, just before it is blocked.

        Args:
            kind: of operation, like `all_reduce`; each of a step's operations of a kind is a place of its own.
            on_device: whether only a GPU waits, and not the host.

        Returns:
            What to give to `leave`; None where nobody is interested.
        """
        if self._is_over or (not self._look.is_open and self._name is None):
            return None
        try:
            return self._arrive(kind, on_device=on_device)
        except Exception as error:  # the boundary to somebody else's job, which goes on unpaced
            self._give_up(error)
            return None

    def leave(self, ticket: Ticket | None, ranks: tuple[int, ...], size_bytes: int = 0) -> None:
        """Note that the rank is released.

        Args:
            ticket: what `arrive` returned.
            ranks: global ranks of those who met here; empty if unknown.
            size_bytes: of the message; where it changes, everything is learnt anew.
        """
        if ticket is None or self._is_over:
            return
        try:
            self._leave(ticket, ranks, size_bytes)
        except Exception as error:  # the boundary to somebody else's job
            self._give_up(error)

    def begin_step(self) -> StepFlag:
        """Collect garbage if that is due; return what marks the step."""
        if self._rounds is None or self._is_over:
            return StepFlag.NONE
        try:
            interval = self._rounds.interval_steps
            if interval and not self._schedule.is_on:
                self._schedule.turn_on(interval)
            elif not interval and self._schedule.is_on:
                self._schedule.turn_off(steps_until=self._watch.steps_until)
            is_collected = self._schedule.begin_step(is_last=self._rounds.is_last_step)
        except Exception as error:  # the boundary to somebody else's job
            self._give_up(error)
            return StepFlag.NONE
        return StepFlag.GC if is_collected else StepFlag.NONE

    def end_step(self, step: int, duration_ns: int, flags: int) -> None:
        """Take a step that has ended, between it and the next. Collective at the end of each window."""
        if self._is_over or self._exchange is None:
            return
        try:
            self._counts.clear()
            self._watch.end_step(is_scheduled=self._schedule.is_on)
            if self._rounds is not None:
                self._end_measured_step(self._rounds, step, duration_ns, flags)
            elif self._look.end_step(step, duration_ns, self._watch.counts[False].time_ns):
                self._begin(self._exchange.allgather(self._look.introduction(self._unix_clock())), self._exchange)
        except Exception as error:  # the boundary to somebody else's job, which goes on unpaced
            self._fail(error)

    def close(self, *, in_order: bool) -> PacingRecord:
        """End pacing and return what came of it. Collective if `in_order`: what is on its way is waited for."""
        rounds = self._rounds
        try:
            if rounds is not None and not self._is_over and in_order:
                rounds.finish()
            if rounds is not None:
                rounds.record(rounds.window)
        except Exception as error:  # the boundary to somebody else's job
            self._fail(error)
        self._is_over = True
        self._watch.stop()
        self._schedule.turn_off()
        # Closing needs all ranks, over MPI at least.
        if self._exchange is not None and in_order and not self._is_given_up:
            with suppress(Exception):  # nobody needs it any more
                self._exchange.close()
        if rounds is not None:
            self._record.reason = self._record.reason or rounds.reason
        self._record.finish(trial=self._trial, policy=self._policy, counts=self._watch.counts)
        return self._record

    def _arrive(self, kind: str, *, on_device: bool) -> Ticket | None:
        index = self._counts[kind]
        self._counts[kind] = index + 1
        name = f"{kind} {index}"
        if on_device:
            self._look.facts = self._look.facts.on_device()
            return None
        if self._name is not None and name != self._name:
            return None
        ready_ns = self._clock()
        if self._rounds is None:
            return Ticket(name, ready_ns, ready_ns, self._thread_clock())
        return Ticket(name, ready_ns, self._hold(self._rounds, ready_ns), 0)

    def _hold(self, rounds: Rounds, ready_ns: int) -> int:
        """Hold this rank back as its policy wants; return when it is released."""
        if rounds.window.arm != PaceArm.ON or self._passages:
            return ready_ns
        delay_ns = self._policy.delay_at(self._unix_clock(), self._passages.work_ns(ready_ns))
        if delay_ns <= 0:
            return ready_ns
        end_ns = self._holder.hold(ready_ns, delay_ns)
        self._add_phase(ready_ns, end_ns)
        return end_ns

    def _leave(self, ticket: Ticket, ranks: tuple[int, ...], size_bytes: int) -> None:
        exit_ns = self._clock()
        if self._rounds is not None:
            self._passages.add(ticket, exit_ns)
            if size_bytes != self._size_bytes and self._size_bytes >= 0:
                self._rounds.status = min(self._rounds.status, Status.RESET)
            self._size_bytes = size_bytes
        elif self._look.is_open:
            own_ns = exit_ns - ticket.ready_ns
            self._look.note_wait(ticket.name, ranks, own_ns=own_ns, thread_ns=ticket.thread_ns)

    def _end_measured_step(self, rounds: Rounds, step: int, duration_ns: int, flags: int) -> None:
        step_ns = float("nan") if flags & _NOT_COUNTED else float(duration_ns)
        rounds.window.add(step, self._passages.end_step(), step_ns=step_ns)
        if len(rounds.window.steps) == self._settings.window_steps:
            rounds.window.overshoot_ns = self._holder.take_overshoots()
        rounds.end_step(self._watch.counts[False])
        if rounds.is_over:
            self._end(rounds.reason)

    def _begin(self, told: Sequence[Introduction], exchange: Gathering) -> None:
        """Choose point and policy, the same on all ranks, and begin the rounds."""
        settings, facts = self._settings, [rank.facts for rank in told]
        points = choose_points([rank.seen for rank in told])
        mechanisms = find_mechanisms(facts, points)
        if settings.policy == "auto":
            self._policy_name = policy_for(mechanisms, has_turns=settings.stagger_slots > 0)
        self._record.begin(
            policy=self._policy_name, points=points, mechanisms=mechanisms, facts=facts, seed=told[0].seed
        )
        if self._policy_name == "slack" and POLLING in mechanisms:
            settings = settings.where_polled()
        reason = self._why_not(points, facts)
        if reason:
            self._end(reason)
            return
        group = next((index for index, point in enumerate(points) if self._rank in point.ranks), -1)
        place = Place(group=group, num_groups=len(points), is_first=self._rank == 0)
        self._name = points[group].name if group >= 0 else None
        members = points[group].ranks if group >= 0 else (self._rank,)
        self._policy = make_policy(
            self._policy_name, settings, index=members.index(self._rank), num_members=len(members)
        )
        self._watch.counts[False] = CollectionCount()  # the first steps of a job are not like the others
        collects = self._policy_name == "coschedule"
        has_trial = settings.trial and self._policy_name != "observe"
        self._trial = Trial(settings, seed=told[0].seed) if has_trial else None
        least_share = _LEAST_GC_SHARE if settings.policy == "auto" else 0.0
        self._rounds = Rounds(
            settings,
            policy=self._policy,
            trial=self._trial,
            plan=CollectionPlan(settings.gc_steps, least_share=least_share) if collects else None,
            exchange=exchange,
            place=place,
            arm=PaceArm.OFF if self._policy_name == "observe" else PaceArm.ON,
            on_row=self._row,
        )

    def _why_not(self, points: Sequence[Point], facts: Sequence[RankFacts]) -> str:
        if self._policy_name == "coschedule":
            return ""
        if any(rank.waits_on_device for rank in facts) and not points:
            return "collectives run on GPUs, where a delay of the host delays nothing: observed only"
        if not points:
            return "there is no operation at which ranks wait for each other once in every step"
        return ""

    def _row(self, step: int, arm: PaceArm, *values: int) -> None:
        self._add_row(step, PacePolicy[self._policy_name.upper().replace("-", "_")], arm, *values)

    def _end(self, reason: str = "") -> None:
        self._is_over = True
        self._record.reason = self._record.reason or reason
        self._schedule.turn_off()

    def _give_up(self, error: Exception) -> None:
        """Hold nobody back from here on, and let the other ranks know with the next exchange."""
        if self._rounds is not None:
            self._rounds.status = Status.END
            self._rounds.policy = self._policy = make_policy("observe", self._settings)
        self._look.forget()
        self._warn(f"no rank is held back any more: {error or type(error).__name__}")

    def _fail(self, error: Exception) -> None:
        self._is_given_up = True
        self._end(f"given up: {error or type(error).__name__}")
        self._warn(f"this job is not paced any more: {error or type(error).__name__}")
