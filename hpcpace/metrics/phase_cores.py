"""How ranks spend their own work: running, waiting for a core, or neither, as with I/O, locks and sleep.

A rank reads in some of its steps, for each phase, how long its thread ran and how long it was ready to run and had no
core. These are exact shares of that phase, so they say how much of an excess over other ranks is waiting for a core.
Time blocked in communication is no own work, and cannot be separated there: a phase that has much of it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.phases import Part
from hpcpace.metrics.special import UPPER_95, Z_95, stdtrit
from hpcpace.trace.schema import PHASES_ON_CORES

PARTS = tuple(Part[phase.name] for phase in PHASES_ON_CORES)
"""The parts of a step that are taken apart, in the order of the arrays below."""
_MIN_SECONDS = 3  # statistics: rows of counters that show how much a mean varies
_MIN_READ = 8  # statistics: steps that were read, of which a mean is close to normal
_TINY = 1e-9  # statistics: no division by zero
_READINGS = ("", "_cpu", "_wait")  # of a phase: its length, and how long the thread ran and was ready to run


@dataclass(frozen=True, kw_only=True)
class WorkThresholds(Thresholds, topic="cores"):
    """When it is known how ranks spend their own work."""

    least_known_share: float = number(0.8, "share")
    """Share of a rank's own work of which it must be known how it was spent: less may hide what makes it late."""
    most_longer: float = number(1.25, "times")
    """Factor up to which a phase may take a larger share of the steps that were read than of all: beyond it, the phase
    has time that is no own work."""
    longer_margin: float = number(0.02, "share")
    """Share of the step that it may take beyond that, as short phases vary."""


@dataclass(frozen=True, kw_only=True)
class WorkUse:
    """How each rank spends its own work, mean over steps, float64, (num_ranks, len(PARTS)), nanoseconds of a step.

    Attributes:
        own_ns: own work in a part.
        running_ns, queued_ns: of it running, and ready to run without a core; 0 where that is not known.
        error_ns: standard error of own work without waiting for cores, (num_ranks,); infinite where it is not known.
        num_seconds: the seconds that it rests on, int64, (num_ranks,).
        is_part_known: whether they are, bool, of the same shape.
        limits: when they are.
    """

    own_ns: Floats
    running_ns: Floats
    queued_ns: Floats
    error_ns: Floats
    num_seconds: Ints
    is_part_known: Bools
    limits: WorkThresholds = WorkThresholds()

    @property
    def is_known(self) -> Bools:
        """Which ranks are known by most of their work, bool, (num_ranks,)."""
        known_ns = (self.own_ns * self.is_part_known).sum(axis=1)
        return np.asarray(known_ns > self.limits.least_known_share * self.own_ns.sum(axis=1))

    @property
    def is_any_known(self) -> Bools:
        """Which ranks are known by some part of their work, bool, (num_ranks,)."""
        return np.asarray(self.is_part_known.any(axis=1))

    @property
    def idle_ns(self) -> Floats:
        """Own work in which a rank neither runs nor waits for a core, float64, (num_ranks, len(PARTS))."""
        return np.where(self.is_part_known, np.maximum(self.own_ns - self.running_ns - self.queued_ns, 0.0), 0.0)

    def of_parts(self, chosen: Bools) -> WorkUse:
        """Return the same of some parts alone, bool, (len(PARTS),); errors stay those of all parts, at least theirs."""
        return replace(
            self,
            own_ns=self.own_ns * chosen,
            running_ns=self.running_ns * chosen,
            queued_ns=self.queued_ns * chosen,
            is_part_known=self.is_part_known & chosen,
        )


class OtherThreads(NamedTuple):
    """What the threads of each rank but the one that trains had of their cores, float64, (num_ranks,), ns of a step.

    Attributes:
        running_ns, queued_ns: how long they ran, and waited for a core.
        error_ns: standard error of `running_ns`.
    """

    running_ns: Floats
    queued_ns: Floats
    error_ns: Floats


