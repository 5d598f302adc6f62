"""Jitter that synchronisation amplifies: every step takes as long as whoever happens to be slowest in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import percent
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.diagnosis.finding import Case, DiagnosisFinding, Evidence, FindingWords, Panels, Said
from hpcpace.diagnosis.summary import Mode
from hpcpace.diagnosis.topics.idle import InputEvidence
from hpcpace.metrics import Floats
from hpcpace.metrics.resampling import Estimate


@dataclass(frozen=True, kw_only=True)
class JitterThresholds(Thresholds, topic="jitter"):
    """When changing work counts as due to the data."""

    least_data_spread: float = number(0.02, "times")
    """Standard deviation of the work of the passes of a step, relative to it, below which the data explain no loss
    above its threshold."""


@dataclass(frozen=True, kw_only=True)
class JitterEvidence(Evidence):
    """Jitter that synchronisation amplifies.

    Attributes:
        share: the loss as a share of the step time.
        later_share: the loss once no rank is late in every step; None where that is no more.
    """

    mode: ClassVar[str] = Mode.AMPLIFICATION
    may_be_uneven_waiting: ClassVar[bool] = True
    makes_steps_differ: ClassVar[bool] = True
    share: float
    later_share: float | None = None

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        return jitter_words(self.share, said, self.later_share)


_GROWS = 1.5  # display: loss without late ranks, relative to that with them, from which it is said


def jitter_words(share: float, said: Said, later_share: float | None = None) -> FindingWords:
    """Return jitter in words; `share` is lost to whichever rank is last in a step, `later_share` without late ranks."""
    cost, who = said.lost, "no rank stands out beyond chance"
    if later_share is not None:
        cost += f", and {percent(later_share)} once no rank is late all the time"
        who = "next to ranks that are late all the time"
    return FindingWords(
        headline=f"synchronisation amplification: every step waits for its slowest rank, which costs {cost}",
        why=f"{who}: {percent(share)} is lost to whichever rank is last in a step",
        next="synchronise less often per step, keep cores free for the system, or align events to the same step",
    )


@dataclass(frozen=True, kw_only=True)
class DataEvidence(Evidence):
    """Work that varies with the data, for which every step waits.

    Attributes:
        share: the loss as a share of the step time.
        shared: correlation of the work of a microbatch between neighbouring stages.
        spread: standard deviation of the work of a pass within a step, relative to it.
    """

    mode: ClassVar[str] = Mode.DATA
    makes_steps_differ: ClassVar[bool] = True
    share: float
    shared: float
    spread: float

    def words(self, said: Said) -> FindingWords:
        """Return the finding in words."""
        return FindingWords(
            headline="work varies with the data (sequence length): steps wait for the longest microbatches, which "
            f"costs {said.lost}",
            why=f"a microbatch that takes long on one stage takes long on the next (correlation {self.shared:.2f}); "
            f"the work of those of a step differs by {percent(self.spread)} (standard deviation)",
            next="give ranks microbatches of equal work: sort or pack sequences by length, or balance tokens across "
            "ranks",
        )


def find(case: Case) -> list[DiagnosisFinding]:
    """Return what steps lose to their slowest rank, where no rank is slow for long, and whether the data make it so.

    The transient part, mean_i(max_r x) - max_r(mean_i x), of the time x that ranks take to reach their collectives, in
    the role where it is largest. Where a rank is slow all the time, most of it shows only once that is mended: that is
    judged, too, and said. In a pipeline, where delays of one stage add to those of others, what the rebuilt step loses
    against one in which all work is as in the mean.
    The loss of events and passing stragglers is not counted twice.
    """
    panels, settings = case.panels, case.settings
    by_roles, explained = _share_of_roles(panels, case.work_ns), _explained(case.findings)
    now = _share_of_roles(panels, panels.work_ns)
    if panels.transient_share is not None and panels.transient_share.value > now.value:
        now = panels.transient_share
    share, later = now.value - explained, by_roles.value - explained
    if max(share, later) < settings.jitter_share:
        return []
    varies, least_spread = panels.data_variation, case.thresholds.of(JitterThresholds).least_data_spread
    found: Evidence = JitterEvidence(share=share, later_share=later if later > _GROWS * max(share, 0.0) else None)
    if varies is not None and varies.shared >= settings.data_share and varies.spread >= least_spread:
        found = DataEvidence(share=share, shared=varies.shared, spread=varies.spread)
    interval = (max(now.low - explained, 0.0), max(now.high - explained, 0.0))
    return [DiagnosisFinding(evidence=found, loss_share=max(share, 0.0), loss_interval=interval, confidence=0.95)]


def _explained(findings: Sequence[DiagnosisFinding]) -> float:
    """Return the loss, as a share of the step time, of findings that make steps differ."""
    passing = sum(finding.loss_share for finding in findings if finding.evidence.makes_steps_differ)
    return passing + sum(
        each.loss_share - each.evidence.share for each in findings if isinstance(each.evidence, InputEvidence)
    )


def _share_of_roles(panels: Panels, work_ns: Floats) -> Estimate:
    # A delay of any stage holds its whole pipeline up.
    reach = np.maximum(panels.reach_ns - (panels.work_ns - work_ns), 0.0)
    found = [Estimate.around(0.0, 0.0)]
    for value in np.unique(panels.role):
        of_role = reach[panels.role == value]
        if len(of_role) > 1 and panels.is_role_known:
            slowest_ns = float(of_role.mean(axis=1).max())
            found.append(
                Estimate.of_mean(of_role.max(axis=0) - slowest_ns).through(lambda ns: ns / panels.mean_time_ns)
            )
    return max(found, key=lambda loss: loss.value)
