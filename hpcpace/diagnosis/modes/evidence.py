"""What speaks for a finding: a dataclass for each kind of evidence.

Its numeric fields are the `numbers` of a finding in summary.json, under the same names (docs/summary.md).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import ClassVar, assert_never

from hpcpace.diagnosis.modes.mode import Mode
from hpcpace.diagnosis.modes.run_end import RunEnd
from hpcpace.hang.views import FoundHang
from hpcpace.metrics.flow_figures import LinkCause
from hpcpace.metrics.roles import StageComparison


class LatePattern(StrEnum):
    """How the lateness of ranks recurs."""

    FIXED = "fixed"
    TRANSIENT = "transient"
    PERIODIC = "periodic"
    ROTATING = "rotating"


def mode_of_pattern(pattern: LatePattern) -> Mode:
    """Return the mode that lateness is counted to: periodic lateness is the control plane's, a rotation is jitter."""
    match pattern:
        case LatePattern.FIXED | LatePattern.TRANSIENT:
            return Mode.STRAGGLER
        case LatePattern.PERIODIC:
            return Mode.RUNTIME
        case LatePattern.ROTATING:
            return Mode.AMPLIFICATION
        case _:
            assert_never(pattern)


@dataclass(frozen=True, kw_only=True)
class EndEvidence:
    """A run that ended before its time.

    Attributes:
        end: what ended it.
        step: the step that was running.
        waiting: how many other ranks stood in an operation then.
    """

    mode: ClassVar = Mode.ENDED
    end: RunEnd
    step: int
    waiting: int

    @property
    def variety(self) -> str:
        """How it ended."""
        return str(self.end.kind)


@dataclass(frozen=True, kw_only=True)
class HangEvidence:
    """An operation that does not end.

    Attributes:
        found: who holds up whom, and what was known of the job then.
        op: name of the operation; empty where nobody waits in one.
        age_ns: from the first enter to the time for which the hang was found: the last sign of life of the ranks
            inside, or just before the operation failed on the first one.
        step: in which it was entered; -1 where unknown.
        inside: how many ranks wait inside then.
        absent: how many members have not entered it by then.
        completed: how many ranks have completed it by then.
        failed: on how many of those inside it failed in the end, such as by a timeout.
        late: how many ranks entered it after it had failed on others.
        late_ranks: which ones.
    """

    mode: ClassVar = Mode.HANG
    found: FoundHang
    op: str
    age_ns: int
    step: int
    inside: int
    absent: int
    completed: int
    failed: int = 0
    late: int = 0
    late_ranks: tuple[int, ...] = ()

    @property
    def variety(self) -> str:
        """The operation."""
        return self.op


