"""Stragglers: ranks that are late again and again, by their own work or by their arrival at collectives on devices.

Own work needs no common clock. Where the host runs ahead of a device, own work is not known, and who is late is judged
by arrivals alone, which name a rank but not the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import format_duration, percent, place_name, printable
from hpcpace.core.thresholds import Thresholds, ThresholdValues, number
from hpcpace.diagnosis.finding import (
    Case,
    CoreWaiting,
    DiagnosisFinding,
    Evidence,
    FindingWords,
    Panels,
    Said,
    confidence_of,
    place_culprit,
    rank_culprit,
    slowest_ns,
)
from hpcpace.diagnosis.incomplete import HOST_TIMES
from hpcpace.diagnosis.measure import beyond_role_ns
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.summary import Culprit, Mode
from hpcpace.diagnosis.topics.beside_hosts import StragglerCost, cost_of
from hpcpace.diagnosis.topics.core_waiting import (
    CorePlace,
    CoreThresholds,
    excess_by_sums,
    excess_of,
    explained,
    late_beyond_waiting,
    places_of,
    stages_beyond_waiting,
)
from hpcpace.diagnosis.topics.idle import ISSUE_LESS
from hpcpace.diagnosis.topics.jitter import jitter_words
from hpcpace.diagnosis.topics.stages import (
    RecurringEvidence,
    advice_of_events,
    advice_of_straggler,
    by_stage,
    longest_phase,
    periodic_headline,
    stage_sentences,
)
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.kernels import others_median
from hpcpace.metrics.phase_cores import PARTS, Spent
from hpcpace.metrics.recurrence import LatenessThresholds, PeriodThresholds, run_begins, steps_between
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.roles import (
    STAGE_OF,
    ExcessThresholds,
    Stage,
    StageComparison,
    StageThresholds,
    WorkExcess,
    compare_events,
    compare_with_others,
    excess_over_role,
)
from hpcpace.metrics.special import lower_median, ndtri, stdtrit
from hpcpace.metrics.stragglers import SearchObstacle, Straggler, StragglerSearch, find_stragglers

_IS_COMPUTE = np.array([STAGE_OF[part] is Stage.COMPUTE for part in PARTS])
_PANELS = {Stage.DATA: "data_ns", Stage.COLLECTION: "gc_ns", Stage.HOST: "host_ns"}
_MAX_EXPLAINED = 4  # display: stragglers whose phases are compared with others'
_HOSTS_NEXT = "without it, the job waits for the hosts of the others: they issue a step little faster than it goes now"
_BEHIND_HOSTS = "hosts are this slow", "hosts issue work faster"
_BEHIND_OTHERS = "the job waits for its other faults", "these others are mended"
_GROWS = 1.5  # display: a larger cost once other faults are mended is shown
_NO_COST = 0.0005  # display: share of the step that is shown as 0.0 %
_MIN_QUEUED = 0.05  # display: part of an excess from which its waiting for a core is mentioned
_MIN_FEW = 3  # statistics: steps in which a rank may stand out although a finding takes more


@dataclass(frozen=True, kw_only=True)
class StragglerThresholds(Thresholds, topic="straggler"):
    """When ranks differ by more than they do anyhow."""

    least_compared: int = number(3, "ranks")
    """Smallest role whose ranks show how much equal ranks differ: of two, either may be the odd one."""
    least_deviations: int = number(8, "ranks")
    """Ranks that must show how much equal ranks differ; fewer cannot, and then no limit follows from it."""
    trimmed_share: float = number(0.1, "share")
    """Ranks farthest from their role that do not count for that: some may be slow without being named."""
    everywhere_share: float = number(0.25, "share")
    """Share of the nodes, or of the ranks of one node, beyond which a period is nobody's in particular."""
    preliminary_excess: float = number(0.2, "share")
    """Excess over the others of its role that a rank must have in each of a few steps to be mentioned: less may be
    noise, of which so few steps show nothing."""
    preliminary_level: float = number(0.1, "probability")
    """Probability by chance up to which that is mentioned: three steps of four ranks just reach it."""
    off_core_part: float = number(0.55, "share")
    """Part of the excess beyond waiting for cores that a rank spends running, or doing neither, from which that is its
    cause if it is so beyond chance: clearly more than half, as counters miss a little of either."""


