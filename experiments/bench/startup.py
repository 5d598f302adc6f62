"""How long commands take to start, in processor time against a script that only loads what they need anyway.

`python -m experiments.bench.startup`: the floor imports numpy, h5py, click and rich. All commands and the floor take
turns in one run, each as a process of its own, so the ratios hold on a machine whose speed changes.

Options:
  --rounds N  [7]
  --runs N    list this many reported runs [1000]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.bench.many_runs import write_runs
from experiments.bench.pairs import compiled_kept, median_interval, python_taken, take_turns
from experiments.options import command_line
from experiments.synthetic_run import SyntheticRun

FLOOR = ("-c", "import numpy, h5py, click, rich.table")
TARGETS = {"--help": 0.8, "report of a missing run": 1.2, "report of a run of 4 ranks": 2.5, "list of runs": 4.0}
NUM_STEPS = 50


def main() -> None:
    """Print the ratio of each command to the floor, beside its target."""
    args = command_line(__doc__)
    with tempfile.TemporaryDirectory(prefix="hpcpace-startup-") as name, compiled_kept(Path(name)):
        todo = commands(Path(name), num_runs=args.runs)
        measures = {name: lambda words=words: python_taken(*words).cpu_s for name, words in todo.items()}
        times = take_turns(measures, num_rounds=args.rounds)
    floor_s = times.pop("floor")
    print(f"floor: {np.median(floor_s):.3f} s of processor time (numpy, h5py, click, rich.table), {args.rounds} rounds")
    for command, taken_s in times.items():
        ratio, low, high = median_interval(taken_s / floor_s)
        print(
            f"{command}: {np.median(taken_s):.3f} s, {ratio:.2f} times [{low:.2f}, {high:.2f}] the floor "
            f"(target {TARGETS[command]})"
        )


def commands(folder: Path, *, num_runs: int) -> dict[str, Sequence[str]]:
    """Return the arguments of Python for each command, and write the runs that they read into a folder."""
    SyntheticRun(num_steps=NUM_STEPS, slow={2: 1.5}, noise=0.02).write(folder / "run")
    write_runs(folder / "runs", num_runs)
    hpcpace = ("-m", "hpcpace")
    return {
        "floor": FLOOR,
        "--help": (*hpcpace, "--help"),
        "report of a missing run": (*hpcpace, "report", str(folder / "none")),
        "report of a run of 4 ranks": (*hpcpace, "report", str(folder / "run")),
        "list of runs": (*hpcpace, "list", str(folder / "runs")),
    }


if __name__ == "__main__":
    main()
