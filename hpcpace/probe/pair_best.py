"""The best that each pair of hosts reached over all rounds: a disturbed round says nothing about the links between."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hpcpace.probe.pair_record import PairRow
from hpcpace.probe.pair_results import LEAST_LATENCY_NS
from hpcpace.probe.pair_solver import outlier_limit

Way = tuple[str, str]
"""The host that sends, and the one that receives."""


def best_rates(rows: Iterable[PairRow]) -> dict[Way, float]:
    """Return the best rate from each host to each other one, bytes per second, where one was measured."""
    best: dict[Way, float] = {}
    for row in rows:
        for way, rate in (((row.first, row.second), row.forward), ((row.second, row.first), row.backward)):
            if rate is not None:
                best[way] = max(rate, best.get(way, 0.0))
    return best


def least_latencies(rows: Iterable[PairRow]) -> dict[Way, PairRow]:
    """Return the row of each pair with its least half round trip, by its hosts in order of their names."""
    best: dict[Way, PairRow] = {}
    for row in rows:
        way = (min(row.first, row.second), max(row.first, row.second))
        if row.least_ns is not None and (way not in best or row.least_ns < (best[way].least_ns or 0.0)):
            best[way] = row
    return best


def late_pairs(rows: Iterable[PairRow]) -> list[PairRow]:
    """Return pairs whose least half round trip stands out, the latest first.

    As for links: by more than three robust deviations and 10 % in 1/ns, and by 5 us, since schedulers do as much.
    """
    best = [row for row in least_latencies(rows).values() if row.least_ns]
    inverse = np.array([1 / (row.least_ns or np.nan) for row in best])
    usual, lowest = outlier_limit(inverse)
    late = [
        row for row, one in zip(best, inverse, strict=True) if one < lowest and 1 / one - 1 / usual >= LEAST_LATENCY_NS
    ]
    return sorted(late, key=lambda row: -(row.least_ns or 0.0))