class LatePattern(StrEnum):
    """How the lateness of ranks recurs."""

    FIXED = "fixed"
    TRANSIENT = "transient"
    PERIODIC = "periodic"
    ROTATING = "rotating"

    @property
    def mode(self) -> Mode:
        """The mode that lateness is counted to: periodic lateness is the control plane's, a rotation is jitter."""
        modes = {LatePattern.PERIODIC: Mode.RUNTIME, LatePattern.ROTATING: Mode.AMPLIFICATION}
        return modes.get(self, Mode.STRAGGLER)


@dataclass(frozen=True, kw_only=True)
class LatenessEvidence(RecurringEvidence):
    """Ranks that are late by their own work again and again.

    Attributes:
        pattern: how their lateness recurs.
        effect: own work above the others of the role, in the steps concerned, relative to the role's median.
        p_value: probability of as much by chance, over all ranks.
        late_share: share of the steps in which one of them is the latest beyond noise.
        share: loss as a share of the step time.
        first, stop: range of the steps of a transient lateness, indices into the used steps; else None.
        ranks: numbers of all late ranks, those of named nodes and slots included.
        spent: how they spend most of their excess: on a core, or in waiting that needs none.
        off_core_ns: by how much longer they neither run nor wait for a core in a step than others, where that explains
            their excess; else None.
        running_ns, idle_ns: by how much longer they run in a step than others, and do neither; None where that is not
            known.
        spent_half_ns: half of the 95 % interval of both; None likewise.
        excess_ns, queued_ns: by how much longer they work in a step than others, and of it waiting for a core; None
            where that is not known.
        place: where the first of them runs, if that differs from the others; else None.
        is_without_waits: whether effect and phases are without waiting for cores, which hides the rest.
        is_alone: whether nobody else does the same work, so that they were compared with themselves in other steps.
        later_share: loss once hosts issue work faster, or other faults are mended, as a share of the step time; None
            where it is the same.
        is_behind_others: whether it is the loss once other faults are mended.
    """

    pattern: LatePattern
    effect: float
    p_value: float
    late_share: float
    share: float
    first: int | None = None
    stop: int | None = None
    ranks: tuple[int, ...] = ()
    spent: Spent = Spent.UNKNOWN
    off_core_ns: float | None = None
    running_ns: float | None = None
    idle_ns: float | None = None
    spent_half_ns: float | None = None
    excess_ns: float | None = None
    queued_ns: float | None = None
    place: CorePlace | None = None
    is_without_waits: bool = False
    is_alone: bool = False
    later_share: float | None = None
    is_behind_others: bool = False

    @property
    def mode(self) -> str:
        """Persistent straggler, or by its pattern runtime and control plane, or synchronisation amplification."""
        return self.pattern.mode

    @property
    def variety(self) -> str:
        """How it recurs."""
        return str(self.pattern)

    @property
    def needs_no_others(self) -> bool:
        """Whether ranks are named, by their own work."""
        return self.mode == Mode.STRAGGLER

    @property
    def makes_steps_differ(self) -> bool:
        """Whether it passes."""
        return self.pattern is not LatePattern.FIXED

    def is_waiting_for_cores(self, finding: DiagnosisFinding, waiting: CoreWaiting, panels: Panels) -> bool:
        """Return whether waiting for cores explains the excess, or how much steps differ."""
        if self.pattern is LatePattern.FIXED:
            if self.off_core_ns is not None:  # it waits for something else
                return False
            return waiting.is_all_of(self.effect, np.isin(panels.rank, self.ranks))
        return finding.loss_share <= waiting.uneven_share

    def part_beyond_waiting(self, waiting: CoreWaiting, panels: Panels) -> Estimate | None:
        """Return which part of a fixed excess is no waiting for cores; None where that is not known."""
        is_fixed = self.pattern is LatePattern.FIXED
        return waiting.part_beyond(np.isin(panels.rank, self.ranks)) if is_fixed else None

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        if self.pattern is LatePattern.ROTATING:
            return jitter_words(self.share, said)
        if self.pattern is LatePattern.PERIODIC:
            return FindingWords(
                headline=periodic_headline(self, said),
                why="late steps recur at more regular intervals than chance allows",
                next=advice_of_events(self),
                more=stage_sentences(self.stages, [said.who]),
            )
        culprits = said.finding.culprits
        kind = "persistent" if self.pattern is LatePattern.FIXED else "transient"
        when = ""
        if self.first is not None and self.stop is not None:
            when = f", in steps {self.first} to {self.stop - 1} of those used (counted from 0)"
        by = by_stage(self.stages, self.spent)
        next_ = advice_of_straggler(self.stages, said.exclusion, self.spent)
        more = list(self._spent_words(said))
        if self.excess_ns and self.queued_ns is not None and self.queued_ns >= _MIN_QUEUED * self.excess_ns:
            queued, all_of_it = format_duration(self.queued_ns), format_duration(self.excess_ns)
            more.append(f"{queued} of the {all_of_it} more in each step is waiting for a core, which is left out here")
        if self.place is not None:
            more.append(f"of rank {self.place.rank}: {self.place.words}")
            next_ = f"{self.place.advice}; or {next_}" if self.off_core_ns is None else next_
        costs = f"{'cost' if culprits[1:] else 'costs'} {said.lost}{by}"
        if self.later_share:
            now, later = _BEHIND_OTHERS if self.is_behind_others else _BEHIND_HOSTS
            if said.finding.loss_share < _NO_COST:
                costs = f"{'cost' if culprits[1:] else 'costs'} nothing{by} while {now}"
            costs += f", and at least {percent(self.later_share)} once {later}"
            if not self.is_behind_others:
                more.append(_HOSTS_NEXT)
                next_ = f"{next_}; and let hosts issue less: {ISSUE_LESS}"
        without = "without waiting for cores " if self.is_without_waits else ""
        usual = "what it is in other steps" if self.is_alone else "that of its role"
        excess = f"{without}{percent(culprits[0].effect)} above {usual} {said.interval}"
        return FindingWords(
            headline=f"{kind} straggler: {said.who} {costs}",
            why=f"own work {excess}{when}; the others wait for it",
            next=next_,
            more=(*more, *stage_sentences(self.stages, [place_name(culprit.kind, culprit.id) for culprit in culprits])),
        )

    def _spent_words(self, said: Said) -> tuple[str, ...]:
        """Return how the ranks spend their excess, unless they compute, or what is not known of it."""
        others = [found for found in self.stages if found is not None and found.stages]
        if self.spent is Spent.RUNNING or not all(Stage.COMPUTE in found.stages for found in others):
            return ()
        if self.idle_ns is None or self.running_ns is None or self.spent_half_ns is None:
            return (f"cannot tell computation from waiting: too little is known of the processor time of {said.who}",)
        phase = longest_phase(self.stages)
        where, half_ns = f" in {phase}" if phase else "", self.spent_half_ns
        running, idle, low, high, half = (
            format_duration(max(ns, 0.0))
            for ns in (self.running_ns, self.idle_ns, self.idle_ns - half_ns, self.idle_ns + half_ns, half_ns)
        )
        if self.spent is Spent.IDLE:
            waits, core = ("wait", "their cores") if said.finding.culprits[1:] else ("waits", "its core")
            return (
                f"{said.who} {waits} {idle} more of each step than others{where} without using {core} "
                f"(95 %: {low} to {high}): I/O, a lock or sleep",
            )
        return (
            f"cannot tell whether computation or waiting prevails: {running} more of each step than others{where} on a "
            f"core, and {idle} more without using one (95 %: +-{half} each)",
        )


