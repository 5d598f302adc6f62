"""What a report says, as data: the terminal prints it, RUN/summary.json holds it.

Whoever shows a summary needs no other module: names of metrics that its fields are made of are exported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from enum import StrEnum
from typing import Any

from hpcpace import __version__
from hpcpace.core.codec import Count
from hpcpace.core.records import dataclass
from hpcpace.diagnosis.network_summary import Comparable as Comparable
from hpcpace.diagnosis.network_summary import NetworkFigures
from hpcpace.diagnosis.network_summary import Overlap as Overlap
from hpcpace.diagnosis.network_summary import ProbedFigures as ProbedFigures
from hpcpace.metrics.clock_suspects import PairViolations
from hpcpace.metrics.communication import OperationKind as OperationKind
from hpcpace.metrics.hotspots import Hotspot
from hpcpace.metrics.lost_operations import OpenOperation
from hpcpace.metrics.phases import Part as Part
from hpcpace.metrics.roles import Excess as Excess
from hpcpace.metrics.roles import ExcessThresholds as ExcessThresholds
from hpcpace.metrics.roles import StageComparison as StageComparison
from hpcpace.metrics.steps import Throughput as Throughput
from hpcpace.metrics.topology import SLURM_ADDRESS as SLURM_ADDRESS
from hpcpace.trace.tables import NO_ERROR_TEXT, ErrorText


class EndKind(StrEnum):
    """How the program of a rank ended, or what ended the run."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    HANG = "hang"
    SILENT = "silent"
    FAILURE = "failed operation"


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How the program of one rank ended before its time.

    Attributes:
        kind: how; `hang` where hpcpace ended it because the job hung; `silent` where a trace ends without a word and
            the program was killed, crashed or still runs.
        what: name of the exception's type, or of the signal, or the exit code; empty where silent.
        step: the step that was running.
        after_ns: time since the first end of any rank, on the common clock; None where that cannot be compared. Where
            silent, it is the last sign of life.
        error: what is recorded of the exception.
    """

    rank: int
    kind: EndKind
    what: str
    step: int
    after_ns: int | None
    error: ErrorText = NO_ERROR_TEXT


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """What ended a run before its time.

    Attributes:
        kind: what came first; `failed operation` where an operation ran out of time and no rank had ended.
        what: as of `RankEnd`; of a failed operation, its name.
        ranks: who came first; of a failed operation, the members that had not entered it, empty if unknown.
        step: the step that was running then.
        waiting: the other ranks that stood in an operation then, or on which it failed.
        waited_in: name of that operation; empty if nobody waited.
        waited_ns: how long it lasted, from the first enter on.
        is_everywhere: whether all ranks ended in this way.
        ends: all ranks that ended before their time, the first one first.
    """

    kind: EndKind
    what: str
    ranks: tuple[int, ...]
    step: int
    waiting: tuple[int, ...]
    waited_in: str
    waited_ns: int
    is_everywhere: bool
    ends: tuple[RankEnd, ...]


SCHEMA = "hpcpace-summary/2"
WAIT_OR_TRANSFER = "wait or transfer"
"""Blocked communication where the two cannot be distinguished."""


class Mode(StrEnum):
    """Why a job does not scale, or does not reach its end: the modes to which other parts refer by name."""

    ENDED = "ended early"
    HANG = "hang"
    STOPPED = "stopped"
    STRAGGLER = "persistent straggler"
    IMBALANCE = "pipeline imbalance"
    CORES = "ranks share cores"
    RUNTIME = "runtime and control plane"
    CONTENTION = "fabric contention"
    LOCALITY = "locality"
    AMPLIFICATION = "synchronisation amplification"
    DATA = "work varies with the data"
    INPUT = "input-bound"
    HOST = "host-bound"
    COMMUNICATION = "communication-bound"
    MEMORY = "memory grows"
    HEALTHY = "healthy"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Who or what is at fault.

    Attributes:
        kind: rank, node, leaf, link, slot or phase.
        id: the rank's number, the host's name, the leaf's name, the slot like `pp2`, the phase's name.
        aliases: all that the data cannot separate from it, itself included, like `rank 5` and `node n3`.
        effect: its excess relative to the others.
        interval: 95 % interval of the effect.
    """

    kind: str
    id: str
    aliases: tuple[str, ...]
    effect: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mode above its threshold.

    Attributes:
        mode, variety, loss_share, confidence, culprits: as of `Verdict`, of this mode alone.
        numbers: the figures behind it by name, as docs/summary.md lists them.
        stages: in which stage each culprit is late, in their order; None where its phases are not known.
        loss_interval: 95 % interval of `loss_share`, or its bounds; None where it is not known.
    """

    mode: str
    variety: str
    loss_share: float
    confidence: float
    culprits: tuple[Culprit, ...]
    numbers: dict[str, float]
    stages: tuple[StageComparison | None, ...] = ()
    loss_interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a report says first.

    Attributes:
        mode: the mode that takes the largest share of the loss, or healthy, or cannot tell.
        variety: how it recurs or which variety it is, such as fixed or transient; may be empty.
        culprits: who or what is at fault in any of the modes, those of the main one first; `findings` has them by mode.
        confidence: probability that the mode is right, as calibrated against known truth.
        loss_share: share of the step time that the mode costs; 0 where nothing is wrong.
        headline: one line.
        why: sentences with the numbers behind it.
        next: what to do, one sentence each.
        also: other modes that share the loss, one sentence each.
        findings: all modes above their thresholds, with their figures.
    """

    mode: str
    variety: str = ""
    culprits: tuple[Culprit, ...] = ()
    confidence: float
    loss_share: float = 0.0
    headline: str
    why: tuple[str, ...]
    next: tuple[str, ...]
    also: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def loss_interval(self) -> tuple[float, float] | None:
        """95 % interval of `loss_share`; None where nothing is wrong or it is not known."""
        return self.findings[0].loss_interval if self.findings else None

    def __str__(self) -> str:
        return self.headline


