"""Transfers between all pairs of nodes or leaf switches, as a matrix to plot.

Kinds of operations differ by orders of magnitude, so each transfer is taken relative to the median of its kind: 1 is
usual everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.metrics.network.transfers import GroupTransfers
from hpcpace.metrics.topology import Topology

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TransferMatrix:
    """Transfers between units, symmetric; NaN if no operation had members on both.

    Attributes:
        labels: names of nodes or leaves, (num_units,).
        mean_ns: mean transfer of an operation, float64, (num_units, num_units).
        relative: mean transfer relative to the median of the same operation, size and number of members, likewise.
    """

    labels: tuple[str, ...]
    mean_ns: FloatArray
    relative: FloatArray


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
    groups: Sequence[GroupTransfers], topology: Topology, unit: NDArray[np.int64], labels: tuple[str, ...]
) -> TransferMatrix:
    """Return the mean over groups with members on both units, only over groups of two if there are any."""
    timed = [group for group in groups if np.isfinite(group.transfer_ns).any()]
    num_members = topology.members_by([group.members for group in timed], unit, len(labels))
    mean_ns = np.array([np.nanmean(group.transfer_ns) for group in timed], np.float64)
    relative = mean_ns / np.maximum(_usual_ns(timed, mean_ns), 1.0)
    is_pair = np.array([len(group.members) == 2 for group in timed], np.bool_)
    both = np.vstack([mean_ns, relative])
    of_pairs, of_groups = (_means_of_both(num_members[rows], both[:, rows]) for rows in (is_pair, ~is_pair))
    chosen = np.where(np.isnan(of_pairs), of_groups, of_pairs)
    return TransferMatrix(labels=labels, mean_ns=chosen[0], relative=chosen[1])


def _usual_ns(groups: Sequence[GroupTransfers], mean_ns: FloatArray) -> FloatArray:
    """Return for each group the median over the groups of its kind, (num_groups,)."""
    kinds: dict[tuple[str, int, int], list[int]] = {}
    for row, group in enumerate(groups):
        kinds.setdefault((group.op, group.size_bytes, len(group.members)), []).append(row)
    usual_ns = np.zeros(len(groups))
    for rows in kinds.values():
        usual_ns[rows] = np.median(mean_ns[rows])
    return usual_ns


def _means_of_both(num_members: NDArray[np.int64], values: FloatArray) -> FloatArray:
    """Return the mean of values over the groups with members on both units, (num_values, num_units, num_units).

    On the diagonal, over groups with all members in the unit.
    """
    is_on = (num_members > 0).astype(np.float64)
    sums = np.stack([(is_on * value[:, None]).T @ is_on for value in values])
    counts = is_on.T @ is_on
    lies_in = is_on * (is_on.sum(axis=1, keepdims=True) == 1) * (num_members > 1)
    diagonal = np.arange(num_members.shape[1])
    sums[:, diagonal, diagonal] = values @ lies_in
    counts[diagonal, diagonal] = lies_in.sum(axis=0)
    return np.asarray(np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0))