@dataclass(frozen=True, kw_only=True)
class ArrivalEvidence(Evidence):
    """Ranks that are late at collectives on devices; their own work is not known.

    Attributes:
        effect: lower bound on the excess work of the latest rank over the others, relative to theirs.
        p_value: probability of as much by chance, over all ranks.
        late_share: share of the steps in which it is late by more than half of its mean.
        share: its lateness as a share of the step time: an upper bound on its cost.
        arrival_ns: how long after the median rank it enters.
        duration_ns: by how much shorter the collective is for it than for the median rank.
        ranks: numbers of all late ranks.
    """

    mode: ClassVar[str] = Mode.STRAGGLER
    variety: ClassVar[str] = "fixed"
    needs_no_others: ClassVar[bool] = True
    effect: float
    p_value: float
    late_share: float
    share: float
    arrival_ns: float
    duration_ns: float
    ranks: tuple[int, ...] = ()

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        arrival, duration = format_duration(self.arrival_ns), format_duration(self.duration_ns)
        costs = "cost" if said.finding.culprits[1:] else "costs"
        not_known = (
            f"found by its arrivals on the device alone: why it is late, and what else costs time, is {HOST_TIMES}"
        )
        return FindingWords(
            headline=f"persistent straggler: {said.who} {costs} at most {percent(said.finding.loss_share)} of the "
            "step time",
            why=f"enters collectives {arrival} after the others, and they last {duration} less for it; "
            f"at least {percent(self.effect)} slower than the others {said.interval}",
            next=advice_of_straggler((None,), said.exclusion),
            more=(not_known,),
        )


