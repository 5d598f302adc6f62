"""Slow links of a network, from transfers of groups that share them (group testing), and transfers as a matrix.

A transfer is as slow as the slowest link that it passes, not as the sum of them. So a fast group clears all of its
links, and a slow group accuses those of its links that no fast group clears. The fewest links that explain all slow
groups are named. Links that no group can separate are named as one set.

Similar groups run the same operation with the same size and the same numbers of members and nodes. Their transfers then
differ only by the links between them and by noise, whose size blocks of steps show. What fast tests clear and slow ones
accuse is the same for whatever passes links: a connection, a transfer of a group, or of a pair of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.records import dataclass
from hpcpace.core.text import first_few
from hpcpace.core.thresholds import Thresholds, number
from hpcpace.metrics import Bools, Floats, Ints
from hpcpace.metrics.resampling import MAX_BLOCKS, Estimate
from hpcpace.metrics.special import ENDS_95, TINY, UPPER_95, stdtr, stdtrit
from hpcpace.metrics.topology import Topology, unit_name


def cleared_links(passed: Bools, clears: Bools) -> Bools:
    """Return the links that fast tests clear: a test clears all links that it passes.

    Args:
        passed: links, or directions of links, that each test passes, (num_tests, ...).
        clears: the tests that clear, (num_tests,); or which clear for each of some slow tests, (num_slow, num_tests).

    Returns:
        bool, of the shape of one row of `passed`, for each slow test if it is asked for by test.
    """
    if clears.ndim == 1:
        return np.asarray(passed[clears].any(axis=0))
    return np.asarray(np.tensordot(clears.astype(np.int64), passed.astype(np.int64), axes=1) > 0)


def suspected_ways(paths: Bools, rows: Ints, clears: Bools) -> Bools:
    """Return the ways, links in one direction, that slow tests pass and no fast test clears.

    Most faults hit both directions of a link. So where every slow test passes a link that no fast one passes in any
    direction, such links are suspected and no others; else a fast test clears a link only in its own direction.

    Args:
        paths: ways that each test passes, bool, (num_tests, num_links, 2).
        rows: which tests are slow, int64, (num_slow,).
        clears: as of `cleared_links`.

    Returns:
        bool, (num_slow, num_links, 2).
    """
    passed = paths[rows]
    one_way = passed & ~cleared_links(paths, clears)
    whole = passed & ~cleared_links(np.asarray(paths.any(axis=2)), clears)[..., None]
    is_explained = whole.any(axis=(1, 2)) | ~one_way.any(axis=(1, 2))
    return np.asarray(whole if is_explained.all() else one_way)


def explanations(suspected: Bools, *, is_joined: bool = False) -> list[tuple[Bools, Bools]]:
    """Return sets of links, at least one of each being slow, with the slow tests that each explains.

    First come links that are the only suspects of a test; then the fewest that explain all others (greedy minimum set
    cover). If several of these explain as many tests, but not the same ones, all suspects of these tests become one
    set, because any choice would be a guess.

    Args:
        suspected: links that each slow test passes and no fast one clears, (num_slow, num_links).
        is_joined: whether all suspects of tests that share one are a set instead, in any order: each test may have
            passed another slow link.
    """
    found = []
    left = np.asarray(suspected.any(axis=1))
    while left.any():
        hits = np.asarray(suspected & left[:, None])
        links, rows = (None if is_joined else _only_suspects(hits)) or _most_explaining(hits)
        while is_joined:
            links, before = np.asarray(hits[rows].any(axis=0)), rows
            rows = np.asarray(hits[:, links].any(axis=1))
            if rows.sum() == before.sum():
                break
        found.append((links, rows))
        left &= ~rows
    return found


def _only_suspects(hits: Bools) -> tuple[Bools, Bools] | None:
    """Return the links that are all suspects of a test and explain the same tests, with these; the most first."""
    found = None
    for links in np.unique(hits[hits.any(axis=1)], axis=0):
        columns = hits[:, links]
        rows = columns[:, 0]
        if (columns == rows[:, None]).all() and (found is None or rows.sum() > found[1].sum()):
            found = np.asarray(links), np.asarray(rows)
    return found


def _most_explaining(hits: Bools) -> tuple[Bools, Bools]:
    """Return the links that explain most tests, with these tests; of rivals all suspects."""
    counts = hits.sum(axis=0)
    best = counts == counts.max()
    rows = hits[:, np.argmax(best)]
    links = best & (hits == rows[:, None]).all(axis=0)
    rivals = best & ~links & (hits & rows[:, None]).any(axis=0)
    if rivals.any():
        rows = rows | hits[:, rivals].any(axis=1)
        links = (hits & rows[:, None]).any(axis=0)
    return np.asarray(links), np.asarray(rows)


_QUARTERS = 4  # statistics: the quartile


@dataclass(frozen=True, kw_only=True)
class TransferThresholds(Thresholds, topic="links"):
    """When transfers of groups are compared."""

    min_steps: int = number(10, "steps", at_least=4)
    """Steps with a transfer of each similar group; fewer have too few blocks for the noise."""


@dataclass(frozen=True, kw_only=True)
class GroupTransfers:
    """The transfers of one process group for operations of one kind and size; a message is a group of two.

    Attributes:
        members: ranks.
        op: name of the operation.
        size_bytes: content of one operation.
        transfer_ns: the largest transfer of its ranks, mean over the operations of a step, float64, (num_steps,);
            NaN in a step without one. All groups have the same steps.
    """

    members: tuple[int, ...]
    op: str
    size_bytes: int
    transfer_ns: Floats


@dataclass(frozen=True, kw_only=True)
class Stratum:
    """Similar groups, by row.

    Attributes:
        groups: which groups, int64, (num_groups,), ascending.
        log_transfer: natural logarithm of nanoseconds in the steps that all of them have, (num_groups, num_steps).
        touches: links that each must pass, bool, (num_groups, num_links).
        min_steps: with fewer steps nothing is compared.
    """

    groups: Ints
    log_transfer: Floats
    touches: Bools
    min_steps: int

    @property
    def compared_links(self) -> Bools:
        """Which links some groups pass and others do not, over enough steps, bool, (num_links,)."""
        has_steps = self.log_transfer.shape[1] >= self.min_steps
        return np.asarray(has_steps & self.touches.any(axis=0) & ~self.touches.all(axis=0))


@dataclass(frozen=True, kw_only=True)
class MeanDifference:
    """Means of differences of logarithms, with their noise; each (num_groups,).

    Attributes:
        mean: mean over blocks of steps of the medians of the blocks.
        error: standard error.
        freedom: degrees of freedom of the error.
    """

    mean: Floats
    error: Floats
    freedom: int

    def p_above(self, difference: float) -> Floats:
        """Return the probability of such means, or larger ones, if the true one is `difference`."""
        ratio = (self.mean - difference) / np.maximum(self.error, TINY)
        return np.asarray(stdtr(self.freedom, -ratio))

    def half_width(self, level: float) -> Floats:
        """Return how much chance adds to a mean, exceeded with probability `level`."""
        return np.asarray(stdtrit(self.freedom, 1 - level) * self.error)


def strata(
    groups: Sequence[GroupTransfers], topology: Topology, min_steps: int = TransferThresholds.min_steps
) -> list[Stratum]:
    """Return the groups between nodes, by what makes them similar.

    Groups with a member whose place is unknown are left out, because the links that they pass are unknown, too.
    """
    members = [group.members for group in groups]
    num_members = topology.members_by(members, topology.node, topology.num_nodes)
    is_known = num_members.sum(axis=1) == [len(set(group)) for group in members]
    num_nodes = (num_members > 0).sum(axis=1)
    touches = topology.touches(members)
    alike: dict[tuple[str, int, int, int], list[int]] = {}
    for row in np.flatnonzero(is_known & (num_nodes > 1)).tolist():
        group = groups[row]
        key = (group.op, group.size_bytes, len(group.members), int(num_nodes[row]))
        alike.setdefault(key, []).append(row)
    found = []
    for rows in alike.values():
        transfer_ns = np.array([groups[row].transfer_ns for row in rows], np.float64)
        kept, usable = _with_common_steps(np.isfinite(transfer_ns), min_steps)
        log_transfer = np.log(np.maximum(transfer_ns[np.ix_(kept, usable)], 1.0))
        chosen = np.array(rows, np.int64)[kept]
        found.append(Stratum(groups=chosen, log_transfer=log_transfer, touches=touches[chosen], min_steps=min_steps))
    return found


def _with_common_steps(has_transfer: Bools, min_steps: int) -> tuple[Ints, Ints]:
    """Return the groups that have enough steps in common, and these steps; those with few of their own are left out.

    Messages that came before their receivers in most steps, for instance, show their transfer in few.

    Args:
        has_transfer: which groups have a transfer in which steps, (num_groups, num_steps).
        min_steps: steps in common at least; without two groups that have them, all are kept.
    """
    order = np.argsort(-has_transfer.sum(axis=1), kind="stable")
    num_common = np.logical_and.accumulate(has_transfer[order], axis=0).sum(axis=1)
    num_kept = int((num_common >= min_steps).sum())
    kept = np.sort(order[:num_kept]) if num_kept > 1 else np.arange(len(has_transfer))
    return kept, np.flatnonzero(has_transfer[kept].all(axis=0))


def mean_difference(difference: Floats) -> MeanDifference:
    """Return means over steps that are robust against single steps and allow for correlated neighbours.

    Args:
        difference: (num_groups, num_steps), at least 4 steps.
    """
    num_groups, num_steps = difference.shape
    num_blocks = min(MAX_BLOCKS, num_steps // 2)
    length = num_steps // num_blocks
    blocks = np.median(difference[:, : num_blocks * length].reshape(num_groups, num_blocks, length), axis=2)
    error = blocks.std(axis=1, ddof=1) / np.sqrt(num_blocks)
    return MeanDifference(mean=blocks.mean(axis=1), error=error, freedom=num_blocks - 1)


def above_fast(stratum: Stratum, *, near: float) -> Floats:
    """Return by how much each group is slower than the fast ones of its stratum, as logarithm of the ratio, by step.

    The fast ones are those within the share `near` of the lower quartile: a slow uplink may slow most groups.
    """
    level = np.median(stratum.log_transfer, axis=1)
    fast = np.sort(level)[(len(level) - 1) // _QUARTERS]
    return np.asarray(stratum.log_transfer - np.median(stratum.log_transfer[level <= fast + np.log1p(near)], axis=0))


_MAX_NAMES = 4  # display: links of a sentence


@dataclass(frozen=True, kw_only=True)
class LinkCulprit:
    """A slow link, or several of which at least one is.

    Attributes:
        ids: the host name for a node's link, or `leaf2 uplink`; several if the data cannot separate them.
        effect: by which share transfers that pass it take longer than those of similar groups.
        p_value: probability that noise alone gives its slowest group, Bonferroni over groups.
    """

    ids: tuple[str, ...]
    effect: Estimate
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
        p_value: probability of such a factor, or a larger one, without a true difference.
    """

    factor: Estimate
    p_value: float