@dataclass(frozen=True, kw_only=True)
class LatenessEvidence:
    """Ranks that are late by their own work again and again.

    Attributes:
        pattern: how their lateness recurs.
        effect: own work above the others of the role, in the steps concerned, relative to the role's median.
        p_value: probability of as much by chance, over all ranks.
        late_share: share of the steps in which one of them is the latest beyond noise.
        share: loss as a share of the step time.
        period_ns: the period of a periodic or rotating lateness; else None.
        first, stop: range of the steps of a transient lateness, indices into the used steps; else None.
        period_steps: the period in steps, where the late steps come at equal numbers of steps; else None.
        stages: for each culprit, in which stage it is late; empty where phases are not known.
        ranks: numbers of all late ranks, those of named nodes and slots included.
    """

    pattern: LatePattern
    effect: float
    p_value: float
    late_share: float
    share: float
    period_ns: float | None = None
    first: int | None = None
    stop: int | None = None
    period_steps: int | None = None
    stages: tuple[StageComparison | None, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def mode(self) -> Mode:
        """The mode that this lateness is counted to."""
        return mode_of_pattern(self.pattern)

    @property
    def variety(self) -> str:
        """How it recurs."""
        return str(self.pattern)


@dataclass(frozen=True, kw_only=True)
class ArrivalEvidence:
    """Ranks that are late at collectives on devices; their own work is not known.

    Attributes:
        effect: the least that the work of the latest exceeds that of the others by, relative to theirs.
        p_value: probability of as much by chance, over all ranks.
        late_share: share of the steps in which it is late by more than half of its mean.
        share: its lateness as a share of the step time: the most that it costs.
        arrival_ns: how long after the median rank it enters.
        duration_ns: by how much shorter the collective is for it than for the median rank.
        ranks: numbers of all late ranks.
    """

    mode: ClassVar = Mode.STRAGGLER
    variety: ClassVar = "fixed"
    effect: float
    p_value: float
    late_share: float
    share: float
    arrival_ns: float
    duration_ns: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImbalanceEvidence:
    """A pipeline stage with more work than the others.

    Attributes:
        effect: the excess as a share of their work.
        stages: what the pipeline stage takes longer for; empty where phases are not known.
    """

    mode: ClassVar = Mode.IMBALANCE
    variety: ClassVar = ""
    effect: float
    stages: tuple[StageComparison | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EventEvidence:
    """Single long steps that recur.

    Attributes:
        events: number of steps.
        share: loss as a share of the step time.
        period_ns: distance of the events; None if they strike one node at irregular distances.
        period_steps: the same in steps, where they come at equal numbers of steps; else None.
        stages: in which stage these steps are longer; empty where phases are not known.
    """

    mode: ClassVar = Mode.RUNTIME
    events: int
    share: float
    period_ns: float | None = None
    period_steps: int | None = None
    stages: tuple[StageComparison | None, ...] = ()

    @property
    def variety(self) -> str:
        """Whether the events have a period."""
        return "recurring" if self.period_ns is None else "periodic"


@dataclass(frozen=True, kw_only=True)
class CollectionEvidence:
    """Garbage collection; `share` is that of the rank that collects longest in each step, of the step time."""

    mode: ClassVar = Mode.RUNTIME
    variety: ClassVar = "garbage collection"
    share: float


@dataclass(frozen=True, kw_only=True)
class InterruptionEvidence:
    """Checkpoints or evaluations of some ranks, for which the others wait.

    Attributes:
        phase: `checkpoint` or `eval`.
        ranks: who makes them.
        events: steps with one.
        mean_ns: mean of the longest of these ranks in such a step.
        share: loss as a share of the step time.
        period_steps: after how many steps they come back; None where that varies.
    """

    mode: ClassVar = Mode.RUNTIME
    phase: str
    ranks: tuple[int, ...]
    events: int
    mean_ns: float
    share: float
    period_steps: int | None = None

    @property
    def variety(self) -> str:
        """What the ranks do."""
        return "evaluation" if self.phase == "eval" else "checkpoint"


@dataclass(frozen=True, kw_only=True)
class InputEvidence:
    """Waiting for data.

    Attributes:
        share: its mean share of the step time.
        ranks: the ranks that wait; empty where that is all of them.
        waiting_ns, others_ns: mean time per step of those that wait and of the others; None where all wait.
    """

    mode: ClassVar = Mode.INPUT
    variety: ClassVar = ""
    share: float
    ranks: tuple[int, ...] = ()
    waiting_ns: float | None = None
    others_ns: float | None = None


@dataclass(frozen=True, kw_only=True)
class HostEvidence:
    """Devices that wait for their hosts to issue work.

    Attributes:
        share: mean share of the step in which they are idle for that.
        phases: the phases that hold most of it, with their shares of the step, largest first.
        is_most: whether these are the most that they can have been idle.
    """

    mode: ClassVar = Mode.HOST
    variety: ClassVar = ""
    share: float
    phases: tuple[tuple[str, float], ...] = ()
    is_most: bool = False


@dataclass(frozen=True, kw_only=True)
class SlowLinkEvidence:
    """A slow link.

    Attributes:
        effect: by what share transfers through it take longer.
        share: exposed transfer as a share of the step time.
    """

    mode: ClassVar = Mode.CONTENTION
    variety: ClassVar = "slow link"
    effect: float
    share: float


@dataclass(frozen=True, kw_only=True)
class FlowEvidence:
    """Connections that a link holds up.

    Attributes:
        cause: what is wrong with it.
        is_certain: whether foreign traffic explains all of it.
        direction: `up` or `down` where only that one is slow; else empty.
        effect: by which share they take longer for their bytes than others.
        share: exposed transfer, or the time for which they were busy if that is less, as a share of the step time.
        slow_bytes_per_s, usual_bytes_per_s: rate of the slowest while it was busy, and of others of its kind.
        foreign_bytes_per_s: foreign traffic on the link, 0 where none is known.
        repeats, others_repeats: share of segments that these connections and the others sent again.
        stalls: share of the time for which they stood still.
        segment_bytes, usual_segment_bytes: largest payload of their segments and of those of others; 0 unknown.
        flows: how many connections it holds up.
    """

    mode: ClassVar = Mode.CONTENTION
    cause: LinkCause
    is_certain: bool
    direction: str
    effect: float
    share: float
    slow_bytes_per_s: float
    usual_bytes_per_s: float
    foreign_bytes_per_s: float
    repeats: float
    others_repeats: float
    stalls: float
    segment_bytes: int
    usual_segment_bytes: int
    flows: int

    @property
    def variety(self) -> str:
        """What is wrong with the link."""
        return str(self.cause)


@dataclass(frozen=True, kw_only=True)
class BurstEvidence:
    """Bursts of slow transfers.

    Attributes:
        share: loss as a share of the step time.
        bursts: share of the steps that have one.
    """

    mode: ClassVar = Mode.CONTENTION
    variety: ClassVar = "bursts"
    share: float
    bursts: float


@dataclass(frozen=True, kw_only=True)
class LocalityEvidence:
    """Groups that cross switches and are slower than groups within one.

    Attributes:
        factor: transfer of the former relative to that of the latter.
        share: exposed transfer as a share of the step time.
    """

    mode: ClassVar = Mode.LOCALITY
    variety: ClassVar = ""
    factor: float
    share: float


@dataclass(frozen=True, kw_only=True)
class TransferEvidence:
    """Much communication without a slow link or bursts.

    Attributes:
        share: steady transfer, that is, exposed transfer without bursts and blocked senders, as a share of the step.
        of_work: steady transfer as a share of own work and steady transfer.
        are_links_compared: whether the groups or the connections of the job can single out a slow link.
        transfer: all exposed transfer as a share of the step; the rest beyond `share` and `bursts` is blocked senders.
        bursts: what bursts take, as a share of the step.
        least: the threshold of `of_work`.
        line_share: the largest part of its interface's line rate that a connection reached while it was busy; None
            where that is not known.
    """

    mode: ClassVar = Mode.COMMUNICATION
    share: float
    of_work: float
    are_links_compared: bool
    transfer: float = 0.0
    bursts: float = 0.0
    least: float = 0.0
    line_share: float | None = None

    @property
    def variety(self) -> str:
        """Whether links were compared."""
        return "even" if self.are_links_compared else "links not told"


@dataclass(frozen=True, kw_only=True)
class JitterEvidence:
    """Jitter that synchronisation amplifies; `share` is the loss as a share of the step time."""

    mode: ClassVar = Mode.AMPLIFICATION
    variety: ClassVar = ""
    share: float


@dataclass(frozen=True, kw_only=True)
class DataEvidence:
    """Work that varies with the data, for which every step waits.

    Attributes:
        share: the loss as a share of the step time.
        shared: correlation of the work of a microbatch between neighbouring stages.
        spread: standard deviation of the work of a pass within a step, relative to it.
    """

    mode: ClassVar = Mode.DATA
    variety: ClassVar = ""
    share: float
    shared: float
    spread: float


class CoreCause(StrEnum):
    """Who has the cores for which ranks wait."""

    RANKS = "ranks"
    OTHERS = "other processes"
    BOTH = "ranks and other processes"
    QUOTA = "quota"
    UNKNOWN = ""


@dataclass(frozen=True, kw_only=True)
class CoreEvidence:
    """Ranks that are ready to run and wait for a core.

    Attributes:
        cause: who has the cores.
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

    mode: ClassVar = Mode.CORES
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
        """Who has the cores."""
        return str(self.cause)


Evidence = (
    EndEvidence
    | HangEvidence
    | LatenessEvidence
    | ArrivalEvidence
    | ImbalanceEvidence
    | EventEvidence
    | CollectionEvidence
    | InterruptionEvidence
    | InputEvidence
    | HostEvidence
    | SlowLinkEvidence
    | FlowEvidence
    | BurstEvidence
    | LocalityEvidence
    | TransferEvidence
    | JitterEvidence
    | DataEvidence
    | CoreEvidence
)


def numbers_of(evidence: Evidence) -> dict[str, float]:
    """Return the figures of some evidence by name, without those that it does not have."""
    values = {item.name: getattr(evidence, item.name) for item in fields(evidence)}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def stages_of(evidence: Evidence) -> tuple[StageComparison | None, ...]:
    """Return in which stage each culprit is late; empty for evidence that compares no stages."""
    return evidence.stages if isinstance(evidence, (LatenessEvidence, ImbalanceEvidence, EventEvidence)) else ()
