"""Measures how fast many runs are compared: `python -m experiments.bench.many_runs`.

`compare` of two runs without summaries, in turns with one report, both as the commands that users call; and `history`
over thousands of reported runs whose traces were removed: the first time, when it makes its index, and again.

Options:
  --records N  operations of all ranks of each compared run [10000000]
  --repeats N  [3]
  --runs N     of the history [10000]
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from experiments.bench.pairs import Taken, python_taken, taken_medians
from experiments.bench.report_speed import _OPERATIONS, write_run
from experiments.options import command_line
from experiments.synthetic_run import SyntheticRun
from hpcpace.core.config import Config
from hpcpace.core.rundir import RunDirectory, json_text
from hpcpace.diagnosis.analyze import analyze
from hpcpace.diagnosis.measure import Selection

_NUM_RANKS = 64
_DAY_NS = 86_400 * 10**9


def main() -> None:
    args = command_line(__doc__)
    with tempfile.TemporaryDirectory(prefix="hpcpace-many-") as folder:
        _compare(Path(folder), args.records, args.repeats)
        _history(Path(folder) / "runs", args.runs, args.repeats)


def _compare(folder: Path, num_records: int, repeats: int) -> None:
    num_steps = -(-num_records // (_NUM_RANKS * len(_OPERATIONS)))
    runs = [folder / name for name in "ab"]
    for run in runs:
        write_run(RunDirectory(run), _NUM_RANKS, num_steps)
    turns = []
    for _ in range(repeats + 1):
        report_s = _seconds("report", str(runs[0]))
        runs[0].joinpath("summary.json").unlink()  # so that both are analysed
        turns.append((report_s, _seconds("compare", *map(str, runs))))
    reports, compares = zip(*turns[1:], strict=True)  # the first one warms the page cache
    ratios = [median(getattr(two, name) / getattr(one, name) for one, two in turns[1:]) for name in ("wall_s", "cpu_s")]
    print(
        f"{num_steps * _NUM_RANKS * len(_OPERATIONS):,} records a run: report {_shown(reports)}, compare of two "
        f"{_shown(compares)}: {ratios[0]:.2f} times ({ratios[1]:.2f} times), median of {repeats} turns"
    )
    for run in runs:
        _seconds("report", str(run))
    print(f"compare of two with summaries: {_shown([_seconds('compare', *map(str, runs)) for _ in range(repeats)])}")


def write_runs(folder: Path, num_runs: int) -> None:
    """Write that many runs of 8 ranks, each with run.json and summary.json."""
    template = SyntheticRun(num_ranks=8, num_steps=30, hosts=tuple(f"n{number}" for number in range(8)), noise=0.01)
    run = template.write(folder.with_name("template"))
    found = analyze(run, run.attempt(0), Selection(), Config(), begin_stage=lambda _: lambda done, total: None)
    assert found is not None
    summary = json_text(found.summary.to_json())
    for number in range(num_runs):
        attempt = folder / f"run-{number:05d}" / "attempt-0"
        attempt.joinpath("trace").mkdir(parents=True)
        record = {"name": f"job{number % 20}", "created_unix_ns": 20_000 * _DAY_NS + number * 10**12}
        attempt.joinpath("run.json").write_text(json.dumps(record))
        attempt.parent.joinpath("summary.json").write_text(summary)


def _history(folder: Path, num_runs: int, repeats: int) -> None:
    write_runs(folder, num_runs)
    first = _seconds("history", str(folder), "--json")
    again = [_seconds("history", str(folder)) for _ in range(repeats)]
    size_mb = os.path.getsize(folder / "hpcpace-history.json") / 1e6
    print(f"history of {num_runs:,} runs: first {_shown([first])}, again {_shown(again)}, index {size_mb:.1f} MB")
    shutil.rmtree(folder)


def _seconds(*words: str) -> Taken:
    """Return how long a command takes; of a report, 3 is that nothing is wrong enough to tell."""
    return python_taken("-P", "-m", "hpcpace", *words, codes=(0, 1, 3))


def _shown(times: Sequence[Taken]) -> str:
    return "{:.2f} s ({:.2f} s of all cores)".format(*taken_medians(times))


if __name__ == "__main__":
    main()
