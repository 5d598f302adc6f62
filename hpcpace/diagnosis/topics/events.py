"""Events of the runtime: long steps that come back, garbage collection, and evaluations or checkpoints of some ranks.

An event is a step that takes much longer; events count if they come back at equal distances or on the same node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import format_duration, percent, plural
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import (
    Case,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Panels,
    Said,
    confidence_of,
    first_ranks,
    mean_share_interval,
    phase_culprit,
    place_culprit,
    rank_culprit,
)
from hpcpace.diagnosis.summary import Culprit, Mode
from hpcpace.diagnosis.topics.stages import (
    RecurringEvidence,
    advice_of_events,
    periodic_headline,
    stage_sentences,
    subject_of_events,
)
from hpcpace.diagnosis.topics.straggler import LatenessEvidence, LatePattern
from hpcpace.metrics import Bools, Floats
from hpcpace.metrics.phases import Part
from hpcpace.metrics.recurrence import Period, PeriodThresholds, find_period, run_begins, steps_between
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.roles import Stage, StageComparison, StageThresholds, compare_events
from hpcpace.metrics.special import NORMAL_MAD, Z_95, bdtrc, lower_median
from hpcpace.trace.schema import Phase

_MIN_P = 1e-300  # statistics: the logarithm of less is not finite


@dataclass(frozen=True, kw_only=True)
class EventThresholds(Thresholds, topic="events"):
    """Which steps are events, and when they come back."""

    least_spreads: float = number(5.0, "standard errors")
    """Robust standard deviations above its median from which a step is an event: jitter stays below."""
    least_excess: float = number(0.03, "times")
    """Excess over the usual work from which a step is an event: shorter ones cost nothing even if steady."""
    least_hit_share: float = number(0.6, "share")
    """Share of the expected events that a node must have to count as struck by a period; a period needs such a node."""
    named_nodes_share: float = number(0.25, "share")
    """Share of the nodes up to which the struck ones are named; more are nobody's in particular."""
    least_ratio: float = number(2.0, "times")
    """Events of a node over those of the next one: where all are struck by chance, one has the most."""
    regular_level: float = number(0.05, "probability")
    """Level at which events of one node count as periodic: only the words depend on it."""
    sure_level: float = number(1e-3, "probability")
    """Level at which a struck node is believed: who is struck says more than that somebody is."""
    least_ratio_of_rank: float = number(2.0, "times")
    """Excess of a rank over that of the next one in each event from which the event may be its own."""
    rank_level: float = number(0.02, "probability")
    """Level at which events of one node that has all ranks are one rank's: by chance each has any rank."""
    rank_level_in_steps: float = number(0.15, "probability")
    """The same where events come by number of steps: what counts steps is the script, which has no rank by chance."""
    alternation_share: float = number(0.1, "share")
    """Part of a cycle by which events may miss a multiple of the alternation of steps and still be it."""
    least_part_of_longest: float = number(0.25, "share")
    """Part of the longest time in checkpoints or evaluations from which a rank counts as making them."""


@dataclass(frozen=True, kw_only=True)
class EventEvidence(RecurringEvidence):
    """Single long steps that recur, without a period if they strike one node at irregular distances.

    Attributes:
        events: number of steps.
        share: loss as a share of the step time.
    """

    mode: ClassVar[str] = Mode.RUNTIME
    may_be_uneven_waiting: ClassVar[bool] = True
    makes_steps_differ: ClassVar[bool] = True
    events: int
    share: float

    @property
    def variety(self) -> str:
        """Whether the events have a period."""
        return "recurring" if self.period_ns is None else "periodic"

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        who = said.who
        if self.period_ns is None:
            headline = f"runtime and control plane: {subject_of_events(self)} that recurs on {who} costs {said.lost}"
            reason = "more often on one node than chance allows"
        else:
            headline, reason = periodic_headline(self, said), "at more regular intervals than chance allows"
            who = who or "the latest rank"
        return FindingWords(
            headline=headline,
            why=f"{self.events} steps stand out, {reason}",
            next=advice_of_events(self),
            more=stage_sentences(self.stages, [who]),
        )


@dataclass(frozen=True, kw_only=True)
class CollectionEvidence(Evidence):
    """Garbage collection.

    Attributes:
        share: that of the rank that collects longest in each step, of the step time.
    """

    mode: ClassVar[str] = Mode.RUNTIME
    variety: ClassVar[str] = "garbage collection"
    needs_no_others: ClassVar[bool] = True
    has_own_cause: ClassVar[bool] = True
    makes_steps_differ: ClassVar[bool] = True
    share: float

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        return FindingWords(
            headline=f"runtime and control plane: garbage collection costs {said.lost}",
            why=f"the phase takes {percent(self.share)} of the step {said.interval}",
            next="call gc.freeze() after start-up, and collect at the same step on all ranks or not in the loop",
        )


