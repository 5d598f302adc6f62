"""From panels of steps to findings: the topics in their order, and what follows from all of their findings together.

A rule finds nothing where its evidence stays below its threshold or within chance. Own work needs no common clock, so
who is late is judged by it; transfers need one, and are not judged where a clock is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, assert_never

from hpcpace.core.text import percent, plural, rank_list
from hpcpace.diagnosis.finding import MAX_NAMED, Case, DiagnosisFinding, Evidence
from hpcpace.diagnosis.topics import (
    communication,
    cores,
    events,
    idle,
    jitter,
    links,
    memory,
    pipeline,
    run_end,
    stops,
    straggler,
)
from hpcpace.metrics.stragglers import MIN_STEPS, SearchObstacle

_MORE_STEPS = "record at least 20 steps, such as schedule(active=20) of torch.profiler, and report them"
_MAX_LIST_CHARS = 30  # display: a longer list of ranks is cut
_MIN_COST = 0.0005  # display: less is said as 0.0 %


class Needs(Enum):
    """The data without which a topic does not run."""

    NOTHING = auto()
    STEPS = auto()
    OWN_WORK = auto()


class Topic(NamedTuple):
    """A topic: its rule, and the data that it needs."""

    find: Callable[[Case], Sequence[DiagnosisFinding]]
    needs: Needs


TOPICS = (
    Topic(run_end.find_hanging, Needs.NOTHING),
    Topic(run_end.find, Needs.NOTHING),
    Topic(stops.find, Needs.NOTHING),
    Topic(memory.find, Needs.NOTHING),
    Topic(straggler.find_by_arrival, Needs.STEPS),
    Topic(idle.find_host_everywhere, Needs.OWN_WORK),
    Topic(straggler.find, Needs.OWN_WORK),
    Topic(pipeline.find, Needs.OWN_WORK),
    Topic(idle.find_input, Needs.OWN_WORK),
    Topic(idle.find_host_somewhere, Needs.OWN_WORK),
    Topic(events.find_collection, Needs.OWN_WORK),
    Topic(events.find_interruptions, Needs.OWN_WORK),
    Topic(links.find, Needs.OWN_WORK),
    Topic(links.find_by_transfers, Needs.OWN_WORK),
    Topic(communication.find, Needs.OWN_WORK),
    Topic(events.find, Needs.OWN_WORK),
    Topic(jitter.find, Needs.OWN_WORK),
    Topic(cores.find, Needs.OWN_WORK),
)
"""All topics, in the order in which they run: each sees the findings of those before it in the case.

Hosts that are too slow everywhere come before all that compares ranks by their work, stragglers before topics that
judge the work without theirs, links before communication, all that makes steps differ before jitter, and cores last,
because they may explain any other finding.
"""


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why the data of a run decide nothing.

    Attributes:
        words: the reason, as the headline has it.
        advice: what to do.
        why: further sentences.
    """

    words: str
    advice: str = "use more steps of the run (--steps, --include-warmup), or record more"
    why: tuple[str, ...] = ()


WRONG_CLOCK = Obstacle(
    words="a clock is wrong, so transfers cannot be judged; the ranks' own work shows no fault",
    advice="see the clock error below",
)
EARLY_EXITS = Obstacle(
    words="ranks leave operations before others enter them: a clock is wrong, or they exchange nothing there, so "
    "transfers cannot be judged; the ranks' own work shows no fault",
    advice="see the clock error below",
)
ABSENT_RANKS = Obstacle(words="nothing that is certain explains the step time")
"""Ranks without a trace may cause the waits of the others."""
_IN_FULL = "record some hundred steps in full: hpcpace switch RUN on, or trace.detail"
NO_PHASES = Obstacle(
    words="phases were not recorded, so who works and who waits inside a step is not known", advice=_IN_FULL
)
NOTHING_COMPARED = Obstacle(
    words="ranks send to each other, and which of them do the same work is not known",
    advice="say how ranks are laid out: hpcpace.session(mesh={'dp': 2, 'pp': 2})",
)