def find(case: Case) -> list[DiagnosisFinding]:
    """Return the ranks that are late by their own work, and leave the case with their work put back.

    The panels of the case come back with the data loading and the garbage collection of stragglers put back likewise,
    if it is that which makes them late, so that it is not found a second time. Each culprit is compared phase by phase
    with the others of its role, a periodic one with its own other steps.

    The loss is what the slowest rank of a role costs with them, less without: mean_i(max_r x) of both panels. That of
    fixed and transient stragglers is what rebuilt steps gain with their work as usual, where steps are rebuilt: a delay
    passes through the stages of a pipeline, and may hide transfers. These are one mode, periodic ones are the control
    plane's, and lateness that goes round is amplification, for which no rank is to blame.
    """
    panels, limits = replace(case.panels, role=_roles(case.panels)), case.thresholds.of(StragglerThresholds)
    case.search = search = search_stragglers(panels, case.settings, case.thresholds)
    hidden = None
    if not any(LatePattern(each.pattern).mode is Mode.STRAGGLER for each in search.found):
        hidden = late_beyond_waiting(panels, case.thresholds.of(CoreThresholds), case.settings.level)
        search = search if hidden is None else replace(search, found=(hidden, *search.found))

    def by_work(some: Sequence[Straggler]) -> float:
        without_ns = slowest_ns(_put_back(case.work_ns, panels.role, some), panels.role)
        return max(slowest_ns(case.work_ns, panels.role) - without_ns, 0.0) / panels.mean_time_ns

    findings = []
    for mode in (Mode.STRAGGLER, Mode.RUNTIME, Mode.AMPLIFICATION):
        found = [straggler for straggler in search.found if LatePattern(straggler.pattern).mode is mode]
        if not found:
            continue
        cost = StragglerCost(found=found, share=by_work(found))
        if mode is Mode.STRAGGLER:
            cost = cost_of(case, found, by_work)
            found, case.late = cost.found, cost.change
        if not found:
            continue
        replaced, loss_share = _put_back(case.work_ns, panels.role, found), cost.share
        # What nobody waits for is no loss, but a slow rank will hold others up at a larger scale.
        if loss_share < case.settings.runtime_share and mode is not Mode.STRAGGLER:
            continue
        evidence = _evidence(found, loss_share, panels, case.thresholds)
        if mode is Mode.STRAGGLER:
            evidence = _with_cores(_with_hidden(evidence, hidden, panels), panels, limits.off_core_part)
            evidence = replace(evidence, later_share=cost.later_share)
        is_everywhere = _is_everywhere(found, panels, limits.everywhere_share)
        findings.append(
            DiagnosisFinding(
                evidence=evidence,
                loss_share=loss_share,
                confidence=confidence_of(found[0].p_value),
                culprits=() if is_everywhere else tuple(_straggler_culprit(each, panels) for each in found),
                loss_interval=cost.interval,
            )
        )
        case.work_ns, case.rest = replaced, _without_stages(case.rest, found, evidence)
    return findings


def preliminary(case: Case) -> str:
    """Return who is slowest in each of a few steps, too few for a finding, in words; empty where nobody stands out.

    The test is exact: if ranks of a role are alike, each order of them is as likely in each step, so that one of K
    ranks is the slowest in all n steps with the probability K^(1 - n), over all roles together at most their sum.
    """
    panels, limits = case.panels, case.thresholds.of(StragglerThresholds)
    num_steps, found, p_value = panels.work_ns.shape[1], None, 0.0
    if num_steps < _MIN_FEW or panels.host_timed or panels.is_unphased or not panels.is_role_known:
        return ""
    for value in np.unique(panels.role):
        rows = np.flatnonzero(panels.role == value)
        if len(rows) < 2:
            continue
        p_value += float(len(rows)) ** (1 - num_steps)
        work_ns = np.maximum(panels.work_ns[rows], 1.0)
        ratio = work_ns / others_median(work_ns)
        latest = int(ratio.min(axis=1).argmax())
        if found is None or ratio[latest].min() > found[1].min():
            found = int(rows[latest]), ratio[latest]
    if found is None or p_value > limits.preliminary_level or found[1].min() < 1 + limits.preliminary_excess:
        return ""
    row, ratio = found
    who = f"rank {panels.rank[row]} on {printable(panels.host[row])}"
    return (
        f"preliminary: {who} works {np.median(ratio):.2f} times as long as the others of its role "
        f"({ratio.min():.2f} to {ratio.max():.2f}) in all {num_steps} steps; by chance, one rank is the slowest in all "
        f"of them with a probability of {p_value:.2g}"
    )


