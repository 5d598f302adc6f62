"""How long ranks waited for a core, and how long devices waited for their host to issue work.

A thread runs, waits for a core, or sleeps. With c of processor time and w of run-queue wait for each second, summed
over the threads of a rank, c + w threads of it are ready on average, and w / (c + w) of that time is waiting. So a rank
is held up for min(1, c + w) w / (c + w) of the time: exactly w where one thread does the work.

The host issues work and marks the stream of its device; the lead of a mark is its time on the device less its time on
the host. Near zero, the device had done all that it had and waited. How long it worked before that is not in the marks:
it is known from stretches of the same phase in which the device set the pace, on any rank of the role, and otherwise
only bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.records import dataclass
from hpcpace.core.text import NS_PER_S, parse_range
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import ordinals
from hpcpace.metrics.phase_cores import WorkThresholds, WorkUse, error_of_few, work_use
from hpcpace.metrics.phases import CoveredTime, innermost
from hpcpace.metrics.special import ROUNDING
from hpcpace.trace.schema import Phase

_MAX_CPUS = 100_000  # memory: a damaged list may name any number
_MAX_THREADS = 1 << 16  # format: more do not run at once
_COUNTERS = ("cpu_time_ns", "run_wait_ns", "cpu_pressure_ns", "cpu_throttled_ns", "involuntary_switches")


@dataclass(frozen=True, kw_only=True)
class CounterThresholds(Thresholds, topic="cores"):
    """When waiting for cores is known."""

    min_rows: int = number(3, "samples", at_least=2)
    """Samples of a rank's counters, one a second; fewer do not show how much its waiting varies."""