@dataclass(frozen=True, kw_only=True)
class InterruptionEvidence(Evidence):
    """Checkpoints or evaluations of some ranks, for which the others wait.

    Attributes:
        phase: `checkpoint` or `eval`.
        ranks: the ranks that make them.
        events: steps with one.
        mean_ns: mean of the longest of these ranks in such a step.
        share: loss as a share of the step time.
        period_steps: after how many steps they come back; None where that varies.
    """

    mode: ClassVar[str] = Mode.RUNTIME
    needs_no_others: ClassVar[bool] = True
    has_own_cause: ClassVar[bool] = True
    phase: str
    ranks: tuple[int, ...]
    events: int
    mean_ns: float
    share: float
    period_steps: int | None = None

    @property
    def variety(self) -> str:
        """The activity of these ranks."""
        return "evaluation" if self.phase == "eval" else "checkpoint"

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        is_eval = self.phase == "eval"
        what = "evaluation" if is_eval else "checkpointing"
        often = f", every {self.period_steps} steps," if self.period_steps else ""
        who = first_ranks(self.ranks, said.hosts)
        return FindingWords(
            headline=f"runtime and control plane: {what} on {who} alone{often} costs {said.lost}",
            why=f"{plural(self.events, 'step')} with it, {format_duration(self.mean_ns)} each; the others wait",
            next="evaluate on all ranks, each on its share of the data, or less often"
            if is_eval
            else "save less often, asynchronously, or on all ranks, each its share (torch.distributed.checkpoint)",
        )


def find_collection(case: Case) -> list[DiagnosisFinding]:
    """Return whether garbage collection costs: what rebuilt steps gain without it.

    Where steps are not rebuilt, per step the largest of all ranks, because the others wait for it. Ranks that are late
    by it at equal numbers of steps were found before, and keep their finding, with the cost of all collections.
    """
    panels = case.rest
    for finding in case.findings:
        if _is_of_collection(finding.evidence):
            return _with_collections(case, finding)
    share = float(panels.gc_ns.max(axis=0).mean()) / panels.mean_time_ns
    if share < case.settings.runtime_share:
        return []
    cost, cost_interval = _cost(case, Phase.GC, np.asarray(panels.gc_ns.any(axis=1))) or (share, None)
    if cost < case.settings.runtime_share:
        return []
    interval = mean_share_interval(panels, panels.gc_ns.max(axis=0, keepdims=True))
    evidence, culprits = CollectionEvidence(share=share), (phase_culprit("gc", share, interval),)
    found = DiagnosisFinding(evidence=evidence, loss_share=cost, confidence=0.95, culprits=culprits)
    return [replace(found, loss_interval=cost_interval)]


def _is_of_collection(evidence: Evidence) -> bool:
    """Return whether a finding is of ranks that garbage collection makes late at equal numbers of steps."""
    if not isinstance(evidence, LatenessEvidence) or evidence.pattern is not LatePattern.PERIODIC:
        return False
    return all(found is not None and found.stages == (Stage.COLLECTION,) for found in evidence.stages)


def _with_collections(case: Case, found: DiagnosisFinding) -> list[DiagnosisFinding]:
    """Put the cost of all collections into a finding on ranks that they make late; these are named if they are all."""
    evidence, collects = found.evidence, np.asarray(case.rest.gc_ns.any(axis=1))
    assert isinstance(evidence, LatenessEvidence)
    is_late = np.isin(case.panels.rank, evidence.ranks)
    cost = _cost(case, Phase.GC, collects | is_late)
    if cost is None:
        return []
    case.findings = [each for each in case.findings if each is not found]
    if cost[0] < case.settings.runtime_share:
        return []
    found = replace(found, evidence=replace(evidence, share=cost[0]), loss_share=cost[0], loss_interval=cost[1])
    return [replace(found, culprits=()) if np.any(collects & ~is_late) else found]


def _cost(case: Case, phase: Phase, rows: Bools | None = None) -> tuple[float, tuple[float, float]] | None:
    """Return what rebuilt steps gain without a phase, of some ranks or all, as a share of the step, with its interval.

    None unless all steps that are judged were rebuilt: those left out may be those with the phase.
    """
    steps, stretches = case.steps, case.stretches(phase)
    if steps is None or stretches is None or len(steps.graph.step) < len(case.panels.times_ns):
        return None
    cost = case.cost(stretches.gain(steps, rows))
    return max(cost.value, 0.0), (max(cost.low, 0.0), max(cost.high, 0.0))


