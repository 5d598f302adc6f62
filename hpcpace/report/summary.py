"""What a report says, as data: the terminal prints it, RUN/summary.json holds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hpcpace import __version__
from hpcpace.metrics.clock import PairViolations
from hpcpace.metrics.communication import Kind
from hpcpace.metrics.open_operations import OpenOperation
from hpcpace.metrics.roles import Excess
from hpcpace.metrics.steps import Throughput

SCHEMA = "hpcpace-summary/1"


@dataclass(frozen=True, kw_only=True)
class World:
    """Who took part: `ranks` are those with a readable trace, `missing` those without."""

    world_size: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    hosts: tuple[str, ...]
    mesh: str
    samples_unit: str


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Which steps the figures use.

    Attributes:
        num_used: steps used.
        first, last: the first and the last of them.
        num_common: steps that all ranks have.
        num_seen: steps that any rank has.
        num_warmup: common steps left out as warm-up.
        num_checkpoint, num_eval: used steps with a checkpoint or an evaluation.
    """

    num_used: int
    first: int
    last: int
    num_common: int
    num_seen: int
    num_warmup: int
    num_checkpoint: int
    num_eval: int


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the step, means over ranks, adding up to 1: forward, backward and optimizer are busy."""

    busy: float
    exposed_wait: float
    transfer: float
    other: float


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """What the trace itself cost; the overhead is the recorder's own time relative to that of the recording."""

    overhead_share: float | None
    size_bytes: int
    num_events: int
    num_dropped: int


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank's steps; times are means per step.

    Attributes:
        parts_ns: by name of `hpcpace.metrics.phases.Part` in lower case; they add up to step_ns.
        shares: the same relative to step_ns.
        excess: of the busy time over the other ranks of its role; None without any, or with too few steps.
        num_operations, size_bytes, wait_ns, transfer_ns: of all its communication, exposed or hidden.
    """

    rank: int
    host: str
    role: str
    step_ns: float
    parts_ns: dict[str, float]
    shares: dict[str, float]
    busy_share: float
    excess: Excess | None
    num_operations: float
    size_bytes: float
    wait_ns: float
    transfer_ns: float


@dataclass(frozen=True, kw_only=True)
class RoleRow:
    """Means over the ranks of one role: one pipeline stage and tensor slot."""

    role: str
    ranks: tuple[int, ...]
    step_ns: float
    parts_ns: dict[str, float]
    shares: dict[str, float]
    busy_share: float


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
        pairs: the same by pair of nodes, with their sizes, and how many the half-widths do not explain.
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
    pairs: tuple[PairViolations, ...]


@dataclass(frozen=True, kw_only=True)
class CutOff:
    """What was missing or cut off."""

    problems: tuple[str, ...]
    not_closed: tuple[int, ...]
    num_open: int
    open: tuple[OpenOperation, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All that a report says about one attempt of a run."""

    run: str
    run_id: str
    attempt: int
    attempts: tuple[int, ...]
    world: World
    steps: Steps
    throughput: Throughput
    shares: Shares
    tracing: Tracing
    ranks: tuple[RankRow, ...]
    roles: tuple[RoleRow, ...]
    kinds: tuple[Kind, ...]
    clocks: Clocks
    cut_off: CutOff

    @property
    def is_whole(self) -> bool:
        """Whether every rank's trace was there, closed, readable and without drops."""
        cut = self.cut_off
        return not (self.world.missing or cut.problems or cut.not_closed or cut.num_open or self.tracing.num_dropped)

    def to_json(self) -> dict[str, Any]:
        """Return the content of summary.json; times are nanoseconds, shares fractions of 1."""
        return {"schema": SCHEMA, "hpcpace_version": __version__, **asdict(self)}
