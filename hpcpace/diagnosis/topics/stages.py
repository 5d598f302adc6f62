"""In which stage a rank is late, in words: the phase that shows it with its figures, and advice that fits the stage."""

from __future__ import annotations

from collections.abc import Sequence

from hpcpace.core.records import dataclass
from hpcpace.core.text import format_duration, listed
from hpcpace.diagnosis.finding import Evidence, Said
from hpcpace.metrics.phase_cores import Spent
from hpcpace.metrics.roles import PhaseExcess, Stage, StageComparison

_MIN_SURE_EVENTS = 8  # display: so many at equal numbers of steps are no cron job, which slips through the steps
_MIN_SHOWN_SHARE = 0.2  # display: of the largest difference, below which a phase is not mentioned

_LATE_BY = {
    Stage.DATA: "data loading",
    Stage.COLLECTION: "garbage collection",
    Stage.NO_PHASE: "something that no phase accounts for",
    Stage.HOST: "a host that keeps its device waiting",
}
_PHASES = {
    "host": "idle time of the device",
    "data": "data loading",
    "gc": "garbage collection",
    "other": "time outside all phases",
}
_NO_GRAD = "work of modules without gradients"
_CHECK_COMPUTE = "check clock speeds, throttling, pinning and other processes there"
_BY_COMPUTE = {
    Spent.RUNNING: "computation",
    Spent.IDLE: "waiting that uses no core",
    Spent.UNKNOWN: "computation or waiting inside it",
}
_CHECK_OFF_CORE = "find out what it waits for there, with py-spy dump: files, locks, other processes, sleep"
_CHECK_SPENT = {
    Spent.RUNNING: _CHECK_COMPUTE,
    Spent.IDLE: _CHECK_OFF_CORE,
    Spent.UNKNOWN: "find out with py-spy dump whether it waits there, for files, locks, other processes or a timer; if "
    f"not, {_CHECK_COMPUTE}",
}
_CHECK = {
    Stage.DATA: "check data loading there: number of workers, file system, tokenising, size of the samples",
    Stage.COLLECTION: "call gc.freeze() after start-up there, and collect at the same step on all ranks",
    Stage.NO_PHASE: "check what the script does there outside the phases: loading without a DataLoader, a rollout, "
    "logging, metrics, saving, sleep",
    Stage.HOST: "check the host there, not its device: pinning, clock speeds and other processes on its cores",
}
_MOVE_LAYERS = "move layers from that stage to the others; if the partition is even, check the stage's host"
_CHECK_NO_GRAD = "check what the script does there without gradients: a rollout, sampling, a teacher, an evaluation"
_CHECK_FORWARD = "this trace has no forward phase, so it may be the forward pass: check that, and what the script does"
_CHECK_EVENTS = {
    Stage.DATA: "check what the loader does then: a new epoch that restarts workers, a new shard, tokenising",
    Stage.COLLECTION: "call gc.freeze() after start-up, and collect at the same step on all ranks or not in the loop",
}
_FIND_PERIODIC = "find out what runs at that interval: cron, health checks, monitoring"
_FIND_RECURRING = "find out what else runs there: daemons, health checks, other jobs, throttling"


