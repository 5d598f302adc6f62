"""What a verdict on a synthetic run should say: the modes that are right, and the culprit with all its other names.

What a cause costs is known by leaving it out: the run without the fault, and the run without noise too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from experiments.score.network import crossings, same_traffic, slow_link
from experiments.score.scenario import NUM_WARMUP, Scenario
from experiments.score.timeline import RECV_NS, SEND_NS, Timeline, simulate
from experiments.score.work import COMPUTE_NS, DATA_NS, OPTIMIZER_NS
from hpcpace.trace.schema import Op

AMPLIFICATION = "synchronisation amplification"
STRAGGLER = "persistent straggler"
IMBALANCE = "pipeline imbalance"
CONTENTION = "fabric contention"
RUNTIME = "runtime and control plane"
COMMUNICATION = "communication-bound"
CORES = "ranks share cores"
HOST_BOUND = "host-bound"
HEALTHY = "healthy"
CANNOT_TELL = "cannot tell"

HEALTHY_SHARE, AMPLIFIED_SHARE = 0.04, 0.08
_BUBBLE_SHARE = 0.08
_CERTAIN = (STRAGGLER, RUNTIME, "input-bound", "hang")
_MODES = {
    "slow_rank": (STRAGGLER,),
    "slow_node": (STRAGGLER,),
    "slow_link": (CONTENTION,),
    "slow_switch": (CONTENTION,),
    "slow_stage": (IMBALANCE,),
    "rotating": (AMPLIFICATION, STRAGGLER),
    "transient": (STRAGGLER, RUNTIME),
    "periodic_service": (RUNTIME,),
    "contention": (CONTENTION,),
    "input_bound": ("input-bound",),
    "communication_bound": (COMMUNICATION,),
    "shared_cores": (CORES,),
    "foreign_load": (CORES,),
    "hang": ("hang",),
}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is right to say about a run.

    Attributes:
        modes: every mode that is right, the expected one first.
        varieties: of a straggler; empty where any is right, or where no straggler is.
        culprits: all names of the culprit that no trace can tell apart, like `rank 5` and `node n3`; empty where there
            is nobody to blame.
        ranks: the ranks that the culprit consists of, where it consists of ranks.
        tolerated: what may be named as well.
        is_identifiable: whether the data tell the culprit from other hardware.
        effect: excess of the culprit's work, or of the transfers that cross its link, over the others; None where
            there is no such figure.
        fault_share, noise_share: of the step time, what fault and noise cost.
    """

    modes: tuple[str, ...]
    varieties: tuple[str, ...]
    culprits: tuple[str, ...]
    ranks: tuple[int, ...]
    tolerated: tuple[str, ...]
    is_identifiable: bool
    effect: float | None
    fault_share: float
    noise_share: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def truth_of(scenario: Scenario) -> Truth:
    """Return the truth about a scenario; it costs three simulations."""
    ideal_ns = simulate(scenario, with_noise=False, with_fault=False).mean_step_ns
    healthy, faulty = simulate(scenario, with_fault=False), simulate(scenario)
    healthy_ns, step_ns = healthy.mean_step_ns, faulty.mean_step_ns
    fault_share = (step_ns - healthy_ns) / step_ns if scenario.fault not in ("none", "hang") else 0.0
    noise_share = (healthy_ns - ideal_ns) / step_ns
    link = slow_link(scenario)
    culprits = same_names(scenario, scenario.affected_ranks) if link is None else _links(scenario, link)
    is_identifiable = link is None or len(culprits) == 1
    truth = Truth(
        modes=_modes(scenario, fault_share, noise_share, is_identifiable=is_identifiable),
        varieties=_varieties(scenario),
        culprits=culprits,
        ranks=scenario.affected_ranks,
        tolerated=_tolerated(scenario),
        is_identifiable=is_identifiable,
        effect=_own_effect(scenario) if link is None else _link_effect(scenario, link, faulty, healthy),
        fault_share=fault_share,
        noise_share=noise_share,
    )
    return truth if scenario.data == "sound" else _without(truth, scenario)


def _without(truth: Truth, scenario: Scenario) -> Truth:
    """Return what is right to say where nothing is known of some ranks: only what the others measured of themselves.

    Waits and transfers prove nothing then. A rank that is slow is slow all the same; that the others are not does not
    make the job healthy.
    """
    left = tuple(rank for rank in truth.ranks if rank not in scenario.lost_ranks)
    modes = [mode for mode in truth.modes if mode in _CERTAIN and (left or mode not in (STRAGGLER, RUNTIME))]
    if left and scenario.fault in ("slow_rank", "slow_node", "transient"):
        modes.append(STRAGGLER)  # what it costs is said as the most that it can be
    return replace(
        truth,
        modes=(CANNOT_TELL, *modes),
        culprits=same_names(scenario, truth.ranks) if left else (),
        ranks=left,
        is_identifiable=bool(left),
        effect=None,
    )


