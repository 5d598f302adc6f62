"""The vocabulary of all rules: the panels they judge, the case they share, and the findings they make.

Each topic of `hpcpace.diagnosis.topics` has a rule that takes a `Case` and returns findings. The evidence of a finding
is a dataclass with the figures behind it, which also says the finding in words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from hpcpace.core.hostlist import exclusion, node_name
from hpcpace.core.records import dataclass
from hpcpace.core.text import alias_name, first_few, listed, named_ranks, percent, printable
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.stops import GrowingMemory, JudgedStops
from hpcpace.diagnosis.summary import Culprit, RunEnd
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.arrivals import LateArrival
from hpcpace.metrics.flow_figures import FlowFindings
from hpcpace.metrics.host_waits import CoreUse
from hpcpace.metrics.links import LinkFindings, Locality
from hpcpace.metrics.lost_operations import OpenOperation
from hpcpace.metrics.pass_work import PassWork
from hpcpace.metrics.phases import EXPOSED_TRANSFER, Part, share_of
from hpcpace.metrics.plausibility import Alternation
from hpcpace.metrics.resampling import Estimate, block_means, half_width
from hpcpace.metrics.roles import DataVariation, StageComparison
from hpcpace.metrics.special import stdtrit
from hpcpace.metrics.stragglers import StragglerSearch
from hpcpace.metrics.what_if import Change, Gain, IssuedNodes, Rebuilt, Replaced
from hpcpace.trace.schema import Phase

if TYPE_CHECKING:
    from hpcpace.diagnosis.close_up import PhaseStretches
    from hpcpace.diagnosis.host_pace import HostPace
    from hpcpace.hang.views import FoundHang

MAX_NAMED = 4  # display: culprits that a sentence names before it counts the others
_WIDE_LOSS = 0.05  # display: share of the step by which a loss may be wrong without its interval beside it
_PER_P_VALUE, _MAX_CONFIDENCE = 10, 0.99  # statistics: as the score calibrates confidence
MAX_RANKS = 8  # display: ranks that a sentence names before it counts the others


_BY_RANK_AND_STEP = (
    "work_ns", "reach_ns", "data_ns", "gc_ns", "wait_ns", "transfer_ns", "host_ns", "unmatched_ns",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class IdlePhase:
    """How long devices waited for their hosts in a phase, `other` outside of all; nanoseconds, mean per rank and step.

    Attributes:
        bounded_ns: part of it that is only an upper bound.
        least_ns: how long they waited at least.
    """

    phase: str
    idle_ns: float
    bounded_ns: float
    least_ns: float


class CpuQuota(NamedTuple):
    """A CPU quota: the file that sets it, as the rank sees it, and how many cores it allows."""

    file: str
    cores: float


@dataclass(frozen=True, kw_only=True)
class Panels:
    """What is judged: one row a rank, one column a step.

    Attributes:
        rank: numbers of the ranks, int64, (num_ranks,), ascending.
        host: name of each rank's host.
        node: index of each rank's host, int64, (num_ranks,).
        role: which ranks do the same work, int64, (num_ranks,).
        stage: pipeline stage of each rank, -1 where there is none, int64, (num_ranks,).
        times_ns: step times, float64, (num_steps,).
        since_ns: when each step ended after the first one, float64, (num_steps,).
        work_ns: own work, without blocked communication, float64, (num_ranks, num_steps).
        reach_ns: time of the step outside of synchronising collectives, float64, (num_ranks, num_steps): own work and
            messages, which carry delays of one stage of a pipeline to the others.
        data_ns, gc_ns, wait_ns, transfer_ns: waiting for data, garbage collection, exposed wait and exposed transfer,
            float64, (num_ranks, num_steps).
        hidden_ns: communication under way that blocked nobody, likewise.
        host_ns: time in which the device waited for its host, likewise.
        unmatched_ns: time blocked in operations that match no other rank's, of which nobody knows whether it is wait
            or transfer, likewise.
        is_role_known: whether roles are known; else no two ranks are compared.
        transient_share: what the rebuilt steps of a pipeline lose to changing work, as a share of the step time; None
            where they are not rebuilt.
        data_variation: how the work of microbatches varies; None where that is not known, as without a pipeline.
        parts_ns: the parts of each step, float64, (num_ranks, num_steps, num_parts); None where they are not known.
        host_timed: ranks with a device whose phases are times of the host, or all ranks where phases were not recorded.
            They do not show what takes time there, so work, waits and exposed transfers of the run are not known.
        is_unphased: whether phases were not recorded.
        num_plain: steps that all ranks have and that were recorded without detail; they are not among those judged.
        has_device: whether some rank computes on a device, so that the processor time of ranks is not their work.
        cores: what the ranks had of their cores; None where that is not known.
        bindings: settings of OpenMP that narrowed the CPUs of a rank, and the line that undoes it, by rank.
        quotas: the CPU quota that stopped each rank; None where none did, or it is not known.
        arrivals: who is late at collectives on devices, the latest first; where own work is not known.
        idle: how long devices waited for their hosts, by phase, longest first.
        issue_ratio: how long the hosts of devices take for passes in which their device is idle, relative to the median
            host, float64, (num_ranks,); empty where not known.
        alternation: how steps alternate on all ranks, as parts of steps counted as steps do; None if they do not.
        flows: what the job's own connections show of links; None where they were not recorded.
        no_grad_share: what calls of modules without gradients take of each rank's time in no phase, float64,
            (num_ranks,); empty where not known.
        step: numbers of the steps, int64, (num_steps,); None where they are not known.
        explained_idle_ns: idle time of devices that a finding explains, mean per step; own work and parts are without
            it.
    """

    rank: Ints
    host: tuple[str, ...]
    node: Ints
    role: Ints
    stage: Ints
    times_ns: Floats
    since_ns: Floats
    work_ns: Floats
    reach_ns: Floats
    data_ns: Floats
    gc_ns: Floats
    wait_ns: Floats
    transfer_ns: Floats
    hidden_ns: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    host_ns: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    unmatched_ns: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    is_role_known: bool = True
    transient_share: Estimate | None = None
    data_variation: DataVariation | None = None
    parts_ns: Floats | None = None
    host_timed: tuple[int, ...] = ()
    is_unphased: bool = False
    num_plain: int = 0
    has_device: bool = False
    cores: CoreUse | None = None
    bindings: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    quotas: tuple[CpuQuota | None, ...] = ()
    arrivals: tuple[LateArrival, ...] = ()
    idle: tuple[IdlePhase, ...] = ()
    issue_ratio: Floats = field(default_factory=lambda: np.zeros(0))
    alternation: Alternation | None = None
    flows: FlowFindings | None = None
    no_grad_share: Floats = field(default_factory=lambda: np.zeros(0))
    step: Ints | None = None
    explained_idle_ns: float = 0.0

    def without_steps(self, is_kept: Bools) -> Panels:
        """Return the panels with some of the steps, bool, (num_steps,)."""
        if is_kept.all():
            return self
        kept: dict[str, Any] = {name: getattr(self, name)[:, is_kept] for name in _BY_RANK_AND_STEP}
        kept |= {name: getattr(self, name)[is_kept] for name in ("times_ns", "since_ns")}
        parts_ns = None if self.parts_ns is None else self.parts_ns[:, is_kept]
        step = None if self.step is None else self.step[is_kept]
        return replace(self, **kept, parts_ns=parts_ns, step=step)

    @property
    def mean_time_ns(self) -> float:
        """Mean step time, at least 1 ns."""
        return max(float(self.times_ns.mean()), 1.0) if len(self.times_ns) else 1.0

    @property
    def mean_length_ns(self) -> float:
        """Mean length of the ranks' own steps, which shares of the step are relative to, at least 1 ns."""
        if self.parts_ns is None:
            return self.mean_time_ns
        return max(float(self.parts_ns.sum(axis=2).mean()) + self.explained_idle_ns, 1.0)

    @property
    def transfer_share(self) -> float:
        """All exposed transfer as a share of the step, blocked senders included."""
        if self.parts_ns is None:
            return float(self.transfer_ns.mean()) / self.mean_length_ns
        return share_of(self.parts_ns, EXPOSED_TRANSFER) * (1 - self.explained_idle_ns / self.mean_length_ns)

    def qualified(self, found: StageComparison | None, late: Ints) -> StageComparison | None:
        """Return a comparison of stages as it is to be read with the phases of these traces; None without phases.

        Args:
            found: the comparison.
            late: rows of the ranks that are late, int64.
        """
        if found is None or self.parts_ns is None:
            return None
        return replace(
            found,
            has_forward=bool(self.parts_ns[:, :, Part.FORWARD].any()),
            is_without_gradients=bool(len(self.no_grad_share) and self.no_grad_share[late].min() > 1 / 2),
        )


