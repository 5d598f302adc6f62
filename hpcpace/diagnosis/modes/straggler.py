"""Stragglers: who is late again and again by own work, and what the others lose by waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from hpcpace.config import DiagnosisConfig
from hpcpace.diagnosis.modes.chance import confidence_of
from hpcpace.diagnosis.modes.evidence import Evidence, LatenessEvidence, LatePattern, mode_of_pattern
from hpcpace.diagnosis.modes.finding import Culprit, DiagnosisFinding, Floats, Int64s, Panels, rank_culprit, slowest_ns
from hpcpace.diagnosis.modes.mode import Mode
from hpcpace.metrics.recurrence import run_begins, steps_between
from hpcpace.metrics.roles import (
    Stage,
    StageComparison,
    WorkExcess,
    compare_events,
    compare_with_others,
    excess_over_role,
)
from hpcpace.metrics.stragglers import Straggler, StragglerSearch, find_stragglers
from hpcpace.metrics.what_if import Change, Rebuilt

_LEAST_COMPARED, _LEAST_TOLD = 3, 8
_MOST_EXPLAINED = 4
_SLOW = (LatePattern.FIXED, LatePattern.TRANSIENT)


def search_stragglers(panels: Panels, settings: DiagnosisConfig) -> StragglerSearch:
    """Return who is late again and again; ranks are not compared if their roles are not known."""
    if not panels.is_role_known:
        return StragglerSearch(found=(), obstacle=None, smallest_share=None, num_compared=0)
    search = find_stragglers(
        panels.work_ns, panels.role, panels.node, floor_share=settings.straggler_share, level=settings.level
    )
    slow = np.zeros(len(panels.rank), np.bool_)
    slow[[rank for each in search.found if each.klass in _SLOW for rank in each.ranks]] = True
    usual_excess, excess = _usual_excess(panels, slow, settings.level), work_excess(panels, np.flatnonzero(slow))
    found, num_steps = [_measured(each, excess) for each in search.found], panels.work_ns.shape[1]
    kept = tuple(each for each in found if _matters(each, usual_excess, num_steps, settings))
    return replace(search, found=kept, slow=tuple(np.flatnonzero(slow).tolist()))


def work_excess(panels: Panels, slow: Sequence[int] | NDArray[np.int64]) -> WorkExcess:
    """Return the excess of own work of all ranks over their roles.

    Args:
        panels: the steps.
        slow: indices of the ranks that stand out, by `search_stragglers`: the usual work of a role is without theirs.
    """
    is_slow = np.zeros(len(panels.rank), np.bool_)
    is_slow[list(slow)] = True
    # Ranks whose roles are not known are compared with nobody.
    role = panels.role if panels.is_role_known else np.arange(len(panels.rank))
    return excess_over_role(panels.work_ns, role, is_slow)


def _matters(straggler: Straggler, usual_excess: float, num_steps: int, settings: DiagnosisConfig) -> bool:
    """Return whether an excess costs enough, and is beyond what ranks differ by anyhow.

    A periodic one costs its size over its period, a passing one its share of the steps.
    """
    if straggler.klass == LatePattern.PERIODIC:
        return straggler.effect_share / max(straggler.period_steps or 1, 1) >= settings.runtime_share
    if straggler.step_range is not None:
        first, stop = straggler.step_range
        return straggler.effect_share * (stop - first) / num_steps >= settings.runtime_share
    return straggler.klass != LatePattern.FIXED or straggler.effect_share >= max(usual_excess, settings.straggler_share)


def _usual_excess(panels: Panels, slow: NDArray[np.bool_], level: float) -> float:
    """Return what the mean work of the slowest of so many ranks exceeds its role by, because none are equally fast.

    Among many that differ by 1 percent some are 3 percent slower than the others. The limit that the largest of n
    normal deviations passes with the probability `level` (Student's t, Bonferroni), the spread being that of the ranks
    of roles of three and more that are not slow, without the tenth that is farthest out; 0 where fewer than eight tell
    it. It holds what is left of the noise of single steps.

    Args:
        panels: the steps.
        slow: ranks that may be stragglers, bool, (num_ranks,).
        level: over all ranks together.
    """
    deviations = [np.zeros(0)]
    for value in np.unique(panels.role):
        members = panels.role == value
        if members.sum() >= _LEAST_COMPARED and (members & ~slow).any():
            mean_ns = panels.work_ns[members & ~slow].mean(axis=1)
            deviations.append(mean_ns / max(float(mean_ns.mean()), 1.0) - 1)
    size = np.sort(np.abs(np.concatenate(deviations)))
    freedom = len(size) - len(deviations) + 1
    if len(size) < _LEAST_TOLD or freedom < 2:
        return 0.0
    kept = size[: -(-9 * len(size) // 10)]
    share = len(kept) / len(size)
    farthest = float(ndtri(0.5 + share / 2)) if share < 1 else 0.0
    # The mean square of a normal distribution between -q and q is 1 - 2 q phi(q) / share.
    of_normal = 1 - 2 * farthest * float(np.exp(-(farthest**2) / 2)) / float(np.sqrt(2 * np.pi)) / share
    spread = float(np.sqrt((kept**2).mean() / of_normal * len(size) / freedom))
    return spread * float(stdtrit(freedom, 1 - level / len(size)))


def straggler_findings(
    panels: Panels, search: StragglerSearch, steps: Rebuilt | None, settings: DiagnosisConfig
) -> tuple[list[DiagnosisFinding], Floats, Panels]:
    """Return what stragglers cost, and the own work of all ranks with theirs put back to that of their role's others.

    The panels come back with the data loading and the garbage collection of stragglers put back likewise, if it is
    that which makes them late, so that it is not found a second time. Each culprit is compared phase by phase with
    the others of its role, a periodic one with its own other steps.

    The loss is what the slowest rank of a role costs with them, less without: mean_i(max_r x) of both panels. That of
    fixed and transient stragglers is what rebuilt steps gain with their work as usual, where steps are rebuilt: a delay
    takes its way through the stages of a pipeline, and may hide transfers. These are one mode, periodic ones are the
    control plane's, and lateness that goes round is amplification, for which no rank is to blame.

    Args:
        panels: the steps.
        search: who is late.
        steps: the steps rebuilt; None where they are not.
        settings: the thresholds.
    """
    work, rest = panels.work_ns, panels
    findings = []
    for mode in (Mode.STRAGGLER, Mode.RUNTIME, Mode.AMPLIFICATION):
        found = [straggler for straggler in search.found if mode_of_pattern(LatePattern(straggler.klass)) is mode]
        if not found:
            continue
        replaced = _put_back(work, panels.role, found)
        loss_ns = slowest_ns(work, panels.role) - slowest_ns(replaced, panels.role)
        if steps is not None and mode is Mode.STRAGGLER:
            ranks = sorted({rank for each in found for rank in each.ranks})
            gain = steps.gain(Change(kind="stragglers", id=ranks[0], ranks=tuple(ranks)))
            loss_ns = gain.gain_share * steps.measured_ns
        first = found[0]
        loss_share = max(loss_ns, 0.0) / panels.mean_time_ns
        finding = DiagnosisFinding(
            evidence=_evidence(found, loss_share, panels),
            loss_share=loss_share,
            confidence=confidence_of(first.p_value),
            culprits=() if _is_everywhere(found, panels) else tuple(_straggler_culprit(each, panels) for each in found),
        )
        # What nobody waits for is no loss, but a slow rank will hold others up at a larger scale.
        if finding.loss_share >= settings.runtime_share or mode is Mode.STRAGGLER:
            findings.append(finding)
            work, rest = replaced, _without_stages(rest, found, finding.evidence)
    return findings, work, rest


def _without_stages(panels: Panels, found: Sequence[Straggler], evidence: Evidence) -> Panels:
    """Return panels with the data loading, collection and idle devices of those put back whom these make late."""
    stages = evidence.stages if isinstance(evidence, LatenessEvidence) else ()
    for straggler, stage in zip(found, stages, strict=False):
        named = stage.stages if stage is not None else ()
        if Stage.DATA in named:
            panels = replace(panels, data_ns=_put_back(panels.data_ns, panels.role, [straggler]))
        if Stage.COLLECTION in named:
            panels = replace(panels, gc_ns=_put_back(panels.gc_ns, panels.role, [straggler]))
        if Stage.HOST in named:
            panels = replace(panels, host_ns=_put_back(panels.host_ns, panels.role, [straggler]))
    return panels


def _evidence(found: Sequence[Straggler], loss_share: float, panels: Panels) -> LatenessEvidence:
    straggler = found[0]
    period, (first, stop) = straggler.period_steps, straggler.step_range or (None, None)
    is_periodic = straggler.klass == LatePattern.PERIODIC
    return LatenessEvidence(
        pattern=LatePattern(straggler.klass),
        effect=straggler.effect_share,
        p_value=straggler.p_value,
        late_share=straggler.late_share,
        share=loss_share,
        period_ns=None if period is None else period * panels.mean_time_ns,
        first=first,
        stop=stop,
        period_steps=steps_between(run_begins(_late_steps(straggler, panels))) if is_periodic else None,
        stages=tuple(_stages(each, found, panels) for each in found[:_MOST_EXPLAINED]),
        ranks=tuple(sorted({int(panels.rank[row]) for each in found for row in each.ranks})),
    )


def _stages(straggler: Straggler, found: Sequence[Straggler], panels: Panels) -> StageComparison | None:
    """Return in which stage a straggler is late; None where its phases are not known or it has nobody to compare with.

    All ranks of the other stragglers are left out of those that it is compared with.
    """
    late = np.array(straggler.ranks)
    if panels.parts_ns is None or straggler.klass == LatePattern.ROTATING:
        return None
    if straggler.klass == LatePattern.PERIODIC:
        is_late = _late_steps(straggler, panels)
        return panels.qualified(compare_events(panels.parts_ns, panels.work_ns, late, is_late))
    is_other = np.isin(panels.role, panels.role[late])
    is_other[[rank for each in found for rank in each.ranks]] = False
    steps = slice(*(straggler.step_range or (0, panels.work_ns.shape[1])))
    return panels.qualified(compare_with_others(panels.parts_ns, late, np.flatnonzero(is_other), steps))


def _late_steps(straggler: Straggler, panels: Panels) -> NDArray[np.bool_]:
    """Return in which steps a periodic straggler is late by at least half of its effect, bool, (num_steps,)."""
    late = np.array(straggler.ranks)
    excess_ns = np.zeros(panels.work_ns.shape[1])
    for rank in late.tolist():
        others = np.flatnonzero((panels.role == panels.role[rank]) & (np.arange(len(panels.role)) != rank))
        excess_ns += (panels.work_ns[rank] - np.median(panels.work_ns[others], axis=0)) / len(late)
    usual_ns = float(np.median(panels.work_ns[late]))
    is_late: NDArray[np.bool_] = excess_ns > straggler.effect_share * usual_ns / 2
    return is_late


def _measured(straggler: Straggler, excess: WorkExcess) -> Straggler:
    """Return a lasting straggler with the excess that all tables show.

    What finds a straggler is more robust, and a little too small where many of a role are slow.
    """
    found = excess.of(straggler.ranks) if straggler.klass == LatePattern.FIXED else None
    if found is None:
        return straggler
    share, interval = found
    return replace(straggler, effect_share=share, interval=interval)


def _is_everywhere(found: Sequence[Straggler], panels: Panels) -> bool:
    """Return whether nobody in particular is to blame: lateness rotates, or a period affects many nodes."""
    if found[0].klass != LatePattern.PERIODIC:
        return found[0].klass == LatePattern.ROTATING
    ranks = [rank for each in found for rank in each.ranks]
    num_struck, num_nodes = len(np.unique(panels.node[ranks])), len(np.unique(panels.node))
    if num_nodes == 1:
        return 4 * len(ranks) > len(panels.rank)
    return num_struck > 1 and 4 * num_struck > num_nodes


def _put_back(work_ns: Floats, role: Int64s, found: Sequence[Straggler]) -> Floats:
    replaced = work_ns.copy()
    slow = np.zeros(len(work_ns), np.bool_)
    slow[[rank for straggler in found for rank in straggler.ranks]] = True
    for value in np.unique(role[slow]):
        others = work_ns[(role == value) & ~slow]
        if len(others):
            own = np.flatnonzero((role == value) & slow)
            replaced[own] = np.minimum(work_ns[own], np.median(others, axis=0))
    return replaced


def _straggler_culprit(straggler: Straggler, panels: Panels) -> Culprit:
    hosts = dict(zip(panels.rank.tolist(), panels.host, strict=True))
    first = straggler.ranks[0]
    if straggler.kind == "rank":
        return rank_culprit(int(panels.rank[first]), hosts, straggler.effect_share, straggler.interval, panels)
    name = panels.host[first] if straggler.kind == "node" else f"local{straggler.ids[0]}"
    aliases = [f"{straggler.kind} {name}"]
    if len(straggler.ranks) == 1:
        aliases.append(f"rank {panels.rank[first]}")
    return Culprit(
        kind=straggler.kind,
        id=name,
        aliases=tuple(aliases),
        effect=straggler.effect_share,
        interval=straggler.interval,
    )
