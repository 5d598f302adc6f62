"""One thing that two probes measured, in time after over time before, and whether that differs beyond noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcpace.core.text import plural

LEAST_CHANGE = 0.05
"""A smaller change is none, whatever the noise."""
_MOST_HALFWIDTH = 0.3
"""A comparison that could not have seen 30 % more time says nothing."""
_MAX_LN = 20.0
"""Times that differ by more than a factor of 500 million were not measured, but a file may say so."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that two probes measured.

    Attributes:
        part: of the probe, such as `sweep`.
        name: what it is, such as `all_reduce` or `n1 to n2`.
        num_nodes: hosts that took part, where that distinguishes things of one name; 0 elsewhere.
        kind: what was measured, such as `latency` or `rate`.
        ratio: time after over time before.
        low, high: its interval.
        least: the change that counts, as a share.
        widest: the share of more time that it must have been able to see, in order to say that nothing changed.
    """

    part: str
    name: str
    num_nodes: int = 0
    kind: str
    ratio: float
    low: float
    high: float
    least: float = LEAST_CHANGE
    widest: float = _MOST_HALFWIDTH

    @property
    def subject(self) -> str:
        """What it is, in words: `all_reduce over 4 hosts`."""
        return f"{self.name} over {plural(self.num_nodes, 'host')}" if self.num_nodes else self.name

    @property
    def is_slower(self) -> bool:
        """Whether it became slower beyond noise."""
        return self.low > 1 and self.ratio > 1 + self.least

    @property
    def is_faster(self) -> bool:
        """Whether it became faster beyond noise."""
        return self.high < 1 and self.ratio < 1 / (1 + self.least)

    @property
    def is_decided(self) -> bool:
        """Whether something changed, or the interval is narrow enough and near enough to 1 to say that nothing did."""
        if self.is_slower or self.is_faster:
            return True
        small = 1 + min(self.least, LEAST_CHANGE)
        stands_out = (self.low > 1 and self.ratio > small) or (self.high < 1 and self.ratio < 1 / small)
        return self.high / self.ratio - 1 < self.widest and not stands_out


def interval(mean: float, variance: float, num_errors: float) -> tuple[float, float, float]:
    """Return ratio, low and high of a `Change`.

    Args:
        mean: ln of time after over time before.
        variance: of that.
        num_errors: standard errors to each side.
    """
    halfwidth = num_errors * math.sqrt(variance)
    ratio, low, high = (
        math.exp(min(max(each, -_MAX_LN), _MAX_LN)) for each in (mean, mean - halfwidth, mean + halfwidth)
    )
    return ratio, low, high


def is_unclear(found: Sequence[Change]) -> bool:
    """Return whether there is nothing to compare, or a part of which no comparison is decided."""
    parts = {one.part for one in found}
    return not parts or bool(parts - {one.part for one in found if one.is_decided})


def outcome_words(found: Sequence[Change]) -> str:
    """Return one sentence on all changes, without a full stop."""
    slower, faster = [one for one in found if one.is_slower], [one for one in found if one.is_faster]
    decided = [one for one in found if one.is_decided]
    if not found:
        return (
            "cannot tell: the probes have no operation and size in common that both measured in two rounds, and no "
            "pair, core or copy"
        )
    if not decided:
        return "cannot tell: times vary too much; probe idle hosts, and for longer (--time)"
    noisy = f"; {len(found) - len(decided)} vary too much to tell" if len(decided) < len(found) else ""
    if slower:
        worst = max(slower, key=lambda one: one.ratio)
        more = f", and {len(slower) - 1} more" if len(slower) > 1 else ""
        return (
            f"slower: {worst.subject} takes {100 * (worst.ratio - 1):.0f} % longer "
            f"({worst.kind}, {100 * (worst.low - 1):+.0f} to {100 * (worst.high - 1):+.0f} %){more}{noisy}"
        )
    if is_unclear(found):
        unclear = " and ".join(sorted({one.part for one in found} - {one.part for one in decided}))
        return f"cannot tell: the times of {unclear} vary too much; probe idle hosts, and for longer (--time)"
    if faster:
        return f"not slower: {len(faster)} of {len(found)} comparisons are faster{noisy}"
    widest = max(max(one.high / one.ratio for one in decided) - 1, LEAST_CHANGE)
    return f"not slower: nothing changed; it could have seen {100 * widest:.0f} %{noisy}"
