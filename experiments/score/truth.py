"""What a verdict on a synthetic run should say: the modes that are right, and the culprit with all its other names.

What a cause costs is known by leaving it out: the run without the fault, the run without noise, and the one without
both. A fault hides noise: beside a rank that is slower than noise ever makes the others, noise costs next to nothing.
Noise must be named for what leaving it out alone saves, and may be for what it costs once the fault is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from experiments.score import timeline
from experiments.score.scenario import NUM_WARMUP, Scenario
from hpcpace.diagnosis.summary import Culprit, Mode, Verdict
from hpcpace.trace.schema import Op

HEALTHY_SHARE, AMPLIFIED_SHARE = 0.04, 0.08
_BUBBLE_SHARE = 0.08
_CERTAIN = (Mode.STRAGGLER, Mode.RUNTIME, Mode.INPUT, Mode.HANG)
_MODES = {
    "slow_rank": (Mode.STRAGGLER,),
    "slow_node": (Mode.STRAGGLER,),
    "slow_link": (Mode.CONTENTION,),
    "slow_switch": (Mode.CONTENTION,),
    "slow_stage": (Mode.IMBALANCE,),
    "rotating": (Mode.AMPLIFICATION, Mode.STRAGGLER),
    "transient": (Mode.STRAGGLER, Mode.RUNTIME),
    "periodic_service": (Mode.RUNTIME,),
    "contention": (Mode.CONTENTION,),
    "input_bound": (Mode.INPUT,),
    "communication_bound": (Mode.COMMUNICATION,),
    "shared_cores": (Mode.CORES,),
    "foreign_load": (Mode.CORES,),
    "hang": (Mode.HANG,),
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
        fault_share, noise_share: of the step time, what leaving out the fault saves, and then the noise.
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
    """Return the truth about a scenario; it costs four simulations."""
    ideal_ns = timeline.simulate(scenario, with_noise=False, with_fault=False).mean_step_ns
    quiet_ns = timeline.simulate(scenario, with_noise=False).mean_step_ns
    healthy, faulty = timeline.simulate(scenario, with_fault=False), timeline.simulate(scenario)
    healthy_ns, step_ns = healthy.mean_step_ns, faulty.mean_step_ns
    fault_share = (step_ns - healthy_ns) / step_ns if scenario.fault not in ("none", "hang") else 0.0
    noise_share, alone_share = (healthy_ns - ideal_ns) / step_ns, (step_ns - quiet_ns) / step_ns
    link = timeline.slow_link(scenario)
    culprits = same_names(scenario, scenario.affected_ranks) if link is None else _links(scenario, link)
    is_identifiable = link is None or len(culprits) == 1
    truth = Truth(
        modes=_modes(scenario, fault_share, noise_share, alone_share, is_identifiable=is_identifiable),
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
    modes = [mode for mode in truth.modes if mode in _CERTAIN and (left or mode not in (Mode.STRAGGLER, Mode.RUNTIME))]
    if left and scenario.fault in ("slow_rank", "slow_node", "transient"):
        modes.append(Mode.STRAGGLER)  # what it costs is said as the most that it can be
    return replace(
        truth,
        modes=(Mode.CANNOT_TELL, *modes),
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
    units: dict[str, set[int]] = {}
    for rank in range(scenario.num_ranks):
        for name in scenario.names_of(rank):
            units.setdefault(name, set()).add(rank)
    return tuple(name for name, members in units.items() if members == wanted)


def _links(scenario: Scenario, link: str) -> tuple[str, ...]:
    return tuple(f"link {name}" for name in timeline.same_traffic(scenario, link))


def _modes(
    scenario: Scenario, fault_share: float, noise_share: float, alone_share: float, *, is_identifiable: bool
) -> tuple[str, ...]:
    modes: list[str] = []
    if scenario.fault == "hang":
        return _MODES["hang"]
    if scenario.device == "host_bound":
        return (Mode.HOST,)
    is_worth = fault_share >= 0.5 * alone_share or alone_share < AMPLIFIED_SHARE
    if scenario.fault != "none" and (is_worth or fault_share >= HEALTHY_SHARE):
        modes += _MODES[scenario.fault]
        # Where each stage is one rank, a slow rank and a stage with more work are the same.
        if scenario.fault in ("slow_rank", "slow_node", "slow_stage") and scenario.layout == "pp":
            modes += [Mode.STRAGGLER, Mode.IMBALANCE]
        if not is_identifiable:
            # One global all_reduce over a slow link looks like a larger message, and nothing is broken then.
            modes += [Mode.COMMUNICATION, Mode.CANNOT_TELL, Mode.HEALTHY]
    if noise_share >= HEALTHY_SHARE and (noise_share >= 0.5 * fault_share or not is_identifiable):
        modes.append(Mode.AMPLIFICATION)
    if scenario.noise == "periodic" and (noise_share >= 0.5 * fault_share or not is_identifiable):
        modes.append(Mode.RUNTIME)
    if noise_share < AMPLIFIED_SHARE and fault_share < HEALTHY_SHARE:
        modes.append(Mode.HEALTHY)
        bubble = (scenario.num_stages - 1) / (scenario.num_microbatches + scenario.num_stages - 1)
        if bubble >= _BUBBLE_SHARE:
            modes.append(Mode.IMBALANCE)
        if scenario.clock_error_ns:
            modes.append(Mode.CANNOT_TELL)
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
    own_ns = np.full(scenario.num_stages, timeline.COMPUTE_NS + timeline.OPTIMIZER_NS + timeline.DATA_NS)
    if scenario.num_stages > 1:
        own_ns[[0, -1]] += scenario.num_microbatches * (timeline.SEND_NS + timeline.RECV_NS)
    added_ns = scenario.size * (timeline.COMPUTE_NS + timeline.OPTIMIZER_NS)
    stages = sorted({rank % scenario.num_stages for rank in scenario.affected_ranks})
    if scenario.fault == "slow_stage" or scenario.num_replicas == 1:
        usual_ns = float(np.median(np.delete(own_ns, stages)))
        return float(np.mean(own_ns[stages] + added_ns)) / usual_ns - 1
    return float(np.mean(added_ns / own_ns[stages]))


def _link_effect(scenario: Scenario, link: str, faulty: timeline.Timeline, healthy: timeline.Timeline) -> float:
    """Return by what share all_reduces that cross a link take longer than without the fault.

    From the last enter until the last rank learns of the end, which takes time however fast the links are.
    """
    crossed = timeline.crossings(scenario)
    stages = [stage for stage in range(scenario.num_stages) if link in crossed.get(("dp", -1, stage), ())]
    total_ns = [0.0, 0.0]
    for index, run in enumerate((healthy, faulty)):
        reduced = next(of for of in run.operations if of.op == Op.ALL_REDUCE)
        for stage in stages:
            ranks = slice(stage, None, scenario.num_stages)
            exit_ns, enter_ns = (times[NUM_WARMUP:, :, ranks].max(axis=2) for times in (reduced.exit, reduced.enter))
            total_ns[index] += float((exit_ns - enter_ns).sum())
    return total_ns[1] / total_ns[0] - 1


# Of the links that nobody can tell apart, a verdict must hold this share for possible, or it claims too much.
_MIN_HELD_POSSIBLE = 0.5


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
        loss_share: what it says that its mode costs, as a share of the step; 0 where it does not say.
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
    loss_share: float = 0.0

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
        return self.mode != Mode.CANNOT_TELL and not self.is_right

    @property
    def is_right(self) -> bool:
        """Whether nothing in it is wrong: the mode, and whom it names, if anybody."""
        return self.is_mode_right and not self.is_wrong


class Judged(Protocol):
    """What is read of a scenario to judge a verdict on it."""

    @property
    def num_ranks(self) -> int: ...
    def names_of(self, rank: int) -> tuple[str, ...]:
        """Return the names of all units that a rank belongs to."""
        ...


def judge(scenario: Judged, truth: Truth, verdict: Verdict) -> Judgement:
    """Return the judgement of a verdict."""
    named = [culprit for culprit in verdict.culprits if not set(_names(culprit)) & set(truth.tolerated)]
    right = [culprit for culprit in named if _is_right(scenario, truth, culprit)]
    is_found = bool(named) and (bool(set(_names(named[0])) & set(truth.culprits)) and named[0] in right)
    if not is_found and truth.ranks and right:
        parts = set().union(*(_ranks(scenario, culprit) for culprit in right))
        is_found = parts == set(truth.ranks)
    is_to_blame = bool(truth.culprits or truth.ranks)
    is_mode_right = verdict.mode in truth.modes
    if verdict.mode == Mode.STRAGGLER and truth.varieties and verdict.variety not in truth.varieties:
        is_mode_right = False
    return Judgement(
        mode=verdict.mode,
        variety=verdict.variety,
        is_mode_right=is_mode_right,
        has_culprit=is_to_blame and truth.is_identifiable,
        is_found=is_found,
        named=tuple(f"{culprit.kind} {culprit.id}" for culprit in named),
        num_named_right=len(right),
        is_abstention=is_to_blame and (not named or verdict.mode == Mode.CANNOT_TELL),
        is_false_alarm=bool(named) and not is_to_blame,
        is_covered=_is_covered(truth, named[0]) if is_found and truth.effect is not None else None,
        confidence=verdict.confidence,
        loss_share=getattr(verdict, "loss_share", 0.0),
    )


def _names(culprit: Culprit) -> tuple[str, ...]:
    return (f"{culprit.kind} {culprit.id}", *culprit.aliases)


def _is_right(scenario: Judged, truth: Truth, culprit: Culprit) -> bool:
    names = set(_names(culprit))
    if names & set(truth.culprits):
        num_held = len(names & set(truth.culprits))
        return truth.is_identifiable or num_held >= _MIN_HELD_POSSIBLE * len(truth.culprits)
    ranks = _ranks(scenario, culprit)
    return bool(ranks) and ranks <= set(truth.ranks)


def _ranks(scenario: Judged, culprit: Culprit) -> set[int]:
    """Return the ranks that a culprit consists of; none for a link or a phase."""
    name = f"{culprit.kind} {culprit.id}"
    return {rank for rank in range(scenario.num_ranks) if name in scenario.names_of(rank)}


def _is_covered(truth: Truth, culprit: Culprit) -> bool:
    low, high = culprit.interval
    return truth.effect is not None and low <= truth.effect <= high