@dataclass(frozen=True, kw_only=True)
class World:
    """Who took part: `ranks` are those with a readable trace, `missing` those without.

    `emulation` says in what way the speed of computation was not real, as in a lab; it is empty where it was.
    `imported` says which other tool recorded the run and what its files lack; it is empty for runs of hpcpace.
    """

    world_size: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    hosts: tuple[str, ...]
    mesh: str
    samples_unit: str
    emulation: str = ""
    imported: str = ""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Where the leaf switches of the hosts come from.

    Attributes:
        source: SLURM_TOPOLOGY_ADDR, or the file; empty where no leaf is known.
        num_leaves: leaf switches, 0 where none is known.
        problems: where a file contradicts itself or the job, one sentence each.
    """

    source: str
    num_leaves: int
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Which steps the figures use.

    Attributes:
        num_used: steps used.
        first, last: the first and the last of them.
        num_common: steps that all ranks have.
        num_seen: steps that any rank has.
        num_warmup: common steps left out as warm-up.
        num_plain: common steps recorded without detail, and so left out.
        num_unphased: common steps recorded without phases.
        kept_from: the first step that the trace still has, where ranks keep only the last ones; else 0.
        has_phases: whether the used steps were recorded with phases; others are used only if none was.
        num_checkpoint, num_eval: used steps with a checkpoint or an evaluation.
        num_apart: used steps that were taken apart operation by operation: all, or stretches spread over a long run.
        sources: how the traces say that steps were found; with the ranks, where these differ.
        warnings: what is implausible about how they were counted, one sentence each.
    """

    num_used: int
    first: int
    last: int
    num_common: int
    num_seen: int
    num_warmup: int
    num_checkpoint: int
    num_eval: int
    num_apart: int
    num_plain: int = 0
    num_unphased: int = 0
    has_phases: bool = True
    kept_from: int = 0
    sources: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def sum_of(values: Mapping[str, float | None], *names: str) -> float | None:
    """Return the sum of some values; None where one of them is not known."""
    known = [value for name in names if (value := values[name]) is not None]
    return sum(known) if len(known) == len(names) else None


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the step, means over ranks, adding up to 1: forward, backward and optimizer are busy.

    `overlap` is apart: hidden communication over all communication. All are None where they are not known. Where only
    the exposed wait is not, because operations have no counterpart, it is in the transfer.
    """

    busy: float | None
    exposed_wait: float | None
    transfer: float | None
    other: float | None
    overlap: float | None = None

    @property
    def whole(self) -> tuple[tuple[str, float], ...] | None:
        """Names and values of busy, exposed wait, transfer and other; None where they are not known.

        Wait and transfer are one where they cannot be distinguished.
        """
        if self.busy is None or self.transfer is None or self.other is None:
            return None
        known = [("exposed wait", self.exposed_wait)] if self.exposed_wait is not None else []
        transfer = "transfer" if known else WAIT_OR_TRANSFER
        return ("busy", self.busy), *known, (transfer, self.transfer), ("other", self.other)


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """What the trace itself cost; the overhead is the recorder's own time relative to that of the recording.

    The overhead is None where it is not recorded, as in runs of other tools.

    `files` is a digest of the names and sizes of the trace files, which shows whether they have changed since.
    """

    overhead_share: float | None
    size_bytes: int
    num_events: int
    num_dropped: int
    files: str = ""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The most memory that a rank had: of the process, and of torch's tensors on its GPU, 0 without one."""

    rank: Count
    rss_bytes: Count
    device_bytes: Count


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank's steps; times are means per step.

    Attributes:
        parts_ns: by name of `Part` in lower case; they add up to step_ns. None where the rank's phases are times of the
            host, and those of its device are not known. Waits that are not known are None, and in the transfers.
        shares: the same relative to step_ns; None likewise, as is busy_share.
        excess: of its own work over the other ranks of its role; None without any, with too few steps, or where own
            work is not known.
        num_operations, size_bytes: of all its communication.
        wait_ns, transfer_ns: likewise, exposed or hidden; None where waits are not known.
    """

    rank: int
    host: str
    role: str
    step_ns: float
    parts_ns: dict[str, float | None] | None
    shares: dict[str, float | None] | None
    busy_share: float | None
    excess: Excess | None
    num_operations: float
    size_bytes: float
    wait_ns: float | None
    transfer_ns: float | None

    @property
    def exposed_wait_ns(self) -> float | None:
        """Wait in which the rank was blocked, per step; None where it is not known."""
        return None if self.parts_ns is None else sum_of(self.parts_ns, "wait", "sync_wait")

    @property
    def exposed_transfer_ns(self) -> float | None:
        """Transfer in which the rank was blocked, per step; None where it is not known."""
        return None if self.exposed_wait_ns is None else self._seeming_transfer_ns

    @property
    def exposed_ns(self) -> float | None:
        """Communication in which the rank was blocked, per step; None where its parts are not known."""
        return None if self._seeming_transfer_ns is None else self._seeming_transfer_ns + (self.exposed_wait_ns or 0.0)

    @property
    def _seeming_transfer_ns(self) -> float | None:
        return None if self.parts_ns is None else sum_of(self.parts_ns, "transfer", "sync_transfer")


@dataclass(frozen=True, kw_only=True)
class RoleRow:
    """Means over the ranks of one role: one pipeline stage and tensor slot; None as in RankRow, of any of its ranks."""

    role: str
    ranks: tuple[int, ...]
    step_ns: float
    parts_ns: dict[str, float | None] | None
    shares: dict[str, float | None] | None
    busy_share: float | None


@dataclass(frozen=True, kw_only=True)
class DevicePhase:
    """A phase on ranks with device times: times are means per step and rank, with the phases inside it.

    Attributes:
        host_ns, device_ns: how long it takes the host, and its device.
        lead_ns: how far the host is ahead at its begin, median.
        dry_share: share of its begins at which the device had run dry.
    """

    phase: str
    host_ns: float
    device_ns: float
    lead_ns: float
    dry_share: float


@dataclass(frozen=True, kw_only=True)
class HostCores:
    """A host on which ranks wait for cores.

    Attributes:
        num_ranks, num_cpus: ranks of the job there, and the CPUs that they may use; 0 where these are not known.
        running, ready: threads of these ranks that run, and that run or wait for a core, on average.
        waiting: largest share of the time for which a rank waits for a core.
        pressure, throttled: largest shares of the time of CPU pressure and of throttling by a quota.
    """

    host: str
    num_ranks: int
    num_cpus: int
    running: float
    ready: float
    waiting: float
    pressure: float
    throttled: float


@dataclass(frozen=True, kw_only=True)
class RankCores:
    """What one rank had of its cores.

    Attributes:
        rank, host: who and where.
        nice: nice value of the thread that trains; 0 also where it is not known.
        num_cpus: CPUs that it may use; 0 where they are not known.
        waiting: share of the time for which it was ready to run and had no core; None where it is not known.
        work_ns: own work in a step, of it running_ns and queued_ns, waiting for a core, the rest doing neither; None
            where it is not known.
        phases: waiting for a core in a step by phase, nanoseconds, where it is known.
    """

    rank: int
    host: str
    nice: int
    num_cpus: int
    waiting: float | None
    work_ns: float | None = None
    running_ns: float | None = None
    queued_ns: float | None = None
    phases: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostPair(PairViolations):
    """Violations of causality between two nodes, with the names of their hosts."""

    exit_host: str
    enter_host: str


@dataclass(frozen=True, kw_only=True)
class ClockSuspect:
    """A host whose clock may be wrong.

    Attributes:
        ahead_ns, behind_ns: how far ahead of and behind another clock it is at least; 0 where that is not proven.
        against: hosts whose clocks it contradicts, the first ones.
        num_against: how many those are.
    """

    node: int
    host: str
    ahead_ns: int
    behind_ns: int
    against: tuple[str, ...]
    num_against: int


@dataclass(frozen=True, kw_only=True)
class ClockJump:
    """A clock that jumped during the run: it was set, or its virtual machine stood still.

    Attributes:
        hosts: whose clock; one of these, where the traces do not show which.
        size_ns: how far it jumped; negative backwards, of the first of the hosts.
        step: in which step; -1 where that is not known.
    """

    hosts: tuple[str, ...]
    size_ns: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """How well times of different ranks compare.

    Attributes:
        num_samples: synchronisations of the rank with the fewest.
        num_unknown: ranks whose clock cannot be compared with that of the others.
        median_halfwidth_ns, max_halfwidth_ns: certified bound of the error, over ranks and used steps.
        residual_ns: largest leave-one-out residual.
        drift_ppm: largest drift against the reference.
        extrapolated_share: share of used step ends outside of the synchronised time.
        num_checked: matched synchronising operations of two ranks or more.
        num_negative: rows of them with a negative transfer, that is, an exit before the last enter.
        num_negative_messages: messages received before they were sent.
        pairs: violations of synchronising operations by pair of nodes, with their sizes, and how many the half-widths
            do not explain.
        num_wrong: the fewest wrong clocks that explain what half-widths do not; 0 where all is explained.
        num_suspects: hosts in the smallest sets that explain it: as many as num_wrong where there is one such set.
        suspects: the first of them.
        jumps: clocks that jumped between two synchronisations, in order of the steps.
    """

    num_samples: int
    num_unknown: int
    median_halfwidth_ns: float | None
    max_halfwidth_ns: float | None
    residual_ns: float | None
    drift_ppm: float | None
    extrapolated_share: float | None
    num_checked: int
    num_negative: int
    num_negative_messages: int
    pairs: tuple[HostPair, ...]
    num_wrong: int
    num_suspects: int
    suspects: tuple[ClockSuspect, ...]
    jumps: tuple[ClockJump, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """Where the training thread of a rank was when a step had lasted too long: Python frames, the innermost last."""

    rank: int
    frames: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HangFigures:
    """Who held up whom when the job hung.

    Attributes:
        kind: of the cause, one of `hpcpace.hang.views.HangKind`.
        culprits: ranks that held up the others.
        could_be: ranks of which at least one did, where the records cannot separate them.
        waiting: ranks that were held up.
        reason: why only a set, or nobody, can be named; empty otherwise.
        operation: in which they waited, in words; empty where unknown.
        op, group, seq, step: of that operation; empty and -1 where unknown.
        age_ns: how long the hang had lasted at the time for which it was found; None where unknown.
        chain: operations that lead from those that waited to the cause, in words, the cause last.
        stacks: of the culprits, where they have written them.
    """

    kind: str
    culprits: tuple[int, ...]
    could_be: tuple[int, ...]
    waiting: tuple[int, ...]
    reason: str
    operation: str
    op: str
    group: str
    seq: int
    step: int
    age_ns: int | None
    chain: tuple[str, ...]
    stacks: tuple[RankStack, ...]


@dataclass(frozen=True, kw_only=True)
class IncompleteRank:
    """A rank whose trace is missing, was not closed, or lacks records.

    Attributes:
        host: empty where unknown.
        has_trace: whether its trace can be read.
        last_step: the last step that it recorded, None without any.
        gap_ns: from the end of its trace to that of the last one; None where that cannot be compared.
        num_lost_operations: those that it entered, as other ranks show, and that are not in its trace; at least.
        num_lost_steps: steps that it ended, as those operations show, and that are not in its trace; at least.
        num_dropped: records that its recorder gave up and counted.
    """

    rank: int
    host: str
    has_trace: bool
    last_step: int | None
    gap_ns: int | None
    num_lost_operations: int
    num_lost_steps: int
    num_dropped: int


@dataclass(frozen=True, kw_only=True)
class Incomplete:
    """What was missing or cut off; `ranks` has those with most lost operations first."""

    problems: tuple[str, ...]
    not_closed: tuple[int, ...]
    num_open: int
    open: tuple[OpenOperation, ...]
    ranks: tuple[IncompleteRank, ...]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the loss to the slowest grows with the number of units that wait for each other; equally long columns.

    Attributes:
        k: numbers of units.
        amplification: A(k), with its 95 % interval from low to high; these are empty for few steps.
        null: A(k) of units that are independent of each other; empty where unknown.
        exponent: slope of ln(A(k) - 1) over ln k in the upper half, lasting differences taken out; None without one.
    """

    k: tuple[int, ...]
    amplification: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    null: tuple[float, ...]
    exponent: float | None
    exponent_interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The loss to waiting on a number of nodes, as a share of the present step time."""

    num_nodes: int
    loss_share: float
    interval: tuple[float, float]
    is_speculative: bool


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The loss at larger scales: `points`, or why it is not predicted; `label` says what is in it."""

    refused: str
    label: str
    points: tuple[Prediction, ...]


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """What the set of ranks that loses most loses by waiting for its slowest; see docs/measuring.md.

    Attributes:
        ranks: the ranks that wait for each other.
        num_steps, num_segments: steps used, and stretches of work between two synchronisations in each.
        amplification: E[max] / E[mean] of the work, with its 95 % interval; persistent times transient.
        persistent_null: what `persistent` would be by noise alone.
        loss_share: share of the step time.
        null, null_interval: amplification of independent units of the same noise; the comparison says where the
            measured one is; a unit is a node where ranks of a node share their noise.
        common_share, rank_share, residual_share: of the variance.
        noise_intensity: mean over 5 % quantile, less 1.
        noise_amplification: alpha, how much of the noise reaches the step time.
        compute_bound_share: of the steps; the others are communication-bound.
    """

    ranks: tuple[int, ...]
    num_steps: int
    num_segments: int
    amplification: float
    interval: tuple[float, float] | None
    persistent: float
    persistent_null: float | None
    transient: float
    loss_share: float
    null: float | None
    null_interval: tuple[float, float] | None
    comparison: str
    is_node_unit: bool
    common_share: float | None
    rank_share: float | None
    residual_share: float | None
    noise_intensity: float | None
    noise_amplification: float | None
    compute_bound_share: float | None
    num_regime_switches: int
    growth: Growth | None
    predictions: Predictions