@dataclass(kw_only=True)
class Case:
    """A run before its rules: the facts, and what earlier topics leave for later ones.

    Attributes:
        panels: the steps that are judged.
        hang: what held the job up; None where nothing did.
        opened: operations that some members entered and that never completed, or that failed.
        links: what comparing the transfers of groups found; None where they were not compared.
        touches: which operations of the rebuilt steps pass some links, and which are alike; as `touching` returns them.
        crossing: groups that cross switches against those inside; None unless there are both.
        is_clock_wrong: whether a clock is proven wrong: transfers are not judged then.
        are_exits_early: whether many ranks leave operations before others enter, likewise: a clock may be wrong.
        rebuilt: steps of the panels, which show what stragglers and slow stages cost; None if they were not rebuilt.
        pace: returns the pace that hosts allow in some steps, some ranks among them; None where nobody asks.
        issued: returns what hosts issued to their devices in the rebuilt steps; None where that is not known.
        stretches: returns when ranks were in a phase in the rebuilt steps; None where none was.
        pass_work: the work of their ranks in their passes; None where these are not known.
        absent: ranks with which those of the panels communicate, and of which nothing is known.
        stepless: those of them whose traces are complete and show no step.
        end: what ended the run before its time; None where nothing did.
        is_shared_on_purpose: whether the user says that ranks share cores on purpose.
        stops: when ranks did not run; the panels are without these steps.
        memory: ranks whose memory grows steadily.
        settings: the thresholds of [diagnosis].
        thresholds: all others.
        findings: what topics have found so far.
        search: who is late again and again; None until stragglers were searched for.
        late: the change that puts lasting stragglers back in the rebuilt steps; None where there are none.
        mended: what puts right there what other findings name.
        work_ns: own work, after that with the stragglers' put back, float64, (num_ranks, num_steps).
        rest: the panels, after that without the phases that make stragglers late.
    """

    panels: Panels
    hang: FoundHang | None = None
    opened: Sequence[OpenOperation] = ()
    links: LinkFindings | None = None
    touches: Callable[[Collection[str]], tuple[Bools, Ints]] | None = None
    crossing: Locality | None = None
    is_clock_wrong: bool = False
    are_exits_early: bool = False
    rebuilt: Rebuilt | None = None
    pass_work: PassWork | None = None
    pace: Callable[[Ints, Sequence[int]], HostPace] | None = None
    issued: Callable[[], IssuedNodes | None] = lambda: None
    stretches: Callable[[Phase], PhaseStretches | None] = lambda phase: None
    absent: Sequence[int] = ()
    stepless: Sequence[int] = ()
    end: RunEnd | None = None
    is_shared_on_purpose: bool = False
    stops: JudgedStops | None = None
    memory: Sequence[GrowingMemory] = ()
    settings: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    thresholds: ThresholdValues = field(default_factory=ThresholdValues)
    findings: list[DiagnosisFinding] = field(default_factory=list)
    search: StragglerSearch | None = None
    late: Change | None = None
    mended: list[Replaced] = field(default_factory=list)
    work_ns: Floats = field(init=False)
    rest: Panels = field(init=False)

    def __post_init__(self) -> None:
        self.work_ns, self.rest = self.panels.work_ns, self.panels

    @property
    def are_transfers_known(self) -> bool:
        """Whether transfers can be judged."""
        return not (self.is_clock_wrong or self.are_exits_early)

    @property
    def steps(self) -> Rebuilt | None:
        """The rebuilt steps where they show what a change gains; else None.

        Messages of absent ranks would be missing from them, and most steps have to be alike.
        """
        if self.rebuilt is None or self.absent:
            return None
        return self.rebuilt if self.rebuilt.graph.num_left_out <= len(self.rebuilt.graph.step) else None

    def cost(self, gain: Gain, relative_error: float = 0.0) -> Estimate:
        """Return what something costs as a share of the step time, by what rebuilt steps gain without it.

        Args:
            gain: of the rebuilt steps.
            relative_error: half-width of the interval of what is removed, as a part of it.
        """
        assert self.rebuilt is not None
        scale, share = self.rebuilt.measured_ns / self.rest.mean_time_ns, gain.share
        below, above = (float(np.hypot(end - share.value, relative_error * share.value)) for end in share.interval)
        found = Estimate(value=share.value, low=share.value - below, high=share.value + above)
        return found.through(lambda part: min(part * scale, 1.0))

    def gain_share(self, part_ns: Floats) -> float:
        """Return what the slowest rank of a role takes with a part of its work, less without, as a share of the step.

        `part_ns` is (num_ranks, num_steps).
        """
        role, without_ns = self.rest.role, np.maximum(self.work_ns - part_ns, 0.0)
        return (slowest_ns(self.work_ns, role) - slowest_ns(without_ns, role)) / self.rest.mean_time_ns


