"""Speeds of runs that others published, and how `compare` judges repeats of the same thing among them.

`python -m experiments.published_speeds repeats` splits the repeats of each system into two groups and compares these:
nothing differs, so that 5 % may be called different. `megatron REPOSITORY` and `mlperf REPOSITORY` write the files of
tests/data/history from a clone of NVIDIA/Megatron-LM or of mlcommons/training_results_v4.0.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import log
from pathlib import Path
from statistics import median, pstdev

import numpy as np

from hpcpace.metrics.resampling import share_of
from hpcpace.metrics.run_difference import PRIOR_CV, log_difference
from hpcpace.runs.load import read_csv

DATA = Path(__file__).parents[1] / "tests" / "data" / "history"
_TESTS = "tests/functional_tests/test_cases"
_CASES = ("moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer", "bert/bert_mcore_tp1_pp2")
_RESULT = re.compile(r"(\w[^/]*)/results/([^/]+)/([^/]+)/result_(\d+)\.txt")
_MAX_REPEATS = 10
_NUM_SPLITS = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.published_speeds", description=__doc__)
    parser.add_argument("what", choices=["repeats", "megatron", "mlperf"])
    parser.add_argument("repository", nargs="?", help="git directory of the clone")
    args = parser.parse_args()
    if args.what == "repeats":
        print("\n".join(judged_repeats(repeats())))
        return
    if args.repository is None:
        parser.error("name the git directory of the clone")
    columns, rows = (
        (("date", "run", "job", "step_time_s"), megatron_rows(args.repository))
        if args.what == "megatron"
        else (("run", "job", "throughput"), mlperf_rows(args.repository))
    )
    path = DATA / {"megatron": "megatron-lm.csv", "mlperf": "mlperf-training-4.0.csv"}[args.what]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([columns, *rows])
    print(f"written: {path}")


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


def megatron_rows(repository: str) -> Iterator[Sequence[str]]:
    """Yield one line for each commit that changed the iteration times of a test."""
    for case in _CASES:
        path = f"{_TESTS}/{case}/golden_values_dev_dgx_h100.json"
        last: list[float] = []
        for line in _git(repository, "log", "--reverse", "--format=%H %aI", "HEAD", "--", path).splitlines():
            commit, date = line.split()
            values = json.loads(_git(repository, "show", f"{commit}:{path}"))["iteration-time"]["values"].values()
            times = [value for value in values if isinstance(value, int | float)]
            if times != last:
                yield date, commit[:10], case.partition("/")[2], f"{median(times):.5g}"
            last = times


def mlperf_rows(repository: str) -> Iterator[Sequence[str]]:
    """Yield one line for each of the first repeats of a system and benchmark that logs its throughput."""
    for name in _git(repository, "ls-tree", "-r", "--name-only", "HEAD").splitlines():
        found = _RESULT.fullmatch(name)
        if found is None or int(found[4]) >= _MAX_REPEATS:
            continue
        # A stored snapshot may lack the largest files.
        text = _git(repository, "show", f"HEAD:{name}", is_needed=False)
        logged = re.findall(r'"value": \{"throughput": ([\d.]+)', text)
        if logged:
            job = f"{found[1]} {found[2]} {found[3]}"
            yield f"result_{found[4]}", job, f"{median(map(float, logged)):.6g}"


def _git(repository: str, *words: str, is_needed: bool = True) -> str:
    command = ["git", f"--git-dir={repository}", *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=is_needed).stdout


if __name__ == "__main__":
    main()
