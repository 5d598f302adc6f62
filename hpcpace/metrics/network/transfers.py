"""Transfers of process groups that can be compared with each other, and how slow each is compared with similar ones.

Similar groups run the same operation with the same size and the same numbers of members and nodes. Their transfers then
differ only by the links between them and by noise, whose size blocks of steps show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from hpcpace.metrics.topology import Topology

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

LEAST_STEPS = 10
_MOST_BLOCKS = 20


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
    transfer_ns: FloatArray


@dataclass(frozen=True, kw_only=True)
class Stratum:
    """Similar groups, by row.

    Attributes:
        groups: which groups, int64, (num_groups,), ascending.
        log_transfer: natural logarithm of nanoseconds in the steps that all of them have, (num_groups, num_steps).
        touches: links that each must pass, bool, (num_groups, num_links).
    """

    groups: IntArray
    log_transfer: FloatArray
    touches: BoolArray

    @property
    def compared_links(self) -> BoolArray:
        """Which links some groups pass and others do not, over enough steps, bool, (num_links,)."""
        has_steps = self.log_transfer.shape[1] >= LEAST_STEPS
        return np.asarray(has_steps & self.touches.any(axis=0) & ~self.touches.all(axis=0))


@dataclass(frozen=True, kw_only=True)
class MeanDifference:
    """Means of differences of logarithms, with their noise; each (num_groups,).

    Attributes:
        mean: mean over blocks of steps of the medians of the blocks.
        error: standard error.
        freedom: degrees of freedom of the error.
    """

    mean: FloatArray
    error: FloatArray
    freedom: int

    def p_above(self, difference: float) -> FloatArray:
        """Return the probability of such means, or larger ones, if the true one is `difference`."""
        ratio = (self.mean - difference) / np.maximum(self.error, 1e-12)
        return np.asarray(stdtr(self.freedom, -ratio))

    def half_width(self, level: float) -> FloatArray:
        """Return how much chance adds to a mean, exceeded with probability `level`."""
        return np.asarray(stdtrit(self.freedom, 1 - level) * self.error)


def strata(groups: Sequence[GroupTransfers], topology: Topology) -> list[Stratum]:
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
        usable = np.isfinite(transfer_ns).all(axis=0)
        log_transfer = np.log(np.maximum(transfer_ns[:, usable], 1.0))
        found.append(Stratum(groups=np.array(rows, np.int64), log_transfer=log_transfer, touches=touches[rows]))
    return found


def mean_difference(difference: FloatArray) -> MeanDifference:
    """Return means over steps that are robust against single steps and allow for correlated neighbours.

    Args:
        difference: (num_groups, num_steps), at least `LEAST_STEPS` steps.
    """
    num_groups, num_steps = difference.shape
    num_blocks = min(_MOST_BLOCKS, num_steps // 2)
    length = num_steps // num_blocks
    blocks = np.median(difference[:, : num_blocks * length].reshape(num_groups, num_blocks, length), axis=2)
    error = blocks.std(axis=1, ddof=1) / np.sqrt(num_blocks)
    return MeanDifference(mean=blocks.mean(axis=1), error=error, freedom=num_blocks - 1)


def above_fast(stratum: Stratum, *, near: float) -> FloatArray:
    """Return by how much each group is slower than the fast ones of its stratum, as logarithm of the ratio, by step.

    The fast ones are those within the share `near` of the lower quartile: a slow uplink may slow most groups.
    """
    level = np.median(stratum.log_transfer, axis=1)
    fast = np.sort(level)[(len(level) - 1) // 4]
    above: FloatArray = stratum.log_transfer - np.median(stratum.log_transfer[level <= fast + np.log1p(near)], axis=0)
    return above