class CoreWaiting(Protocol):
    """The waiting of ranks for cores, against which a finding is held: it may be nothing else."""

    mean_share: float
    uneven_share: float

    def is_all_of(self, effect: float, slow: Bools) -> bool:
        """Return whether an excess of own work, of the ranks of a mask, may be waiting for cores."""

    def part_beyond(self, slow: Bools) -> Estimate | None:
        """Return which part of the excess of these ranks is beyond waiting for cores; None where that is not known."""


class Evidence(ABC):
    """Base of the evidence of all topics: frozen dataclasses of figures.

    Their numeric fields are the `numbers` of a finding in summary.json, under the same names (docs/summary.md).

    Attributes:
        mode: the mode that it speaks for: the words with which the verdict names it.
        variety: how it recurs or which variety it is, such as fixed, transient, periodic; may be empty.
        precedence: findings with a smaller one come first, whatever they cost.
        needs_no_others: whether it rests on what ranks measured of themselves, or on an operation that never ended. Who
            waits for whom, and how long a transfer takes, is not known while members of a group are missing; nor is
            what an event or jitter costs, because the steps may be as long without it.
        has_own_cause: whether it keeps a finding of its own, and is not merged with others of its mode.
        wins_ties: whether it comes before a finding that costs as much, because it may be its cause.
        may_be_uneven_waiting: whether it may be what ranks lose because each step waits for whoever waits longest for
            a core.
        makes_steps_differ: whether it explains why steps differ, so that its loss is not counted as jitter again.
        later_share: what it costs once the cause is mended that takes all or some of it back now; None without one.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every subclass is a dataclass
    precedence: ClassVar[int] = 2
    has_own_cause: ClassVar[bool] = False
    wins_ties: ClassVar[bool] = False
    may_be_uneven_waiting: ClassVar[bool] = False
    later_share: float | None = None

    # What follows from the figures of some topics is a property here, and a constant in most topics.
    @property
    @abstractmethod
    def mode(self) -> str:
        """The mode that it speaks for."""

    @property
    def variety(self) -> str:
        """How it recurs, or which variety it is."""
        return ""

    @property
    def needs_no_others(self) -> bool:
        """Whether it holds while ranks are missing."""
        return False

    @property
    def makes_steps_differ(self) -> bool:
        """Whether it explains why steps differ."""
        return False

    @abstractmethod
    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""

    def is_waiting_for_cores(self, finding: DiagnosisFinding, waiting: CoreWaiting, panels: Panels) -> bool:
        """Return whether the finding may be nothing but ranks that wait for cores."""
        return self.may_be_uneven_waiting and finding.loss_share <= waiting.uneven_share

    def part_beyond_waiting(self, waiting: CoreWaiting, panels: Panels) -> Estimate | None:
        """Return which part of the loss is certainly no waiting for cores; None where that is not known."""
        return None

    def numbers(self) -> dict[str, float]:
        """Return the figures by name, without those that it does not have."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }


