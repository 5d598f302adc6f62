"""Time without work: ranks that wait for their data, and devices that wait for their hosts to issue some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import format_duration, listed, percent, rank_list
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    IdlePhase,
    Panels,
    Said,
    first_ranks,
    mean_share_interval,
    phase_culprit,
    rank_culprit,
)
from hpcpace.diagnosis.measure import beyond_role_ns
from hpcpace.diagnosis.summary import Mode
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.phases import Part
from hpcpace.trace.schema import Phase


@dataclass(frozen=True, kw_only=True)
class InputThresholds(Thresholds, topic="input"):
    """When waiting for data is worth a word, and which ranks are named."""

    notable_share: float = number(0.05, "share")
    """Share of the step that waiting for data must take to be mentioned if nothing is wrong."""
    part_of_all: float = number(0.5, "share")
    """Part of the threshold of all ranks that one rank must wait to be named: others wait less."""
    part_of_longest: float = number(0.25, "share")
    """Part of the longest wait of a rank that another one must wait to be named with it."""


@dataclass(frozen=True, kw_only=True)
class InputEvidence(Evidence):
    """Waiting for data.

    Attributes:
        share: its mean share of the step time.
        ranks: the ranks that wait; empty where that is all of them.
        waiting_ns, others_ns: mean time per step of those that wait and of the others; None where all wait.
    """

    mode: ClassVar[str] = Mode.INPUT
    needs_no_others: ClassVar[bool] = True
    share: float
    ranks: tuple[int, ...] = ()
    waiting_ns: float | None = None
    others_ns: float | None = None

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        why = f"the phase takes {percent(self.share)} of the step {said.interval}"
        if self.waiting_ns is not None and self.others_ns is not None:
            waiting, others = format_duration(self.waiting_ns), format_duration(self.others_ns)
            why += f"; {waiting} per step on {rank_list(self.ranks)}, {others} on the others"
        return FindingWords(
            headline=f"input-bound: waiting for data costs {said.lost}{self._where(said.hosts)}",
            why=why,
            next="use more loader workers, prefetching, or a faster or node-local file system",
        )

    def _where(self, hosts: Mapping[int, str]) -> str:
        if not self.ranks:
            return ", on all ranks" if len(hosts) > 1 else ""
        return f", on {first_ranks(self.ranks, hosts)}"


def find_input(case: Case) -> list[DiagnosisFinding]:
    """Return whether the job waits for its data: mean share of the phase `data` in the step.

    The loss is what the slowest rank of a role takes with this phase, less without: all wait for the rank whose data
    arrive last.
    """
    panels, limits, least = case.rest, case.thresholds.of(InputThresholds), case.settings.input_share
    share = float(panels.data_ns.mean()) / panels.mean_time_ns
    if share < least:
        return []
    of_rank = panels.data_ns.mean(axis=1) / panels.mean_time_ns
    waits: Bools = of_rank >= max(limits.part_of_all * least, limits.part_of_longest * float(of_rank.max()))
    interval = mean_share_interval(panels, panels.data_ns)
    evidence = InputEvidence(share=share)
    culprits = [phase_culprit("data", share, interval)]
    if not waits.all():
        for row in np.flatnonzero(waits).tolist():
            spent_ns = panels.data_ns[row : row + 1]
            effect, interval = float(spent_ns.mean()) / panels.mean_time_ns, mean_share_interval(panels, spent_ns)
            culprits.append(rank_culprit(int(panels.rank[row]), effect, interval, panels))
        evidence = InputEvidence(
            share=share,
            ranks=tuple(panels.rank[waits].tolist()),
            waiting_ns=float(panels.data_ns[waits].mean()),
            others_ns=float(panels.data_ns[~waits].mean()),
        )
    loss_share = max(case.gain_share(panels.data_ns), share)
    return [DiagnosisFinding(evidence=evidence, loss_share=loss_share, confidence=0.97, culprits=tuple(culprits))]


_CONFIDENCE, _BOUNDED_CONFIDENCE = 0.95, 0.8  # statistics: as the score calibrates them; the latter of upper bounds


@dataclass(frozen=True, kw_only=True)
class HostThresholds(Thresholds, topic="host"):
    """Which hosts and phases are blamed for idle devices."""

    least_phase_share: float = number(0.2, "share")
    """Share of all idle time that a phase must hold to be named: less helps nobody to find the cause."""
    bounded_part: float = number(0.5, "share")
    """Part of an upper bound on idle time that counts when findings are ranked: a sure cost comes first."""
    everywhere_share: float = number(0.01, "share")
    """Share of the step for which devices of some ranks of a role must be idle for hosts to be too slow everywhere."""
    idle_ranks_part: float = number(0.25, "share")
    """Part of the ranks of a role that these must be more than, where it is not in passes that devices are idle: there,
    hosts are compared."""
    slower_host: float = number(0.1, "share")
    """Share by which a host takes longer than the median one to issue a step, from which it is slow by itself."""
    common_part: float = number(0.5, "share")
    """Part of all idle time that hosts which are not slower than the others must have for it to be all hosts' fault,
    and part of it that must be in passes for their times there to be compared."""
    widest_bounds: float = number(0.35, "share")
    """Width of the bounds on the cost, as a share of the step, beyond which the cost is not known."""


@dataclass(frozen=True, kw_only=True)
class HostEvidence(Evidence):
    """Devices that wait for their hosts to issue work.

    Attributes:
        share: mean share of the step in which they are idle for that.
        least_share: how much of it is certain.
        phases: the phases that hold most of it, with their shares of the step, largest first.
        ranks: the only ones whose devices wait; empty where many do.
        is_upper_bound: whether these are upper bounds of the idle time.
        is_open: whether the cost may be anything between its bounds.
        bounds: of the cost, where idle time may hide in what looks like work; None elsewhere.
    """

    mode: ClassVar[str] = Mode.HOST
    needs_no_others: ClassVar[bool] = True
    share: float
    least_share: float = 0.0
    phases: tuple[tuple[str, float], ...] = ()
    ranks: tuple[int, ...] = ()
    is_upper_bound: bool = False
    is_open: bool = False
    bounds: tuple[float, float] | None = None

    @property
    def makes_steps_differ(self) -> bool:
        """Whether it explains why steps differ: idle time of some steps and ranks is part of its cost."""
        return True

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        at_most = "at most " if self.is_upper_bound else ""
        names = [name for name, _ in self.phases]
        where = listed([name for name in names if name != "other"] + ["outside of all phases"] * ("other" in names))
        shares = ", ".join(f"{name} {at_most}{percent(share)}" for name, share in self.phases)
        cost = f"which costs {at_most}{percent(said.finding.loss_share)} of the step time"
        if self.bounds is not None:
            cost = f"which costs between {percent(self.bounds[0])} and {percent(self.bounds[1])} of the step time"
        latest = first_ranks(self.ranks, said.hosts)
        who, end = f"of {latest} " if self.ranks else "", ";" if self.is_open else ","
        advice = [f"look at {latest} first: a slow host there may be all of it"] if self.ranks else []
        if self.is_open:
            cost = "cannot tell how much that costs"
            advice.append(f"{_LEARN}: its kernels show how long devices work")
        if set(names) - {"other"}:
            advice.append(
                f"issue less work there ({where}): {ISSUE_LESS}; "
                "remove calls that wait for the device, such as .item() and .cpu()"
            )
        if "other" in names:
            advice.append("check what the script does between its phases: logging, metrics, .item(), saving")
        more = []
        if not self.is_open and said.finding.loss_share >= _MOSTLY_WAITS * self.share:
            more.append("the rest of its cost is time in which ranks wait for those whose devices are idle")
        if self.ranks:
            more.append(f"all other devices wait for {latest}, not for their own hosts; {_HELD}")
        if self.bounds is not None:
            more.append(
                "devices that wait for their hosts between two operations look as if they worked, and the ranks whose "
                "devices are idle seem to work longer"
            )
        if self.is_upper_bound:
            more.append(
                "how long devices worked there is not known: no step shows these phases without waiting for the host. "
                "A synchronisation at their ends looks the same"
            )
        bounds = f"between {percent(self.least_share)} and {percent(self.share)}" if self.is_open else ""
        return FindingWords(
            headline=f"host-bound: devices {who}wait for their hosts ({where}){end} {cost}",
            why=f"idle {bounds or at_most + percent(self.share)} of the step, because nothing was issued: {shares}",
            next="; ".join(advice),
            more=tuple(more),
        )


_HELD = (
    "those hosts are held up once their launch queues are full, so that all seem equally slow: whether they would keep "
    "up is not known"
)
_PASSES = ("forward", "backward")
_MOSTLY_WAITS = 1.5  # display: cost relative to idle time from which the difference is explained
ISSUE_LESS = "torch.compile, CUDA graphs, fused optimizers, larger batches"
"""What lets hosts issue less work."""
_LEARN = "profile a few steps with torch.profiler and read them with hpcpace import kineto"


def find_host_everywhere(case: Case) -> list[DiagnosisFinding]:
    """Return whether hosts are too slow everywhere, and leave the case without the idle time that this explains.

    Who is late, and which stage has more work, is then judged by the work of devices: where in a schedule a slow host
    holds its device up depends on the schedule. A host that takes longer than the others keeps the idle time that
    others of its role do not have. Where hosts take equally long for passes, it does not matter whose devices are idle
    there: where ranks wait for each other many times a step, it is those whose hosts happen to be the latest.
    """
    panels, limits = case.panels, case.thresholds.of(HostThresholds)
    of_rank = panels.host_ns.mean(axis=1) / panels.mean_time_ns
    if len(of_rank) != len(panels.rank):
        return []
    roles = [of_rank[panels.role == of] for of in np.unique(panels.role)]
    is_compared = len(panels.issue_ratio) == len(panels.rank)
    in_passes = sum(each.idle_ns * (each.phase in _PASSES) for each in panels.idle)
    is_of_passes = is_compared and in_passes >= limits.common_part * sum(each.idle_ns for each in panels.idle)
    part = 0.0 if is_of_passes else limits.idle_ranks_part
    if max(np.quantile(own, 1 - part, method="lower") for own in roles) < limits.everywhere_share:
        return []
    common_ns = panels.host_ns.copy()
    if is_compared:
        is_slower = panels.issue_ratio > 1 + limits.slower_host
        for row in np.flatnonzero(is_slower).tolist():
            others = np.flatnonzero((panels.role == panels.role[row]) & ~is_slower)
            usual_ns = np.median(panels.host_ns[others], axis=0) if len(others) else 0.0
            common_ns[row] = np.minimum(common_ns[row], usual_ns)
    if common_ns.sum() < limits.common_part * panels.host_ns.sum():
        return []
    low, cost, high = _cost(case)
    is_hidden = _hides_in_work(case, of_rank)
    if is_hidden:  # ranks may wait for each other's hosts as well
        high = min(high + float(panels.wait_ns.mean()) / panels.mean_time_ns, 1.0)
    finding = _host_finding(case, panels, cost, (low, high), is_hidden=is_hidden)
    parts_ns = panels.parts_ns
    if parts_ns is not None:
        parts_ns = parts_ns.copy()
        parts_ns[:, :, Part.HOST] -= common_ns
    case.panels = case.rest = replace(
        panels,
        work_ns=np.maximum(panels.work_ns - common_ns, 0.0),
        reach_ns=np.maximum(panels.reach_ns - common_ns, 0.0),
        host_ns=panels.host_ns - common_ns,
        parts_ns=parts_ns,
        explained_idle_ns=float(common_ns.mean()),
    )
    case.work_ns = case.panels.work_ns
    return [finding] if cost >= case.settings.host_share else []


def find_host_somewhere(case: Case) -> list[DiagnosisFinding]:
    """Return whether devices wait for their hosts: mean share of the step in which they are idle for them.

    The loss is what the slowest rank of a role takes with this idle time, less without, and must exceed the threshold
    as well. Time in which devices wait for data is not in it: that is the phase `data`, and another mode. Where idle
    time is only bounded, ranks may wait for each other's hosts as well, so the bound has all exposed wait.
    """
    panels = case.rest
    share = float(panels.host_ns.mean()) / panels.mean_time_ns
    gain_share = case.gain_share(panels.host_ns)
    if min(share, gain_share) < case.settings.host_share:
        return []
    if _is_bound(_named(case, panels)):
        gain_share = min(gain_share + float(panels.wait_ns.mean()) / panels.mean_time_ns, 1.0)
    return [_host_finding(case, panels, gain_share, None)]


def _cost(case: Case) -> tuple[float, float, float]:
    """Return what idle time costs at least, probably or at most, and at most, as shares of the step time.

    What rebuilt steps gain without it. Where steps are not rebuilt, what the slowest rank of a role takes with it, less
    without, and all exposed wait at most.
    """
    panels = case.panels
    idle = case.stretches(Phase.IDLE)
    if case.steps is not None and idle is not None:
        most, least = (case.cost(idle.gain(case.steps, is_least=is_least)) for is_least in (False, True))
        return max(min(least.low, most.low), 0.0), most.value, most.high
    gain_share = case.gain_share(panels.host_ns)
    is_bound = _is_bound(_named(case, panels))
    high = min(gain_share + float(panels.wait_ns.mean()) / panels.mean_time_ns, 1.0)
    return 0.0 if is_bound else gain_share, high if is_bound else gain_share, high


def _hides_in_work(case: Case, idle_of_rank: Floats) -> bool:
    """Return whether there may be more idle time than is known.

    Where a device waits for its host between two operations, that looks like work. If a rank whose device is known to
    be idle also works longer than the others of its role, both may come from its host.
    """
    panels, least = case.panels, case.thresholds.of(HostThresholds).everywhere_share
    excess_ns = np.maximum(beyond_role_ns(panels.work_ns - panels.host_ns, panels.role), 0.0)
    excess_ns[idle_of_rank < least] = 0.0
    return panels.is_role_known and case.gain_share(excess_ns) >= case.settings.host_share


def _named(case: Case, panels: Panels) -> list[IdlePhase]:
    """Return the phases that hold most of the idle time."""
    least_ns = case.thresholds.of(HostThresholds).least_phase_share * sum(each.idle_ns for each in panels.idle)
    return [each for each in panels.idle if each.idle_ns >= least_ns]


def _is_bound(idle: Sequence[IdlePhase]) -> bool:
    return sum(each.bounded_ns for each in idle) > sum(each.idle_ns for each in idle) / 2


def _host_finding(
    case: Case, panels: Panels, cost: float, interval: tuple[float, float] | None, *, is_hidden: bool = False
) -> DiagnosisFinding:
    share, idle = float(panels.host_ns.mean()) / panels.mean_time_ns, _named(case, panels)
    is_bound, limits = _is_bound(idle), case.thresholds.of(HostThresholds)
    low, high = interval or (0.0, cost)
    few = _alone(case, panels)
    evidence = HostEvidence(
        share=share,
        least_share=min(sum(each.least_ns for each in panels.idle) / panels.mean_time_ns, share),
        phases=tuple((each.phase, each.idle_ns / panels.mean_time_ns) for each in idle),
        ranks=tuple(panels.rank[few].tolist()),
        is_upper_bound=is_bound,
        is_open=is_bound and high - low > limits.widest_bounds,
        bounds=(low, high) if is_hidden and not is_bound else None,
    )
    own = [(row, panels.host_ns[row : row + 1]) for row in few.tolist()]
    late = [
        rank_culprit(
            int(panels.rank[row]), float(ns.mean()) / panels.mean_time_ns, mean_share_interval(panels, ns), panels
        )
        for row, ns in own
    ]
    of_phase = mean_share_interval(panels, panels.host_ns)
    return DiagnosisFinding(
        evidence=evidence,
        loss_share=cost,
        confidence=_BOUNDED_CONFIDENCE if is_bound or is_hidden else _CONFIDENCE,
        counted_part=limits.bounded_part if is_bound else 1.0,
        culprits=(*late, *(phase_culprit(each.phase, share, of_phase) for each in idle[:1])),
        loss_interval=interval,
    )


def _alone(case: Case, panels: Panels) -> Ints:
    """Return the few ranks whose devices wait while nothing shows that other hosts are as slow, (num_found,)."""
    limits, none = case.thresholds.of(HostThresholds), np.zeros(0, np.int64)
    waits: Bools = panels.host_ns.mean(axis=1) / panels.mean_time_ns >= limits.everywhere_share
    if len(waits) != len(panels.rank) or waits.sum() > limits.idle_ranks_part * len(waits):
        return none
    few = np.flatnonzero(waits)
    if case.pace is None or panels.step is None:
        return few
    pace = case.pace(panels.step, ())
    others_ns = pace.figures("least_ns")[~np.isin(pace.row, few)]
    are_slow = (others_ns >= (1 - limits.slower_host) * panels.mean_time_ns).sum() > limits.common_part * len(others_ns)
    return none if are_slow else few