def _with_hidden(evidence: LatenessEvidence, hidden: Straggler | None, panels: Panels) -> LatenessEvidence:
    """Return the evidence on a rank whose lateness waits for cores hide: its phases without these."""
    if hidden is None or panels.cores is None or panels.cores.work is None:
        return evidence
    stages = (stages_beyond_waiting(panels, panels.cores.work, hidden.ranks[0]),)
    return replace(evidence, stages=stages, is_without_waits=True)


def _with_cores(evidence: LatenessEvidence, panels: Panels, least_part: float) -> LatenessEvidence:
    """Return evidence with what late ranks had of their cores, where ranks compute on their hosts.

    Work in which no thread of a rank runs or is ready to is a wait that its phases do not show: I/O, a lock or sleep.
    That, or computation, is said where it is most of the excess in the phases that compute, beyond chance; of all
    phases where no stage is known.
    """
    cores = panels.cores
    is_late = np.isin(panels.rank, evidence.ranks)
    if panels.has_device:
        return replace(evidence, spent=Spent.RUNNING)
    if cores is None or not (np.isin(panels.role, panels.role[is_late]) & ~is_late).any():
        return evidence
    evidence = replace(evidence, place=explained(places_of(panels, evidence.ranks)))
    found = excess_of(panels, cores, is_late)
    if found is not None:
        evidence = replace(evidence, excess_ns=found.excess_ns, queued_ns=found.queued_ns)
    known = [stage.stages for stage in evidence.stages if stage is not None and stage.stages]
    if known:
        found = excess_of(panels, cores, is_late, _IS_COMPUTE)
    found = found if found is not None else excess_by_sums(panels, cores, is_late)
    if found is None:
        return evidence
    spent = found.mostly(least_part)
    is_compute = all(Stage.COMPUTE in stages for stages in known)
    return replace(
        evidence,
        spent=spent,
        off_core_ns=found.idle_ns if spent is Spent.IDLE and is_compute else None,
        running_ns=found.running_ns,
        idle_ns=found.idle_ns,
        spent_half_ns=found.half_ns,
    )


def find_by_arrival(case: Case) -> list[DiagnosisFinding]:
    """Return the ranks that are late at collectives on devices by more than the threshold, as one finding.

    Others work no longer than the step without their wait for the late rank, so lateness relative to that is a lower
    bound on its excess work. What it costs is at most its lateness, if nobody can use that time otherwise.
    """
    panels = case.panels

    def excess(late_ns: float) -> float:
        return late_ns / max(panels.mean_time_ns - late_ns, 1.0)

    late = [each for each in panels.arrivals if excess(each.duration_ns) >= case.settings.straggler_share]
    if not late or not panels.host_timed:
        return []
    first = late[0]
    share = first.duration_ns / panels.mean_time_ns
    culprits = []
    for each in late:
        low, high = (excess(bound_ns) for bound_ns in each.interval_ns)
        culprits.append(rank_culprit(each.rank, excess(each.duration_ns), (low, high), panels))
    evidence = ArrivalEvidence(
        effect=excess(first.duration_ns),
        p_value=first.p_value,
        late_share=first.late_share,
        share=share,
        arrival_ns=first.arrival_ns,
        duration_ns=first.duration_ns,
        ranks=tuple(sorted(each.rank for each in late)),
    )
    confidence = confidence_of(first.p_value)
    return [DiagnosisFinding(evidence=evidence, loss_share=share, confidence=confidence, culprits=tuple(culprits))]