def _tolerated(scenario: Scenario) -> tuple[str, ...]:
    if scenario.device == "host_bound":
        return ("phase forward", "phase backward", "phase optimizer", "phase other")
    return ("phase data",) if scenario.fault == "input_bound" else ()


def same_names(scenario: Scenario, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return every name of exactly these ranks: a rank, a node, a leaf or a slot."""
    wanted = frozenset(ranks)
    nodes, leaves = scenario.node_of_rank.tolist(), scenario.leaf_of_rank.tolist()
    units: dict[str, set[int]] = {}
    for rank in range(scenario.num_ranks):
        names = [f"rank {rank}", f"node n{nodes[rank] + 1}", f"leaf leaf{leaves[rank] + 1}"]
        if scenario.num_stages > 1:
            names.append(f"slot pp{rank % scenario.num_stages}")
        for name in names:
            units.setdefault(name, set()).add(rank)
    return tuple(name for name, members in units.items() if members == wanted)


def _links(scenario: Scenario, link: str) -> tuple[str, ...]:
    return tuple(f"link {name}" for name in same_traffic(scenario, link))


def _modes(scenario: Scenario, fault_share: float, noise_share: float, *, is_identifiable: bool) -> tuple[str, ...]:
    modes: list[str] = []
    if scenario.fault == "hang":
        return _MODES["hang"]
    if scenario.device == "host_bound":
        return (HOST_BOUND,)
    is_worth = fault_share >= 0.5 * noise_share or noise_share < AMPLIFIED_SHARE
    if scenario.fault != "none" and (is_worth or fault_share >= HEALTHY_SHARE):
        modes += _MODES[scenario.fault]
        # Where each stage is one rank, a slow rank and a stage with more work are the same.
        if scenario.fault in ("slow_rank", "slow_node", "slow_stage") and scenario.layout == "pp":
            modes += [STRAGGLER, IMBALANCE]
        if not is_identifiable:
            # One global all_reduce over a slow link looks like a larger message, and nothing is broken then.
            modes += [COMMUNICATION, CANNOT_TELL, HEALTHY]
    if noise_share >= HEALTHY_SHARE and (noise_share >= 0.5 * fault_share or not is_identifiable):
        modes.append(AMPLIFICATION)
        if scenario.noise == "periodic":
            modes.append(RUNTIME)
    if noise_share < AMPLIFIED_SHARE and fault_share < HEALTHY_SHARE:
        modes.append(HEALTHY)
        bubble = (scenario.num_stages - 1) / (scenario.num_microbatches + scenario.num_stages - 1)
        if bubble >= _BUBBLE_SHARE:
            modes.append(IMBALANCE)
        if scenario.clock_error_ns:
            modes.append(CANNOT_TELL)
    return tuple(dict.fromkeys(modes))


def _varieties(scenario: Scenario) -> tuple[str, ...]:
    if scenario.fault in ("rotating", "transient"):
        return (scenario.fault,)
    if scenario.fault == "periodic_service":
        return ("periodic",)
    return ("", "fixed", "fixed rank", "fixed slot", "fixed node")


def _own_effect(scenario: Scenario) -> float | None:
    """Return by what share the own work of the culprit's ranks exceeds that of others, the mean over its ranks.

    The first and the last stage of a pipeline have nobody to receive from or to send to, and take the time for their
    own: that, too, is work that they have and others do not. None where no rank is slow for good.
    """
    if scenario.fault not in ("slow_rank", "slow_node", "slow_stage"):
        return None
    own_ns = np.full(scenario.num_stages, COMPUTE_NS + OPTIMIZER_NS + DATA_NS)
    if scenario.num_stages > 1:
        own_ns[[0, -1]] += scenario.num_microbatches * (SEND_NS + RECV_NS)
    added_ns = scenario.size * (COMPUTE_NS + OPTIMIZER_NS)
    stages = sorted({rank % scenario.num_stages for rank in scenario.affected_ranks})
    if scenario.fault == "slow_stage" or scenario.num_replicas == 1:
        usual_ns = float(np.median(np.delete(own_ns, stages)))
        return float(np.mean(own_ns[stages] + added_ns)) / usual_ns - 1
    return float(np.mean(added_ns / own_ns[stages]))


def _link_effect(scenario: Scenario, link: str, faulty: Timeline, healthy: Timeline) -> float:
    """Return by what share all_reduces that cross a link take longer than without the fault.

    From the last enter until the last rank learns of the end, which takes time however fast the links are.
    """
    crossed = crossings(scenario)
    stages = [stage for stage in range(scenario.num_stages) if link in crossed.get(("dp", -1, stage), ())]
    total_ns = [0.0, 0.0]
    for index, timeline in enumerate((healthy, faulty)):
        reduced = next(of for of in timeline.operations if of.op == Op.ALL_REDUCE)
        for stage in stages:
            ranks = slice(stage, None, scenario.num_stages)
            exit_ns, enter_ns = (times[NUM_WARMUP:, :, ranks].max(axis=2) for times in (reduced.exit, reduced.enter))
            total_ns[index] += float((exit_ns - enter_ns).sum())
    return total_ns[1] / total_ns[0] - 1
