"""What a verdict on a synthetic run should say: the modes that are right, and the culprit with all its other names.

What a cause costs is known by leaving it out: the run without the fault, and the run without noise too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from experiments.score.scenario import NUM_WARMUP, Scenario
from experiments.score.timeline import (
    COMPUTE_NS,
    DATA_NS,
    OPTIMIZER_NS,
    RECV_NS,
    SEND_NS,
    Timeline,
    crossings,
    same_traffic,
    simulate,
    slow_link,
)
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


# Of the links that nobody can tell apart, a verdict must hold this share for possible, or it claims too much.
_MIN_HELD_POSSIBLE = 0.5


class Culprit(Protocol):
    """What is read of a culprit of a verdict."""

    @property
    def kind(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def interval(self) -> tuple[float, float]: ...


class Verdict(Protocol):
    """What is read of a verdict; `variety` says how a straggler recurs."""

    @property
    def mode(self) -> str: ...
    @property
    def variety(self) -> str: ...
    @property
    def culprits(self) -> Sequence[Culprit]: ...
    @property
    def confidence(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The judgement of one verdict.

    Attributes:
        mode, variety: that it gave.
        is_mode_right: whether the truth holds it for right.
        has_culprit: whether somebody was to be named.
        is_found: whether the one to be named was named.
        named: the culprits that it named, without those that may be named.
        num_named_right: those of them that are, or are part of, the true one.
        is_abstention: whether somebody was to be named, and nobody was.
        is_false_alarm: whether somebody was named, and nobody is to blame.
        is_covered: whether the interval of the found culprit's effect holds the true effect; None without.
        confidence: that it gave.
    """

    mode: str
    variety: str
    is_mode_right: bool
    has_culprit: bool
    is_found: bool
    named: tuple[str, ...]
    num_named_right: int
    is_abstention: bool
    is_false_alarm: bool
    is_covered: bool | None
    confidence: float

    @property
    def num_named(self) -> int:
        """Culprits that it named."""
        return len(self.named)

    @property
    def is_wrong(self) -> bool:
        """Whether it blames somebody who is not to blame."""
        return self.num_named > self.num_named_right

    @property
    def is_wrong_and_confident(self) -> bool:
        """Whether it says something, and that is wrong: a mode, or whom it names."""
        return self.mode != CANNOT_TELL and not self.is_right

    @property
    def is_right(self) -> bool:
        """Whether nothing in it is wrong: the mode, and whom it names, if anybody."""
        return self.is_mode_right and not self.is_wrong


def judge(scenario: Scenario, truth: Truth, verdict: Verdict) -> Judgement:
    """Return the judgement of a verdict."""
    named = [culprit for culprit in verdict.culprits if not set(_names(culprit)) & set(truth.tolerated)]
    right = [culprit for culprit in named if _is_right(scenario, truth, culprit)]
    is_found = bool(named) and (bool(set(_names(named[0])) & set(truth.culprits)) and named[0] in right)
    if not is_found and truth.ranks and right:
        parts = set().union(*(_ranks(scenario, culprit) for culprit in right))
        is_found = parts == set(truth.ranks)
    is_mode_right = verdict.mode in truth.modes
    if verdict.mode == STRAGGLER and truth.varieties and verdict.variety not in truth.varieties:
        is_mode_right = False
    return Judgement(
        mode=verdict.mode,
        variety=verdict.variety,
        is_mode_right=is_mode_right,
        has_culprit=bool(truth.culprits) and truth.is_identifiable,
        is_found=is_found,
        named=tuple(f"{culprit.kind} {culprit.id}" for culprit in named),
        num_named_right=len(right),
        is_abstention=bool(truth.culprits) and (not named or verdict.mode == CANNOT_TELL),
        is_false_alarm=bool(named) and not truth.culprits,
        is_covered=_is_covered(truth, named[0]) if is_found and truth.effect is not None else None,
        confidence=verdict.confidence,
    )


def _names(culprit: Culprit) -> tuple[str, ...]:
    return (f"{culprit.kind} {culprit.id}", *culprit.aliases)


def _is_right(scenario: Scenario, truth: Truth, culprit: Culprit) -> bool:
    names = set(_names(culprit))
    if names & set(truth.culprits):
        num_held = len(names & set(truth.culprits))
        return truth.is_identifiable or num_held >= _MIN_HELD_POSSIBLE * len(truth.culprits)
    ranks = _ranks(scenario, culprit)
    return bool(ranks) and ranks <= set(truth.ranks)


def _ranks(scenario: Scenario, culprit: Culprit) -> set[int]:
    """Return the ranks that a culprit consists of; none for a link or a phase."""
    numbers = range(scenario.num_ranks)
    match culprit.kind:
        case "rank":
            return {int(culprit.id)}
        case "node":
            return {rank for rank in numbers if f"n{scenario.node_of_rank[rank] + 1}" == culprit.id}
        case "leaf":
            return {rank for rank in numbers if f"leaf{scenario.leaf_of_rank[rank] + 1}" == culprit.id}
        case "slot":
            return {rank for rank in numbers if f"pp{rank % scenario.num_stages}" == culprit.id}
        case _:
            return set()


def _is_covered(truth: Truth, culprit: Culprit) -> bool:
    low, high = culprit.interval
    return truth.effect is not None and low <= truth.effect <= high
