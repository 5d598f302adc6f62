"""How often `hpcpace compare` is right on made-up runs: `python -m experiments.compare_synthetic`.

Each run is 16 ranks on 8 nodes; runs of the same thing differ by `--run-cv` as a whole, and the speed of each node by
that as well. Half of the pairs are A/A; in the other half a node of B does its own work 5 % more slowly.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.compare_judge import JudgedPair, judge_pair, score_lines
from experiments.synthetic_run import SyntheticRun
from hpcpace.parallel import map_processes

_NUM_RANKS, _HOSTS = 16, tuple(f"n{number}" for number in range(8))
_SLOWER = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.compare_synthetic", description=__doc__)
    parser.add_argument("--pairs", type=int, default=100, help="of each kind")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side")
    parser.add_argument("--noise", type=float, default=0.01, help="of each step, relative")
    parser.add_argument("--run-cv", type=float, default=0.005, help="standard deviation between runs and nodes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpcpace-compare-") as folder:

        def judged(seed: int) -> JudgedPair:
            return _judged(Path(folder), seed, args)

        found = list(map_processes(judged, list(range(2 * args.pairs))))
    for line in score_lines(found[0::2], found[1::2]):
        print(line)


def _judged(folder: Path, seed: int, args: argparse.Namespace) -> JudgedPair:
    """Write and compare one pair; odd seeds have a slower node."""
    random = np.random.default_rng(seed)
    slower = int(random.integers(len(_HOSTS))) if seed % 2 else None
    sides = [[folder / f"{seed}-{side}{number}" for number in range(args.repeats)] for side in "ab"]
    for paths, node in zip(sides, (None, slower), strict=True):
        for path in paths:
            run = SyntheticRun(
                num_ranks=_NUM_RANKS,
                num_steps=args.steps,
                hosts=_HOSTS,
                noise=args.noise,
                slow=_factors(random, args.run_cv, node),
                seed=int(random.integers(1 << 32)),
            )
            run.write(path)
    judged = judge_pair(sides[0], sides[1], "" if slower is None else _HOSTS[slower])
    for path in sides[0] + sides[1]:
        shutil.rmtree(path)
    return judged


def _factors(random: np.random.Generator, spread: float, slower: int | None) -> Mapping[int, float]:
    of_run = random.normal(0.0, spread)
    of_node = random.normal(0.0, spread, len(_HOSTS))
    if slower is not None:
        of_node[slower] += np.log1p(_SLOWER)
    per_node = _NUM_RANKS // len(_HOSTS)
    return {rank: float(np.exp(of_run + of_node[rank // per_node])) for rank in range(_NUM_RANKS)}


if __name__ == "__main__":
    main()