@dataclass(frozen=True, kw_only=True)
class DiagnosisFinding:
    """One mode, with what speaks for it.

    Attributes:
        evidence: the figures behind it.
        loss_share: share of the step time that it costs.
        confidence: probability that the mode is right, as calibrated by `make score`.
        culprits: who or what is at fault; empty if nobody can be named.
        counted_part: part of its loss that counts when findings are ranked; less than 1 for an upper bound.
        loss_interval: 95 % interval of `loss_share`, or its bounds; None where it is not known.
    """

    evidence: Evidence
    loss_share: float
    confidence: float
    culprits: tuple[Culprit, ...] = ()
    counted_part: float = 1.0
    loss_interval: tuple[float, float] | None = None

    @property
    def mode(self) -> str:
        """The mode that the evidence speaks for."""
        return self.evidence.mode

    @property
    def variety(self) -> str:
        """How it recurs or which variety it is, such as fixed, transient, periodic, rotating; may be empty."""
        return self.evidence.variety


@dataclass(frozen=True, kw_only=True)
class FindingWords:
    """A finding in words: one line, the figures behind it, what to do, and further figures, one sentence each."""

    headline: str
    why: str
    next: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Said:
    """A finding with all that its sentences need besides its figures.

    Attributes:
        finding: the finding.
        hosts: host names by rank.
        is_upper_bound: whether its loss is an upper bound.
    """

    finding: DiagnosisFinding
    hosts: Mapping[int, str]
    is_upper_bound: bool = False

    @property
    def lost(self) -> str:
        """The loss, such as `3.0 % of the step time`, with its interval where that is wide."""
        share = self.finding.loss_share
        if self.is_upper_bound:
            return f"at most {percent(share)} of the step time"
        low, high = self.finding.loss_interval or (share, share)
        is_wide = max(share - low, high - share) >= _WIDE_LOSS
        return f"{percent(share)} of the step time" + is_wide * f" (95 %: {percent(max(low, 0.0))} to {percent(high)})"

    @property
    def who(self) -> str:
        """The names of the culprits."""
        culprits = self.finding.culprits
        are_nodes = culprits[1:] and all(each.kind == "node" and len(each.aliases) < 2 for each in culprits)
        names = [printable(each.id) if are_nodes else culprit_name(each, self.hosts) for each in culprits]
        return ("nodes " if are_nodes else "") + shortened(names)

    @property
    def interval(self) -> str:
        """The interval of the first culprit's effect."""
        return interval_words(self.finding.culprits[0])

    @property
    def exclusion(self) -> str:
        """The line that keeps the culprits' nodes out of the next job; empty where that is all of them."""
        culprits, hosts = self.finding.culprits, self.hosts
        nodes = {culprit.id for culprit in culprits if culprit.kind == "node"}
        nodes |= {hosts.get(int(culprit.id), "") for culprit in culprits if culprit.kind == "rank"} - {""}
        return exclusion({node_name(host) for host in nodes}, [node_name(host) for host in hosts.values()])


