"""Ranks that share cores: they are ready to run and wait, for each other, for other processes, or for a quota.

A rank that waits for a core seems to compute or to communicate for longer. So the findings of other topics are held
against this waiting, and dropped where it may be all that is behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import numpy as np

from hpcpace.core.text import percent, plural, printable, rank_list
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Panels,
    Said,
    place_culprit,
    shortened,
)
from hpcpace.diagnosis.summary import Culprit, HostCores, Mode
from hpcpace.diagnosis.topics.communication import BurstEvidence
from hpcpace.metrics import Bools
from hpcpace.metrics.host_waits import CoreUse

_MIN_SHOWN_SHARE = 0.0005  # display: less is 0.0 %
_Z_95 = 1.96  # statistics: half of a 95 % interval in standard errors
_TINY = 1e-9  # numerics: no division by zero


@dataclass(frozen=True, kw_only=True)
class CoreThresholds(Thresholds, topic="cores"):
    """When ranks wait for cores, and on whom."""

    notable_wait_share: float = number(0.05, "share")
    """Share of the time that a rank waits for a core from which a report mentions it, and other findings are held
    against it."""
    least_errors: float = number(2.0, "standard errors")
    """The wait must exceed the notable one by so much, because it is sampled once a second."""
    crowded_ready: float = number(1.5, "times")
    """Ready threads per CPU from which ranks of the job wait for each other."""
    crowded_running_share: float = number(0.75, "share")
    """Share of the CPUs that such ranks must keep busy: otherwise somebody else has them."""
    least_others_share: float = number(0.1, "share")
    """Share of the CPUs that other processes must take to be named as well."""
    least_cpu_excess: float = number(0.1, "times")
    """Excess processor time from which a slow rank works more, and does not only wait for a core."""
    throttled_part: float = number(0.5, "share")
    """Part of the longest wait for which the quota must throttle ranks to be named as the reason."""
    everywhere_part: float = number(0.5, "share")
    """Part of the loss that counts when findings are ranked, if all hosts share cores: that costs between nothing and
    the share for which ranks wait."""


class CoreCause(StrEnum):
    """Holder of the cores for which ranks wait."""

    RANKS = "ranks"
    OTHERS = "other processes"
    BOTH = "ranks and other processes"
    QUOTA = "quota"
    UNKNOWN = ""


@dataclass(frozen=True, kw_only=True)
class CoreEvidence(Evidence):
    """Ranks that are ready to run and wait for a core.

    Attributes:
        cause: holder of the cores.
        share: share of the time for which the rank that waits longest waits for a core.
        ranks: the ranks that wait.
        hosts: where they are, that of the rank that waits longest first.
        of_host: how many ranks of the job are on the host of the one that waits longest.
        cpus: how many CPUs they may use; 0 where that is not known.
        running: how many of them they use, on average.
        ready: how many of their threads run or wait for a core, on average.
        pressure: share of the time for which some task there waits for a core; 0 where that is not known.
        throttled: share of the time for which the quota of the cgroup keeps that rank from running.
        switches: its involuntary context switches for each second.
        least: the threshold of `share`.
    """

    mode: ClassVar[str] = Mode.CORES
    needs_no_others: ClassVar[bool] = True
    wins_ties: ClassVar[bool] = True
    cause: CoreCause
    share: float
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    of_host: int
    cpus: int
    running: float
    ready: float
    pressure: float
    throttled: float
    switches: float
    least: float

    @property
    def variety(self) -> str:
        """The holder of the cores."""
        return str(self.cause)

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        where = shortened([printable(host) for host in self.hosts])
        cpus, ranks = plural(self.cpus, "CPU"), plural(self.of_host, "rank")
        who = rank_list(self.ranks) if len(set(said.hosts.values())) == 1 else where
        crowd = f"{ranks} of this job on {cpus} of {printable(self.hosts[0])}"
        fewer = "start fewer ranks per node or fewer threads per rank, or give each rank its own cores (srun -c N)"
        others = f"find what else runs on {where} (top, squeue -w), or ask for whole nodes (sbatch --exclusive)"
        holders, advice = {
            CoreCause.RANKS: (crowd, fewer),
            CoreCause.OTHERS: (f"other processes on {where} take them", others),
            CoreCause.BOTH: (f"{crowd}, and other processes there", f"{others}; and {fewer}"),
            CoreCause.QUOTA: (
                f"the CPU quota of the cgroup on {where} is used up",
                f"raise the quota (cpu.max of the cgroup; srun -c N), or {fewer}",
            ),
            CoreCause.UNKNOWN: (f"on {where}", f"{fewer}, or {others}"),
        }[self.cause]
        verb = "waits" if len(self.ranks) == 1 and who != where else "wait"
        subject = who if who != where else f"ranks on {where}"
        return FindingWords(
            headline=f"ranks share cores: {holders}; {subject} {verb} for a core for up to {percent(self.share)} of "
            "the time",
            why="; ".join(self._facts(cpus)),
            next=advice,
        )

    def _facts(self, cpus: str) -> list[str]:
        use = f"on average {self.ready:.1f} of their threads are ready to run, and {self.running:.1f} run"
        facts = [f"{use} on {cpus}" if self.cpus else use]
        if self.throttled >= _MIN_SHOWN_SHARE:
            facts.append(f"throttled for {percent(self.throttled)} of the time")
        if self.pressure >= _MIN_SHOWN_SHARE:
            facts.append(f"CPU pressure {percent(self.pressure)}")
        return [*facts, f"{self.switches:.0f} involuntary context switches a second and rank"]


def find_shared(case: Case) -> DiagnosisFinding | None:
    """Return that ranks share cores, also where that costs less than its threshold; None where it is not notable.

    The loss is the waiting of the rank that waits longest: the others wait for it in the next collective.
    """
    panels, use, limits = case.panels, case.panels.cores, case.thresholds.of(CoreThresholds)
    if use is None or not (waits := is_notable(use, limits)).any():
        return None
    rows = np.flatnonzero(waits)
    first = int(rows[use.waiting[rows].argmax()])
    hosts = tuple(dict.fromkeys(panels.host[row] for row in (first, *rows)))
    host = _host_cores(use, panels, int(panels.node[first]))
    evidence = CoreEvidence(
        cause=_cause(host, limits),
        share=float(use.waiting[first]),
        ranks=tuple(panels.rank[rows].tolist()),
        hosts=hosts,
        of_host=host.num_ranks,
        cpus=host.num_cpus,
        running=host.running,
        ready=host.ready,
        pressure=float(use.pressure[first]),
        throttled=float(use.throttled[first]),
        switches=float(use.switches[first]),
        least=case.settings.core_share,
    )
    is_everywhere = set(hosts) == set(panels.host)
    return DiagnosisFinding(
        evidence=evidence,
        loss_share=evidence.share,
        confidence=0.95,
        culprits=() if is_everywhere else tuple(_culprit(use, panels, host, waits) for host in hosts),
        counted_part=limits.everywhere_part if is_everywhere else 1.0,
    )


def is_notable(use: CoreUse, limits: CoreThresholds) -> Bools:
    """Return which ranks wait for a core for a notable share of the time, bool, (num_ranks,)."""
    sure = np.nan_to_num(use.waiting) - limits.least_errors * np.nan_to_num(use.error)
    return np.asarray(sure >= limits.notable_wait_share)


def _host_cores(use: CoreUse, panels: Panels, node: int) -> HostCores:
    near = np.flatnonzero(panels.node == node)
    return HostCores(
        host=panels.host[near[0]],
        num_ranks=len(near),
        num_cpus=len(frozenset().union(*(use.cpus[row] for row in near))),
        running=float(np.nansum(use.running[near])),
        ready=float(np.nansum(use.running[near] + use.queued[near])),
        waiting=float(np.nanmax(use.waiting[near])),
        pressure=float(np.nanmax(use.pressure[near])),
        throttled=float(np.nanmax(use.throttled[near])),
    )


def _cause(host: HostCores, limits: CoreThresholds) -> CoreCause:
    """Return the holder of the cores for which ranks of a host wait.

    Ranks share them with each other where there are more ranks than CPUs, or many more ready threads, which keep the
    CPUs busy. While a rank waits, all of its CPUs are busy: what the job did not use of them then, others did.
    """
    if host.throttled >= limits.throttled_part * host.waiting:
        return CoreCause.QUOTA
    if not (num_cpus := host.num_cpus):
        return CoreCause.UNKNOWN
    is_crowded = host.ready > limits.crowded_ready * num_cpus and host.running > limits.crowded_running_share * num_cpus
    is_own = host.num_ranks > num_cpus or is_crowded
    is_others = not is_own or num_cpus * host.waiting - host.running >= limits.least_others_share * num_cpus
    if is_own and is_others:
        return CoreCause.BOTH
    return CoreCause.RANKS if is_own else CoreCause.OTHERS


def _culprit(use: CoreUse, panels: Panels, host: str, waits: Bools) -> Culprit:
    rows = np.array([row for row, name in enumerate(panels.host) if name == host and waits[row]])
    row = int(rows[use.waiting[rows].argmax()])
    effect, half = float(use.waiting[row]), _Z_95 * float(use.error[row])
    own = [index for index, name in enumerate(panels.host) if name == host]
    return place_culprit("node", host, own, effect, (effect - half, effect + half), panels)


def find(case: Case) -> list[DiagnosisFinding]:
    """Drop the findings that waiting for cores may explain, and return that ranks share cores above its threshold.

    Where the ranks that wait for cores are late, too, that is why, and costs what their lateness costs.
    """
    panels, cores, use = case.panels, find_shared(case), case.panels.cores
    if panels.lab_cores is not None:
        uneven = _uneven_share(panels.lab_cores)
        case.findings = [
            each for each in case.findings if not isinstance(each.evidence, BurstEvidence) or each.loss_share > uneven
        ]
    if cores is None or use is None:
        return []
    waiting = _Waiting(panels, use, case.thresholds.of(CoreThresholds).least_cpu_excess)
    kept = [each for each in case.findings if not each.evidence.is_waiting_for_cores(each, waiting, panels)]
    case.findings = kept
    if cores.loss_share < case.settings.core_share:
        return []
    named = {alias for culprit in cores.culprits for alias in culprit.aliases}
    late = [each.loss_share for each in kept if named & {a for culprit in each.culprits for a in culprit.aliases}]
    return [replace(cores, loss_share=max(cores.loss_share, *late, 0.0))]


class _Waiting:
    """The waiting for cores of all ranks, as `CoreWaiting` has it."""

    def __init__(self, panels: Panels, use: CoreUse, least_cpu_excess: float) -> None:
        self._panels, self._use, self._least_cpu_excess = panels, use, least_cpu_excess
        self.mean_share = float(np.nanmean(use.waiting))
        self.uneven_share = _uneven_share(use)

    def is_all_of(self, effect: float, slow: Bools) -> bool:
        """Return whether an excess of some ranks over the others may be waiting for cores.

        It is more where their processor time exceeds that of the others by a good part of it, or where their longer
        waiting leaves more of it than ranks wait at all: so much may depend on which rank the scheduler lets run when.
        """
        panels, running, waiting = self._panels, self._use.running, self._use.waiting
        others = np.isin(panels.role, panels.role[slow]) & ~slow
        others = others if others.any() else ~slow
        if np.isnan(waiting[slow]).all() or np.isnan(waiting[others]).all():
            return False
        cpu_excess = float(np.nanmean(running[slow]) / max(float(np.nanmedian(running[others])), _TINY)) - 1
        if cpu_excess >= max(effect / 2, self._least_cpu_excess):
            return False
        usual = float(panels.work_ns[others].mean()) / panels.mean_time_ns
        longer = (float(np.nanmean(waiting[slow])) - float(np.nanmedian(waiting[others]))) / max(usual, _TINY)
        return not effect - longer > float(np.nanmean(waiting))


def _uneven_share(use: CoreUse) -> float:
    """Return the share of the time that ranks may lose because each step waits for whoever waits longest for a core.

    Waits that are as uneven as an exponential distribution have a largest of n that is 1 + 1/2 + ... + 1/n times their
    mean, so that a step loses so many times the mean less one; at least the waiting itself.
    """
    largest = float((1 / np.arange(1, len(use.waiting) + 1)).sum())
    return float(np.nan_to_num(use.waiting).max(initial=0.0)) * max(largest - 1, 1.0)


def core_figures(panels: Panels, limits: CoreThresholds) -> tuple[HostCores, ...]:
    """Return the hosts on which some rank waits notably for a core, the one of the longest waiting first."""
    use = panels.cores
    if use is None:
        return ()
    rows = [_host_cores(use, panels, node) for node in np.unique(panels.node[is_notable(use, limits)]).tolist()]
    return tuple(sorted(rows, key=lambda row: -row.waiting))
