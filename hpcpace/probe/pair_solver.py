"""Which link is slow, from transfers between pairs of hosts: a slow pair accuses its links, a fast one clears them.

A link is at least as fast as the fastest transfer that passed it, its capability. A kind of link (of hosts, or uplinks)
has a usual capability, the median over its links, and a link below that by more than three robust deviations and 10 %
is not cleared. A slow transfer accuses the links on its path that are not cleared. Where that is one link, it is the
slow one; where several are, the slow one cannot be singled out, and all of them are named.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.link_explanations import explanations

NO_LINK = -1
"""Fills the columns of a path that has fewer links."""
_DEVIATIONS = 3.0
_MIN_SHARE = 0.10
# The standard deviation of a normal distribution is 1.4826 times its median absolute deviation.
_MAD_TO_DEVIATION = 1.4826


@dataclass(frozen=True, kw_only=True)
class LinkTests:
    """Transfers and the directed links that they passed.

    Attributes:
        path: numbers of links, int64, (num_tests, most_links), filled up with NO_LINK.
        value: what was reached, the more the better, such as bytes per second, (num_tests,); nan where nothing was
            measured.
        is_apart: whether nothing else passed these links meanwhile, (num_tests,); other transfers clear links and
            accuse none.
        kind: kind of each link, int64, (num_links,).
    """

    path: Ints
    value: Floats
    is_apart: Bools
    kind: Ints

    @property
    def num_links(self) -> int:
        """Directed links."""
        return len(self.kind)


@dataclass(frozen=True, kw_only=True)
class SlowLinks:
    """What the transfers say about the links.

    Attributes:
        capability: of each link, in the unit of the values, (num_links,); nan where nothing passed it.
        usual: usual capability by kind, (num_kinds,); nan where no link of a kind was passed.
        threshold: the least capability by kind that counts as usual, (num_kinds,).
        is_cleared: links that a fast transfer passed, (num_links,).
        num_alone: slow transfers that leave each link as the only possible one, int64, (num_links,).
        certain: links that some slow transfer leaves as the only possible one, ascending.
        unclear: sets of links of which at least one is slow; no set shares a link with another.
        unexplained: slow transfers all of whose links are cleared, indices of tests.
        doubtful: links that would be certain if they were not as fast as transfers that are unexplained.
    """

    capability: Floats
    usual: Floats
    threshold: Floats
    is_cleared: Bools
    num_alone: Ints
    certain: tuple[int, ...]
    unclear: tuple[tuple[int, ...], ...]
    unexplained: tuple[int, ...]
    doubtful: tuple[int, ...] = ()

    @property
    def suspects(self) -> set[int]:
        """Links that are certain or possible."""
        return set(self.certain) | {link for links in self.unclear for link in links}


def find_slow_links(tests: LinkTests) -> SlowLinks:
    """Return which links are slow, or among which links one is."""
    on_path = tests.path != NO_LINK
    capability = _capability(tests, on_path)
    usual, threshold = _references(_comparable(tests, on_path, capability), tests.kind)
    with np.errstate(invalid="ignore"):
        is_cleared = capability >= threshold[tests.kind]
        # A transfer cannot be faster than what is usual of the slowest kind of link on its path.
        limits = np.where(on_path, usual[tests.kind[tests.path]], np.inf)
        limiting = np.take_along_axis(
            tests.kind[tests.path], np.argmin(np.where(np.isnan(limits), np.inf, limits), axis=1)[:, None], axis=1
        )
        is_slow = tests.is_apart & (tests.value < threshold[limiting[:, 0]])
    slow = np.flatnonzero(is_slow)
    passed = np.zeros((len(slow), tests.num_links + 1), np.bool_)  # the last column is that of NO_LINK
    np.put_along_axis(passed, tests.path[slow], True, axis=1)
    suspected = passed[:, :-1] & ~is_cleared
    count = suspected.sum(axis=1)
    num_alone = suspected[count == 1].sum(axis=0)
    return SlowLinks(
        capability=capability,
        usual=usual,
        threshold=threshold,
        is_cleared=is_cleared,
        num_alone=num_alone,
        certain=tuple(np.flatnonzero(num_alone).tolist()),
        unclear=_unclear(suspected, num_alone > 0, capability, tests.value[slow]),
        unexplained=tuple(slow[count == 0].tolist()),
    )


def _capability(tests: LinkTests, on_path: Bools) -> Floats:
    capability = np.full(tests.num_links, -np.inf)
    known = on_path & np.isfinite(tests.value)[:, None]
    np.maximum.at(capability, tests.path[known], np.broadcast_to(tests.value[:, None], known.shape)[known])
    return np.where(np.isfinite(capability), capability, np.nan)


def _comparable(tests: LinkTests, on_path: Bools, capability: Floats) -> Floats:
    """Return the capabilities of links that something passed alone; all of them where nothing did.

    What links carry while others share them varies with the others.
    """
    is_comparable = np.zeros(tests.num_links, np.bool_)
    is_comparable[tests.path[on_path & (tests.is_apart & np.isfinite(tests.value))[:, None]]] = True
    return np.where(is_comparable, capability, np.nan) if is_comparable.any() else capability


def _references(capability: Floats, kind: Ints) -> tuple[Floats, Floats]:
    """Return the usual capability and the threshold of each kind."""
    num_kinds = int(kind.max(initial=-1)) + 1
    usual, threshold = np.full(num_kinds, np.nan), np.full(num_kinds, np.nan)
    for number in range(num_kinds):
        usual[number], threshold[number] = outlier_limit(capability[(kind == number) & np.isfinite(capability)])
    return usual, threshold


def outlier_limit(values: Floats) -> tuple[float, float]:
    """Return the median of values, and what is an outlier below: three robust deviations and 10 % less; nan for none.

    An even number of values takes the upper middle value and the lower middle deviation: where half of four hosts are
    slow, no link has the mean of both halves.
    """
    if not len(values):
        return float("nan"), float("nan")
    usual = float(np.sort(values)[len(values) // 2])
    away = np.sort(np.abs(values - usual))
    deviation = _MAD_TO_DEVIATION * float(away[(len(away) - 1) // 2])
    return usual, usual - max(_DEVIATIONS * deviation, _MIN_SHARE * usual)


def _unclear(suspected: Bools, is_certain: Bools, capability: Floats, value: Floats) -> tuple[tuple[int, ...], ...]:
    """Return the sets of links that slow transfers accuse, without transfers that a certain link explains."""
    # A transfer much slower than the certain links on its path has passed another slow link.
    certain_limit = np.where(suspected & is_certain, capability, np.inf).min(axis=1, initial=np.inf)
    with np.errstate(invalid="ignore"):
        is_explained = value >= (1 - _MIN_SHARE) * certain_limit
    left = suspected & ~is_certain & ~is_explained[:, None]
    return tuple(sorted(tuple(np.flatnonzero(links).tolist()) for links, _ in explanations(left, is_joined=True)))