def interval_words(culprit: Culprit) -> str:
    """Return the 95 % interval of a culprit's effect, like `(95 %: 2.0 % to 3.0 %)`."""
    low, high = culprit.interval
    return f"(95 %: {percent(low)} to {percent(high)})"


def longer_words(culprit: Culprit) -> str:
    """Return how much longer transfers through a culprit take, with the interval."""
    low, high = culprit.interval
    if culprit.effect < 1:
        return f"{percent(culprit.effect)} longer than others {interval_words(culprit)}"
    return f"{1 + culprit.effect:.1f} times as long as others (95 %: {1 + low:.1f} to {1 + high:.1f})"


def culprit_name(culprit: Culprit, hosts: Mapping[int, str]) -> str:
    """Return the name of a culprit, with everything that the data cannot separate from it."""
    own = f"{culprit.kind} {culprit.id}"
    name = _alias_name(own, hosts)
    others = [_alias_name(alias, hosts) for alias in culprit.aliases if alias != own]
    if culprit.kind == "rank" and any(other.startswith("node ") for other in others):
        others = [other for other in others if not other.startswith("node ")]  # the rank is named with its host
        name += " (its only rank)"
    if culprit.kind == "link" and others:
        names = [name, *others]
        if all(each.startswith("link ") for each in names):
            return "one of the links " + shortened([each.removeprefix("link ") for each in names])
        return "one of " + shortened(names)
    return name + (f" (or {listed(others[:MAX_NAMED])}: not distinguishable here)" if others else "")


