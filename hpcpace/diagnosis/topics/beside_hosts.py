"""What stragglers cost beside hosts that could not issue work any faster than these let the job go.

A rank that gets faster gains no more than the hosts of the others leave: both have to be mended then. And where hosts
hold devices up by turns, idle time that nothing shows may look like work: who is late then must work longer for sure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import Case
from hpcpace.diagnosis.host_pace import HostPace
from hpcpace.diagnosis.summary import Mode
from hpcpace.metrics import Bools
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.special import Z_95
from hpcpace.metrics.stragglers import Straggler
from hpcpace.metrics.what_if import Change

_MIN_EXCESS = 1e-3  # statistics: no division by zero


@dataclass(frozen=True, kw_only=True)
class SureThresholds(Thresholds, topic="straggler"):
    """When a rank surely works longer than others whose devices wait for their hosts."""

    sure_part: float = number(0.5, "share")
    """Part of its excess over all time of the others in which its device was surely not idle: the rest may be noise."""
    waiting_pace_share: float = number(0.6, "share")
    """Share of the step that a host must take to issue it for its pace to count where it waits for its device in each
    step: the device has work left from one that takes less."""


@dataclass(frozen=True, kw_only=True)
class StragglerCost:
    """What stragglers cost.

    Attributes:
        found: the stragglers; empty if none of them is sure.
        share: what they cost as a share of the step time.
        interval: of that; None where it is not known.
        change: what puts them back in the rebuilt steps; None without these.
        later_share: what they cost once hosts issue work faster, if these take some of it back; else None.
    """

    found: list[Straggler]
    share: float
    interval: tuple[float, float] | None = None
    change: Change | None = None
    later_share: float | None = None


def cost_of(case: Case, found: list[Straggler], by_work: Callable[[Sequence[Straggler]], float]) -> StragglerCost:
    """Return what lasting or passing stragglers cost, as far as the hosts of the others let it be gained.

    Where these limit it, those are left out whose excess may be idle time, unless nothing else was found; of those that
    pass, also where devices are known to wait for their hosts. A launch queue that is full for a while makes hosts seem
    slower, and waiting for each other makes them slower together, so that the interval is as wide on both sides as what
    they take back.

    Args:
        case: what is judged.
        found: at least one.
        by_work: returns the share of the step that some cost by their own work, where steps are not rebuilt.
    """
    pace = None if case.pace is None or case.panels.step is None else case.pace(case.panels.step, ())
    alone = _alone(case, found, by_work, pace)
    most, is_host_bound = most_gain(case, _rows(found)), any(each.mode == Mode.HOST for each in case.findings)
    is_limited = alone.share > most
    if not is_limited and alone.interval is not None:
        low, high = alone.interval
        alone = replace(alone, interval=(min(low, most_gain(case, _rows(found), is_possible=True)), high))
    if not is_limited and not is_host_bound:
        return alone
    doubtful = [each for each in found if is_limited or each.step_range is not None]
    sure = [each for each in found if each not in doubtful or _works_longer(case, each)]
    if is_host_bound and len(sure) == len(found) > 1:
        # The slowest host is late as well, by idle time of its device, and limits what the others could gain.
        sure = [each for each in found if _works_longer(case, each)] or found
    if len(sure) < len(found) and (sure or is_host_bound):
        alone = _alone(case, sure, by_work, pace) if sure else StragglerCost(found=[], share=0.0)
        most = most_gain(case, _rows(sure)) if sure else most
    taken = alone.share - most
    if taken <= 0:
        return alone
    later = alone.later_share or alone.share
    return replace(alone, share=most, interval=(max(most - taken, 0.0), later), later_share=later)


def _alone(
    case: Case, found: list[Straggler], by_work: Callable[[Sequence[Straggler]], float], pace: HostPace | None
) -> StragglerCost:
    """Return what stragglers cost where no host is in the way but those that wait for their devices."""
    if case.steps is None:
        return _by_work(case, found, max(by_work(found), 0.0))
    ranks = _rows(found)
    change = Change(kind="stragglers", id=ranks[0], ranks=tuple(ranks))
    cost = case.cost(case.steps.gain(change), _usual_error(case, found))
    if case.is_clock_wrong:  # so are the waits of rebuilt steps for messages, and own work needs no clock
        whole = max(by_work(found), 0.0)
        cost = Estimate(value=whole, low=min(cost.low, whole), high=max(cost.high, whole))
    share = max(cost.value, 0.0)
    alone = StragglerCost(found=found, share=share, interval=cost.interval, change=change)
    issued = case.issued() if pace is not None and _are_waiting(case, ranks, pace) else None
    least = cost if issued is None else case.cost(case.steps.gain_beside_hosts(change, issued))
    if least.value >= cost.low:
        return alone
    # How much of the work before an operation is left when it is issued is not known: between none and all of it.
    middle, interval = (max(least.value, 0.0) + share) / 2, (max(least.low, 0.0), cost.high)
    return replace(alone, share=middle, interval=interval, later_share=share)


def _by_work(case: Case, found: list[Straggler], share: float) -> StragglerCost:
    """Return what stragglers cost by their own work alone: at most that, and less by what their work hides.

    Transfers that are under way meanwhile may show without it. In a pipeline, it may be in a bubble altogether.
    """
    panels = case.panels
    error = share * _usual_error(case, found)
    spread = max((high - low) / 2 for each in found for low, high in [each.effect.interval])
    error = float(np.hypot(error, share * spread / max(found[0].effect.value, _MIN_EXCESS)))
    hidden = float(panels.hidden_ns.mean()) / panels.mean_time_ns
    low = 0.0 if len(np.unique(panels.stage)) > 1 else max(share - error - hidden, 0.0)
    return StragglerCost(found=found, share=share, interval=(low, share + error))


def _usual_error(case: Case, found: Sequence[Straggler]) -> float:
    """Return how wrong the usual work of stragglers may be, half of a 95 % interval as a part of their excess.

    Without its fault, a rank differs from the others of its role by as much as these differ from each other. It is 0
    where fewer than two others show that.
    """
    role, work_ns = case.panels.role, case.panels.work_ns.mean(axis=1)
    is_late = np.isin(np.arange(len(role)), [rank for each in found for rank in each.ranks])
    others = [work_ns[(role == of) & ~is_late] for of in np.unique(role[is_late]).tolist()]
    apart = np.concatenate(
        [of_role / of_role.mean() - 1 for of_role in others if len(of_role) and of_role.any()] or [[]]
    )
    freedom = len(apart) - len(others)
    if freedom < 1:
        return 0.0
    excess = float(np.mean([each.effect.value for each in found]))
    return Z_95 * float(np.sqrt((apart**2).sum() / freedom)) / max(excess, _MIN_EXCESS)


def _are_waiting(case: Case, late: Sequence[int], pace: HostPace) -> bool:
    """Return whether hosts of ranks that are not late wait for their devices in each step, and issue it hardly faster.

    These begin each step anew, so that no operation comes before its host has issued it.
    """
    is_other, waiting_ns = ~np.isin(pace.row, late), pace.figures("waiting_ns")
    own_ns = (pace.figures("issue_ns") - waiting_ns)[is_other & (waiting_ns > 0)]
    least = case.thresholds.of(SureThresholds).waiting_pace_share
    return bool((own_ns >= least * case.rest.mean_time_ns).any())


def _rows(found: Sequence[Straggler]) -> list[int]:
    return sorted({rank for each in found for rank in each.ranks})


def most_gain(case: Case, late: Sequence[int], *, is_possible: bool = False) -> float:
    """Return what a step can gain at most with the hosts of the ranks that are not late; 1 where that is not known.

    Args:
        case: what is judged.
        late: indices of the ranks that are.
        is_possible: whether hosts count as slow that may be held up at the pace of their devices.
    """
    if case.pace is None or case.panels.step is None:
        return 1.0
    pace = case.pace(case.panels.step, ())
    least_ns = pace.figures("possible_ns" if is_possible else "least_ns")[~np.isin(pace.row, late)]
    return max(1 - float(least_ns.max()) / case.rest.mean_time_ns, 0.0) if least_ns.any() else 1.0


def _works_longer(case: Case, straggler: Straggler) -> bool:
    """Return whether ranks surely work longer than others of their role, or have slower hosts."""
    first, stop = straggler.step_range or (0, case.panels.work_ns.shape[1])
    is_late = np.isin(np.arange(len(case.panels.role)), straggler.ranks)
    is_other = ~is_late & np.isin(case.panels.role, case.panels.role[is_late])
    return works_longer(case, is_late, is_other, straggler.effect.value, slice(first, stop))


def works_longer(case: Case, late: Bools, others: Bools, effect: float, steps: slice = slice(None)) -> bool:
    """Return whether devices surely work longer than others, or their hosts take longer; True where nobody asks.

    Args:
        case: what is judged.
        late, others: the ranks, bool, (num_ranks,).
        effect: by what part they seem to work longer.
        steps: the steps that show it.
    """
    if case.pace is None or case.panels.step is None:
        return True
    pace = case.pace(case.panels.step[steps], np.flatnonzero(late).tolist())
    is_late, is_other = late[pace.row], others[pace.row]
    if not is_other.any():
        return False
    least = 1 + case.thresholds.of(SureThresholds).sure_part * effect
    issue_ns = pace.figures("issue_ns") - pace.figures("waiting_ns")
    pairs = (pace.figures("sure_ns"), pace.figures("most_ns")), (issue_ns, issue_ns)
    return any(own[is_late].mean() >= least * np.median(usual[is_other]) for own, usual in pairs)