class Spent(StrEnum):
    """How ranks spend most of an excess: on a core, in waiting that needs none, or the data show neither."""

    RUNNING = "running"
    IDLE = "idle"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class ExcessUse:
    """What the excess of some ranks over others consists of, nanoseconds of a step.

    Attributes:
        excess_ns: own work of the ranks beyond the median of the others.
        queued_ns: of it waiting for a core, of the thread that trains or of one that it waits for.
        idle_ns: of it neither running nor waiting for a core.
        unknown_ns: of it in parts of which it is not known how they are spent; it may be waiting.
        usual_ns: own work of the others without what is known of their waiting for cores, by median.
        error_ns: standard error of `beyond_ns`.
        is_whole: whether most of the work of both is known; else there may be more beyond waiting.
        unsure_ns: own work of the others in parts that count although it is not known how they spend it: any of it may
            be running, idle, or waiting for a core.
    """

    excess_ns: float
    queued_ns: float
    idle_ns: float
    unknown_ns: float
    usual_ns: float
    error_ns: float
    is_whole: bool
    unsure_ns: float = 0.0

    @property
    def beyond_ns(self) -> float:
        """What waiting for cores does not explain: more than the excess where these ranks wait less than the others."""
        return self.excess_ns - self.unknown_ns - self.queued_ns

    @property
    def running_ns(self) -> float:
        """The part of the excess in which ranks run on a core."""
        return self.beyond_ns - self.idle_ns

    @property
    def half_ns(self) -> float:
        """Half of the 95 % interval of `running_ns` and `idle_ns`."""
        return Z_95 * self.error_ns + max(self.unknown_ns, 0.0) + self.unsure_ns

    def mostly(self, least_part: float) -> Spent:
        """Return what holds at least a part of the excess beyond waiting for cores, and does so beyond chance."""
        for spent, part_ns in ((Spent.RUNNING, self.running_ns), (Spent.IDLE, self.idle_ns)):
            if part_ns - least_part * self.beyond_ns > max(least_part, 1 - least_part) * self.half_ns:
                return spent
        return Spent.UNKNOWN


def work_use(
    tables: Sequence[Mapping[str, NDArray[Any]]],
    begin_ns: Sequence[int],
    end_ns: Sequence[int],
    parts_ns: Floats,
    limits: WorkThresholds = WorkThresholds(),
) -> WorkUse:
    """Return how ranks spent their own work between two times.

    Running and idle times are means over the steps that were read: they are much the same in each step, however long it
    waits for cores. What own work has beyond them in all steps is waiting.

    Args:
        tables: the `host` table of each rank.
        begin_ns, end_ns: from when to when, on each rank's own clock.
        parts_ns: the parts of each step, (num_ranks, num_steps, num_parts).
        limits: when it is known.
    """
    mean_ns = parts_ns.mean(axis=1)
    own_ns = mean_ns[:, list(PARTS)]
    seconds = [_seconds(table, *times) for table, *times in zip(tables, begin_ns, end_ns, strict=True)]
    read = np.array([of_rank.sum(axis=0) for of_rank in seconds])
    num_read = np.maximum(read[:, :1], 1.0)
    length, running, queued = _by_reading(read)
    running = np.minimum(running, length)
    share = length / np.maximum(read[:, 1:2], 1.0)
    usual_share = own_ns / np.maximum(mean_ns.sum(axis=1, keepdims=True), 1.0)
    is_known = (length > 0) & (share <= limits.most_longer * usual_share + limits.longer_margin)
    running_ns = np.where(is_known, np.minimum(running / num_read, own_ns), 0.0)
    idle_ns = np.minimum(np.maximum(length - running - queued, 0.0) / num_read, own_ns - running_ns)
    return WorkUse(
        own_ns=own_ns,
        running_ns=running_ns,
        queued_ns=np.where(is_known, own_ns - running_ns - idle_ns, 0.0),
        error_ns=np.array([_error(*of_rank) for of_rank in zip(seconds, parts_ns[:, :, list(PARTS)], strict=True)]),
        num_seconds=np.array([len(of_rank) for of_rank in seconds], np.int64),
        is_part_known=is_known,
        limits=limits,
    )


def _seconds(table: Mapping[str, NDArray[Any]], begin_ns: int, end_ns: int) -> Floats:
    """Return what was read between neighbouring rows, float64, (num_seconds, num_columns), those with steps.

    The last row may be the first after the end: only steps are read, and most runs end with the last one. Columns are
    the number of steps, their time, and for each phase its length, running and waiting. None where nothing was read, or
    a counter runs backwards.
    """
    names = ["read_steps", "read_ns"]
    for phase in PHASES_ON_CORES:
        names += [f"{phase.name.lower()}{end}_ns" for end in _READINGS]
    time_ns = np.asarray(table["time_ns"], np.int64)
    inside = (time_ns >= begin_ns) & (np.arange(len(time_ns)) <= np.searchsorted(time_ns, end_ns))
    if inside.sum() < 2 or names[0] not in table:
        return np.zeros((0, len(names)))
    grown = np.diff(np.array([np.asarray(table[name], np.float64)[inside] for name in names]), axis=1).T
    return np.asarray(grown[:0] if (grown < 0).any() else grown[grown[:, 0] > 0])


def _by_reading(read: Floats) -> tuple[Floats, Floats, Floats]:
    """Return length, running and waiting of each phase, each (num_rows, len(PARTS)), of rows as of `_seconds`."""
    length, running, queued = np.moveaxis(read[:, 2:].reshape(len(read), len(PARTS), len(_READINGS)), -1, 0)
    return length, running, queued


