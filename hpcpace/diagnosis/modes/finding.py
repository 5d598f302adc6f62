"""What every mode is judged by, and what it says: panels of steps in, findings out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.modes.evidence import Evidence
from hpcpace.diagnosis.modes.mode import Mode
from hpcpace.metrics.arrivals import LateArrival
from hpcpace.metrics.flow_figures import FlowFindings
from hpcpace.metrics.host_waits import CoreUse
from hpcpace.metrics.phases import EXPOSED_TRANSFER, Part, share_of
from hpcpace.metrics.plausibility import Alternation
from hpcpace.metrics.roles import DataVariation, StageComparison

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]


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
class DiagnosisFinding:
    """One mode, with what speaks for it.

    Attributes:
        evidence: the figures behind it.
        loss_share: share of the step time that it costs.
        confidence: probability that the mode is right, as calibrated by `make score`.
        culprits: who or what is at fault; empty if nobody can be named.
    """

    evidence: Evidence
    loss_share: float
    confidence: float
    culprits: tuple[Culprit, ...] = ()

    @property
    def mode(self) -> Mode:
        """The mode that the evidence speaks for."""
        return self.evidence.mode

    @property
    def variety(self) -> str:
        """How it recurs or which variety it is, such as fixed, transient, periodic, rotating; may be empty."""
        return self.evidence.variety


@dataclass(frozen=True, kw_only=True)
class IdlePhase:
    """How long devices waited for their hosts in a phase, `other` outside of all; nanoseconds, mean per rank and step.

    Attributes:
        bounded_ns: what of it is only the most that they can have waited.
    """

    phase: str
    idle_ns: float
    bounded_ns: float


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
        host_ns: time in which the device waited for its host, likewise.
        unmatched_ns: time blocked in operations that match no other rank's, of which nobody knows whether it is wait
            or transfer, likewise.
        is_role_known: whether roles are told; else no two ranks are compared.
        transient_share: what the rebuilt steps of a pipeline lose to changing work, as a share of the step time; None
            where they are not rebuilt.
        data_variation: how the work of microbatches varies; None where that is not known, as without a pipeline.
        parts_ns: the parts of each step, float64, (num_ranks, num_steps, num_parts); None where they are not known.
        host_timed: ranks with a device whose phases are times of the host, or all ranks where phases were not recorded.
            They do not show what takes time there, so work, waits and exposed transfers of the run are not known.
        is_unphased: whether phases were not recorded.
        cores: what the ranks had of their cores; None where that is not known.
        lab_cores: the same in a lab, whose hosts share the cores of one machine: no finding, but it explains bursts.
        arrivals: who is late at collectives on devices, the latest first; where own work is not known.
        idle: how long devices waited for their hosts, by phase, longest first.
        alternation: how steps alternate on all ranks, as parts of steps counted as steps do; None if they do not.
        flows: what the job's own connections show of links; None where they were not recorded.
    """

    rank: Int64s
    host: tuple[str, ...]
    node: Int64s
    role: Int64s
    stage: Int64s
    times_ns: Floats
    since_ns: Floats
    work_ns: Floats
    reach_ns: Floats
    data_ns: Floats
    gc_ns: Floats
    wait_ns: Floats
    transfer_ns: Floats
    host_ns: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    unmatched_ns: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    is_role_known: bool = True
    transient_share: float | None = None
    data_variation: DataVariation | None = None
    parts_ns: Floats | None = None
    host_timed: tuple[int, ...] = ()
    is_unphased: bool = False
    cores: CoreUse | None = None
    lab_cores: CoreUse | None = None
    arrivals: tuple[LateArrival, ...] = ()
    idle: tuple[IdlePhase, ...] = ()
    alternation: Alternation | None = None
    flows: FlowFindings | None = None

    @property
    def mean_time_ns(self) -> float:
        """Mean step time, at least 1 ns."""
        return max(float(self.times_ns.mean()), 1.0) if len(self.times_ns) else 1.0

    @property
    def mean_length_ns(self) -> float:
        """Mean length of the ranks' own steps, which shares of the step are relative to, at least 1 ns."""
        return self.mean_time_ns if self.parts_ns is None else max(float(self.parts_ns.sum(axis=2).mean()), 1.0)

    @property
    def transfer_share(self) -> float:
        """All exposed transfer as a share of the step, blocked senders included."""
        if self.parts_ns is None:
            return float(self.transfer_ns.mean()) / self.mean_length_ns
        return share_of(self.parts_ns, EXPOSED_TRANSFER)

    def qualified(self, found: StageComparison | None) -> StageComparison | None:
        """Return a comparison of stages as it is to be read with the phases of these traces; None without phases."""
        if found is None or self.parts_ns is None:
            return None
        has_forward = bool(self.parts_ns[:, :, Part.FORWARD].any())
        return replace(found, has_forward=has_forward)


def rank_culprit(
    rank: int, hosts: dict[int, str], effect: float, interval: tuple[float, float], panels: Panels
) -> Culprit:
    """Return a rank as culprit, with its node as alias where it is alone on it; `hosts` by rank."""
    aliases = [f"rank {rank}"]
    at = np.flatnonzero(panels.rank == rank)
    if len(at) and (panels.node == panels.node[at[0]]).sum() == 1:
        aliases.append(f"node {hosts[rank]}")
    return Culprit(kind="rank", id=str(rank), aliases=tuple(aliases), effect=effect, interval=interval)


def slowest_ns(work_ns: Floats, role: Int64s) -> float:
    """Return the mean over steps of the slowest rank's work, of the role where that is largest, nanoseconds."""
    return max(float(work_ns[role == value].max(axis=0).mean()) for value in np.unique(role))
