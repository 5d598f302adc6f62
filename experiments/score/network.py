"""Which links an operation crosses, and how long transfers take: the slowest link of a group sets its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.score.scenario import NUM_WARMUP, Scenario
from experiments.score.work import COMPUTE_NS, MS

ALL_REDUCE_NS, MESSAGE_NS, NORM_NS = 8 * MS, 0.7 * MS, 0.04 * MS
ALL_REDUCE_BYTES, MESSAGE_BYTES, NORM_BYTES = 50_000_000, 8_000_000, 4
BURST_SHARE, BURST_STEPS = 0.3, 5
TRANSFER_NOISE = 0.03

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Nanoseconds that transfers take once all have come.

    Attributes:
        all_reduce: by bucket and by group of data parallelism, (total_steps, num_buckets, num_stages).
        message: of each microbatch between stage s and s + 1 of a replica, back and forth,
            (total_steps, 2, num_microbatches, num_replicas, num_stages - 1).
        norm: of the small all_reduce over all ranks, (total_steps,).
        size_factor: by which the messages are larger than usual.
    """

    all_reduce: FloatArray
    message: FloatArray
    norm: FloatArray
    size_factor: float


def link_names(scenario: Scenario) -> tuple[str, ...]:
    """Return the names of all links: those of the nodes, then the uplinks of the leaves."""
    uplinks = [f"leaf{leaf + 1} uplink" for leaf in range(scenario.num_leaves)] if scenario.num_leaves > 1 else []
    return (*(f"n{node + 1}" for node in range(scenario.num_nodes)), *uplinks)


def links_of(scenario: Scenario, ranks: Sequence[int]) -> frozenset[str]:
    """Return the links that an operation of these ranks crosses."""
    nodes = {int(scenario.node_of_rank[rank]) for rank in ranks}
    leaves = {int(scenario.leaf_of_rank[rank]) for rank in ranks}
    names = [f"n{node + 1}" for node in nodes] if len(nodes) > 1 else []
    return frozenset([*names, *(f"leaf{leaf + 1} uplink" for leaf in leaves if len(leaves) > 1)])


def crossings(scenario: Scenario) -> dict[tuple[str, int, int], frozenset[str]]:
    """Return the links of every group of large transfers, by (kind, replica, stage); a group of all replicas has -1."""
    stages, replicas = scenario.num_stages, scenario.num_replicas
    found = {}
    for stage in range(stages):
        if replicas > 1:
            found["dp", -1, stage] = links_of(scenario, range(stage, scenario.num_ranks, stages))
    for replica in range(replicas):
        for stage in range(stages - 1):
            first = replica * stages + stage
            found["pp", replica, stage] = links_of(scenario, (first, first + 1))
    return found


def slow_link(scenario: Scenario) -> str | None:
    """Return the name of the link that the fault slows."""
    if scenario.fault == "slow_link":
        return f"n{scenario.resolved_target + 1}"
    return f"leaf{scenario.resolved_target + 1} uplink" if scenario.fault == "slow_switch" else None


def same_traffic(scenario: Scenario, link: str) -> tuple[str, ...]:
    """Return the links that are crossed by the same operations as this one, so that no trace can tell them apart."""
    carried = {
        name: frozenset(key for key, links in crossings(scenario).items() if name in links)
        for name in link_names(scenario)
    }
    return tuple(name for name, operations in carried.items() if operations == carried[link])


def transfers_of(scenario: Scenario, *, with_fault: bool = True) -> Transfers:
    """Return the transfers of a scenario; their noise is the same with and without the fault."""
    steps, stages, replicas = scenario.total_steps, scenario.num_stages, scenario.num_replicas
    random = scenario.random("transfer")
    all_reduce = random.lognormal(0.0, TRANSFER_NOISE, (steps, scenario.num_buckets, stages))
    # A ring sends 2 (n - 1) / n of the message over each link (Patarasuk and Yuan 2009, section 3).
    all_reduce *= (replicas - 1) / replicas * ALL_REDUCE_NS / scenario.num_buckets
    shape = (steps, 2, scenario.num_microbatches, replicas, stages - 1)
    message = MESSAGE_NS * random.lognormal(0.0, TRANSFER_NOISE, shape)
    norm = NORM_NS + random.exponential(0.2 * NORM_NS, steps)
    size_factor = 1.0
    slower = 1.0 + scenario.size * COMPUTE_NS / ALL_REDUCE_NS
    link = slow_link(scenario)
    if with_fault and link is not None:
        for (kind, replica, stage), links in crossings(scenario).items():
            if link in links and kind == "dp":
                all_reduce[:, :, stage] *= slower
            elif link in links:
                message[:, :, :, replica, stage] *= slower
    elif with_fault and scenario.fault == "communication_bound":
        size_factor = slower
        all_reduce *= slower
        message *= slower
    elif with_fault and scenario.fault == "contention":
        inflation = _bursts(scenario)
        all_reduce *= inflation[:, None, None]
        message *= inflation[:, None, None, None, None]
    return Transfers(all_reduce=all_reduce, message=message, norm=norm, size_factor=size_factor)


def _bursts(scenario: Scenario) -> FloatArray:
    """Return by what other traffic inflates transfers, (total_steps,): bursts of random length, `size` on average."""
    random = scenario.random("fault")
    steps = scenario.total_steps
    quiet_steps = round(BURST_STEPS * (1 - BURST_SHARE) / BURST_SHARE)
    # Quiet spells are of bounded length, so that a short run has a burst too.
    quiet = random.integers(1, 2 * quiet_steps, steps)
    lengths = np.stack([quiet, random.geometric(1 / BURST_STEPS, steps)])
    is_burst = np.repeat(np.tile([False, True], steps), lengths.T.ravel())[:steps]
    is_burst[:NUM_WARMUP] = False
    height = scenario.size / BURST_SHARE * COMPUTE_NS / ALL_REDUCE_NS * random.gamma(4.0, 0.25, steps)
    return 1.0 + is_burst * height
