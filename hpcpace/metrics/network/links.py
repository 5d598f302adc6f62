"""Slow links of a network, from groups that share them (group testing).

A transfer is as slow as the slowest link that it passes, not as the sum of them. So a fast group clears all of its
links, and a slow group accuses those of its links that no fast group clears. The fewest links that explain all slow
groups are named (group testing). Links that no group can separate are named as one set.

A test is a group of ranks or a flow that passes some links. A fast test clears all links that it passes; the rest of a
slow test's links are suspected, and the fewest links that explain all slow tests are accused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from hpcpace.metrics.network.transfers import (
    GroupTransfers,
    MeanDifference,
    Stratum,
    above_fast,
    mean_difference,
    strata,
)
from hpcpace.metrics.topology import Topology, unit_name

BoolArray = NDArray[np.bool_]


def fewest_links(suspected: BoolArray) -> list[tuple[BoolArray, BoolArray]]:
    """Return sets of links, at least one of each being slow, with the slow tests that each explains; the most first.

    Greedy minimum set cover. If several links explain as many tests, but not the same ones, all suspects of these tests
    become one set, because any choice would be a guess.

    Args:
        suspected: links that each slow test passes and no fast one clears, (num_slow, num_links).
    """
    found = []
    left = np.asarray(suspected.any(axis=1))
    while left.any():
        hits = suspected & left[:, None]
        counts = hits.sum(axis=0)
        best = counts == counts.max()
        rows = hits[:, np.argmax(best)]
        links = best & (hits == rows[:, None]).all(axis=0)
        rivals = best & ~links & (hits & rows[:, None]).any(axis=0)
        if rivals.any():
            rows = rows | hits[:, rivals].any(axis=1)
            links = (hits & rows[:, None]).any(axis=0)
        found.append((links, rows))
        left &= ~rows
    return found


FloatArray = NDArray[np.float64]

_MOST_NAMES = 4


@dataclass(frozen=True, kw_only=True)
class LinkCulprit:
    """A slow link, or several of which at least one is.

    Attributes:
        ids: the host name for a node's link, or `leaf2 uplink`; several if the data cannot separate them.
        effect_share: by which share transfers that pass it take longer than those of similar groups.
        interval: 95 % interval of the share.
        p_value: probability that noise alone gives its slowest group, Bonferroni over groups.
    """

    ids: tuple[str, ...]
    effect_share: float
    interval: tuple[float, float]
    p_value: float

    @property
    def aliases(self) -> tuple[str, ...]:
        """The links as `link n3`, `link leaf2 uplink`."""
        return tuple(unit_name(("link", name)) for name in self.ids)


@dataclass(frozen=True, kw_only=True)
class LinkFindings:
    """What the transfers show about links.

    Attributes:
        culprits: slow links, largest effect first; empty if none is slow, or nothing can be compared.
        is_identifiable: whether each culprit is one link, or without any, whether a slow link would have shown.
        reason: what could not be decided, as a sentence; empty otherwise.
        candidates: links that no similar groups differ in: one may be slow if all operations that pass them are.
    """

    culprits: tuple[LinkCulprit, ...]
    is_identifiable: bool
    reason: str
    candidates: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Locality:
    """Groups that cross leaves compared with similar groups inside one leaf.

    Attributes:
        factor: transfer across leaves over transfer inside.
        interval: 95 % interval.
        p_value: probability of such a factor, or a larger one, without a true difference.
        num_inside, num_crossing: number of groups compared.
    """

    factor: float
    interval: tuple[float, float]
    p_value: float
    num_inside: int
    num_crossing: int


def locate_links(
    groups: Sequence[GroupTransfers], topology: Topology, *, floor_share: float = 0.2, level: float = 0.005
) -> LinkFindings:
    """Return the slow links.

    A group is slow if its median transfer exceeds that of the fast similar groups by `floor_share`, and by half of it
    beyond chance (blocks of steps, Student's t, Bonferroni over groups). It is fast if even with chance it stays below
    `floor_share`. Kinds of operations without any slow group (barriers on a link of low rate) clear nothing.

    Args:
        groups: transfers by group, operation and size.
        topology: where the ranks are.
        floor_share: smallest effect that is named.
        level: largest probability of a false culprit.
    """
    links, is_uplink = topology.links, topology.is_uplink
    none = np.zeros(len(links), np.bool_)
    between = strata(groups, topology)
    compared = [stratum for stratum in between if stratum.compared_links.any()]
    is_used = np.any([none, *(stratum.touches.any(axis=0) for stratum in between)], axis=0)
    is_compared = np.any([none, *(stratum.compared_links for stratum in between)], axis=0)
    candidates = _names(links, is_used & ~is_compared)
    slow = _slow_groups(compared, is_uplink, floor_share=floor_share, level=level)
    culprits = [_culprit(links, slow, is_meant, rows) for is_meant, rows in _explanations(slow, is_uplink)]
    num_left = int(np.count_nonzero(~slow.suspected.any(axis=1)))
    untold = [culprit.ids for culprit in culprits if len(culprit.ids) > 1]
    reasons = [f"no group separates the links {_listed(ids, topology)}" for ids in untold]
    reasons += [f"no link explains why {num_left} of the groups are slow"] if num_left else []
    if not between:
        reasons = ["no group of known ranks communicates between nodes"]
    elif candidates and not culprits:
        why = "no similar groups differ in it over enough steps"
        reasons += [f"one of the links {_listed(candidates, topology)} may be slow without showing: {why}"]
    return LinkFindings(
        culprits=tuple(sorted(culprits, key=lambda culprit: -culprit.effect_share)),
        is_identifiable=not reasons,
        reason="; ".join(reasons),
        candidates=candidates,
    )


def locality(groups: Sequence[GroupTransfers], topology: Topology) -> Locality | None:
    """Return how much slower groups across leaves are than similar groups inside one; None without both.

    The factor is the ratio of the medians over groups in each step. Its logarithm is averaged over kinds of operations,
    weighted by the smaller number of groups. The error comes from blocks of steps.

    Args:
        groups: transfers by group, operation and size.
        topology: where the ranks are.
    """
    parts, weights, num_inside, num_crossing = [], [], 0, 0
    for stratum in strata(groups, topology):
        crosses = stratum.touches[:, topology.is_uplink].any(axis=1)
        if not stratum.compared_links[topology.is_uplink].any() or crosses.all():
            continue
        inside, across = stratum.log_transfer[~crosses], stratum.log_transfer[crosses]
        parts.append(mean_difference((np.median(across, axis=0) - np.median(inside, axis=0))[None]))
        weights.append(min(len(inside), len(across)))
        num_inside, num_crossing = num_inside + len(inside), num_crossing + len(across)
    if not parts:
        return None
    whole = _weighted_mean(parts, np.array(weights) / sum(weights))
    mean, half_width = float(whole.mean[0]), float(whole.half_width(0.025)[0])
    return Locality(
        factor=float(np.exp(mean)),
        interval=(float(np.exp(mean - half_width)), float(np.exp(mean + half_width))),
        p_value=float(whole.p_above(0.0)[0]),
        num_inside=num_inside,
        num_crossing=num_crossing,
    )


def _weighted_mean(parts: Sequence[MeanDifference], share: FloatArray) -> MeanDifference:
    """Return the mean of independent differences, each of one group, with weights that add up to 1."""
    mean = float(sum(part.mean[0] * weight for part, weight in zip(parts, share, strict=True)))
    error = float(np.sqrt(sum((part.error[0] * weight) ** 2 for part, weight in zip(parts, share, strict=True))))
    return MeanDifference(mean=np.array([mean]), error=np.array([error]), freedom=min(part.freedom for part in parts))


@dataclass(frozen=True, kw_only=True)
class _SlowGroups:
    """Groups that are slow compared with similar ones, by row.

    Attributes:
        suspected: links that each passes and no fast group clears, bool, (num_slow, num_links).
        above: for each stratum with slow groups, the logarithm of their ratio to fast ones, (num_rows, num_steps); all
            rows together are those of the other columns.
        p_value: after correction for the number of groups, (num_slow,).
        is_all_crossing: whether they are exactly the groups that cross leaves.
    """

    suspected: BoolArray
    above: Sequence[FloatArray]
    p_value: FloatArray
    is_all_crossing: bool


def _slow_groups(compared: Sequence[Stratum], is_uplink: BoolArray, *, floor_share: float, level: float) -> _SlowGroups:
    num_compared = sum(len(stratum.groups) for stratum in compared)
    floor, near = np.log1p(floor_share), float(np.log1p(floor_share / 2))
    is_cleared, is_all_crossing = np.zeros(len(is_uplink), np.bool_), True
    touches, slow, p_values = [], [], []
    for stratum in compared:
        above = above_fast(stratum, near=floor_share / 2)
        found = mean_difference(above)
        p_value = np.minimum(found.p_above(near) * num_compared, 1.0)
        is_slow = (found.mean >= floor) & (p_value <= level)
        if not is_slow.any():
            continue
        is_fast = found.mean + found.half_width(level / num_compared) < floor
        is_cleared |= stratum.touches[is_fast].any(axis=0)
        is_all_crossing &= bool((is_slow == stratum.touches[:, is_uplink].any(axis=1)).all())
        touches.append(stratum.touches[is_slow])
        slow.append(above[is_slow])
        p_values.append(p_value[is_slow])
    return _SlowGroups(
        suspected=np.concatenate([np.zeros((0, len(is_uplink)), np.bool_), *touches]) & ~is_cleared,
        above=slow,
        p_value=np.concatenate([np.zeros(0), *p_values]),
        is_all_crossing=is_all_crossing,
    )


def _explanations(slow: _SlowGroups, is_uplink: BoolArray) -> list[tuple[BoolArray, BoolArray]]:
    """Return sets of links, at least one of each being slow, with the slow groups that each explains."""
    uplinks = np.asarray(slow.suspected.any(axis=0) & is_uplink)
    if slow.is_all_crossing and uplinks.any():
        # All groups that cross leaves are slow: any uplink, what is above them, or distance itself may be the cause.
        return [(uplinks, np.asarray((slow.suspected & uplinks).any(axis=1)))]
    return fewest_links(slow.suspected)


def _culprit(links: Sequence[str], slow: _SlowGroups, is_meant: BoolArray, rows: BoolArray) -> LinkCulprit:
    mean, half_width = _mean_slowness(slow, rows)
    return LinkCulprit(
        ids=_names(links, is_meant),
        effect_share=float(np.expm1(mean)),
        interval=(float(np.expm1(mean - half_width)), float(np.expm1(mean + half_width))),
        p_value=float(slow.p_value[rows].min()),
    )


def _mean_slowness(slow: _SlowGroups, rows: BoolArray) -> tuple[float, float]:
    """Return the mean logarithm over some of the slow groups, and half of its 95 % interval.

    Groups of one stratum are averaged step by step, because they are compared with the same fast ones.
    """
    edges = np.cumsum([len(above) for above in slow.above])[:-1]
    chosen = [(above[own], int(own.sum())) for above, own in zip(slow.above, np.split(rows, edges), strict=True)]
    parts = [(mean_difference(above.mean(axis=0, keepdims=True)), number) for above, number in chosen if number]
    total = sum(number for _, number in parts)
    mean = sum(float(part.mean[0]) * number for part, number in parts) / total
    error = float(np.sqrt(sum((float(part.error[0]) * number) ** 2 for part, number in parts))) / total
    return mean, float(stdtrit(min(part.freedom for part, _ in parts), 0.975)) * error


def _names(links: Sequence[str], is_meant: BoolArray) -> tuple[str, ...]:
    return tuple(links[index] for index in np.flatnonzero(is_meant).tolist())


def _listed(ids: Sequence[str], topology: Topology) -> str:
    ends = topology.link_ends
    more = [f"and {len(ids) - _MOST_NAMES} more"] if len(ids) > _MOST_NAMES else []
    return ", ".join([*(ends[link] for link in ids[:_MOST_NAMES]), *more])