@dataclass(frozen=True, kw_only=True)
class GainRow:
    """What the step would gain, as a share of it, if the own work or the transfers named were as usual."""

    name: str
    gain_share: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class OriginRow:
    """The exposed waiting of all ranks that began at one rank.

    Attributes:
        share_of_waits: of all exposed wait, what cannot be traced included.
        propagated_share: of that, what reached others through ranks that had waited themselves.
        step_share: of the step time, mean over all ranks.
    """

    rank: int
    share_of_waits: float
    propagated_share: float
    step_share: float


@dataclass(frozen=True, kw_only=True)
class PathRow:
    """A share of the critical path: own work of a rank, or transfers of a kind of operation."""

    name: str
    share: float


@dataclass(frozen=True, kw_only=True)
class PipelineBubble:
    """The share of the step in which stages wait for messages; the ideal one where all stages are alike."""

    share: float
    ideal_share: float | None
    by_stage: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Causes:
    """Where waiting began and what would change the step.

    Attributes:
        gains: what one change at a time would bring, the largest first.
        rebuild_error: median relative error of the steps rebuilt from their operations; None where they were not.
        origins: the ranks at which most waiting began.
        traced_share: what of the exposed wait could be traced to the rank where it began, as a share of the step; None
            where waits are not known.
        path: what the critical path consists of, the largest shares.
        suspected_ranks: ranks whose arrivals on the common clock contradict how long their operations last.
        bubble: of a pipeline; None if there is none.
    """

    gains: tuple[GainRow, ...] = ()
    rebuild_error: float | None = None
    origins: tuple[OriginRow, ...] = ()
    traced_share: float | None = None
    path: tuple[PathRow, ...] = ()
    suspected_ranks: tuple[int, ...]
    bubble: PipelineBubble | None = None


