"""The choice of pacing points and policy, the same on all ranks, and garbage collections on the same step of all.

A pacing point is the operation of a step where ranks wait longest for each other. Waiting alone costs nothing that
pacing could recover: a synchronous step ends when its slowest rank arrives. Delaying a rank helps only if its early
arrival hurts others: it polls on a core that another rank needs, it sends to one rank at the same time as many others,
or it does on its own step what all ranks could do on the same step.

A full collection stops one rank for tens of milliseconds, and in a synchronous job all others with it. If P ranks
collect on different steps, the job stops P times as often as if they collect on the same step. Collections of the young
generations cost microseconds, keep memory in check and stay as they are.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.pace.settings import PaceSettings

POLLING = "polling on shared cores"
# Share of a wait that the waiting thread would spend on a core of its own: 1 if it polls, nearly 0 if it sleeps.
_POLLING_SHARE = 0.4
_GC_SHARE = 0.002
_MANY_TO_ONE = "gather"
_MIN_SENDERS = 4
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
# Every rank sends its own to all others.
_MAX_CANDIDATES = 64


@dataclass(frozen=True, kw_only=True)
class PacingPoint:
    """One blocking operation per step, at which some ranks meet.

    Attributes:
        name: like `all_reduce 3`: the fourth blocking all_reduce of a step.
        ranks: global ranks that meet there.
        wait_ns: how long they wait for each other, mean over ranks and steps.
    """

    name: str
    ranks: tuple[int, ...]
    wait_ns: float

    @property
    def kind(self) -> str:
        """Return the kind of operation, like `all_reduce`."""
        return self.name.rpartition(" ")[0]

    def facts(self) -> dict[str, Any]:
        """Return plain values."""
        return {"name": self.name, "ranks": list(self.ranks), "wait_ns": round(self.wait_ns)}


@dataclass(frozen=True, kw_only=True)
class PointCandidate:
    """An operation at which this rank was blocked once in every step.

    Attributes:
        name: as in `PacingPoint`.
        ranks: the group's.
        own_ns: exit - ready of each step, (num_steps,).
    """

    name: str
    ranks: tuple[int, ...]
    own_ns: tuple[int, ...]


@dataclass
class CandidateLog:
    """The waits of this rank in the first steps, by name of the operation."""

    own_ns: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ranks: dict[str, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))

    def add(self, name: str, ranks: tuple[int, ...], own_ns: int) -> None:
        """Note that this rank was blocked on an operation; `ranks` are empty where they are not known."""
        self.own_ns[name].append(own_ns)
        if ranks:
            self.ranks[name].add(ranks)

    def regular(self, num_steps: int) -> list[PointCandidate]:
        """Return the operations that came once in each of so many steps, in one group; the longest ones of many."""
        found = [
            PointCandidate(name=name, ranks=next(iter(self.ranks[name])), own_ns=tuple(own_ns))
            for name, own_ns in self.own_ns.items()
            if len(own_ns) == num_steps and len(self.ranks.get(name, ())) == 1
        ]
        return sorted(found, key=lambda candidate: (-sum(candidate.own_ns), candidate.name))[:_MAX_CANDIDATES]


def choose_points(candidates: Sequence[Sequence[PointCandidate]]) -> list[PacingPoint]:
    """Return the pacing points, at most one for each rank, the longest waits first; the same from the same input.

    A group has a point where all of its ranks were blocked on one operation in every step. Ranks in several groups
    are paced in the one in which more is waited for.

    Args:
        candidates: those of each rank, in order of rank.
    """
    columns: dict[tuple[str, tuple[int, ...]], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, rows in enumerate(candidates):
        for row in rows:
            columns[row.name, row.ranks][rank] = row.own_ns
    points = []
    for (name, ranks), own_ns in columns.items():
        if len(ranks) < 2 or set(own_ns) != set(ranks):
            continue
        panel_ns = np.array([own_ns[rank] for rank in ranks], dtype=np.float64)
        wait_ns = float((panel_ns - panel_ns.min(axis=0)).mean())
        points.append(PacingPoint(name=name, ranks=ranks, wait_ns=wait_ns))
    taken: set[int] = set()
    chosen = []
    for point in sorted(points, key=lambda point: (-point.wait_ns * len(point.ranks), point.name, point.ranks)):
        if taken.isdisjoint(point.ranks):
            taken.update(point.ranks)
            chosen.append(point)
    return chosen


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """How a rank runs and waits, as seen in the first steps.

    Attributes:
        host_key: equal on ranks of one host.
        cores: names of the cores that it may run on.
        polling_share: processor time of its waits over their duration.
        gc_share: share of its steps spent in full garbage collections.
        waits_on_device: whether its collectives run on a GPU, where the host does not wait.
    """

    host_key: str
    cores: frozenset[str]
    polling_share: float = 0.0
    gc_share: float = 0.0
    waits_on_device: bool = False


def crowding(ranks: Sequence[RankProfile]) -> float:
    """Return the ranks per core on the most crowded host."""
    cores: dict[str, set[str]] = defaultdict(set)
    num_ranks: dict[str, int] = defaultdict(int)
    for rank in ranks:
        cores[rank.host_key] |= rank.cores
        num_ranks[rank.host_key] += 1
    return max(num_ranks[host] / max(len(cores[host]), 1) for host in cores)


def find_mechanisms(ranks: Sequence[RankProfile], points: Sequence[PacingPoint]) -> list[str]:
    """Return the names of the mechanisms that could make pacing pay; empty if there are none.

    `polling on shared cores` and `garbage collection` are measured; `many to one`, a pacing point at which at least
    four ranks send to one, says only that buffers may overflow there.
    """
    found = []
    # Of several pollers on a core, each gets its part of it.
    polling_share = max(rank.polling_share for rank in ranks) * crowding(ranks)
    if crowding(ranks) > 1 and polling_share > _POLLING_SHARE:
        found.append(POLLING)
    if any(point.kind == _MANY_TO_ONE and len(point.ranks) > _MIN_SENDERS for point in points):
        found.append("many to one")
    if len(ranks) > 1 and any(rank.gc_share > _GC_SHARE for rank in ranks):
        found.append("garbage collection")
    return found


def policy_for(mechanisms: Sequence[str], *, has_turns: bool) -> str:
    """Return the policy that `auto` tries.

    Args:
        mechanisms: as `find_mechanisms` returns them.
        has_turns: whether the settings give this job a turn on a shared link.
    """
    if POLLING in mechanisms:
        return "slack"
    # Full collections are too rare to show in the first steps: coschedule counts them in the trial's unpaced part.
    return "stagger" if has_turns or "many to one" in mechanisms else "coschedule"


def core_names(cpus: Sequence[int], *, root: Path = Path("/")) -> frozenset[str]:
    """Return the cores of some CPUs, with hardware threads of a core as one; a CPU unknown to sysfs is a core.

    Args:
        cpus: numbers of CPUs, as in `os.sched_getaffinity`.
        root: replaced in tests.
    """
    names = set()
    for cpu in cpus:
        path = root / _SIBLINGS.format(cpu).lstrip("/")
        try:
            names.add(path.read_text().strip() or str(cpu))
        except OSError:
            names.add(str(cpu))
    return frozenset(names)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What each rank sends to all others once, before they choose the pacing point.

    Attributes:
        candidates: operations on which it was blocked exactly once in every step.
        profile: how it runs and waits.
        seed: a number; all ranks use that of rank 0.
    """

    candidates: list[PointCandidate]
    profile: RankProfile
    seed: int