def doubtful(case: Case) -> str:
    """Return who works longer than its role by as much as jitter must cost, though it may be chance; empty if nobody.

    A rank that comes and goes in a few long stretches may be late in half of the steps without a test to show it.
    """
    panels, search = case.panels, case.search
    if search is None or not panels.is_role_known:
        return ""
    share = beyond_role_ns(case.work_ns, panels.role).mean(axis=1) / panels.mean_time_ns
    share[list(search.slow)] = 0.0
    size = (panels.role[:, None] == panels.role).sum(axis=1)
    share[size < case.thresholds.of(StragglerThresholds).least_compared] = 0.0
    row = int(share.argmax())
    if share[row] < case.settings.jitter_share:
        return ""
    who = printable(f"rank {panels.rank[row]} on {panels.host[row]}")
    return (
        f"{who} works longer than its role by {percent(share[row])} of the step, but comes and goes: it may be chance"
    )


def behind_others(case: Case) -> list[DiagnosisFinding]:
    """Return the findings, lasting stragglers with what they cost once the other faults of rebuilt steps are mended.

    A slow link or stage may hold the job up for longer than a rank does, which then costs nothing until that is mended.
    """
    if case.late is None or case.steps is None or not case.mended:
        return case.findings
    later = case.cost(case.steps.gain(case.late, case.steps.replaced(*case.mended))).value

    def seen(finding: DiagnosisFinding) -> DiagnosisFinding:
        evidence = finding.evidence
        if not isinstance(evidence, LatenessEvidence) or evidence.mode != Mode.STRAGGLER or evidence.later_share:
            return finding
        if later < _GROWS * max(finding.loss_share, _NO_COST):
            return finding
        return replace(finding, evidence=replace(evidence, later_share=later, is_behind_others=True))

    return [seen(finding) for finding in case.findings]


def search_stragglers(
    panels: Panels,
    settings: DiagnosisConfig,
    thresholds: ThresholdValues,
) -> StragglerSearch:
    """Return who is late again and again; ranks are not compared if their roles are not known.

    Where no two ranks are known to do the same work, as in a pipeline without replicas, each is compared with itself in
    other steps: stages may differ, but one that takes longer for a while or every few steps, while the others do not,
    is late. Where the work of all changes too much from step to step, as with batches that grow, a lasting straggler is
    sought in the work relative to that of its role in each step.
    """

    def searched(work_ns: Floats, role: Ints) -> StragglerSearch:
        limits = thresholds.of(LatenessThresholds)
        share, level = settings.straggler_share, settings.level
        return find_stragglers(work_ns, role, panels.node, floor_share=share, level=level, limits=limits)

    search = searched(panels.work_ns, _roles(panels))
    if search.obstacle is SearchObstacle.TOO_MUCH_NOISE:
        shares = searched(_work_by_step(panels), _roles(panels))
        slower = tuple(each for each in shares.found if each.pattern == LatePattern.FIXED)
        search = replace(search, found=slower, obstacle=None) if slower else search
    if search.obstacle is SearchObstacle.NOBODY_COMPARED:
        usual_ns = np.maximum(np.median(panels.work_ns, axis=1, keepdims=True), 1.0)
        changes = searched(panels.work_ns / usual_ns * usual_ns.mean(), np.zeros_like(panels.role))
        of_changes = (LatePattern.TRANSIENT, LatePattern.PERIODIC)
        passing = tuple(each for each in changes.found if each.pattern in of_changes)
        search = replace(search, found=passing)
    lasting = [each for each in search.found if LatePattern(each.pattern).mode is Mode.STRAGGLER]
    slow = sorted({rank for each in lasting for rank in each.ranks})
    is_slow = np.isin(np.arange(len(panels.rank)), slow)
    usual_excess = _usual_excess(panels, is_slow, settings.level, thresholds.of(StragglerThresholds))
    excess = work_excess(panels, slow, thresholds.of(ExcessThresholds))
    found, num_steps = [_measured(each, excess) for each in search.found], panels.work_ns.shape[1]
    kept = tuple(each for each in found if _matters(each, usual_excess, num_steps, settings))
    return replace(search, found=kept, slow=tuple(slow))


def work_excess(panels: Panels, slow: Sequence[int] | Ints, limits: ExcessThresholds) -> WorkExcess:
    """Return the excess of own work of all ranks over their roles.

    Args:
        panels: the steps.
        slow: indices of the ranks that stand out, by `search_stragglers`: the usual work of a role is without theirs.
        limits: when an excess is mentioned.
    """
    is_slow = np.isin(np.arange(len(panels.rank)), slow)
    return excess_over_role(panels.work_ns, _roles(panels), is_slow, limits)