@dataclass(frozen=True, kw_only=True)
class CoreUse:
    """What ranks had of their cores; one value a rank, float64, (num_ranks,), NaN where it is not known.

    Attributes:
        running: processor time of a rank's threads for each second.
        queued: run-queue wait of a rank's threads for each second.
        waiting: share of the time for which a rank was ready to run and waited for a core.
        error: standard error of `waiting`.
        running_error: that of `running`, infinite for few rows; None where it is not known.
        pressure: share of the time for which some task of the rank's cgroup, or else of its host, waited for a core.
        throttled: share of the time for which the quota of its cgroup kept a rank from running.
        switches: involuntary context switches of a rank for each second.
        cpus: the CPUs that a rank may use; empty where they are not known.
        nice: nice value of the thread that trains, int64; 0 also where it is not known; None if of no rank.
        work: how each rank spends its own work; None if that was not measured.
        lab_waiting, lab_throttled: what of `waiting` and `throttled` a lab causes on all of its hosts alike; None
            outside of labs.
    """

    running: Floats
    queued: Floats
    waiting: Floats
    error: Floats
    pressure: Floats
    throttled: Floats
    switches: Floats
    cpus: tuple[frozenset[int], ...]
    nice: Ints | None = None
    work: WorkUse | None = None
    running_error: Floats | None = None
    lab_waiting: float | None = None
    lab_throttled: float | None = None

    def in_lab(self, node: Ints) -> CoreUse:
        """Return the same of ranks in a lab, whose hosts share the cores of one machine and have one quota each.

        What the lab causes is what half of its hosts have at least: the lower median of their longest waiting. Of two
        hosts either may wait for longer by chance, so all waiting is the lab's; a quota is no chance.

        Args:
            node: index of each rank's host, int64, (num_ranks,).
        """
        of_hosts = [
            [float(np.nan_to_num(share[node == host]).max()) for host in np.unique(node)]
            for share in (self.waiting, self.throttled)
        ]
        waiting, throttled = (sorted(shares)[(len(shares) - 1) // 2] for shares in of_hosts)
        return replace(self, lab_waiting=waiting if len(of_hosts[0]) > 2 else max(of_hosts[0]), lab_throttled=throttled)


def core_use(
    tables: Sequence[Mapping[str, NDArray[Any]]],
    begin_ns: Sequence[int],
    end_ns: Sequence[int],
    cpus: Sequence[str],
    parts_ns: Floats | None = None,
    min_rows: int = CounterThresholds.min_rows,
    work_limits: WorkThresholds | None = None,
) -> CoreUse:
    """Return what ranks had of their cores between two times.

    Args:
        tables: the `host` table of each rank.
        begin_ns, end_ns: from when to when, on each rank's own clock.
        cpus: the CPUs of each rank, as the kernel lists them.
        parts_ns: the parts of each step, (num_ranks, num_steps, num_parts); None leaves out nice values and own work.
        min_rows: nothing is known of a rank with fewer samples.
        work_limits: when it is known how ranks spend their own work; the defaults if None.
    """
    rates = [_rates(table, begin, end, min_rows) for table, begin, end in zip(tables, begin_ns, end_ns, strict=True)]
    mean = np.array([rate.mean(axis=0) if len(rate) else np.full(len(_COUNTERS), np.nan) for rate in rates])
    running, queued, pressure, throttled, switches = mean.reshape(len(rates), len(_COUNTERS)).T
    waiting = [held_up(rate[:, 0], rate[:, 1]) for rate in rates]
    return CoreUse(
        running=running,
        queued=queued,
        waiting=held_up(running, queued),
        error=np.array([each.std() / np.sqrt(len(each)) if len(each) else np.nan for each in waiting]),
        running_error=np.array([error_of_few(rate[:, 0]) for rate in rates]),
        pressure=np.minimum(pressure, 1.0),
        throttled=np.minimum(throttled, 1.0),
        switches=switches * NS_PER_S,
        cpus=tuple(cpus_of(text) for text in cpus),
        nice=None if parts_ns is None else _last_nice(tables),
        work=None
        if parts_ns is None
        else work_use(tables, begin_ns, end_ns, parts_ns, work_limits or WorkThresholds()),
    )


def _last_nice(tables: Sequence[Mapping[str, NDArray[Any]]]) -> Ints:
    return np.array([int(table["nice"][-1]) if len(table["nice"]) else 0 for table in tables], np.int64)


def held_up(running: Floats, queued: Floats) -> Floats:
    """Return the share of the time for which a rank waits for a core, from running and queued threads for each."""
    ready = running + queued
    return np.asarray(np.minimum(ready, 1.0) * queued / np.maximum(ready, ROUNDING))


def _rates(table: Mapping[str, NDArray[Any]], begin_ns: int, end_ns: int, min_rows: int) -> Floats:
    """Return how fast each counter grew between neighbouring rows, float64, (num_seconds, num_counters).

    No rows where the run-queue wait is not known, or a counter runs backwards or faster than any number of threads can.
    """
    none = np.zeros((0, len(_COUNTERS)))
    time_ns = np.asarray(table["time_ns"], np.float64)
    inside = (time_ns >= begin_ns) & (time_ns <= end_ns)
    if inside.sum() < min_rows or not np.any(table["run_wait_ns"][inside]):
        return none
    rows = np.array([np.asarray(table[name][inside], np.float64) for name in _COUNTERS]).T
    passed_ns = np.diff(time_ns[inside])
    grown = np.diff(rows, axis=0)
    if (passed_ns <= 0).any() or (grown < 0).any() or (grown[:, :2] > _MAX_THREADS * passed_ns[:, None]).any():
        return none
    return np.asarray(grown / passed_ns[:, None])


def cpus_of(text: str) -> frozenset[int]:
    """Return the CPUs of a list like `0-3,8`; none where the text is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        try:
            numbers = parse_range(part)
        except ValueError:
            return frozenset()
        if numbers.stop > _MAX_CPUS:
            return frozenset()
        found.update(numbers)
    return frozenset(found)


NO_PHASE = len(Phase)
_PACED = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER, NO_PHASE)
_MAX_PIECES = 8  # memory: of a phase; more are alike
_LOW, _MIDDLE = 0.1, 0.5  # statistics: quantile of leads that waiting for others does not lengthen, and median


@dataclass(frozen=True, kw_only=True)
class HostPaceThresholds(Thresholds, topic="host"):
    """When a device had run dry, or follows its host operation by operation."""

    lead_ns: int = number(50_000, "ns")
    """Lead of the host below which the device had run dry: marks take so long to arrive."""
    lead_share: float = number(0.01, "share")
    """Share of a stretch, likewise: a device that ends it so soon after its host had followed it."""
    min_stretches: int = number(5, "samples", at_least=1)
    """Stretches of a kind, fewer of which do not show how long the device takes, or whether it follows."""
    far_share: float = number(0.95, "share")
    """Share of the usual lengths that a stretch must exceed for its device to have waited, if only its end shows it."""
    last_share: float = number(0.25, "share")
    """Share of a phase that the last operation may take: a longer lead at its end means that the host is ahead."""
    steady_part: float = number(0.25, "share")
    """Part of the spread of the host's time up to which a lead does not depend on it; leads of devices that set the
    pace vary as much."""
    least_spread: float = number(0.002, "share")
    """Spread of the host's time, as a share of the phase, below which it does not show what follows it."""
    most_growth: float = number(0.03, "share")
    """Growth of the lead in a phase, as a share of it, from which the device sets the pace where hosts vary by less."""
    held_lead_share: float = number(0.1, "share")
    """Share of the step by which a host must be ahead of its device all the time for its launch queue to be full."""
    held_pace_share: float = number(0.98, "share")
    """Share of the step that such a host must take to issue it: one that takes less is not held up."""
    slower_part: float = number(0.1, "share")
    """Part by which such a host must take longer than its device works where nothing holds that, to be slower than it:
    a full launch queue holds it at the pace of its device."""


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """The stream of a rank between consecutive marks inside steps, each (num_stretches,).

    Attributes:
        step: its number.
        phase: innermost phase of the host there, `hpcpace.trace.schema.Phase`, NO_PHASE without one.
        piece: number of the stretch within its phase, which nested phases cut into several.
        begin_ns, end_ns: on the device.
        is_dry_before, is_dry_after: whether the device had run dry at its begin and its end.
        collected_ns: how long the host collected garbage meanwhile.
        host_ns: time between the marks on the host.
        lead_before_ns, lead_after_ns: how far the host was ahead of the device at both marks.
    """

    step: Ints
    phase: Ints
    piece: Ints
    begin_ns: Ints
    end_ns: Ints
    is_dry_before: Bools
    is_dry_after: Bools
    collected_ns: Ints
    host_ns: Ints
    lead_before_ns: Ints
    lead_after_ns: Ints

    @property
    def kind(self) -> Ints:
        """Which stretches are alike: those of one piece of one phase, (num_stretches,)."""
        return np.asarray(self.phase + (NO_PHASE + 1) * np.minimum(self.piece, _MAX_PIECES))

    @property
    def length_ns(self) -> Ints:
        """How long they last on the device."""
        return self.end_ns - self.begin_ns

    @property
    def most_idle_ns(self) -> Ints:
        """How long the device may have been idle at most: until its host was done, once it had done all before."""
        return np.where(np.isin(self.phase, _PACED), np.clip(self.host_ns - self.lead_before_ns, 0, self.length_ns), 0)

    def select(self, rows: Ints | Bools) -> Stretches:
        """Return some of them."""
        return Stretches(**{item.name: getattr(self, item.name)[rows] for item in fields(self)})


def stretches_between_marks(
    steps: Sequence[Ints],
    phases: Sequence[Ints],
    collections: tuple[Ints, Ints],
    limits: HostPaceThresholds = HostPaceThresholds(),
) -> Stretches:
    """Return the stream between the marks of steps and phases.

    Args:
        steps: number, begin and end on the host, begin and end on the device, each (num_steps,).
        phases: phase and the same times, each (num_phases,).
        collections: begin and end of garbage collections on the host, disjoint and ascending.
        limits: when a device had run dry.
    """
    (_, *of_steps), (_, *of_phases) = steps, phases
    host = np.concatenate([*of_steps[:2], *of_phases[:2]])
    device = np.concatenate([*of_steps[2:], *of_phases[2:]])
    order = np.lexsort((device, host))
    edges, first = np.unique(host[order], return_index=True)
    passed = np.maximum.accumulate(device[order])
    # Of marks that the host made at one time, as around a wait of the stream alone, the first ends what came before.
    arrived, left = passed[first], passed[np.append(first[1:], len(order)) - 1]
    inside = innermost(phases[1], phases[2], edges)
    phase = np.append(phases[0].astype(np.int64), NO_PHASE)[inside]
    row = np.searchsorted(steps[1], edges[:-1], side="right") - 1
    is_used = (row >= 0) & (edges[:-1] < steps[2][row])
    least = np.maximum(limits.lead_ns, limits.lead_share * (arrived[1:] - left[:-1]))
    collected = np.diff(CoveredTime(begin_ns=collections[0], end_ns=collections[1]).until_ns(edges))
    columns = {
        "step": steps[0].astype(np.int64)[row],
        "phase": phase,
        "piece": _pieces(inside),
        "begin_ns": left[:-1],
        "end_ns": arrived[1:],
        "is_dry_before": (left - edges)[:-1] < least,
        "is_dry_after": (arrived - edges)[1:] < least,
        "collected_ns": collected,
        "host_ns": np.diff(edges),
        "lead_before_ns": np.maximum((left - edges)[:-1], 0),
        "lead_after_ns": np.maximum((arrived - edges)[1:], 0),
    }
    return Stretches(**{name: values[is_used] for name, values in columns.items()})


def _pieces(inside: Ints) -> Ints:
    """Number the stretches of each phase from 0; `inside` is the phase of each stretch, (num_stretches,)."""
    order = np.argsort(inside, kind="stable")
    found = np.empty(len(inside), np.int64)
    found[order] = ordinals(np.diff(inside[order], prepend=-2) != 0)
    return np.where(inside >= 0, found, 0)


def following_hosts(
    of_ranks: Sequence[Stretches],
    role: Sequence[int],
    shown: Mapping[tuple[int, int], bool],
    limits: HostPaceThresholds,
) -> list[Stretches]:
    """Return stretches that are also dry where devices follow their hosts operation by operation.

    Where hosts issue more slowly than devices work, a device is idle before each operation, and when its host has
    issued the last one, that is all that is left to do: the lead at the end is short, and does not depend on how long
    the host took. Where devices set the pace, the lead is what the host took less, and varies with it. Without any
    lead, as where the host waited for its device, nothing follows. Ranks wait for each other, so one slow host at a
    time suffices, and the shortest lead of all ranks counts.

    Args:
        of_ranks: all ranks of a job, at least one.
        role: ranks of one role work alike, (num_ranks,).
        shown: whether those of a role and kind follow, where leads at single operations show it.
        limits: when a device follows its host.
    """
    step, kind, length, host, before, after = (
        np.concatenate([getattr(each, name) for each in of_ranks])
        for name in ("step", "kind", "length_ns", "host_ns", "lead_before_ns", "lead_after_ns")
    )
    phase, is_dry = (np.concatenate([getattr(each, name) for each in of_ranks]) for name in ("phase", "is_dry_after"))
    is_following = np.zeros(len(step), np.bool_)
    shortest: dict[int, tuple[Ints, Ints, Ints]] = {}  # of each kind: its rows, and both leads in each step
    for code in np.unique(kind).tolist():
        rows = np.flatnonzero(kind == code)
        numbers, at = np.unique(step[rows], return_inverse=True)
        leads = np.full((2, len(numbers)), np.iinfo(np.int64).max)
        for values, lead in zip(leads, (before, after), strict=True):
            np.minimum.at(values, at, lead[rows])
        if len(numbers) >= limits.min_stretches:
            shortest[code] = rows, leads[0], leads[1]
    # A lead that grows must end somewhere: where a host waits for its device, none is left.
    has_waits = any(np.median(leads) < limits.lead_ns for _, *both in shortest.values() for leads in both)
    for rows, lead_before, lead_after in shortest.values():
        usual_ns = max(float(np.median(length[rows])), 1.0)
        host_spread, lead_spread = _spread(host[rows]), _spread(lead_after)
        is_steady = (
            lead_spread <= limits.steady_part * host_spread
            if host_spread > limits.least_spread * usual_ns
            else not has_waits or np.median(lead_after - lead_before) <= limits.most_growth * usual_ns
        )
        if phase[rows[0]] in _PACED and np.median(lead_after) <= limits.last_share * usual_ns and is_steady:
            is_following[rows] = (after[rows] <= 2 * limits.last_share * length[rows]) & ~is_dry[rows]
    ends = np.cumsum([len(each.step) for each in of_ranks])
    of_row = np.repeat(role, np.diff(ends, prepend=0))
    for (of, code), follows in shown.items():
        rows = (of_row == of) & (kind == code)
        is_following[rows] = follows & ~is_dry[rows] & (after[rows] <= 2 * limits.last_share * length[rows])
    return [
        replace(each, is_dry_before=each.is_dry_before | own, is_dry_after=each.is_dry_after | own)
        for each, own in zip(of_ranks, np.split(is_following, ends[:-1]), strict=True)
    ]


def _spread(values: Ints) -> float:
    """Return by how much the median exceeds the least tenth: a device that waits for others has longer leads, too."""
    low, median = np.quantile(values, (_LOW, _MIDDLE))
    return float(median - low)


def usual_lengths(of_role: Sequence[Stretches], limits: HostPaceThresholds = HostPaceThresholds()) -> Floats:
    """Return how long stretches of each kind last where the device sets the pace: median, and what few of them exceed.

    Args:
        of_role: those of each rank.
        limits: how many show it, and how few exceed the longest.

    Returns:
        float64, (2, num_kinds); NaN for kinds of which too few stretches are known. If hosts pace some of these from
        begin to end, any may have been idle: 0 as what few exceed.
    """
    kind, phase, length = (
        np.concatenate([getattr(each, name) for each in of_role]) for name in ("kind", "phase", "length_ns")
    )
    is_own = np.concatenate([~each.is_dry_after & (each.collected_ns == 0) for each in of_role])
    is_paced = np.concatenate([each.is_dry_before & each.is_dry_after for each in of_role])
    usual = np.full((2, (NO_PHASE + 1) * (_MAX_PIECES + 1)), np.nan)
    for code in np.unique(kind[np.isin(phase, _PACED)]).tolist():
        lengths = length[is_own & (kind == code)]
        if len(lengths) >= limits.min_stretches:
            usual[:, code] = np.quantile(lengths, (_MIDDLE, limits.far_share))
        elif (is_paced & (kind == code)).any():
            usual[1, code] = 0.0
    return usual


def idle_ns(stretches: Stretches, usual: Floats) -> tuple[Ints, Ints]:
    """Return how long the device was idle in each stretch: for its host, and for a garbage collection of the host.

    A stretch that begins and ends dry was paced by its host: idle is what exceeds the usual length. Of others, which
    may hide a wait or end with a synchronisation, only what exceeds nearly all usual lengths counts, if the device then
    had run dry or the host collected garbage. Where the usual length is not known, idle is at most what is left of a
    stretch that ends dry from when the device can have done all before it. Time outside of phases counts only on ranks
    that have forward and backward: elsewhere it may be these.

    Args:
        stretches: of a rank.
        usual: from `usual_lengths`.

    Returns:
        Both int64, (num_stretches,).
    """
    median, most = usual[:, stretches.kind]
    length = stretches.length_ns.astype(np.float64)
    beyond = np.maximum(length - np.nan_to_num(median), 0.0)
    # What was left to do when the host was done is work.
    beyond = np.clip(length - stretches.lead_after_ns, 0.0, beyond)
    is_far = length > most
    is_paced = np.isin(stretches.phase, _PACED)
    if not np.isin((Phase.FORWARD, Phase.BACKWARD), stretches.phase).all():
        is_paced &= ~np.isin(stretches.phase, (Phase.OTHER, NO_PHASE))
    is_dry = stretches.is_dry_after & (stretches.is_dry_before | is_far)
    is_held_up = is_dry | (is_far & ~np.isnan(median))
    collected = np.where(is_paced & is_held_up, np.minimum(beyond, stretches.collected_ns), 0.0)
    waited = np.where(is_paced & is_dry, np.minimum(beyond, stretches.most_idle_ns) - collected, 0.0)
    return waited.astype(np.int64), collected.astype(np.int64)