class PointSearch:
    """Notes where this rank is blocked, over a number of steps.

    Args:
        first_step: the first of these steps.
        num_steps: how many there are.
        profile: what is known of this rank beforehand.
        thread_clock: processor time of the calling thread in nanoseconds.

    Attributes:
        is_open: whether one of these steps is running.
        profile: what is known of this rank.
    """

    def __init__(
        self, *, first_step: int, num_steps: int, profile: RankProfile, thread_clock: Callable[[], int]
    ) -> None:
        self.is_open = False
        self.profile = profile
        self._first_step, self._num_steps = first_step, num_steps
        self._thread_clock = thread_clock
        self._log = CandidateLog()
        self._polled_ns = self._waited_ns = self._steps_ns = self._collected_ns = 0

    def note_wait(self, name: str, ranks: tuple[int, ...], *, own_ns: int, thread_ns: int) -> None:
        """Take a wait that has ended; `thread_ns` is the thread clock's reading when it began."""
        self._log.add(name, ranks, own_ns)
        self._polled_ns += self._thread_clock() - thread_ns
        self._waited_ns += own_ns

    def forget(self) -> None:
        """Drop all candidates: this rank cannot be paced."""
        self._log = CandidateLog()

    def end_step(self, step: int, duration_ns: int, collected_ns: int) -> bool:
        """Take a step that has ended; return whether it was the last of the search.

        Args:
            step: its number.
            duration_ns: how long it took.
            collected_ns: time of all full garbage collections so far.
        """
        if self.is_open:
            self._steps_ns += duration_ns
        else:
            self._collected_ns = collected_ns
        end_step = self._first_step + self._num_steps
        self.is_open = self._first_step <= step + 1 < end_step
        if step + 1 < end_step:
            return False
        self.profile = replace(
            self.profile,
            polling_share=self._polled_ns / max(self._waited_ns, 1),
            gc_share=(collected_ns - self._collected_ns) / max(self._steps_ns, 1),
        )
        return True

    def report(self, seed: int) -> RankReport:
        """Return what this rank sends to the others at the end of the search."""
        return RankReport(candidates=self._log.regular(self._num_steps), profile=self.profile, seed=seed)