def _work_by_step(panels: Panels) -> Floats:
    """Return the work of ranks as if it were the same in all steps, float64, (num_ranks, num_steps).

    That of a step is the lower median of the role: of two ranks, one may be late.
    """
    work_ns, roles = panels.work_ns.copy(), _roles(panels)
    for value in np.unique(roles):
        rows = np.flatnonzero(roles == value)
        usual_ns = np.maximum(lower_median(work_ns[rows]), 1.0)
        work_ns[rows] *= float(np.median(usual_ns)) / usual_ns
    return work_ns


def _roles(panels: Panels) -> Ints:
    """Return the roles of ranks, (num_ranks,); those whose roles are not known are compared with nobody."""
    return panels.role if panels.is_role_known else np.arange(len(panels.rank))


def _matters(straggler: Straggler, usual_excess: float, num_steps: int, settings: DiagnosisConfig) -> bool:
    """Return whether an excess costs enough, and is beyond what ranks differ by anyhow.

    A periodic one costs its size over its period, a passing one its share of the steps.
    """
    if straggler.pattern == LatePattern.PERIODIC:
        return straggler.effect.value / max(straggler.period_steps or 1, 1) >= settings.runtime_share
    if straggler.step_range is not None:
        first, stop = straggler.step_range
        return straggler.effect.value * (stop - first) / num_steps >= settings.runtime_share
    return straggler.pattern != LatePattern.FIXED or straggler.effect.value >= max(
        usual_excess, settings.straggler_share
    )


def _usual_excess(panels: Panels, slow: Bools, level: float, limits: StragglerThresholds) -> float:
    """Return what the mean work of the slowest of so many ranks exceeds its role by, because none are equally fast.

    Among many that differ by 1 percent some are 3 percent slower than the others. The limit that the largest of n
    normal deviations passes with the probability `level` (Student's t, Bonferroni), the spread being that of the ranks
    of roles of three and more that are not slow, without the tenth that is farthest out; 0 where fewer than eight show
    it. It includes the remaining noise of single steps.

    Args:
        panels: the steps.
        slow: ranks that may be stragglers, bool, (num_ranks,).
        level: over all ranks together.
        limits: which ranks show the spread.
    """
    deviations = [np.zeros(0)]
    for value in np.unique(panels.role):
        members = panels.role == value
        if members.sum() >= limits.least_compared and (members & ~slow).any():
            mean_ns = panels.work_ns[members & ~slow].mean(axis=1)
            deviations.append(mean_ns / max(float(mean_ns.mean()), 1.0) - 1)
    size = np.sort(np.abs(np.concatenate(deviations)))
    freedom = len(size) - len(deviations) + 1
    if len(size) < limits.least_deviations or freedom < 2:
        return 0.0
    kept = size[: len(size) - int(limits.trimmed_share * len(size))]
    share = len(kept) / len(size)
    farthest = float(ndtri(0.5 + share / 2)) if share < 1 else 0.0
    # The mean square of a normal distribution between -q and q is 1 - 2 q phi(q) / share.
    of_normal = 1 - 2 * farthest * float(np.exp(-(farthest**2) / 2)) / float(np.sqrt(2 * np.pi)) / share
    spread = float(np.sqrt((kept**2).mean() / of_normal * len(size) / freedom))
    return spread * float(stdtrit(freedom, 1 - level / len(size)))


def _without_stages(panels: Panels, found: Sequence[Straggler], evidence: LatenessEvidence) -> Panels:
    """Return panels with the data loading, collection and idle devices of those put back whom these make late."""
    for straggler, stage in zip(found, evidence.stages, strict=False):
        for part in stage.stages if stage is not None else ():
            if (name := _PANELS.get(part)) is not None:
                changed: dict[str, Any] = {name: _put_back(getattr(panels, name), panels.role, [straggler])}
                panels = replace(panels, **changed)
    return panels


def _evidence(
    found: Sequence[Straggler], loss_share: float, panels: Panels, thresholds: ThresholdValues
) -> LatenessEvidence:
    straggler, limits = found[0], thresholds.of(StageThresholds)
    period, (first, stop) = straggler.period_steps, straggler.step_range or (None, None)
    is_periodic = straggler.pattern == LatePattern.PERIODIC
    return LatenessEvidence(
        pattern=LatePattern(straggler.pattern),
        effect=straggler.effect.value,
        p_value=straggler.p_value,
        late_share=straggler.late_share,
        share=loss_share,
        period_ns=None if period is None else period * panels.mean_time_ns,
        first=first,
        stop=stop,
        period_steps=steps_between(run_begins(_late_steps(straggler, panels)), thresholds.of(PeriodThresholds))
        if is_periodic
        else None,
        stages=tuple(_stages(each, found, panels, limits) for each in found[:_MAX_EXPLAINED]),
        is_alone=bool((panels.role == panels.role[straggler.ranks[0]]).sum() == 1),
        ranks=tuple(sorted({int(panels.rank[row]) for each in found for row in each.ranks})),
    )