def _error(seconds: Floats, own_ns: Floats) -> float:
    """Return the standard error of what a rank does in a step besides waiting for cores.

    It follows from how much seconds differ, for few of them wider as Student's t, and is at most that of all own work
    in as many steps as were read: waiting for cores makes steps differ more. Infinite where few steps were read.

    Args:
        seconds: what was read, as of `_seconds`.
        own_ns: own work of each step, (num_steps, len(PARTS)).
    """
    num_read = float(seconds[:, 0].sum())
    of_steps = float(own_ns.sum(axis=1).std() / np.sqrt(num_read)) if num_read >= _MIN_READ else float("inf")
    length, _, queued = _by_reading(seconds)
    return min(error_of_few((length - queued).sum(axis=1) / seconds[:, 0]), of_steps)


def error_of_few(values: Floats) -> float:
    """Return the standard error of a mean, wider by Student's t for few values; infinite for fewer than three."""
    if len(values) < _MIN_SECONDS:
        return float("inf")
    wider = float(stdtrit(len(values) - 1, UPPER_95)) / Z_95
    return wider * float(values.std(ddof=1) / np.sqrt(len(values)))


def excess_use(
    use: WorkUse, threads: OtherThreads, slow: Bools, others: Bools, *, is_placed: bool = False
) -> ExcessUse | None:
    """Return what the excess of some ranks over others consists of; None where that is not known.

    Where the thread that trains neither runs nor waits, it may wait for another of its process that runs, or has no
    core. So what other threads run for longer beyond chance counts as running. Of their longer waiting, as much counts
    as such waiting costs other ranks, or all of it if these ranks are placed unlike the others.

    Args:
        use: how all ranks spend their work.
        threads: what other threads of each rank had of their cores.
        slow: the ranks, bool, (num_ranks,).
        others: those that they are compared with, likewise.
        is_placed: whether the ranks have other CPUs or another priority than the others.
    """
    is_whole = bool((slow & use.is_known).any() and (others & use.is_known).any())
    known = use.is_known if is_whole else use.is_any_known
    slow = slow & known
    others, parts = _compared(use, slow, others & known)
    if not slow.any() or not others.any() or not parts.any():
        return None

    def excess(of_ranks: Floats) -> float:
        return float(of_ranks[slow].mean() - np.median(of_ranks[others]))

    idle_ns = np.where(use.is_part_known, use.idle_ns, use.own_ns)  # at most
    queued, idle = (each[:, parts].sum(axis=1) for each in (use.queued_ns, idle_ns))
    threads_ns = np.nan_to_num(threads.queued_ns)
    cost = 1.0 if is_placed else float(np.clip(np.median((idle / np.maximum(threads_ns, _TINY))[others]), 0.0, 1.0))
    hidden = max(min(excess(idle), cost * excess(threads_ns)), 0.0)
    chance_ns = Z_95 * float(np.hypot(threads.error_ns[slow].max(), np.median(threads.error_ns[others])))
    beyond_chance_ns = excess(threads.running_ns) - chance_ns
    run_elsewhere = float(np.clip(np.nan_to_num(beyond_chance_ns), 0.0, max(excess(idle) - hidden, 0.0)))
    return ExcessUse(
        excess_ns=excess(use.own_ns.sum(axis=1)),
        queued_ns=excess(queued) + hidden,
        idle_ns=excess(idle) - hidden - run_elsewhere,
        unknown_ns=excess(use.own_ns[:, ~parts].sum(axis=1)),
        usual_ns=max(float(np.median((use.own_ns.sum(axis=1) - queued)[others])), _TINY),
        error_ns=float(np.hypot(use.error_ns[slow].max(), np.median(use.error_ns[others]))),
        is_whole=is_whole,
        unsure_ns=float(np.median(np.where(use.is_part_known, 0.0, use.own_ns)[others][:, parts].sum(axis=1))),
    )


def _compared(use: WorkUse, slow: Bools, others: Bools) -> tuple[Bools, Bools]:
    """Return which others some ranks are compared with, and the parts of work in which all of these are known.

    Known enough is also a part in which the others do less in all than these ranks besides waiting, as where they are
    blocked in communication for most of it: the difference is no waiting, whatever the others do there.
    """
    is_less = use.own_ns < (use.running_ns + use.idle_ns)[slow].min(axis=0, initial=np.inf)
    is_known = use.is_part_known | is_less
    parts = np.asarray(use.is_part_known[slow].all(axis=0) & is_known[others].any(axis=0))
    known = others & is_known[:, parts].all(axis=1)
    if not known.any():  # each of the others has another part that is not known
        known, parts = others, np.asarray(parts & is_known[others].all(axis=0))
    return known, parts
