"""Ranks that share cores: they are ready to run and wait, for each other, for other processes, or for a quota.

A rank that waits for a core seems to compute or to communicate for longer. So the findings of other topics are held
against this waiting, and dropped where it may be all that is behind them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import listed, percent, plural, printable, rank_list
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    MAX_NAMED,
    Case,
    CpuQuota,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Panels,
    Said,
    place_culprit,
    rank_culprit,
    shortened,
)
from hpcpace.diagnosis.summary import Culprit, HostCores, Mode, RankCores
from hpcpace.diagnosis.topics.core_waiting import CorePlace, CoreThresholds, Waiting, is_notable, places_of
from hpcpace.diagnosis.topics.links import SlowLinkEvidence
from hpcpace.metrics import Bools, Ints
from hpcpace.metrics.flow_figures import LinkCause
from hpcpace.metrics.host_waits import CoreUse
from hpcpace.metrics.phase_cores import PARTS
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.special import Z_95

_MIN_SHOWN_SHARE = 0.0005  # display: less is 0.0 %
_TINY = 1e-9  # statistics: no division by zero
_SECOND = 0.99  # display: a finding that counts this part of another comes after it
_FEWER = "start fewer ranks per node or fewer threads per rank, or give each rank its own cores (srun -c N)"


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
        of_host: how many ranks of the job are on the host of the one that waits longest, or on its CPUs where others of
            that host have more.
        cpus: how many CPUs they may use; 0 where that is not known.
        running: how many of them they use, on average.
        ready: how many of their threads run or wait for a core, on average.
        pressure: share of the time for which some task there waits for a core; 0 where that is not known.
        throttled: share of the time for which the quota of the cgroup keeps that rank from running.
        switches: its involuntary context switches for each second.
        least: the threshold of `share`.
        is_on_purpose: whether the user says that ranks share cores on purpose.
        place: where the rank runs that is named alone; None where none is.
        nicer: where ranks run that wait and have a higher nice value than all others.
        others_share: the longest waiting of the others of its host, then.
        binding, unbound: settings of OpenMP that narrow the CPUs of all ranks that wait, and the line that undoes them.
        quota: the CPU quota that stops these ranks; None where another cause is.
        is_of_lab: whether the hosts are those of a lab, which share the cores of one machine on purpose, alike.
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
    is_on_purpose: bool = False
    place: CorePlace | None = None
    nicer: tuple[CorePlace, ...] = ()
    others_share: float = 0.0
    binding: str = ""
    unbound: str = ""
    quota: StoppedByQuota | None = None
    is_of_lab: bool = False

    @property
    def variety(self) -> str:
        """The holder of the cores."""
        return str(self.cause)

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        if self.place is not None:
            return self._words_of(self.place)
        where = shortened([printable(host) for host in self.hosts])
        cpus, ranks = plural(self.cpus, "CPU"), plural(self.of_host, "rank")
        who = rank_list(self.ranks) if len(set(said.hosts.values())) == 1 else where
        crowd = f"{ranks} of this job on {cpus} of {printable(self.hosts[0])}"
        crowd += f", to which {self.binding} narrowed them" if self.binding else ""
        fewer = self.unbound or _FEWER
        other = "" if self.is_on_purpose else "; on purpose? hpcpace report --shared-cores looks for other causes"
        others = f"find what else runs on {where} (top, squeue -w), or ask for whole nodes (sbatch --exclusive)"
        if self.quota is not None:
            why = "; ".join([*self._facts(cpus), *quota_why(self.quota)])
            headline = quota_headline(self.quota, self.hosts, self.hosts[0])
            return FindingWords(headline=headline, why=why, next=quota_advice(self.quota))
        if self.is_of_lab:
            return FindingWords(
                headline=f"ranks share cores: the hosts of a lab share those of one machine; {who} wait for a core for "
                f"up to {percent(self.share)} of the time",
                why="; ".join(self._facts("its CPUs")),
                next=f"use fewer ranks in the lab, or a machine with more cores and less other work{other}",
            )
        holders, advice = {
            CoreCause.RANKS: (crowd, fewer),
            CoreCause.OTHERS: (f"other processes on {where} take them", others),
            CoreCause.BOTH: (f"{crowd}, and other processes there", f"{others}; and {fewer}"),
            CoreCause.UNKNOWN: (f"on {where}", f"{fewer}, or {others}"),
        }[self.cause]
        verb = "waits" if len(self.ranks) == 1 and who != where else "wait"
        subject = who if who != where else f"ranks on {where}"
        facts, steps = self._facts(cpus), [advice]
        if self.nicer:
            runs = "runs" if len(self.nicer) == 1 else "run"
            facts = [f"{rank_list([each.rank for each in self.nicer])} {runs} {self.nicer[0].at_nice}", *facts]
            steps = [self.nicer[0].advice, *steps]
        return FindingWords(
            headline=f"ranks share cores: {holders}; {subject} {verb} for a core for up to {percent(self.share)} of "
            "the time",
            why="; ".join(facts),
            next="; ".join(steps) + other,
        )

    def _words_of(self, place: CorePlace) -> FindingWords:
        """Return the words of a rank that waits longer than the others of its host."""
        who, host = f"rank {place.rank} on {printable(place.host)}", printable(place.host)
        others = f", the others of {host} for up to {percent(self.others_share)}" if self.of_host > 1 else ""
        look = f"find what else runs on its CPUs (top, squeue -w {host}), or ask for whole nodes (sbatch --exclusive)"
        is_own = self.cause is CoreCause.RANKS
        holders, advice = ("it has more threads than CPUs", _FEWER) if is_own else ("others run on its CPUs", look)
        return FindingWords(
            headline=f"ranks share cores: {who} waits for a core for {percent(self.share)} of the time{others}: "
            f"{place.words or holders}",
            why="; ".join(self._facts(plural(self.cpus, "CPU"))),
            next=place.advice or advice,
        )

    def _facts(self, cpus: str) -> list[str]:
        whose = "its" if self.place is not None else "their"
        use = f"on average {self.ready:.1f} of {whose} threads are ready to run, and {self.running:.1f} run"
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
    quota = stopped_by_quota(panels, use, case.thresholds.of(QuotaThresholds))
    is_of_lab = use.lab_waiting is not None
    if quota is not None:
        waits = np.isin(np.arange(len(waits)), quota.rows)
    elif is_of_lab and (beyond := waits & _is_beyond_lab(use, limits)).any():
        waits, is_of_lab = beyond, False
    rows = np.flatnonzero(waits)
    first = int(rows[use.waiting[rows].argmax()]) if quota is None else quota.rows[0]
    hosts = tuple(dict.fromkeys(panels.host[row] for row in (first, *rows)))
    crammed = None if quota is not None or is_of_lab else _crammed(use, panels, first)
    host = _host_cores(use, panels, int(panels.node[first])) if crammed is None else _cores_of(use, panels, crammed)
    place = None if quota is not None or is_of_lab or crammed is not None else _singled_out(use, panels, first, limits)
    near = (panels.node == panels.node[first]) & (np.arange(len(panels.rank)) != first)
    own = host if place is None else _cores_of(use, panels, np.array([first]))
    bound = rows if crammed is None else crammed
    bindings = {panels.bindings.get(rank, ("", "")) for rank in panels.rank[bound].tolist()}
    binding, unbound = bindings.pop() if len(bindings) == 1 else ("", "")
    evidence = CoreEvidence(
        cause=CoreCause.QUOTA if quota is not None else _cause(own, limits),
        share=float(use.waiting[first]),
        ranks=tuple(panels.rank[rows].tolist()),
        hosts=hosts,
        of_host=host.num_ranks,
        cpus=own.num_cpus,
        running=own.running,
        ready=own.ready,
        pressure=float(use.pressure[first]),
        throttled=float(use.throttled[first]),
        switches=float(use.switches[first]),
        least=case.settings.core_share,
        is_on_purpose=case.is_shared_on_purpose,
        place=place,
        nicer=_nicer(use, panels, waits),
        others_share=float(np.nan_to_num(use.waiting[near]).max(initial=0.0)),
        binding=binding,
        unbound=unbound,
        quota=quota,
        is_of_lab=is_of_lab and quota is None,
    )
    if place is not None:
        culprit = _rank_culprit(use, panels, first)
        return DiagnosisFinding(evidence=evidence, loss_share=evidence.share, confidence=0.95, culprits=(culprit,))
    if crammed is not None:
        named = tuple(_rank_culprit(use, panels, row) for row in crammed.tolist())
        return DiagnosisFinding(evidence=evidence, loss_share=evidence.share, confidence=0.95, culprits=named)
    is_everywhere = set(hosts) == set(panels.host)
    return DiagnosisFinding(
        evidence=evidence,
        loss_share=0.0 if evidence.is_of_lab else evidence.share,
        confidence=0.95,
        culprits=() if is_everywhere else tuple(_culprit(use, panels, host, waits) for host in hosts),
        counted_part=limits.everywhere_part if is_everywhere else 1.0,
    )


def _crammed(use: CoreUse, panels: Panels, row: int) -> Ints | None:
    """Return the ranks that share CPUs with one, more ranks than CPUs, while others of their host have more CPUs.

    None where there are none.
    """
    near = np.flatnonzero(panels.node == panels.node[row])
    alike = np.array([other for other in near.tolist() if use.cpus[other] == use.cpus[row]])
    has_more = any(use.cpus[row] < use.cpus[other] for other in near.tolist())
    return alike if has_more and len(alike) > len(use.cpus[row]) > 0 and len(alike) > 1 else None


def _singled_out(use: CoreUse, panels: Panels, row: int, limits: CoreThresholds) -> CorePlace | None:
    """Return where the rank runs that waits longest, if it waits much longer than others, or is placed unlike them.

    What counts is the part of the time in which it has something to run: ranks that wait for it have nothing. It must
    wait that much longer in all of the time, too. Where the others have fewer CPUs than ranks, any may wait longest.
    """
    near = (panels.node == panels.node[row]) & (np.arange(len(panels.rank)) != row)
    (place,) = places_of(panels, [int(panels.rank[row])])
    if not near.any():
        return place if place.words else None
    ready = use.running + use.queued
    wanting = np.nan_to_num(use.queued / np.maximum(ready, _TINY))
    if use.work is not None and use.work.is_known[row] and use.work.is_known[near].all():
        queued_ns = use.work.queued_ns.sum(axis=1)
        wanting = queued_ns / np.maximum(queued_ns + use.work.running_ns.sum(axis=1), _TINY)
    is_crowded = near.sum() + 1 > len(frozenset().union(*(use.cpus[other] for other in np.flatnonzero(near))))
    is_longer = not is_crowded and all(
        share[row] >= limits.singled_out_part * np.nan_to_num(share[near]).max() for share in (wanting, use.waiting)
    )
    is_placed = bool(place.words) and wanting[row] > wanting[near].max()
    return place if is_longer or is_placed else None


def _nicer(use: CoreUse, panels: Panels, waits: Bools) -> tuple[CorePlace, ...]:
    """Return where those of the waiting ranks run that all others run before."""
    if use.nice is None:
        return ()
    places = places_of(panels, panels.rank[waits & (use.nice == use.nice.max())].tolist())
    return tuple(place for place in places if place.is_nicer)


def _is_beyond_lab(use: CoreUse, limits: CoreThresholds) -> Bools:
    """Return which ranks of a lab wait for far longer than its hosts cause each other, bool, (num_ranks,)."""
    sure = np.nan_to_num(use.waiting) - limits.least_errors * np.nan_to_num(use.error)
    return np.asarray(sure >= limits.lab_factor * (use.lab_waiting or 0.0))


def _host_cores(use: CoreUse, panels: Panels, node: int) -> HostCores:
    return _cores_of(use, panels, np.flatnonzero(panels.node == node))


def _cores_of(use: CoreUse, panels: Panels, near: Ints) -> HostCores:
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
    own = [index for index, name in enumerate(panels.host) if name == host]
    return place_culprit("node", host, own, float(use.waiting[row]), _interval(use, row), panels)


def _rank_culprit(use: CoreUse, panels: Panels, row: int) -> Culprit:
    return rank_culprit(int(panels.rank[row]), float(use.waiting[row]), _interval(use, row), panels)


def _interval(use: CoreUse, row: int) -> tuple[float, float]:
    effect, half = float(use.waiting[row]), Z_95 * float(use.error[row])
    return effect - half, effect + half


def find(case: Case) -> list[DiagnosisFinding]:
    """Drop the findings that waiting for cores may explain, and return that ranks share cores above its threshold.

    Where the ranks that wait for cores are late, too, that is why, and costs what their lateness costs.
    """
    panels, cores, use = case.panels, find_shared(case), case.panels.cores
    limits = case.thresholds.of(CoreThresholds)
    if cores is None or use is None:
        return []
    waiting = Waiting(panels, use, least_excess=limits.least_cpu_excess, least_errors=limits.least_errors)
    kept = [each for each in case.findings if not each.evidence.is_waiting_for_cores(each, waiting, panels)]
    if isinstance(cores.evidence, CoreEvidence) and cores.evidence.quota is not None:
        kept = [each for each in kept if not _is_of_starved(each, cores.evidence.hosts)]
    parts = [each.evidence.part_beyond_waiting(waiting, panels) for each in kept]
    case.findings = [
        each if part is None else _without_waiting(each, part) for each, part in zip(kept, parts, strict=True)
    ]
    place = cores.evidence.place if isinstance(cores.evidence, CoreEvidence) else None
    is_accepted = case.is_shared_on_purpose and (place is None or not place.words)
    if is_accepted or cores.loss_share < case.settings.core_share:
        return []
    named = {alias for culprit in cores.culprits for alias in culprit.aliases}
    pairs = list(zip(case.findings, parts, strict=True))
    late = [
        each.loss_share
        for each, part in pairs
        if part is None and named & {a for culprit in each.culprits for a in culprit.aliases}
    ]
    cores = replace(cores, loss_share=max(cores.loss_share, *late, 0.0))
    clear = max((each.loss_share for each, part in pairs if part is not None), default=0.0)
    if clear < limits.clear_fault_share * (1 - waiting.mean_share):
        return [cores]
    return [replace(cores, counted_part=min(cores.counted_part, _SECOND * clear / cores.loss_share))]


def _without_waiting(finding: DiagnosisFinding, part: Estimate) -> DiagnosisFinding:
    """Return a finding that costs only the part of its loss which is no waiting for cores."""
    bounds = finding.loss_interval
    bounds = None if bounds is None else (bounds[0] * part.low, bounds[1] * part.high)
    return replace(finding, loss_share=finding.loss_share * part.value, loss_interval=bounds)


def _is_of_starved(finding: DiagnosisFinding, hosts: Collection[str]) -> bool:
    """Return whether links seem slow because the process at their end is starved: it reads and writes late."""
    is_slow = isinstance(finding.evidence, SlowLinkEvidence) or finding.variety in (LinkCause.SLOW, LinkCause.FOREIGN)
    return is_slow and bool(finding.culprits) and all(each.id in hosts for each in finding.culprits)


def core_figures(panels: Panels, limits: CoreThresholds) -> tuple[HostCores, ...]:
    """Return the hosts on which some rank waits notably for a core, the one of the longest waiting first."""
    use = panels.cores
    if use is None:
        return ()
    rows = [_host_cores(use, panels, node) for node in np.unique(panels.node[is_notable(use, limits)]).tolist()]
    return tuple(sorted(rows, key=lambda row: -row.waiting))


def rank_figures(panels: Panels, limits: CoreThresholds) -> tuple[RankCores, ...]:
    """Return what ranks had of their cores, the one that waits longest first.

    Those of hosts on which some rank waits notably, and of all hosts where nice values differ.
    """
    use = panels.cores
    if use is None:
        return ()
    nice = use.nice if use.nice is not None else np.zeros(len(panels.rank), np.int64)
    is_shown = np.isin(panels.node, panels.node[is_notable(use, limits)]) | bool((nice != nice[:1]).any())
    rows = [_rank_row(use, panels, row, int(nice[row])) for row in np.flatnonzero(is_shown).tolist()]
    return tuple(sorted(rows, key=lambda row: (-(row.waiting or 0.0), row.rank)))


def _rank_row(use: CoreUse, panels: Panels, row: int, nice: int) -> RankCores:
    waiting = float(use.waiting[row])
    found = RankCores(
        rank=int(panels.rank[row]),
        host=panels.host[row],
        nice=nice,
        num_cpus=len(use.cpus[row]),
        waiting=None if np.isnan(waiting) else waiting,
    )
    work = use.work
    if work is None or not work.is_known[row]:
        return found
    known = work.is_part_known[row]
    return replace(
        found,
        work_ns=float(work.own_ns[row][known].sum()),
        running_ns=float(work.running_ns[row].sum()),
        queued_ns=float(work.queued_ns[row].sum()),
        phases=tuple(
            (part.name.lower(), float(work.queued_ns[row, index])) for index, part in enumerate(PARTS) if known[index]
        ),
    )


# CPU quotas that stop ranks: whose they are, how many cores they allow, and the files that set them


@dataclass(frozen=True, kw_only=True)
class QuotaThresholds(Thresholds, topic="cores"):
    """When a CPU quota holds ranks up."""

    throttled_part: float = number(0.5, "share")
    """Part of the longest wait for a core for which the quota must throttle ranks to be named as the reason."""
    notable_throttled_share: float = number(0.1, "share")
    """Share of the time for which a quota must stop a rank, in a lab beyond what it stops the ranks of other hosts."""
    used_part: float = number(0.7, "share")
    """Part of a known quota that the ranks of a host must use for it to be the reason, however long they wait: nothing
    else can give them more."""
    uneven_share: float = number(0.1, "share")
    """Share of the time by which quotas stop the ranks of some hosts for longer than those of others, from which these
    hosts are named."""


@dataclass(frozen=True, kw_only=True)
class StoppedByQuota:
    """Ranks that a CPU quota stops.

    Attributes:
        rows: their indices, those that are stopped longest first.
        share: of the time, of the first.
        others_share: the same of the host that is stopped least.
        is_uneven: whether they are stopped for longer than others.
        quota: of the first; None where it is not known.
        others: cores that quotas allow on other hosts; None where that is not known, or there is none.
    """

    rows: tuple[int, ...]
    share: float
    others_share: float
    is_uneven: bool
    quota: CpuQuota | None
    others: float | None


def stopped_by_quota(panels: Panels, use: CoreUse, limits: QuotaThresholds) -> StoppedByQuota | None:
    """Return the ranks that a quota stops for a notable share of the time; None where none does."""
    throttled = np.nan_to_num(np.minimum(use.throttled, np.fmax(use.waiting, 0.0)))
    waiting = np.nan_to_num(use.waiting) - (use.lab_waiting or 0.0)
    is_stopped: Bools = throttled - (use.lab_throttled or 0.0) >= limits.notable_throttled_share
    is_stopped &= (throttled >= limits.throttled_part * waiting) | _are_used_up(panels, use, limits.used_part)
    if not is_stopped.any():
        return None
    of_hosts = [float(throttled[panels.node == node].max()) for node in np.unique(panels.node)]
    is_longer: Bools = is_stopped & (throttled - min(of_hosts) >= limits.uneven_share)
    named = is_longer if is_longer.any() else is_stopped
    rows = sorted(np.flatnonzero(named).tolist(), key=lambda row: -throttled[row])
    quotas = _quotas(panels)
    others = [quotas[row] for row in np.flatnonzero(~np.isin(panels.node, panels.node[rows])).tolist()]
    return StoppedByQuota(
        rows=tuple(rows),
        share=float(throttled[rows[0]]),
        others_share=min(of_hosts),
        is_uneven=bool(is_longer.any()),
        quota=quotas[rows[0]],
        others=min((quota.cores for quota in others if quota is not None), default=None),
    )


def _are_used_up(panels: Panels, use: CoreUse, part: float) -> Bools:
    """Return whether the ranks of each rank's host use about all that its quota allows, bool, (num_ranks,).

    What counts is how much they get while they have something to run: a quota stops a rank that computes for a tenth of
    a step, too, and with it all of its threads, which together wait for several times as long as it is stopped.
    """
    while_ready = use.running
    if use.work is not None:
        running_ns, queued_ns = use.work.running_ns.sum(axis=1), use.work.queued_ns.sum(axis=1)
        of_work = running_ns / np.maximum(running_ns + queued_ns, 1.0)
        while_ready = np.where(use.work.is_known, np.fmax(use.running, of_work), use.running)
    running = np.array([float(np.nansum(while_ready[panels.node == node])) for node in panels.node])
    allowed = np.array([np.inf if quota is None else quota.cores for quota in _quotas(panels)])
    return np.asarray(running >= part * allowed)


def _quotas(panels: Panels) -> tuple[CpuQuota | None, ...]:
    return panels.quotas or (None,) * len(panels.rank)


def quota_headline(stopped: StoppedByQuota, hosts: Sequence[str], first_host: str) -> str:
    """Return the line that names a quota.

    Args:
        stopped: the ranks that it stops.
        hosts: their hosts.
        first_host: that of the rank which is stopped longest.
    """
    where = listed([printable(host) for host in hosts[:MAX_NAMED]])
    often = f"stops ranks there for up to {percent(stopped.share)} of the time"
    if stopped.quota is None:
        return f"ranks share cores: the CPU quota of the cgroup on {where} is used up; it {often}"
    at = "" if len(hosts) == 1 else f" on {printable(first_host)}"
    return (
        f"CPU quota: {where} may use {_cores(stopped.quota.cores)}{at} ({printable(stopped.quota.file)}); that {often}"
    )


def quota_why(stopped: StoppedByQuota) -> list[str]:
    """Return how others fare."""
    if not stopped.is_uneven:
        return []
    cores = "" if stopped.others is None else f", with a quota of {_cores(stopped.others)}"
    return [f"on other hosts, ranks are stopped for {percent(stopped.others_share)} of the time{cores}"]


def quota_advice(stopped: StoppedByQuota) -> str:
    """Return what to do about a quota."""
    fewer = "or start fewer ranks or threads there"
    if stopped.quota is None:
        return f"raise the quota (cpu.max of the cgroup; srun -c N), {fewer}"
    return (
        "raise the quota: the limit of the container, pod or slice that sets this file (systemctl set-property SLICE "
        f"CPUQuota=), or srun -c N; {fewer}"
    )


def _cores(number_of_them: float) -> str:
    return f"{number_of_them:.3g} {'core' if number_of_them == 1 else 'cores'}"