def _stages(
    straggler: Straggler, found: Sequence[Straggler], panels: Panels, limits: StageThresholds
) -> StageComparison | None:
    """Return in which stage a straggler is late; None where its phases are not known or it has nobody to compare with.

    All ranks of the other stragglers are left out of those that it is compared with.
    """
    late = np.array(straggler.ranks)
    if panels.parts_ns is None or straggler.pattern == LatePattern.ROTATING:
        return None
    if straggler.pattern == LatePattern.PERIODIC:
        is_late = _late_steps(straggler, panels)
        return panels.qualified(compare_events(panels.parts_ns, panels.work_ns, late, is_late, limits), late)
    is_other = np.isin(panels.role, panels.role[late])
    is_other[[rank for each in found for rank in each.ranks]] = False
    steps = slice(*(straggler.step_range or (0, panels.work_ns.shape[1])))
    return panels.qualified(compare_with_others(panels.parts_ns, late, np.flatnonzero(is_other), steps, limits), late)


def _late_steps(straggler: Straggler, panels: Panels) -> Bools:
    """Return in which steps a periodic straggler is late by at least half of its effect, bool, (num_steps,)."""
    late = np.array(straggler.ranks)
    excess_ns = np.zeros(panels.work_ns.shape[1])
    for rank in late.tolist():
        others = np.flatnonzero((panels.role == panels.role[rank]) & (np.arange(len(panels.role)) != rank))
        work_ns = panels.work_ns[rank]
        usual_ns = np.median(panels.work_ns[others], axis=0) if len(others) else np.median(work_ns)
        excess_ns += (work_ns - usual_ns) / len(late)
    return np.asarray(excess_ns > straggler.effect.value * float(np.median(panels.work_ns[late])) / 2)


def _measured(straggler: Straggler, excess: WorkExcess) -> Straggler:
    """Return a lasting straggler with the excess that all tables show.

    What finds a straggler is more robust, and a little too small where many of a role are slow.
    """
    found = excess.of(straggler.ranks) if straggler.pattern == LatePattern.FIXED else None
    return straggler if found is None else replace(straggler, effect=found)


def _is_everywhere(found: Sequence[Straggler], panels: Panels, least_share: float) -> bool:
    """Return whether nobody in particular is to blame: lateness rotates, or a period affects many nodes."""
    if found[0].pattern != LatePattern.PERIODIC:
        return found[0].pattern == LatePattern.ROTATING
    ranks = [rank for each in found for rank in each.ranks]
    num_struck, num_nodes = len(np.unique(panels.node[ranks])), len(np.unique(panels.node))
    if num_nodes == 1:
        return len(ranks) > 1 and len(ranks) > least_share * len(panels.rank)
    return num_struck > 1 and num_struck > least_share * num_nodes


def _put_back(work_ns: Floats, role: Ints, found: Sequence[Straggler]) -> Floats:
    replaced = work_ns.copy()
    slow = np.isin(np.arange(len(work_ns)), [rank for straggler in found for rank in straggler.ranks])
    for value in np.unique(role[slow]):
        others = work_ns[(role == value) & ~slow]
        own = np.flatnonzero((role == value) & slow)
        if len(others):
            replaced[own] = np.minimum(work_ns[own], np.median(others, axis=0))
        elif len(own) == 1:  # a rank that was compared with itself
            replaced[own] = np.minimum(work_ns[own], np.median(work_ns[own]))
    return replaced


def _straggler_culprit(straggler: Straggler, panels: Panels) -> Culprit:
    first, effect, interval = straggler.ranks[0], straggler.effect.value, straggler.effect.interval
    if straggler.kind == "rank":
        return rank_culprit(int(panels.rank[first]), effect, interval, panels)
    name = panels.host[first] if straggler.kind == "node" else f"local{straggler.ids[0]}"
    return place_culprit(straggler.kind, name, straggler.ranks, effect, interval, panels)