@dataclass(frozen=True, kw_only=True)
class SensitivityRow:
    """How the transfer of one kind and size of collectives depends on the skew of their ranks; see docs/measuring.md.

    Attributes:
        slope: transfer per skew, with its 95 % interval; below 0 where all arriving together makes transfers longer.
        num_operations: collectives used, those whose skew is beyond the clocks' error.
    """

    op: str
    group_size: int
    size_bytes: int
    slope: float
    interval: tuple[float, float]
    num_operations: int


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One of several attempts of a run.

    Attributes:
        world_size, num_ranks: ranks of the job; those with a readable trace. Both 0 where none can be read.
        num_steps, first, last: steps that count, as for the report; the first and the last of them.
        p50_ns: median step time; None without a step.
        num_not_closed: traces that were not closed: the rank was killed, crashed, or still runs.
        num_inside: ranks that stood inside an operation when their recording ended.
    """

    attempt: int
    world_size: int
    num_ranks: int
    hosts: tuple[str, ...]
    mesh: str
    num_steps: int
    first: int | None
    last: int | None
    p50_ns: float | None
    num_not_closed: int
    num_inside: int


@dataclass(frozen=True, kw_only=True)
class AuditMatch:
    """A finding of the audit on somebody whom the verdict blames.

    Attributes:
        who: a rank, node or link, as the verdict names it.
        rule: id of the rule; `hpcpace audit explain ID` has more.
        severity: F or W.
        host, place, seen, cost, fix: as the audit says them.
        is_common: whether it holds for all ranks of the job, and so does not explain why this one is slow.
        told: one sentence.
    """

    who: str
    rule: str
    severity: str
    host: str
    place: str
    seen: str
    cost: str
    fix: str
    is_common: bool
    told: str


@dataclass(frozen=True, kw_only=True)
class AuditFigures:
    """What the audit's rules say of the snapshots that the session has saved.

    Attributes:
        num_hosts, num_ranks: those that the snapshots have.
        counts: findings by severity, alike ones of several hosts once.
        matches: those on whom the verdict blames.
        found: each warning and failure in a few words, host and place included, in order.
        problems: snapshots that cannot be read, or are not there, one sentence each.
    """

    num_hosts: int
    num_ranks: int
    counts: dict[str, int]
    matches: tuple[AuditMatch, ...]
    problems: tuple[str, ...]
    found: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PacingFigures:
    """The outcome of pacing, from trial.json.

    Attributes:
        policy: what was asked for.
        tried: the policy that was tried; empty where none was.
        is_on: whether ranks were paced at the end.
        sentence: the outcome in words.
        mechanisms: what could make pacing pay in this job.
        points: names of the operations at which ranks were paced.
        outcome: of the trial; empty without one.
        gain: mean of ln(T_off / T_on), with its interval.
        detectable: the smallest gain that the trial would have shown.
        num_pairs: pairs of a paced and an unpaced block.
        step_off_ns, step_on_ns: mean step of the unpaced and the paced blocks.
        cv_off, cv_on: their coefficients of variation.
        waits_on_device: whether collectives run on GPUs, where ranks are not delayed.
        slack_ns: how much longer a rank waits on its device in a step than the one that waits least, mean over ranks
            and steps; None where that is not known or ranks can be delayed.
        most_slack_ns, most_slack_rank: mean over steps of the rank with the largest slack, and its number.
        most_gain: the share of the step that a trial could gain at most, which is that of exposed wait.
    """

    policy: str
    tried: str
    is_on: bool
    sentence: str
    mechanisms: tuple[str, ...]
    points: tuple[str, ...]
    outcome: str
    gain: float | None
    interval: tuple[float, float] | None
    detectable: float | None
    num_pairs: int
    step_off_ns: float | None
    step_on_ns: float | None
    cv_off: float | None
    cv_on: float | None
    waits_on_device: bool = False
    slack_ns: float | None = None
    most_slack_ns: float | None = None
    most_slack_rank: int | None = None
    most_gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All that a report says about one attempt of a run; `settings` are the thresholds of `[diagnosis]` by name.

    `thresholds` are all others by topic and name. `history` has all attempts where there are several, `sensitivity` the
    collectives that take most time. `outcome` and
    `memory` are what `hpcpace train` recorded at its end; empty elsewhere. `audit` is None without snapshots,
    `pacing` where the run was not paced, `end` where nothing ended it before its time. `unknown` says why figures that
    rest on phases are not known; empty where they are. `devices` has the phases of ranks with device times, `cores`
    the hosts on which ranks wait for cores, `rank_cores` what each rank had of its cores there, `network` what
    interfaces and connections carried between hosts, `switches` where the places of hosts come from. `comparable` is
    what comparisons with other runs need. `probe` is None without a probe of the hosts.
    """

    run: str
    run_id: str
    attempt: int
    attempts: tuple[int, ...]
    verdict: Verdict
    world: World
    steps: Steps
    throughput: Throughput
    shares: Shares
    jitter: Jitter | None
    hotspots: tuple[Hotspot, ...]
    causes: Causes | None
    tracing: Tracing
    ranks: tuple[RankRow, ...]
    roles: tuple[RoleRow, ...]
    kinds: tuple[OperationKind, ...]
    clocks: Clocks
    cut_off: Incomplete
    settings: dict[str, float] = field(default_factory=dict)
    thresholds: dict[str, dict[str, float]] = field(default_factory=dict)
    sensitivity: tuple[SensitivityRow, ...] = ()
    history: tuple[AttemptRow, ...] = ()
    outcome: str = ""
    dtype: str = ""
    memory: tuple[RankMemory, ...] = ()
    audit: AuditFigures | None = None
    pacing: PacingFigures | None = None
    end: RunEnd | None = None
    unknown: str = ""
    devices: tuple[DevicePhase, ...] = ()
    cores: tuple[HostCores, ...] = ()
    rank_cores: tuple[RankCores, ...] = ()
    hang: HangFigures | None = None
    network: NetworkFigures | None = None
    comparable: Comparable | None = None
    switches: Switches = Switches(source="", num_leaves=0, problems=())
    probe: ProbedFigures | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every rank's trace was there, closed, readable and without gaps, and no clock was wrong."""
        cut = self.cut_off
        is_missing = self.world.missing or cut.problems or cut.not_closed or cut.num_open or cut.ranks
        return not (is_missing or self.tracing.num_dropped or self.clocks.num_wrong)

    def to_json(self) -> dict[str, Any]:
        """Return the content of summary.json; times are nanoseconds, shares fractions of 1."""
        return {"schema": SCHEMA, "hpcpace_version": __version__, **asdict(self)}