@dataclass(frozen=True, kw_only=True)
class PacingChoice:
    """What all ranks agree on.

    Attributes:
        settings: those given, adapted to ranks that poll on shared cores.
        policy: the policy to try; `auto` has been replaced by what it stands for.
        points: where ranks are paced.
        mechanisms: what could make pacing pay.
        profiles: of all ranks, in order.
        seed: for the order of the trial's blocks.
        obstacle: why nothing can be tried; empty otherwise.
    """

    settings: PaceSettings
    policy: str
    points: list[PacingPoint]
    mechanisms: list[str]
    profiles: list[RankProfile]
    seed: int
    obstacle: str


def choose(settings: PaceSettings, reports: Sequence[RankReport]) -> PacingChoice:
    """Return the choice that follows from the reports of all ranks, in order of rank."""
    profiles = [report.profile for report in reports]
    points = choose_points([report.candidates for report in reports])
    mechanisms = find_mechanisms(profiles, points)
    policy = settings.policy
    if policy == "auto":
        policy = policy_for(mechanisms, has_turns=settings.stagger_slots > 0)
    if policy == "slack" and POLLING in mechanisms:
        settings = settings.where_polled()
    obstacle = ""
    if policy != "coschedule" and not points:
        obstacle = "no operation blocks a group of ranks exactly once in every step"
        if any(profile.waits_on_device for profile in profiles):
            obstacle = "collectives run on GPUs, where a delay of the host delays nothing: observed only"
    return PacingChoice(
        settings=settings,
        policy=policy,
        points=points,
        mechanisms=mechanisms,
        profiles=profiles,
        seed=reports[0].seed,
        obstacle=obstacle,
    )


_FULL = 2
_NEVER = 2**31 - 1
# Blocks of a trial hold two collections; if these are further apart, a trial takes too long.
_LONGEST_BLOCK_STEPS = 400


@dataclass(kw_only=True)
class CollectionCount:
    """Full collections of one rank over some steps.

    Attributes:
        num_steps: number of these steps.
        num_full: full collections in them.
        time_ns: their total time.
    """

    num_steps: int = 0
    num_full: int = 0
    time_ns: int = 0