def locate_links(
    groups: Sequence[GroupTransfers],
    topology: Topology,
    *,
    floor_share: float,
    level: float,
    min_steps: int = TransferThresholds.min_steps,
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
        min_steps: groups with fewer steps are not compared.
    """
    links, is_uplink = topology.links, topology.is_uplink
    none = np.zeros(len(links), np.bool_)
    between = strata(groups, topology, min_steps)
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
        culprits=tuple(sorted(culprits, key=lambda culprit: -culprit.effect.value)),
        is_identifiable=not reasons,
        reason="; ".join(reasons),
        candidates=candidates,
    )


def locality(
    groups: Sequence[GroupTransfers], topology: Topology, min_steps: int = TransferThresholds.min_steps
) -> Locality | None:
    """Return how much slower groups across leaves are than similar groups inside one; None without both.

    The factor is the ratio of the medians over groups in each step. Its logarithm is averaged over kinds of operations,
    weighted by the smaller number of groups. The error comes from blocks of steps.

    Args:
        groups: transfers by group, operation and size.
        topology: where the ranks are.
        min_steps: groups with fewer steps are not compared.
    """
    parts, weights = [], []
    for stratum in strata(groups, topology, min_steps):
        crosses = stratum.touches[:, topology.is_uplink].any(axis=1)
        if not stratum.compared_links[topology.is_uplink].any() or crosses.all():
            continue
        inside, across = stratum.log_transfer[~crosses], stratum.log_transfer[crosses]
        parts.append(mean_difference((np.median(across, axis=0) - np.median(inside, axis=0))[None]))
        weights.append(min(len(inside), len(across)))
    if not parts:
        return None
    shares = np.array(weights) / sum(weights)
    whole = MeanDifference(
        mean=np.array([sum(part.mean[0] * share for part, share in zip(parts, shares, strict=True))]),
        error=np.sqrt([sum((part.error[0] * share) ** 2 for part, share in zip(parts, shares, strict=True))]),
        freedom=min(part.freedom for part in parts),
    )
    factor = Estimate.around(float(whole.mean[0]), float(whole.half_width(ENDS_95[0])[0])).through(np.exp)
    return Locality(factor=factor, p_value=float(whole.p_above(0.0)[0]))


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

    suspected: Bools
    above: Sequence[Floats]
    p_value: Floats
    is_all_crossing: bool


def _slow_groups(compared: Sequence[Stratum], is_uplink: Bools, *, floor_share: float, level: float) -> _SlowGroups:
    num_compared = sum(len(stratum.groups) for stratum in compared)
    floor, near = np.log1p(floor_share), float(np.log1p(floor_share / 2))
    is_all_crossing, touches, clears, slow, p_values = True, [], [], [], []
    for stratum in compared:
        above = above_fast(stratum, near=floor_share / 2)
        found = mean_difference(above)
        p_value = np.minimum(found.p_above(near) * num_compared, 1.0)
        is_slow = (found.mean >= floor) & (p_value <= level)
        if not is_slow.any():
            continue
        is_fast = found.mean + found.half_width(level / num_compared) < floor
        clears.append(cleared_links(stratum.touches, is_fast))
        is_all_crossing &= bool((is_slow == stratum.touches[:, is_uplink].any(axis=1)).all())
        touches.append(stratum.touches[is_slow])
        slow.append(above[is_slow])
        p_values.append(p_value[is_slow])
    none = np.zeros((0, len(is_uplink)), np.bool_)
    return _SlowGroups(
        suspected=np.concatenate([none, *touches]) & ~np.any([none.any(axis=0), *clears], axis=0),
        above=slow,
        p_value=np.concatenate([np.zeros(0), *p_values]),
        is_all_crossing=is_all_crossing,
    )


def _explanations(slow: _SlowGroups, is_uplink: Bools) -> list[tuple[Bools, Bools]]:
    """Return sets of links, at least one of each being slow, with the slow groups that each explains."""
    uplinks = np.asarray(slow.suspected.any(axis=0) & is_uplink)
    if slow.is_all_crossing and uplinks.any():
        # All groups that cross leaves are slow: any uplink, what is above them, or distance itself may be the cause.
        return [(uplinks, np.asarray((slow.suspected & uplinks).any(axis=1)))]
    return explanations(slow.suspected)


def _culprit(links: Sequence[str], slow: _SlowGroups, is_meant: Bools, rows: Bools) -> LinkCulprit:
    """Return some links with the mean logarithm over the slow groups that they explain.

    Groups of one stratum are averaged step by step, because they are compared with the same fast ones.
    """
    edges = np.cumsum([len(above) for above in slow.above])[:-1]
    chosen = [(above[own], int(own.sum())) for above, own in zip(slow.above, np.split(rows, edges), strict=True)]
    parts = [(mean_difference(above.mean(axis=0, keepdims=True)), number) for above, number in chosen if number]
    total = sum(number for _, number in parts)
    mean = sum(float(part.mean[0]) * number for part, number in parts) / total
    error = float(np.sqrt(sum((float(part.error[0]) * number) ** 2 for part, number in parts))) / total
    half_width = float(stdtrit(min(part.freedom for part, _ in parts), UPPER_95)) * error
    return LinkCulprit(
        ids=_names(links, is_meant),
        effect=Estimate.around(mean, half_width).through(np.expm1),
        p_value=float(slow.p_value[rows].min()),
    )


def _names(links: Sequence[str], is_meant: Bools) -> tuple[str, ...]:
    return tuple(links[index] for index in np.flatnonzero(is_meant).tolist())


def _listed(ids: Sequence[str], topology: Topology) -> str:
    return ", ".join(first_few(ids, _MAX_NAMES, words=topology.link_ends.__getitem__, before="and "))


@dataclass(frozen=True, kw_only=True)
class TransferMatrix:
    """Transfers between units, symmetric; NaN if no operation had members on both.

    Attributes:
        labels: names of nodes or leaves, (num_units,).
        relative: mean transfer relative to the median of the same operation, size and number of members, float64,
            (num_units, num_units).
    """

    labels: tuple[str, ...]
    relative: Floats


def node_matrix(groups: Sequence[GroupTransfers], topology: Topology) -> TransferMatrix:
    """Return transfers between nodes, on the diagonal those inside a node.

    Args:
        groups: transfers by group, operation and size.
        topology: where the ranks are.
    """
    return _matrix(groups, topology, topology.node, topology.node_names)


def leaf_matrix(groups: Sequence[GroupTransfers], topology: Topology) -> TransferMatrix:
    """Return transfers between leaf switches, on the diagonal those inside a leaf.

    Args:
        groups: transfers by group, operation and size.
        topology: where the ranks are.
    """
    return _matrix(groups, topology, topology.leaf, topology.leaf_names)


def _matrix(
    groups: Sequence[GroupTransfers], topology: Topology, unit: Ints, labels: tuple[str, ...]
) -> TransferMatrix:
    """Return the mean over groups with members on both units, only over groups of two if there are any."""
    timed = [group for group in groups if np.isfinite(group.transfer_ns).any()]
    num_members = topology.members_by([group.members for group in timed], unit, len(labels))
    mean_ns = np.array([np.nanmean(group.transfer_ns) for group in timed], np.float64)
    kinds: dict[tuple[str, int, int], list[int]] = {}
    for row, group in enumerate(timed):
        kinds.setdefault((group.op, group.size_bytes, len(group.members)), []).append(row)
    relative = np.zeros(len(timed))
    for alike in kinds.values():
        relative[alike] = mean_ns[alike] / max(np.median(mean_ns[alike]), 1.0)
    is_pair = np.array([len(group.members) == 2 for group in timed], np.bool_)
    of_pairs, of_groups = (_means_of_both(num_members[rows], relative[rows]) for rows in (is_pair, ~is_pair))
    return TransferMatrix(labels=labels, relative=np.where(np.isnan(of_pairs), of_groups, of_pairs))


def _means_of_both(num_members: Ints, values: Floats) -> Floats:
    """Return the mean of values over the groups with members on both units, (num_units, num_units).

    On the diagonal, over groups with all members in the unit.
    """
    is_on = (num_members > 0).astype(np.float64)
    sums, counts = (is_on * values[:, None]).T @ is_on, is_on.T @ is_on
    lies_in = is_on * (is_on.sum(axis=1, keepdims=True) == 1) * (num_members > 1)
    np.fill_diagonal(sums, values @ lies_in)
    np.fill_diagonal(counts, lies_in.sum(axis=0))
    return np.asarray(np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0))
