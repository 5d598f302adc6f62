"""How much of an excess is waiting for cores, and why single ranks lack them: their nice value, or fewer CPUs.

Where ranks have read what their thread had of its core in each phase, that decides. Without it, sums over all threads
of a rank bound what waiting may explain.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import plural, printable
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import Panels
from hpcpace.metrics import Bools, Floats
from hpcpace.metrics.host_waits import CoreUse
from hpcpace.metrics.phase_cores import PARTS, ExcessUse, OtherThreads, WorkUse, excess_use
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.roles import PhaseExcess, StageComparison
from hpcpace.metrics.special import Z_95, stdtrit
from hpcpace.metrics.stragglers import Straggler

_TINY = 1e-9  # statistics: no division by zero


@dataclass(frozen=True, kw_only=True)
class CorePlace:
    """Where one rank runs, as far as that differs from the others or explains its waiting for cores.

    Attributes:
        rank, host: who and where.
        nice, usual_nice: its nice value, and that of the others by median.
        num_cpus, usual_cpus: CPUs that it may use, and of the others by median; 0 where they are not known.
        binding: settings of OpenMP that narrow its CPUs; empty where none do.
        unbound: the line that undoes these.
    """

    rank: int
    host: str
    nice: int
    usual_nice: int
    num_cpus: int
    usual_cpus: int
    binding: str
    unbound: str

    @property
    def is_nicer(self) -> bool:
        """Whether others run before it."""
        return self.nice > self.usual_nice

    @property
    def at_nice(self) -> str:
        """Its nice value and that of the others."""
        return f"at nice {self.nice}, the others at {self.usual_nice}"

    @property
    def is_narrowed(self) -> bool:
        """Whether it has fewer CPUs than others."""
        return 0 < self.num_cpus < self.usual_cpus

    @property
    def words(self) -> str:
        """Return what is different, with `it` as the subject; empty where nothing is."""
        parts = []
        if self.is_nicer:
            parts.append(f"it runs {self.at_nice}")
        if self.is_narrowed:
            why = f", because {self.binding} narrowed its mask" if self.binding else ""
            parts.append(f"it may use {plural(self.num_cpus, 'CPU')}, the others {self.usual_cpus}{why}")
        return "; ".join(parts)

    @property
    def advice(self) -> str:
        """Return what to do about that; empty where nothing is different."""
        parts = []
        if self.is_nicer:
            parts.append(
                f"start rank {self.rank} at nice {self.usual_nice}: look for nice in its batch line and wrappers; or, "
                f"as root on {printable(self.host)}, renice -n {self.usual_nice} -p PID"
            )
        if self.is_narrowed:
            parts.append(self.unbound or f"give rank {self.rank} as many CPUs as the others (srun -c N, taskset)")
        return "; ".join(parts)


def places_of(panels: Panels, ranks: Iterable[int]) -> tuple[CorePlace, ...]:
    """Return where some ranks run; none where nothing is known of cores."""
    use = panels.cores
    if use is None:
        return ()
    chosen = set(ranks)
    nice = use.nice if use.nice is not None else np.zeros(len(panels.rank), np.int64)
    cpus = np.array([len(of_rank) for of_rank in use.cpus])
    others = ~np.isin(panels.rank, list(chosen))
    others = others if others.any() else ~others
    usual_nice = int(np.median(nice[others]))
    usual_cpus = int(np.median(cpus[others]))
    return tuple(
        CorePlace(
            rank=rank,
            host=panels.host[row],
            nice=int(nice[row]),
            usual_nice=usual_nice,
            num_cpus=int(cpus[row]),
            usual_cpus=usual_cpus,
            binding=panels.bindings.get(rank, ("", ""))[0],
            unbound=panels.bindings.get(rank, ("", ""))[1],
        )
        for row, rank in enumerate(panels.rank.tolist())
        if rank in chosen
    )


def explained(places: Iterable[CorePlace]) -> CorePlace | None:
    """Return the first place that differs from the others; None if none does."""
    return next((place for place in places if place.words), None)


@dataclass(frozen=True, kw_only=True)
class CoreThresholds(Thresholds, topic="cores"):
    """When ranks wait for cores, and on whom."""

    notable_wait_share: float = number(0.05, "share")
    """Share of the time that a rank waits for a core from which a report mentions it, and other findings are held
    against it."""
    least_errors: float = number(2.0, "standard errors")
    """The wait must exceed the notable one by so much, and an excess must exceed its waiting by so much: both are
    sampled once a second."""
    crowded_ready: float = number(1.5, "times")
    """Ready threads per CPU from which ranks of the job wait for each other."""
    crowded_running_share: float = number(0.75, "share")
    """Share of the CPUs that such ranks must keep busy: otherwise somebody else has them."""
    least_others_share: float = number(0.1, "share")
    """Share of the CPUs that other processes must take to be named as well."""
    least_cpu_excess: float = number(0.1, "times")
    """Excess processor time, or work beyond waiting, from which a slow rank does more than to wait for a core: ranks
    that share cores differ by less."""
    clear_fault_share: float = number(0.1, "share")
    """Loss to ranks that are late beyond their waiting for cores, as a share of the time in which ranks do not wait for
    cores, from which it comes first: it is certain, and what waiting costs is an upper bound."""
    singled_out_part: float = number(3.0, "times")
    """Waiting of a rank, in times of that of the others of its host, from which it is named and not the host."""
    lab_factor: float = number(2.0, "times")
    """Waiting of a host of a lab over what its hosts cause each other on one machine, from which somebody else has its
    cores: up to there, waits are uneven by chance."""
    everywhere_part: float = number(0.5, "share")
    """Part of the loss that counts when findings are ranked, if all hosts share cores: that costs between nothing and
    the share for which ranks wait."""


def is_notable(use: CoreUse, limits: CoreThresholds) -> Bools:
    """Return which ranks wait for a core for a notable share of the time, bool, (num_ranks,)."""
    sure = np.nan_to_num(use.waiting) - limits.least_errors * np.nan_to_num(use.error)
    return np.asarray(sure >= limits.notable_wait_share)


def excess_of(panels: Panels, use: CoreUse, slow: Bools, parts: Bools | None = None) -> ExcessUse | None:
    """Return what the excess of some ranks over others of their roles consists of; None where that is not known.

    Args:
        panels: the steps.
        use: what ranks had of their cores.
        slow: the ranks, bool, (num_ranks,).
        parts: the parts of own work that count, bool, (len(PARTS),); all if None.
    """
    if use.work is None:
        return None
    # The sums over all threads have the thread that trains in them, also while it is blocked: upper bounds. It is left
    # out in the parts that are known of all compared, as what one rank lacks would seem to be other threads.
    compared = (slow | others_of(panels, slow)) & use.work.is_any_known
    is_known = use.work.is_part_known[compared].all(axis=0)
    running_ns, queued_ns = (
        np.maximum(of_all * panels.mean_time_ns - of_one[:, is_known].sum(axis=1), 0.0)
        for of_all, of_one in ((use.running, use.work.running_ns), (use.queued, use.work.queued_ns))
    )
    error = np.full(len(slow), np.inf) if use.running_error is None else use.running_error
    threads = OtherThreads(running_ns=running_ns, queued_ns=queued_ns, error_ns=error * panels.mean_time_ns)
    work = use.work if parts is None else use.work.of_parts(parts)
    is_placed = explained(places_of(panels, panels.rank[slow].tolist())) is not None
    found = excess_use(work, threads, slow, others_of(panels, slow), is_placed=is_placed)
    return found if found is not None and np.isfinite(found.error_ns) else None  # of few steps, it has no error


def excess_by_sums(panels: Panels, use: CoreUse, slow: Bools) -> ExcessUse | None:
    """Return the same by sums over all threads of each rank, where nothing is known of the one that trains.

    That thread ran for as long at most, so what is left of own work it spent idle at least. Waiting of any of the
    threads may be its own. None where no processor time is known.
    """
    work, others = panels.work_ns.mean(axis=1) / panels.mean_time_ns, others_of(panels, slow)

    def excess(share: Floats) -> float:
        return float(share[slow].mean() - np.median(share[others])) * panels.mean_time_ns

    running_ns, excess_ns = excess(use.running), excess(work)
    idle_ns = excess(np.maximum(work - use.running - use.queued, 0.0))
    if not np.isfinite(idle_ns):
        return None
    error = np.full(len(work), np.inf) if use.running_error is None else use.running_error
    return ExcessUse(
        excess_ns=excess_ns,
        queued_ns=0.0,
        idle_ns=idle_ns,
        unknown_ns=excess_ns - running_ns - idle_ns,
        usual_ns=max(float(np.median(work[others])) * panels.mean_time_ns, _TINY),
        # What ranks run is missing from what they idle, so that the difference of both errs by twice as much.
        error_ns=2 * float(np.hypot(error[slow].max(), np.median(error[others]))) * panels.mean_time_ns,
        is_whole=True,
    )


def others_of(panels: Panels, slow: Bools) -> Bools:
    """Return the ranks that some ranks are compared with: the others of their roles, or else all others."""
    others = np.isin(panels.role, panels.role[slow]) & ~slow
    return others if others.any() else ~slow


class Waiting:
    """The waiting for cores of all ranks, as `hpcpace.diagnosis.finding.CoreWaiting` has it.

    Args:
        panels: the steps.
        use: what ranks had of their cores.
        least_excess: excess processor time, or work beyond waiting, from which a slow rank does not only wait.
        least_errors: standard errors that work beyond waiting must reach.
    """

    def __init__(self, panels: Panels, use: CoreUse, *, least_excess: float, least_errors: float) -> None:
        self._panels, self._use, self._least_excess, self._least_errors = panels, use, least_excess, least_errors
        self.mean_share = float(np.nanmean(use.waiting))
        self.uneven_share = uneven_share(use)

    def part_beyond(self, slow: Bools) -> Estimate | None:
        """Return which part of the excess of these ranks is beyond waiting for cores; None where that is not known."""
        found = excess_of(self._panels, self._use, slow)
        if found is None or not (found.is_whole or self._is_clear(found)):
            return None
        beyond_ns = Estimate.around(found.beyond_ns, Z_95 * found.error_ns)
        return beyond_ns.through(lambda part_ns: np.clip(part_ns / max(found.excess_ns, _TINY), 0.0, 1.0))

    def is_all_of(self, effect: float, slow: Bools) -> bool:
        """Return whether an excess of some ranks over the others may be waiting for cores.

        Where it is not known what the thread that trains had of its core, it is more where their processor time exceeds
        that of the others by a good part of it, or where their longer waiting leaves more of it than ranks wait at all:
        so much may depend on which rank the scheduler lets run when.
        """
        panels, running, waiting = self._panels, self._use.running, self._use.waiting
        found = excess_of(panels, self._use, slow)
        if found is not None and (found.is_whole or self._is_clear(found)):
            return not self._is_clear(found)
        others = others_of(panels, slow)
        if np.isnan(waiting[slow]).all() or np.isnan(waiting[others]).all():
            return False
        cpu_excess = float(np.nanmean(running[slow]) / max(float(np.nanmedian(running[others])), _TINY)) - 1
        if cpu_excess >= max(effect / 2, self._least_excess):
            return False
        usual = float(panels.work_ns[others].mean()) / panels.mean_time_ns
        longer = (float(np.nanmean(waiting[slow])) - float(np.nanmedian(waiting[others]))) / max(usual, _TINY)
        return not effect - longer > float(np.nanmean(waiting))

    def _is_clear(self, found: ExcessUse) -> bool:
        """Return whether an excess is more than waiting, by enough and beyond chance."""
        return found.beyond_ns >= max(self._least_excess * found.usual_ns, self._least_errors * found.error_ns)


def uneven_share(use: CoreUse) -> float:
    """Return the share of the time that ranks may lose because each step waits for whoever waits longest for a core.

    Waits that are as uneven as an exponential distribution have a largest of n that is 1 + 1/2 + ... + 1/n times their
    mean, so that a step loses so many times the mean less one; at least the waiting itself.
    """
    largest = float((1 / np.arange(1, len(use.waiting) + 1)).sum())
    return float(np.nan_to_num(use.waiting).max(initial=0.0)) * max(largest - 1, 1.0)


def late_beyond_waiting(panels: Panels, limits: CoreThresholds, level: float) -> Straggler | None:
    """Return the rank that is late by most beyond waiting for cores, although waits hide it; None if there is none.

    Steps of ranks that wait for cores differ so much that no test of single steps finds anybody. What a rank does
    besides waiting hardly varies: its mean is held against that of others by Student's t, over all ranks (Bonferroni).
    """
    use = panels.cores
    if use is None or use.work is None or panels.has_device or panels.host_timed or not panels.is_role_known:
        return None
    if not is_notable(use, limits).any():
        return None
    latest: tuple[float, Straggler] | None = None
    for row in np.flatnonzero(use.work.is_any_known).tolist():
        slow = np.arange(len(panels.rank)) == row
        found = excess_of(panels, use, slow) if (panels.role == panels.role[row]).sum() > 1 else None
        freedom = int(use.work.num_seconds[use.work.is_any_known].min()) - 1
        if found is None or freedom < 1:
            continue
        factor = float(stdtrit(freedom, 1 - level / len(panels.rank)))
        share, error = found.beyond_ns / found.usual_ns, found.error_ns / found.usual_ns
        if share < max(limits.least_cpu_excess, factor * error) or (latest is not None and share <= latest[0]):
            continue
        effect = Estimate.around(share, Z_95 * error)
        number = int(panels.rank[row])
        latest = (
            share,
            Straggler(
                kind="rank", ids=(number,), ranks=(row,), pattern="fixed", effect=effect, p_value=level, late_share=1.0
            ),
        )
    return None if latest is None else latest[1]


def stages_beyond_waiting(panels: Panels, use: WorkUse, row: int) -> StageComparison:
    """Return in which stages a rank is late by what it does besides waiting for cores.

    Of a part in which it is not known how others spend their work, all of it counts, as long as this rank does more.
    """
    others = (panels.role == panels.role[row]) & use.is_any_known & (np.arange(len(panels.rank)) != row)
    busy_ns = np.where(use.is_part_known, use.running_ns + use.idle_ns, use.own_ns)
    is_shown = use.is_part_known | (busy_ns < busy_ns[row])
    busy_ns = np.where(use.is_part_known[row] & is_shown[others].all(axis=0), busy_ns, 0.0)
    usual_ns, half_ns = np.median(busy_ns[others], axis=0), Z_95 * float(use.error_ns[row])
    phases = [
        PhaseExcess(
            phase=part.name.lower(),
            own_ns=float(own_ns),
            usual_ns=float(of_others),
            interval_ns=(float(own_ns - of_others) - half_ns, float(own_ns - of_others) + half_ns),
        )
        for part, own_ns, of_others in zip(PARTS, busy_ns[row], usual_ns, strict=True)
    ]
    phases.sort(key=lambda each: each.usual_ns - each.own_ns)
    longest_ns = phases[0].own_ns - phases[0].usual_ns
    named = [each for each in phases if each.is_longer and each.own_ns - each.usual_ns >= longest_ns / 2]
    stages = tuple(dict.fromkeys(each.stage for each in named))
    return StageComparison(stages=stages, phases=tuple(phases), num_steps=panels.work_ns.shape[1])
