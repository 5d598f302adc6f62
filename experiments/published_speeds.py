"""Speeds of runs that others published, and how `compare` judges repeats of the same thing among them.

`python -m experiments.published_speeds repeats` splits the repeats of each system into two groups and compares these:
nothing differs, so that 5 % may be called different. tests/data/history/README.md says where the speeds are from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import log
from pathlib import Path
from statistics import median, pstdev

import numpy as np

from analysis.library.estimates import share_of
from hpcpace.metrics.run_difference import PRIOR_CV, log_difference
from hpcpace.runs.load import read_csv

DATA = Path(__file__).parents[1] / "tests" / "data" / "history"
_NUM_SPLITS = 20


def main() -> None:
    print("\n".join(judged_repeats(repeats())))


def repeats() -> dict[str, list[float]]:
    """Return the logarithms of the throughputs of each system and benchmark."""
    found: dict[str, list[float]] = {}
    for run in read_csv(DATA / "mlperf-training-4.0.csv"):
        found.setdefault(run.job, []).append(log(run.throughput or 1.0))
    return found


def judged_repeats(groups: dict[str, list[float]]) -> Iterator[str]:
    """Yield how often runs of the same thing are called different, by single runs and by halves."""
    spreads = sorted(pstdev(values) for values in groups.values())
    yield (
        f"{len(groups)} systems and benchmarks with {sum(map(len, groups.values()))} runs; CV of runs: "
        f"{100 * spreads[0]:.2f} to {100 * spreads[-1]:.2f} %, median {100 * median(spreads):.2f} %"
    )
    single = [
        (_is_called([one], [two]), pstdev(values) <= PRIOR_CV)
        for values in groups.values()
        for one, two in combinations(values, 2)
    ]
    yield f"single runs, prior CV of 1 %: {_rate([called for called, _ in single])} called different"
    yield f"  of systems with a CV up to 1 %: {_rate([called for called, is_within in single if is_within])}"
    yield f"  of the others: {_rate([called for called, is_within in single if not is_within])}"
    random = np.random.default_rng(0)
    for least, what in ((3, "3 repeats a side"), (5, "5 repeats a side")):
        halves = [
            _is_called(shuffled[:least], shuffled[least : 2 * least])
            for values in groups.values()
            if len(values) >= 2 * least
            for shuffled in (random.permutation(values).tolist() for _ in range(_NUM_SPLITS))
        ]
        yield f"{what}, {_NUM_SPLITS} splits of each system: {_rate(halves)} called different"


def _is_called(before: Sequence[float], after: Sequence[float]) -> bool:
    none = [0.0] * max(len(before), len(after))
    return log_difference(
        before, after, before_errors=none[: len(before)], after_errors=none[: len(after)]
    ).is_beyond_noise


def _rate(called: Sequence[bool]) -> str:
    return f"{sum(called)} of {len(called)}, {share_of(sum(called), len(called)).as_percent(is_change=False)}"


if __name__ == "__main__":
    main()
