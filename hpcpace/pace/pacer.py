"""The pacing of one rank, first step to last: it searches for the pacing point, then paces.

The observers call `arrive` where the rank is about to be blocked and `leave` where it is released; the session says
where steps begin and end. Any error in here ends pacing on all ranks with one warning, never the job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

from hpcpace.core.codec import convert, plain
from hpcpace.pace.choice import PointSearch, RankProfile, RankReport, choose
from hpcpace.pace.coschedule import CollectionCount, CollectionSchedule, CollectionWatch
from hpcpace.pace.record import PacingRecord
from hpcpace.pace.rounds import Arrival, Exchange, PacerClocks, PacingTrace, PreciseSleep, Rounds
from hpcpace.pace.settings import PaceSettings
from hpcpace.trace.schema import StepFlag


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
        """Take a step that has ended, between it and the next. Collective at the end of each window."""
        if self._is_over or self._exchange is None:
            return
        with self._boundary(self._fail):
            self._counts.clear()
            self._watch.end_step(is_scheduled=self._schedule.is_on)
            if self._active is not None:
                self._active.end_step(step, duration_ns, flags)
                if self._active.is_over:
                    self._end(self._active.reason)
            elif self._search.end_step(step, duration_ns, self._watch.counts[False].time_ns):
                report = plain(self._search.report(self._clocks.unix()))
                reports = [convert(other, RankReport) for other in self._exchange.allgather(report)]
                self._activate(reports, self._exchange)

    def close(self, *, in_order: bool) -> PacingRecord:
        """End pacing and return its record. Collective if `in_order`: waits for the exchange in flight."""
        active = self._active
        with self._boundary(self._fail):
            if active is not None and not self._is_over and in_order:
                active.finish()
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
