"""What a synthetic run is: its cluster, its layout, its noise, its clocks and the one fault in it, all from a seed.

A scenario holds all that `experiments.score.generator` needs. The seed decides what it leaves open: the target of the
fault, and whose clock is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

NoiseKind = Literal["normal", "lognormal", "heavy", "periodic", "common_mode", "per_node"]
Fault = Literal[
    "none", "slow_rank", "slow_node", "slow_link", "slow_switch", "slow_stage", "rotating", "transient",
    "periodic_service", "contention", "input_bound", "communication_bound", "shared_cores", "foreign_load", "hang",
]  # fmt: skip
DataFault = Literal[
    "sound", "missing", "other_run", "other_start", "zero_times", "unknown_enums", "exits_before_enters",
    "overlapping_steps", "wrong_clock", "no_collectives", "host_times",
]  # fmt: skip
DeviceKind = Literal["none", "synchronised", "ahead", "host_bound"]

NUM_WARMUP = 2
EVERYWHERE = -1


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One synthetic run.

    Ranks are numbered like elements of an array (dp, pp) in C order, and fill one node after the other.

    Attributes:
        num_stages: of the pipeline: 1 is data parallelism, `num_ranks` a pipeline alone, anything between both.
        num_steps: steps behind the warm-up of `NUM_WARMUP` steps.
        num_microbatches: of a step, where there is a pipeline.
        num_buckets: blocking all_reduces of a step within each group of data parallelism.
        level: standard deviation of the noise, relative to the computation of a step.
        spread: standard deviation of the ranks' speeds, which last the run: no two pieces of hardware are equal.
        max_offset_ns, max_drift_ppm: bounds of what the nodes' clocks are apart.
        clock_interval_s: between two synchronisations; 0 synchronises at the begin and the end only.
        clock_error_ns: what the recorded offsets of one innocent node are wrong by, beyond their half-width.
        size: of the fault, relative to the computation of a step: what it adds to a step of its target at most times.
        target: rank, node, leaf or stage, from 0, whichever the fault is about; None leaves it to the seed, EVERYWHERE
            is for a periodic service on all nodes.
        device: what the hosts of ranks with a device do; none without devices. `host_bound` keeps devices waiting.
        data: what is wrong with the traces themselves; `host_times` of devices lack those of steps and phases.
        lost_share: of the ranks whose traces that is about; one rank at least, and all but one at the most unless 1.
        is_culprit_lost: whether the ranks that the fault slows are among them.
    """

    seed: int
    num_ranks: int = 64
    ranks_per_node: int = 4
    nodes_per_leaf: int = 4
    num_stages: int = 1
    num_steps: int = 200
    num_microbatches: int = 8
    num_buckets: int = 2
    noise: NoiseKind = "normal"
    level: float = 0.02
    spread: float = 0.0
    max_offset_ns: int = 2_000_000_000
    max_drift_ppm: float = 20.0
    clock_interval_s: float = 0.0
    clock_error_ns: int = 0
    fault: Fault = "none"
    size: float = 0.0
    target: int | None = None
    device: DeviceKind = "none"
    data: DataFault = "sound"
    lost_share: float = 0.0
    is_culprit_lost: bool = False

    def __post_init__(self) -> None:
        if self.noise not in get_args(NoiseKind) or self.fault not in get_args(Fault):
            raise ValueError(f"no such noise or fault: {self.noise!r}, {self.fault!r}")
        if self.num_ranks % self.ranks_per_node or self.num_ranks % self.num_stages:
            raise ValueError(f"{self.num_ranks} ranks do not fill nodes of {self.ranks_per_node} or the pipelines")
        if self.fault == "hang" and self.layout == "pp":
            raise ValueError("a hang is one of an all_reduce, and a pipeline alone has none")
        if self.fault == "slow_stage" and self.num_stages == 1:
            raise ValueError("a slow stage needs a pipeline")
        if {"slow_link": self.num_nodes, "slow_switch": self.num_leaves}.get(self.fault, 2) == 1:
            raise ValueError(f"{self.fault} needs traffic between nodes or leaves")
        if self.target is not None and not EVERYWHERE <= self.target < max(self.num_targets, 1):
            raise ValueError(f"target {self.target}: there are {self.num_targets} for {self.fault}")

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def num_leaves(self) -> int:
        return -(-self.num_nodes // self.nodes_per_leaf)

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.num_stages

    @property
    def layout(self) -> Literal["dp", "pp", "dp x pp"]:
        if self.num_stages == 1:
            return "dp"
        return "pp" if self.num_replicas == 1 else "dp x pp"

    @property
    def total_steps(self) -> int:
        """Warm-up, steps, and the one in which a run hangs."""
        return NUM_WARMUP + self.num_steps + (self.fault == "hang")

    @property
    def num_targets(self) -> int:
        """How many things the fault can be about; 0 where it has no target."""
        targets = {"slow_switch": self.num_leaves, "slow_stage": self.num_stages}
        targets |= dict.fromkeys(("slow_rank", "transient", "hang"), self.num_ranks)
        targets |= dict.fromkeys(("slow_node", "slow_link", "periodic_service", "foreign_load"), self.num_nodes)
        return targets.get(self.fault, 0)

    @property
    def resolved_target(self) -> int:
        """The target, drawn from the seed unless given; EVERYWHERE if the fault has no target."""
        if not self.num_targets:
            return EVERYWHERE
        return int(self.random("target").integers(self.num_targets)) if self.target is None else self.target

    @property
    def affected_ranks(self) -> tuple[int, ...]:
        """The ranks whose own work the fault slows; empty where it slows no rank in particular."""
        target = self.resolved_target
        ranks = np.arange(self.num_ranks)
        if target == EVERYWHERE:
            return ()
        if self.fault in ("slow_rank", "transient", "hang"):
            return (target,)
        if self.fault in ("slow_node", "periodic_service", "foreign_load"):
            return tuple(ranks[self.node_of_rank == target].tolist())
        return tuple(ranks[ranks % self.num_stages == target].tolist()) if self.fault == "slow_stage" else ()

    @property
    def lost_ranks(self) -> frozenset[int]:
        """The ranks of which the traces say nothing that can be believed."""
        if self.data in ("sound", "host_times"):
            return frozenset()
        if self.lost_share == 1:
            return frozenset(range(self.num_ranks))
        guilty = set(self.affected_ranks)
        others = [rank for rank in range(self.num_ranks) if rank not in guilty]
        order = self.random("lost").permutation(others).tolist()
        order = [*sorted(guilty), *order] if self.is_culprit_lost else [*order, *sorted(guilty)]
        number = min(max(round(self.lost_share * self.num_ranks), 1), self.num_ranks - 1)
        return frozenset(order[:number])

    @property
    def clock_error_node(self) -> int | None:
        """The node whose recorded offsets are wrong: neither the reference nor one that the fault is about."""
        if not self.clock_error_ns:
            return None
        guilty = {0, *(self.node_of_rank[list(self.affected_ranks)].tolist())}
        if self.fault == "slow_link":
            guilty.add(self.resolved_target)
        innocent = [node for node in range(self.num_nodes) if node not in guilty]
        return int(self.random("clock error").choice(innocent)) if innocent else None

    @property
    def node_of_rank(self) -> np.ndarray:
        return np.arange(self.num_ranks) // self.ranks_per_node

    @property
    def leaf_of_rank(self) -> np.ndarray:
        return self.node_of_rank // self.nodes_per_leaf

    def names_of(self, rank: int) -> tuple[str, ...]:
        """Return the names of all units that a rank belongs to: itself, its node, leaf and slot."""
        node, leaf = rank // self.ranks_per_node, rank // self.ranks_per_node // self.nodes_per_leaf
        names = (f"rank {rank}", f"node n{node + 1}", f"leaf leaf{leaf + 1}")
        return names if self.num_stages == 1 else (*names, f"slot pp{rank % self.num_stages}")

    def random(self, stream: str) -> np.random.Generator:
        """Return the random numbers of one purpose: what else a scenario draws does not change them."""
        return np.random.default_rng([self.seed, *stream.encode()])