def too_few_steps(num_steps: int, least: int, *, num_plain: int = 0) -> Obstacle:
    """Return that a run has fewer steps than a diagnosis needs, beside those that were recorded without detail."""
    are = "is" if num_steps == 1 else "are"
    words = f"{plural(num_steps, 'step')} {are} too few: at least {least} are needed"
    if not num_plain:
        return Obstacle(words=words)
    others = "1 other was" if num_plain == 1 else f"{num_plain} others were"
    return Obstacle(words=f"{words}, and {others} recorded without detail", advice=_IN_FULL)


def too_much_noise(smallest_share: float) -> Obstacle:
    """Return that only a rank slower than its role by more than a share would stand out from the noise."""
    return Obstacle(words=f"noise hides any rank that is less than {smallest_share:.0%} slower than its role")


def unsampled_step(words: str) -> Obstacle:
    """Return that a single step took a rank far longer than usual, in words, and that nothing shows why."""
    return Obstacle(words=words, advice="record samples of the hosts (trace.counters = true)")


def host_times(ranks: Sequence[int]) -> Obstacle:
    """Return that phases of ranks with a device are times of their hosts, so that their work is not known."""
    return Obstacle(
        words=f"phases of {shortened_ranks(ranks)} are host times, and what their devices do is not known",
        advice="trace a few hundred steps with device times of phases (hpcpace help ranks with a device)",
        why=(
            "the host runs ahead of the device, so own work, waits and transfers in a step are not known; arrivals at "
            "collectives on the device name no rank as late",
        ),
    )


