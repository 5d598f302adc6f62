"""What `hpcpace history` says of made-up series whose truth is known: `python -m experiments.history_rates`.

Each line is the share of series of which each word is said. The rules were chosen with other seeds than these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import expm1

import numpy as np
from numpy.typing import NDArray

from experiments.pages import row, share, table
from hpcpace.metrics.run_difference import Duration, level_changes
from hpcpace.runs.history import MIN_CHANGE, history
from hpcpace.runs.history_row import HistoryRow, IndexedRuns

Series = NDArray[np.float64]
Random = np.random.Generator

_FIRST_SEED = 5_000_000
_DAY_NS = 86_400 * 10**9
_NUM_HOSTS = 16
_WORDS = (Duration.LASTING, Duration.DRIFT, Duration.ONE_OFF, Duration.RECENT)


def _noise(random: Random, num_runs: int, spread: float = 0.01) -> Series:
    return spread * random.standard_normal(num_runs)


def _follows_the_last(random: Random) -> Series:
    values = _noise(random, 60)
    for run in range(1, 60):
        values[run] += 0.8 * values[run - 1]
    return values


Make = Callable[[Random], Series]
_NUM_EQUAL, _NUM_OTHERS = 1000, 300
"""Series of each kind: of equal runs, which nothing is to be said of, and of others."""


def _series() -> dict[str, Make]:
    """Return kinds of series of one job: how one is made, by what they are."""
    run, day = np.arange(60), np.arange(180) // 3
    made: dict[str, Make] = {}
    for num_runs in (6, 8, 10, 12, 16, 60):
        made[f"equal, {num_runs} runs, 2 %"] = partial(_noise, num_runs=num_runs, spread=0.02)
    made["three a day, slower on working days by 3 %"] = lambda random: _noise(random, 180) + 0.03 * (day % 7 < 5)
    made["swings by 2 % in 30 runs"] = lambda random: _noise(random, 60) + 0.02 * np.sin(run / 30 * 2 * np.pi)
    made["each slower by 6 % with a chance of 20 %, 0.5 %"] = _sometimes_slower
    made["each goes with the run before by 0.8"] = _follows_the_last
    for size in (0.03, 0.05, 0.1):
        made[f"5 to 55 runs, then {100 * size:g} % slower"] = partial(_one_step, run, size)
    made["8 runs, the later half 5 % slower"] = lambda random: _noise(random, 8) + 0.05 * (np.arange(8) >= 4)
    for size in (0.03, 0.05):
        steps = size * (run >= 20) + size * (run >= 40)
        made[f"two steps of {100 * size:g} %"] = partial(_added, steps)
    for num_runs, total in ((60, 0.15), (60, 0.05), (14, 0.15)):
        made[f"drift of {100 * total:g} % over {num_runs} runs"] = partial(_added, np.linspace(0.0, total, num_runs))
    made["drift only in the last 20 runs, 15 %"] = partial(_added, np.maximum(run - 40, 0) / 20 * 0.15)
    return made


def _added(change: Series, random: Random) -> Series:
    return _noise(random, len(change)) + change


def _one_step(run: Series, size: float, random: Random) -> Series:
    return _noise(random, 60) + size * (run >= random.integers(5, 55))


def _sometimes_slower(random: Random) -> Series:
    return _noise(random, 60, 0.005) + 0.06 * (random.random(60) < 0.2)


def _of_series(make: Callable[[Random], Series], num_series: int) -> Counter[str]:
    said: Counter[str] = Counter()
    for seed in range(num_series):
        changes = level_changes(make(np.random.default_rng(_FIRST_SEED + seed)))
        said.update({str(change.duration) for change in changes if abs(expm1(change.size)) >= MIN_CHANGE})
    return said


def _of_hosts(num_runs: int, *, spread: float, slower: float, num_histories: int) -> Counter[str]:
    """Return in how many histories of one job on 16 hosts something is said; in the later half, n3 is slower."""
    said: Counter[str] = Counter()
    for seed in range(num_histories):
        random = np.random.default_rng(_FIRST_SEED + seed)
        rows = []
        for number in range(num_runs):
            slowness = dict(
                zip((f"n{host}" for host in range(_NUM_HOSTS)), _noise(random, _NUM_HOSTS, spread), strict=True)
            )
            slowness["n3"] += slower if number >= num_runs // 2 else 0.0
            step_ns = 1e9 * float(np.exp(_noise(random, 1, spread)[0]))
            rows.append(
                HistoryRow(
                    run=f"run-{number}",
                    begun_unix_ns=(number + 20_000) * _DAY_NS,
                    job="train",
                    kind="16 ranks",
                    p50_ns=step_ns,
                    mean_ns=step_ns,
                    hosts=tuple(slowness),
                    slowness={host: float(value) for host, value in slowness.items()},
                )
            )
        events = history(
            "made up", IndexedRuns(rows=tuple(rows), broken={}, num_running=0, num_read=0, index="")
        ).events
        said["anything"] += bool(events)
        said["lasting"] += any(event.duration == "lasting" for event in events)
        said["chronic"] += any(event.duration == "chronic" for event in events)
        said["n3 lasting"] += any((event.name, event.duration) == ("n3", "lasting") for event in events)
    return said


def main() -> None:
    """Print the tables of docs/results/history.md."""
    head = ("series of one job, a spread of 1 % unless said", "lasting", "drift", "one-off", "recent")
    print(table(head, []))
    for name, make in _series().items():
        num_series = _NUM_EQUAL if name.startswith("equal") else _NUM_OTHERS
        said = _of_series(make, num_series)
        print(row([name, *(share(said[word], num_series) for word in _WORDS)]), flush=True)
    words = ("anything", "lasting", "chronic", "n3 lasting")
    print("\n" + table(("runs of one job on 16 hosts", *words), []))
    for name, spread, slower in (
        ("equal, 2 %", 0.02, 0.0),
        ("n3 5 % slower, 1 %", 0.01, 0.05),
        ("n3 10 % slower, 1 %", 0.01, 0.1),
    ):
        for num_runs in (4, 8, 12, 20, 60):
            num = 100 if num_runs == 60 else 200
            said = _of_hosts(num_runs, spread=spread, slower=slower, num_histories=num)
            print(row([f"{num_runs}, {name}", *(share(said[word], num) for word in words)]), flush=True)


if __name__ == "__main__":
    main()
