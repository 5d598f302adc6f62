"""The stages of a pipeline that no mesh names: found from which ranks reduce together and which send to each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import coo_array

_MOST_NEIGHBOURS = 2


def stages_of_traffic(
    ranks: Sequence[int], groups: Collection[Sequence[int]], messages: Collection[Sequence[int]]
) -> NDArray[np.int64]:
    """Return the stage of each rank, int64, (num_ranks,), numbered by their lowest ranks; all -1 if there are none.

    Ranks that have collectives together, but not with all, are of one stage (data and tensor parallelism). It is a
    pipeline, or any other chain or ring, if all stages have as many ranks, messages go between stages only, and each
    stage has at most two neighbours.

    Args:
        ranks: the ranks, distinct.
        groups: the ranks of each group that has collectives.
        messages: pairs of ranks that send to each other.
    """
    none = np.full(len(ranks), -1, np.int64)
    index = {rank: place for place, rank in enumerate(ranks)}
    pairs = [(index[a], index[b]) for a, b in messages if a in index and b in index]
    if not pairs:
        return none  # parts that no message joins are no stages

    from scipy.sparse.csgraph import connected_components  # slow to load, and only pipelines need it

    together = [
        (index[group[0]], index[other])
        for group in groups
        if len(set(group)) < len(ranks) and all(rank in index for rank in group)
        for other in group[1:]
    ]
    num_parts, part = connected_components(_graph(together, len(ranks)), directed=False)
    links = {(int(part[a]), int(part[b])) for a, b in pairs}
    if num_parts < 2 or len(set(np.bincount(part).tolist())) > 1 or any(a == b for a, b in links):
        return none
    neighbours = np.zeros((num_parts, num_parts), bool)
    for a, b in links:
        neighbours[a, b] = neighbours[b, a] = True
    is_whole = connected_components(neighbours, directed=False)[0] == 1
    if not is_whole or neighbours.sum(axis=0).max() > _MOST_NEIGHBOURS:
        return none
    lowest = np.array([min(np.asarray(ranks)[part == one]) for one in range(num_parts)])
    place: NDArray[np.int64] = np.argsort(np.argsort(lowest))[part].astype(np.int64)
    return place


def _graph(edges: Sequence[tuple[int, int]], num_nodes: int) -> coo_array:
    from scipy.sparse import coo_array

    source, target = np.array(edges, np.int64).reshape(-1, 2).T
    return coo_array((np.ones(len(source)), (source, target)), shape=(num_nodes, num_nodes))