class CollectionWatch:
    """Counts full collections, separately for steps with and without the schedule.

    Attributes:
        counts: by whether the schedule is on.
        steps_since: unscheduled steps since this rank's last unscheduled collection.
    """

    def __init__(self, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._begin_ns = 0
        self._num_full = self._time_ns = 0
        self.counts = {False: CollectionCount(), True: CollectionCount()}
        self.steps_since = 0

    def start(self) -> None:
        """Start to count."""
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        """Stop to count."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def end_step(self, *, is_scheduled: bool) -> None:
        """Assign the collections since the last call to a step with or without the schedule."""
        if not is_scheduled:
            self.steps_since = 0 if self._num_full else self.steps_since + 1
        count = self.counts[is_scheduled]
        count.num_steps += 1
        count.num_full += self._num_full
        count.time_ns += self._time_ns
        self._num_full = self._time_ns = 0

    @property
    def steps_until(self) -> int | None:
        """The steps until this rank would collect again without a schedule; None if it never did."""
        count = self.counts[False]
        return max(count.num_steps // count.num_full - self.steps_since, 1) if count.num_full else None

    def _note(self, moment: str, info: dict[str, int]) -> None:
        if info["generation"] != _FULL:
            return
        if moment == "start":
            self._begin_ns = self._clock()
        else:
            self._num_full += 1
            self._time_ns += self._clock() - self._begin_ns


class CollectionSchedule:
    """Collects at a fixed interval of steps while it is on; Python collects by itself while it is off.

    It sends no messages: ranks that turn it on and off at the same steps collect on the same steps. When it is turned
    off, each rank returns to its own earlier rhythm; otherwise the ranks would stay in step for long, and a trial would
    compare the schedule with itself.

    Args:
        collect: replaced in tests.
    """

    def __init__(self, *, collect: Callable[[], object] = gc.collect) -> None:
        self._collect = collect
        self._thresholds: tuple[int, int, int] | None = None
        self._num_steps = 0
        self._interval_steps = 0
        self._steps_until = 0

    @property
    def is_on(self) -> bool:
        """Whether the ranks collect together."""
        return self._interval_steps > 0

    def turn_on(self, interval_steps: int) -> None:
        """Collect on every `interval_steps`-th step from here on."""
        self._interval_steps = interval_steps
        if self._thresholds is None:
            self._thresholds = gc.get_threshold()
            gc.set_threshold(*self._thresholds[:2], _NEVER)

    def turn_off(self, *, steps_until: int | None = None) -> None:
        """Let Python collect by itself again.

        Args:
            steps_until: in how many steps this rank would have collected by itself: it collects then, and Python takes
                over. None: Python takes over at once, without a collection.
        """
        self._interval_steps = self._num_steps = 0
        self._steps_until = steps_until or 0
        if not steps_until and self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
            self._thresholds = None

    def begin_step(self, *, is_last: bool = False) -> bool:
        """Collect if a collection is due in this step; return whether it was, the same on all ranks.

        Args:
            is_last: whether the schedule is turned off after this step. A collection that is due by then runs in this
                step; otherwise the steps after it would bear the cost.
        """
        if not self.is_on:
            if self._steps_until:  # this rank returns to its own rhythm
                self._steps_until -= 1
                if not self._steps_until:
                    self._collect()
                    self.turn_off()
            return False
        self._num_steps += 1
        owed = self._interval_steps // 2 if is_last else self._interval_steps
        if self._num_steps < max(owed, 1):
            return False
        self._num_steps = 0
        self._collect()
        return True


class CollectionPlan:
    """How often the ranks collect together: as often as the rank that collected most often by itself.

    Args:
        interval: steps between two collections; 0 to find out.
        least_share: share of the steps' time spent in full collections, below which a schedule is not worth it.

    Attributes:
        interval: the same; 0 while unknown.
    """

    def __init__(self, interval: int = 0, *, least_share: float = 0.0) -> None:
        self.interval = interval
        self._least_share = least_share
        self._num_steps = self._num_full = self._full_ns = 0
        self._time_ns = 0.0

    def note(self, steps_ns: Sequence[float], *, num_full: int, full_ns: int, is_scheduled: bool) -> None:
        """Take a window of steps, and the most collections of any rank up to its end without a schedule."""
        if is_scheduled:
            return
        counted = [time_ns for time_ns in steps_ns if time_ns == time_ns]
        self._num_steps += len(counted)
        self._time_ns += sum(counted)
        self._num_full, self._full_ns = num_full, full_ns

    def decide(self) -> str:
        """Fix the interval; return why that is not possible, or an empty text."""
        if self.interval:
            return ""
        if not self._num_steps:
            return "the trial starts before any step without a schedule was counted"
        if not self._num_full:
            return f"no full garbage collection in {self._num_steps} steps"
        if self._full_ns < self._least_share * self._time_ns:
            return f"garbage collection takes {self._full_ns / self._time_ns:.2%} of the steps"
        # That of the rank that collects most often.
        self.interval = max(self._num_steps // self._num_full, 1)
        return ""

    def block_steps(self) -> int:
        """Return the least number of steps in a block of a trial; 0 if that is too long for a trial."""
        return 2 * self.interval if 2 * self.interval <= _LONGEST_BLOCK_STEPS else 0