def unmatched_operations(share: float) -> Obstacle:
    """Return that a share of the step is in operations that match no other rank's."""
    return Obstacle(
        words=f"{percent(share)} of the step time is in operations that match no other rank's: whether ranks wait or "
        "transfer there is not known",
        advice="record groups, numbers and peers of operations: hpcpace trace does",
    )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings on a run, the largest loss first.

    Attributes:
        findings: all modes above their thresholds; empty if nothing is wrong.
        obstacle: why the data decide nothing; None if they do.
        smallest_effect: the smallest excess of one rank that would have been named with a probability of 0.9; None
            where no two ranks are compared.
        absent: ranks with which the judged ones communicate, and of which nothing is known. Then waits and transfers
            prove nothing, and the loss to a straggler is an upper bound.
        stepless: those of them whose traces are complete and show no step.
        num_present: ranks that are judged.
        slow: indices of the ranks that stand out: the usual work of a role is without theirs.
        cores: that ranks share cores, where that is notable; among the findings only above its threshold.
    """

    findings: tuple[DiagnosisFinding, ...]
    obstacle: Obstacle | None
    smallest_effect: float | None
    absent: tuple[int, ...] = ()
    stepless: tuple[int, ...] = ()
    num_present: int = 0
    slow: tuple[int, ...] = ()
    cores: DiagnosisFinding | None = None

    @property
    def late_ranks(self) -> frozenset[int]:
        """The ranks that findings name as late by their own work, those of named nodes and slots included."""
        named = (finding for finding in self.findings if finding.culprits)
        late = (each.evidence for each in named if isinstance(each.evidence, straggler.LatenessEvidence))
        return frozenset(rank for evidence in late for rank in evidence.ranks)


def diagnose(case: Case) -> Diagnosis:
    """Return what is wrong with a run."""
    panels, cores_found = case.panels, cores.find_shared(case)
    known = _known(case)
    for topic in TOPICS:
        if topic.needs.value <= known.value:
            found = topic.find(case)  # may drop earlier findings
            case.findings = [*case.findings, *found]
    findings = sorted((each for each in _joined(case.findings) if _costs(each)), key=_place)
    if case.absent:
        findings = [finding for finding in findings if finding.evidence.needs_no_others]
    search = case.search
    return Diagnosis(
        findings=tuple(findings),
        obstacle=None if findings else _obstacle(case, known, is_noise_explained=cores_found is not None),
        smallest_effect=search.smallest_share if search is not None else None,
        absent=tuple(case.absent),
        stepless=tuple(case.stepless),
        num_present=len(panels.rank),
        slow=search.slow if search is not None else (),
        cores=cores_found,
    )


def _known(case: Case) -> Needs:
    """Return what the data of a case suffice for."""
    if len(case.panels.times_ns) < case.settings.least_steps:
        return Needs.NOTHING
    return Needs.STEPS if case.panels.host_timed else Needs.OWN_WORK


def _costs(finding: DiagnosisFinding) -> bool:
    """Return whether a finding costs anything, or is a fault by itself: an end, a hang, a broken link."""
    evidence = finding.evidence
    is_fault = evidence.precedence < Evidence.precedence or evidence.has_own_cause
    return max(finding.loss_share, evidence.later_share or 0.0) >= _MIN_COST or is_fault


def _place(finding: DiagnosisFinding) -> tuple[float, float, bool]:
    """Return the sort key of a finding: what stopped the run, then the largest loss as far as it is certain."""
    evidence = finding.evidence
    return evidence.precedence, -finding.loss_share * finding.counted_part, not evidence.wins_ties


def _obstacle(case: Case, known: Needs, *, is_noise_explained: bool) -> Obstacle | None:
    """Return why the data decide nothing, if nothing was found; None if the run is healthy."""
    panels = case.panels
    if known is Needs.NOTHING:
        few = too_few_steps(len(panels.times_ns), case.settings.least_steps, num_plain=panels.num_plain)
        first = "" if case.absent else straggler.preliminary(case)
        advice = few.advice if panels.num_plain else _MORE_STEPS
        return replace(few, words=f"{few.words}; {first}", advice=advice) if first else few
    if known is Needs.STEPS:  # nothing but arrivals rests on what devices did
        return NO_PHASES if panels.is_unphased else host_times(panels.host_timed)
    if case.absent:
        return ABSENT_RANKS
    if case.is_clock_wrong:
        return WRONG_CLOCK
    if case.are_exits_early:
        return EARLY_EXITS
    if words := stops.long_step(case):
        return unsampled_step(words)
    return _obstacle_of_search(case, is_noise_explained=is_noise_explained) or _unmatched(case)


def _obstacle_of_search(case: Case, *, is_noise_explained: bool) -> Obstacle | None:
    """Return why ranks could not be compared; explained noise is reported with the rank that it would not hide."""
    search, panels = case.search, case.panels
    if search is None:
        return None
    match search.obstacle:
        case SearchObstacle.TOO_FEW_STEPS:
            return too_few_steps(len(panels.times_ns), MIN_STEPS, num_plain=panels.num_plain)
        case SearchObstacle.TOO_MUCH_NOISE:
            return None if is_noise_explained else too_much_noise(search.smallest_share or 0.0)
        case SearchObstacle.NOBODY_COMPARED | None:  # stages and transfers are judged without comparing ranks
            return NOTHING_COMPARED if not panels.is_role_known and panels.stage.max() < 1 else None
        case _:
            assert_never(search.obstacle)


def _unmatched(case: Case) -> Obstacle | None:
    """Return that operations without a counterpart take as much as would make the job bound by communication."""
    panels = case.panels
    unmatched_ns, work_ns = float(panels.unmatched_ns.mean()), float(panels.work_ns.mean())
    if unmatched_ns < case.settings.communication_share * max(unmatched_ns + work_ns, 1.0):
        return None
    return unmatched_operations(unmatched_ns / panels.mean_length_ns)


def _joined(findings: Sequence[DiagnosisFinding]) -> list[DiagnosisFinding]:
    """Return one finding a mode: the first one of it, with the loss and the culprits of all.

    Findings with an independent cause, such as an evaluation or a lossy link, are not merged.
    """
    joined: dict[tuple[str, str], DiagnosisFinding] = {}
    for finding in findings:
        key = (finding.mode, finding.variety if finding.evidence.has_own_cause else "")
        first = joined.get(key)
        if first is None:
            joined[key] = finding
            continue
        known = {culprit.aliases for culprit in first.culprits}
        more = tuple(culprit for culprit in finding.culprits if culprit.aliases not in known)
        share = first.loss_share + finding.loss_share
        own, more_of = first.loss_interval, finding.loss_interval
        interval = (own[0] + more_of[0], own[1] + more_of[1]) if own is not None and more_of is not None else None
        joined[key] = replace(first, loss_share=share, culprits=first.culprits + more, loss_interval=interval)
    return list(joined.values())


def shortened_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks, or the first of many and how many there are."""
    text = rank_list(ranks)
    return text if len(text) <= _MAX_LIST_CHARS else f"{len(ranks)} ranks ({rank_list(ranks[:MAX_NAMED])}, ...)"