def find_interruptions(case: Case) -> list[DiagnosisFinding]:
    """Return checkpoints and evaluations for which ranks wait that make none; none where all make them alike.

    The loss is what rebuilt steps gain without them, because others may have waited for these ranks less long; where
    steps are not rebuilt, what the longest rank takes beyond the mean of those that make none.
    """
    if case.panels.parts_ns is None:
        return []
    parts = ((Part.CHECKPOINT, Phase.CHECKPOINT), (Part.EVAL, Phase.EVAL))
    found = [_interruption(case, case.panels.parts_ns[:, :, part], phase) for part, phase in parts]
    return [finding for finding in found if finding is not None and finding.loss_share >= case.settings.runtime_share]


def _interruption(case: Case, spent_ns: Floats, phase: Phase) -> DiagnosisFinding | None:
    panels, limits = case.panels, case.thresholds.of(EventThresholds)
    mean_ns = spent_ns.mean(axis=1)
    makes: Bools = mean_ns >= limits.least_part_of_longest * mean_ns.max()
    if not mean_ns.any() or makes.all():
        return None
    lost_ns = np.maximum(spent_ns[makes].max(axis=0) - spent_ns[~makes].mean(axis=0), 0.0)
    is_event: Bools = np.any(spent_ns[makes] > 0, axis=0)
    interval = mean_share_interval(panels, lost_ns[None, :])
    share, interval = _cost(case, phase, makes) or (float(lost_ns.mean()) / panels.mean_time_ns, interval)
    evidence = InterruptionEvidence(
        phase=phase.name.lower(),
        ranks=tuple(panels.rank[makes].tolist()),
        events=int(is_event.sum()),
        mean_ns=float(spent_ns[makes].max(axis=0)[is_event].mean()),
        share=share,
        period_steps=steps_between(run_begins(is_event), case.thresholds.of(PeriodThresholds)),
    )
    ranks = [rank_culprit(rank, share, interval, panels) for rank in evidence.ranks]
    culprits = (*ranks, phase_culprit(evidence.phase, share, interval))
    return DiagnosisFinding(
        evidence=evidence, loss_share=share, loss_interval=interval, confidence=0.95, culprits=culprits
    )


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Events that come back.

    Attributes:
        period_ns: their distance; None where they share a node and no distance.
        p_value: of as much by chance.
        nodes: the nodes that they strike, as indices into the sorted nodes; empty where those are many.
        is_event: bool, (num_nodes, num_steps).
    """

    period_ns: float | None
    p_value: float
    nodes: tuple[int, ...]
    is_event: Bools


def find(case: Case) -> list[DiagnosisFinding]:
    """Return events that come back, with what they add to the slowest own work in their steps as loss.

    Events that are garbage collection are judged once. Steps that alternate are no events: the report warns that they
    may be parts of steps.
    """
    panels, work_ns, limits = case.panels, case.work_ns, case.thresholds.of(EventThresholds)
    periods = case.thresholds.of(PeriodThresholds)
    found = recurrence(panels, work_ns, limits, periods.min_events)
    if found is None or found.p_value >= 2 * case.settings.level or _is_alternation(panels, found, limits):
        return []
    is_event: Bools = np.any(found.is_event, axis=0)
    slowest = work_ns.max(axis=0) if not panels.is_role_known else _above_role(panels, work_ns)
    usual = float(np.median(slowest[~is_event])) if not is_event.all() else 0.0
    share = float(np.where(is_event, np.maximum(slowest - usual, 0.0), 0.0).mean()) / panels.mean_time_ns
    if share < case.settings.runtime_share:
        return []
    stage = _stages(panels, work_ns, found, is_event, case.thresholds.of(StageThresholds))
    is_of_collection = stage is not None and stage.stages[:1] == (Stage.COLLECTION,)
    is_judged = any(isinstance(each.evidence, CollectionEvidence) for each in case.findings)
    if is_of_collection and (is_judged or _cost(case, Phase.GC) is not None):
        return []
    is_large = is_event & _is_large(work_ns, is_event)
    is_large[: int(is_large.argmin())] = False  # the end of the warm-up
    in_steps = steps_between(run_begins(is_event), periods) or steps_between(run_begins(is_large), periods)
    evidence = EventEvidence(
        events=int(is_event.sum()),
        share=share,
        period_ns=found.period_ns,
        period_steps=in_steps if found.period_ns is not None else None,
        stages=(stage,),
    )
    level = limits.rank_level if evidence.period_steps is None else limits.rank_level_in_steps
    return [
        DiagnosisFinding(
            evidence=evidence,
            loss_share=share,
            confidence=confidence_of(found.p_value),
            culprits=tuple(_node_culprit(panels, work_ns, found.is_event, unit) for unit in found.nodes)
            or _rank_culprits(panels, work_ns, is_large, level, limits),
        )
    ]


def _is_alternation(panels: Panels, found: Recurrence, limits: EventThresholds) -> bool:
    """Return whether events come as often as steps alternate, or after a multiple of that many steps."""
    if panels.alternation is None or found.period_ns is None:
        return False
    num_cycles = found.period_ns / panels.mean_time_ns / panels.alternation.period
    return abs(num_cycles - round(num_cycles)) < limits.alternation_share or num_cycles < 1


def _stages(
    panels: Panels, work_ns: Floats, found: Recurrence, is_event: Bools, limits: StageThresholds
) -> StageComparison | None:
    """Return in which stage the steps of events are longer, of the ranks that they strike; None without phases."""
    if panels.parts_ns is None:
        return None
    units = np.unique(panels.node)
    struck = np.flatnonzero(np.isin(panels.node, units[list(found.nodes)] if found.nodes else units))
    return panels.qualified(compare_events(panels.parts_ns, work_ns, struck, is_event, limits), struck)


def _above_role(panels: Panels, work_ns: Floats) -> Floats:
    """Return by how much the slowest rank exceeds the median of its role, plus what all share, (num_steps,)."""
    rows = [work_ns[panels.role == value] for value in np.unique(panels.role)]
    return np.asarray(np.max([of.max(axis=0) - np.median(of) for of in rows], axis=0))


def recurrence(
    panels: Panels, work_ns: Floats, limits: EventThresholds, min_events: int = PeriodThresholds.min_events
) -> Recurrence | None:
    """Return the events that come back most surely; None without any.

    A node has an event where the mean own work of its ranks, beyond what all ranks share in that step, exceeds its
    median by five robust standard deviations and by 3 percent; what all share is judged alike, as events of all. Three
    questions: have the events of all nodes one distance, each node with a phase of its own? Have those that all share
    one? And do events strike one node more often than one in so many (binomial), at equal distances or not (both by
    Fisher's method), all events or the large ones?
    """
    # What all ranks share: of two nodes, one may be late.
    shared = lower_median(work_ns)
    units = np.unique(panels.node)
    own = np.array([work_ns[panels.node == unit].mean(axis=0) - shared for unit in units])
    usual = max(float(np.median(shared)), 1.0)
    of_node, of_all = _events(own, usual, limits), _events(shared[None, :], usual, limits)
    large = _large(own, of_node, min_events)
    found = [
        *_together(panels, of_node, limits, min_events),
        *_together(panels, np.repeat(of_all, len(units), axis=0), limits, min_events),
        *_on_one(panels, of_node, limits, min_events),
        *(
            replace(each, p_value=2 * each.p_value)
            for on in (_together, _on_one)
            for each in on(panels, large, limits, min_events)
        ),
    ]
    # Who is struck says more than that somebody is.
    return min(found, key=lambda each: (each.p_value > limits.sure_level or not each.nodes, each.p_value), default=None)


def _together(panels: Panels, is_event: Bools, limits: EventThresholds, min_events: int) -> list[Recurrence]:
    begins = _begins(is_event)
    # Equal rows count once; as bytes they compare many times faster than np.unique does with thousands of columns.
    rows = sorted({row.tobytes() for row in begins[begins.any(axis=1)]})
    period = _period(panels, [np.frombuffer(row, np.bool_) for row in rows], min_events)
    if period is None:
        return []
    num_expected = float(panels.since_ns[-1] - panels.since_ns[0]) / period.length
    num_events = begins.sum(axis=1)
    is_hit = num_events >= limits.least_hit_share * num_expected
    if not is_hit.any():
        return []  # events everywhere, of which some are at equal distances by chance
    # Where all nodes have the period and some events are too small to count, a few nodes have the most.
    is_theirs = num_events[is_hit].min() >= limits.least_ratio * num_events[~is_hit].max(initial=0)
    is_named = is_theirs and is_hit.sum() <= limits.named_nodes_share * len(is_event)
    nodes = tuple(np.flatnonzero(is_hit).tolist()) if is_named else ()
    return [Recurrence(period_ns=period.length, p_value=period.p_value, nodes=nodes, is_event=is_event)]


def _on_one(panels: Panels, is_event: Bools, limits: EventThresholds, min_events: int) -> list[Recurrence]:
    begins = _begins(is_event)
    num_events = begins.sum(axis=1)
    unit, total = int(num_events.argmax()), int(num_events.sum())
    # Where all nodes are struck by chance, one has the most events: less than twice as many are no reason to name it.
    if len(begins) < 2 or num_events[unit] < max(min_events, limits.least_ratio * np.sort(num_events)[-2]):
        return []
    same = min(1.0, len(begins) * float(bdtrc(int(num_events[unit]) - 1, total, 1 / len(begins))))
    period = _period(panels, [begins[unit]], min_events)
    regular = period.p_value if period is not None else 1.0
    product = max(same * regular, _MIN_P)
    own = np.zeros_like(is_event)
    own[unit] = is_event[unit]
    return [
        Recurrence(
            period_ns=period.length if period is not None and regular < limits.regular_level else None,
            p_value=product * (1 - float(np.log(product))),
            nodes=(unit,),
            is_event=own,
        )
    ]


def _begins(is_event: Bools) -> Bools:
    """Return the first steps of runs of late steps: a run is one event."""
    return np.asarray(is_event & ~np.pad(is_event, ((0, 0), (1, 0)))[:, :-1])


def _period(panels: Panels, rows: list[Bools], min_events: int) -> Period | None:
    since_ns = panels.since_ns - panels.since_ns[0]
    times, least = [since_ns[row] for row in rows], 2 * panels.mean_time_ns
    return find_period(times, span=float(since_ns[-1]), least=least, min_events=min_events)


def _events(rows_ns: Floats, usual_ns: float, limits: EventThresholds) -> Bools:
    above = rows_ns - np.median(rows_ns, axis=1, keepdims=True)
    spread = NORMAL_MAD * np.median(np.abs(above), axis=1, keepdims=True)
    return np.asarray(above > np.maximum(limits.least_spreads * spread, limits.least_excess * usual_ns))


def _large(rows_ns: Floats, is_event: Bools, min_events: int) -> Bools:
    """Return the events of more than half of the third largest: small ones everywhere hide large ones of one node."""
    above = rows_ns - np.median(rows_ns, axis=1, keepdims=True)
    sizes_ns = np.sort(above[is_event])
    if len(sizes_ns) < min_events:
        return is_event
    return np.asarray(is_event & (above > sizes_ns[-min_events] / 2))


def _node_culprit(panels: Panels, work_ns: Floats, is_event: Bools, unit: int) -> Culprit:
    rows = np.flatnonzero(panels.node == np.unique(panels.node)[unit])
    work = work_ns[rows].mean(axis=0) - lower_median(work_ns)
    excess = (work[is_event[unit]] - np.median(work)) / max(float(np.median(work_ns)), 1.0)
    found = _mean_excess(excess)
    return place_culprit("node", panels.host[rows[0]], rows, found.value, found.interval, panels)


def _is_large(work_ns: Floats, is_event: Bools) -> Bools:
    """Return the steps in which some rank exceeds its usual work by half of what it does in the usual event, at least.

    Noise adds small events, which have neither the period nor the rank of the others.
    """
    sizes_ns = (work_ns - np.median(work_ns, axis=1, keepdims=True)).max(axis=0)
    return np.asarray(sizes_ns >= np.median(sizes_ns[is_event]) / 2)


def _rank_culprits(
    panels: Panels, work_ns: Floats, is_large: Bools, level: float, limits: EventThresholds
) -> tuple[Culprit, ...]:
    """Return the rank whose own work is by far the longest in all large events of a job on one node; else nothing."""
    num_ranks = len(work_ns)
    if num_ranks < 2 or not is_large.any() or len(np.unique(panels.node)) > 1:
        return ()
    usual_ns = np.median(work_ns, axis=1, keepdims=True)
    above_ns = (work_ns - usual_ns)[:, is_large]
    latest = int(np.median(above_ns, axis=1).argmax())
    others_ns = np.delete(above_ns, latest, axis=0).max(axis=0)
    is_its_own = bool((above_ns[latest] >= limits.least_ratio_of_rank * others_ns).all())
    num_events = int(_begins(is_large[None, :]).sum())
    if not is_its_own or float(num_ranks) ** (1 - num_events) > level:
        return ()
    excess = above_ns[latest] / max(float(usual_ns[latest, 0]), 1.0)
    found = _mean_excess(excess)
    return (rank_culprit(int(panels.rank[latest]), found.value, found.interval, panels),)


def _mean_excess(excess: Floats) -> Estimate:
    return Estimate.around(float(excess.mean()), Z_95 * float(excess.std()) / float(np.sqrt(len(excess))))
