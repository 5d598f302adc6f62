"""The fewest links that explain a set of slow tests (group testing).

A test is a group of ranks or a flow that passes some links. What a fast test passes is cleared; what is left of a slow
one is suspected.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