def _alias_name(alias: str, hosts: Mapping[int, str]) -> str:
    kind, _, name = alias.partition(" ")
    if kind == "rank":
        host = hosts.get(int(name), "") if name.isdigit() else ""
        return f"rank {name}" + (f" on {printable(host)}" if host else "")
    return alias_name(alias)


def shortened(names: Sequence[str]) -> str:
    """Return the first names and how many more there are."""
    return listed(first_few(names, MAX_NAMED))


def first_ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return the first ranks with their hosts, and how many more there are."""
    more = f" and {len(ranks) - MAX_RANKS} more" if ranks[MAX_RANKS:] else ""
    return named_ranks(ranks[:MAX_RANKS], hosts) + more


def phase_culprit(phase: str, effect: float, interval: tuple[float, float]) -> Culprit:
    """Return a phase as culprit."""
    return Culprit(kind="phase", id=phase, aliases=(f"phase {phase}",), effect=effect, interval=interval)


def place_culprit(
    kind: str, name: str, rows: Sequence[int] | Ints, effect: float, interval: tuple[float, float], panels: Panels
) -> Culprit:
    """Return a place with some rows of the panels as culprit, with its rank as alias where it has one only."""
    alone = (f"rank {panels.rank[rows[0]]}",) if len(rows) == 1 else ()
    return Culprit(kind=kind, id=name, aliases=(f"{kind} {name}", *alone), effect=effect, interval=interval)


def rank_culprit(rank: int, effect: float, interval: tuple[float, float], panels: Panels) -> Culprit:
    """Return a rank as culprit, with its node as alias where it is alone on it."""
    aliases = [f"rank {rank}"]
    at = np.flatnonzero(panels.rank == rank)
    if len(at) and (panels.node == panels.node[at[0]]).sum() == 1:
        aliases.append(f"node {panels.host[at[0]]}")
    return Culprit(kind="rank", id=str(rank), aliases=tuple(aliases), effect=effect, interval=interval)


def slowest_ns(work_ns: Floats, role: Ints) -> float:
    """Return the mean over steps of the slowest rank's work, of the role where that is largest, nanoseconds."""
    return max(float(work_ns[role == value].max(axis=0).mean()) for value in np.unique(role))


def block_error(share: Floats, level: float) -> tuple[Floats, Floats, float]:
    """Return means over steps, their standard errors from blocks of steps, and the quantile of Student's t.

    Neighbouring steps share their noise, so errors come from blocks of them.
    """
    blocks = block_means(share)
    error = blocks.std(axis=1, ddof=1) / np.sqrt(blocks.shape[1])
    return share.mean(axis=1), error, float(stdtrit(blocks.shape[1] - 1, 1 - level))


def mean_share_interval(panels: Panels, part_ns: Floats) -> tuple[float, float]:
    """Return the 95 % interval of a part's share of the mean step time; `part_ns` is (num_ranks, num_steps)."""
    share = (part_ns.mean(axis=0) / panels.mean_time_ns)[None, :]
    mean, error, _ = block_error(share, 0.5)
    half = half_width(float(error[0]), block_means(share).shape[1])
    return float(mean[0]) - half, float(mean[0]) + half


def confidence_of(p_value: float) -> float:
    """Return the probability that a finding with this p-value is right, by docs/results/diagnosis-score.md."""
    return float(min(max(1.0 - _PER_P_VALUE * p_value, 0.5), _MAX_CONFIDENCE))