@dataclass(frozen=True, kw_only=True)
class StagedEvidence(Evidence):
    """Evidence on ranks whose phases are compared with those of others, or with their own other steps.

    Attributes:
        stages: in which stage each culprit is late, in their order; None where its phases are not known.
    """

    stages: tuple[StageComparison | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecurringEvidence(StagedEvidence):
    """Evidence on something that may come back.

    Attributes:
        period_ns: its distance in nanoseconds; None where it varies.
        period_steps: the same in steps, where it comes at equal numbers of steps; else None.
    """

    period_ns: float | None = None
    period_steps: int | None = None


def by_stage(comparisons: Sequence[StageComparison | None], spent: Spent = Spent.RUNNING) -> str:
    """Return by what ranks are late, such as ` by data loading`; empty where that is not known of all of them.

    Args:
        comparisons: of each culprit.
        spent: how they spend most of their excess in computation, or all of it where no stage is known.
    """
    stages = _stages(comparisons)
    if not stages:
        return f" by {_BY_COMPUTE[spent]}" if spent is Spent.IDLE else ""
    return f" by {listed([_late_by(stage, comparisons, spent) for stage in stages])}"


def _late_by(stage: Stage, comparisons: Sequence[StageComparison | None], spent: Spent) -> str:
    if _is_no_grad(stage, comparisons):
        return f"{_NO_GRAD}, outside forward and backward"
    return _BY_COMPUTE[spent] if stage is Stage.COMPUTE else _LATE_BY[stage]


def _is_no_grad(stage: Stage, comparisons: Sequence[StageComparison | None]) -> bool:
    """Return whether the time in no phase that makes ranks late is that of modules which run without gradients."""
    of_stage = [found for found in comparisons if found is not None and stage in found.stages]
    return stage is Stage.NO_PHASE and bool(of_stage) and all(found.is_without_gradients for found in of_stage)


def stage_sentences(comparisons: Sequence[StageComparison | None], names: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence for each culprit: the phases that make it late with their times, or why none can be named."""
    pairs = zip(comparisons, names, strict=False)
    return tuple(sentence for found, name in pairs if found is not None for sentence in _sentences(found, name))


def _sentences(found: StageComparison, name: str) -> list[str]:
    if not found.stages:
        return [f"cannot tell which stage{_of(name)} is slow: no phase holds most of the excess beyond chance"]
    phases = [each for each in found.phases if each.stage in found.stages]
    largest_ns = phases[0].own_ns - phases[0].usual_ns
    # Phases of a stage may be longer than others' beyond chance only together.
    longer = [each for each in phases if each.is_longer] or phases[:1]
    return [
        _phase_words(each, name, found)
        for each in longer
        if each.own_ns - each.usual_ns >= _MIN_SHOWN_SHARE * largest_ns
    ]


def _phase_words(each: PhaseExcess, name: str, found: StageComparison) -> str:
    own, usual, low, high = (format_duration(max(ns, 0.0)) for ns in (each.own_ns, each.usual_ns, *each.interval_ns))
    figures = f"{own} in these steps, {usual} in others" if found.is_with_itself else f"{own}, others {usual}"
    where = f", most of it {_NO_GRAD}" if _is_no_grad(each.stage, [found]) else ""
    return f"{_PHASES.get(each.phase, each.phase)}{_of(name)}: {figures} (95 %: {low} to {high} more){where}"


def longest_phase(comparisons: Sequence[StageComparison | None]) -> str:
    """Return the phase of computation that makes ranks late by most; empty where stages or phases differ."""
    named = [found.phases if found is not None and Stage.COMPUTE in found.stages else () for found in comparisons]
    first = {next((each.phase for each in phases if each.stage is Stage.COMPUTE), "") for phases in named}
    return first.pop() if len(first) == 1 else ""


def _of(name: str) -> str:
    return f" of {name}" if name else ""


def advice_of_straggler(
    comparisons: Sequence[StageComparison | None], exclusion: str, spent: Spent = Spent.RUNNING
) -> str:
    """Return what to do about ranks that are late, in the stage that makes them late.

    Args:
        comparisons: of each culprit.
        exclusion: the line that leaves their nodes out of the next job, which helps against slow hardware alone.
        spent: how they spend most of their excess in computation, or all of it where no stage is known.
    """
    stages = _stages(comparisons)
    if not stages:
        is_open = any(found is not None for found in comparisons)
        advice = f"{_CHECK_SPENT[spent]}, and data loading" if is_open else _CHECK_SPENT[spent]
    else:
        advice = "; ".join(_check(stage, comparisons, spent) for stage in stages)
    is_of_hardware = spent is not Spent.IDLE and (not stages or Stage.COMPUTE in stages)
    return f"{advice}, or leave it out: {exclusion}" if exclusion and is_of_hardware else advice


def advice_of_imbalance(comparisons: Sequence[StageComparison | None]) -> str:
    """Return what to do about a pipeline stage with more work: layers can only be moved where it computes more."""
    stages = _stages(comparisons) or [Stage.COMPUTE]
    return "; ".join(_MOVE_LAYERS if stage is Stage.COMPUTE else _check(stage, comparisons) for stage in stages)


def _check(stage: Stage, comparisons: Sequence[StageComparison | None], spent: Spent = Spent.RUNNING) -> str:
    has_forward = all(found is None or found.has_forward for found in comparisons)
    if _is_no_grad(stage, comparisons):
        return _CHECK_NO_GRAD
    if stage is Stage.COMPUTE:
        return _CHECK_SPENT[spent]
    return _CHECK[stage] if has_forward or stage is not Stage.NO_PHASE else _CHECK_FORWARD


def _stages(comparisons: Sequence[StageComparison | None]) -> list[Stage]:
    """Return the stages of all culprits, in order; none if that of one is not known."""
    named = [found.stages if found is not None else () for found in comparisons]
    return list(dict.fromkeys(stage for stages in named for stage in stages)) if all(named) else []


def periodic_headline(evidence: RecurringEvidence, said: Said) -> str:
    """Return the line that names something periodic."""
    where = f" on {said.who}" if said.finding.culprits else ""
    what, often = subject_of_events(evidence), interval_words_of(evidence)
    return f"runtime and control plane: {what} that recurs every {often}{where} costs {said.lost}"


def subject_of_events(evidence: RecurringEvidence) -> str:
    """Return what recurs: a stage where one holds most of the events, else `something`."""
    named = [
        _NO_GRAD if _is_no_grad(stage, evidence.stages) else _LATE_BY[stage]
        for stage in _stages(evidence.stages)
        if stage in (Stage.DATA, Stage.COLLECTION) or _is_no_grad(stage, evidence.stages)
    ]
    return listed(named) or "something"


def interval_words_of(evidence: RecurringEvidence) -> str:
    """Return the distance of events, in steps where they are bound to these, as in `50 steps (826 ms)`."""
    length = format_duration(evidence.period_ns or 0.0)
    return f"{evidence.period_steps} steps ({length})" if evidence.period_steps else length


def advice_of_events(evidence: RecurringEvidence) -> str:
    """Return what to do about events: what recurs in steps is the script's, what recurs in time is the system's."""
    stages = _stages(evidence.stages)
    known = [_CHECK_EVENTS[stage] for stage in stages if stage in _CHECK_EVENTS]
    if known:
        return "; ".join(known)
    if evidence.period_ns is None:
        return _FIND_RECURRING
    if not evidence.period_steps:
        return _FIND_PERIODIC
    script = f"find out what the script does every {evidence.period_steps} steps"
    if _is_no_grad(Stage.NO_PHASE, evidence.stages):
        script += " without gradients"
    elif Stage.NO_PHASE in stages:
        script += ", which no phase accounts for"
    advice = f"{script}: a rollout, evaluation, checkpoints, logging"
    # A few events may be at equal numbers of steps by chance.
    num_late = max((found.num_steps for found in evidence.stages if found is not None), default=0)
    return advice if num_late >= _MIN_SURE_EVENTS else f"{advice}; or what runs on the host at that interval"
