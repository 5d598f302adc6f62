"""Which links explain slow tests: what fast tests clear, what slow ones accuse, and the fewest links that explain all.

A test is whatever passes links: a connection, a transfer of a group, or of a pair of hosts.
"""

from __future__ import annotations

import numpy as np

from hpcpace.metrics import Bools, Ints


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
