"""A job of several ranks, each a thread with a clock of its own, paced by the real pacers over a hub in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcpace.pace.choice import RankProfile
from hpcpace.pace.pacer import Pacer, PacingRecord
from hpcpace.pace.rounds import PacerClocks, PreciseSleep
from hpcpace.pace.settings import PaceSettings

TIMEOUT_S = 20.0
TRANSFER_NS = 1_000_000
STEP_NS = 100_000_000


class Clock:
    """Stands still but for what is spent, and a microsecond a look, so that whoever spins gets on."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def spend(self, time_s: float) -> None:
        self.now_ns += max(round(time_s * 1e9), 0)


class Hub:
    """Where the ranks meet: each of them brings a value and gets all."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._brought: dict[str, dict[int, Any]] = {}
        self._changed = threading.Condition()

    def bring(self, meeting: str, rank: int, value: Any) -> None:
        with self._changed:
            self._brought.setdefault(meeting, {})[rank] = value
            self._changed.notify_all()

    def all_of(self, meeting: str, timeout_s: float = 60.0, *, num_ranks: int = 0) -> list[Any]:
        expected = num_ranks or self._num_ranks
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._brought.get(meeting, {})) == expected, timeout_s):
                raise RuntimeError(f"not every rank came to {meeting}")
            return [value for _, value in sorted(self._brought[meeting].items())]


@dataclass(frozen=True)
class HubAnswer:
    """What all ranks bring to a meeting, as `combine` has it; a rank that takes it waits for them in virtual time."""

    hub: Hub
    meeting: str
    combine: Callable[[list[Any]], Any] = list

    def result(self, timeout_s: float) -> Any:
        return self.combine(self.hub.all_of(self.meeting, TIMEOUT_S))


class HubExchange:
    """The exchange of one rank; fails at its `fails_at`-th message."""

    def __init__(self, hub: Hub, rank: int, *, fails_at: int = -1) -> None:
        self._hub, self._rank, self._fails_at = hub, rank, fails_at
        self._num_started = 0
        self.is_closed = False

    def allgather(self, value: Any) -> HubAnswer:
        self._hub.bring("allgather", self._rank, value)
        return HubAnswer(self._hub, "allgather")

    def minimum(self, values: Sequence[float]) -> HubAnswer:
        self._num_started += 1
        if self._num_started == self._fails_at:
            raise RuntimeError("the network is gone")
        self._hub.bring(f"minimum {self._num_started}", self._rank, list(values))
        return HubAnswer(self._hub, f"minimum {self._num_started}", lambda brought: np.min(brought, axis=0).tolist())

    def close(self) -> None:
        self.is_closed = True


@dataclass(kw_only=True)
class PacedRank:
    """What came of one rank."""

    record: PacingRecord
    warnings: list[str] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    delays: list[tuple[int, int]] = field(default_factory=list)

    def add_pacing(self, *row: int) -> None:
        self.rows.append(row)

    def add_delay(self, begin_ns: int, end_ns: int) -> None:
        self.delays.append((begin_ns, end_ns))


Work = Callable[[int, int, list[int]], float]
"""Duration of the work of (rank, step, delays of all ranks in the step before) in nanoseconds."""


def run_job(
    settings: PaceSettings,
    work: Work,
    *,
    num_ranks: int = 4,
    num_steps: int = 400,
    profile: RankProfile | None = None,
    customise: Callable[[Pacer, int], None] | None = None,
    fails_at: dict[int, int] | None = None,
    size_bytes: Callable[[int, int], int] = lambda rank, step: 1000,
    on_device: bool = False,
    thread_share: float = 0.0,
    flags: Callable[[int], int] = lambda step: 0,
    meets: bool = True,
    groups: Sequence[tuple[int, ...]] = (),
) -> list[PacedRank]:
    """Run a job, and return what came of each rank."""
    hub = Hub(num_ranks)

    def one(rank: int) -> PacedRank:
        clock, found = Clock(), PacedRank(record=PacingRecord(policy=""))
        pacer = Pacer(
            settings,
            rank=rank,
            exchange=HubExchange(hub, rank, fails_at=(fails_at or {}).get(rank, -1)),
            profile=profile or RankProfile(host_key="host", cores=frozenset({"0", "1"})),
            first_step=2,
            trace=found,
            warn=found.warnings.append,
            clocks=PacerClocks(monotonic=clock, thread=lambda: int(thread_share * clock.now_ns), unix=lambda: 0),
            precise_sleep=PreciseSleep(clock=clock, sleep=clock.spend),
        )
        if customise is not None:
            customise(pacer, rank)
        members = next((group for group in groups or [tuple(range(num_ranks))] if rank in group), (rank,))
        delayed_ns = [0] * num_ranks
        for step in range(num_steps):
            begin_ns = clock.now_ns
            pacer.begin_step()
            clock.now_ns += round(work(rank, step, delayed_ns))
            arrival = pacer.arrive("all_reduce", on_device=on_device) if meets and len(members) > 1 else None
            own_ns = 0 if arrival is None else arrival.released_ns - arrival.ready_ns
            hub.bring(f"step {step} of {members}", rank, (clock.now_ns, own_ns))
            met = hub.all_of(f"step {step} of {members}", num_ranks=len(members))
            clock.now_ns, delayed_ns = max(time_ns for time_ns, _ in met) + TRANSFER_NS, [late for _, late in met]
            pacer.leave(arrival, members, size_bytes(rank, step))
            pacer.end_step(step, clock.now_ns - begin_ns, flags(step))
        found.record = pacer.close(in_order=True)
        return found

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(one, range(num_ranks)))
