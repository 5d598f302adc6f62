"""Measures how long the simulation of a large job takes: `python -m experiments.bench.simulation`.

One thread; the ratio is to drawing the noise of the same job alone, which nothing that simulates it can do without.

Options:
  --ranks N  [16384]
  --steps N  [1000]
  --repeats N  [3]
"""

from __future__ import annotations

import time
from functools import partial
from timeit import repeat

import numpy as np

from analysis.library.simulation import Noise, ParametricNoise, ResampledNoise, SimulatedJob, TracedNoise, simulate
from experiments.options import command_line

NS_PER_MS = 1e6


def main() -> None:
    args = command_line(__doc__)
    residual_ns = np.random.default_rng(0).standard_normal((8, 500)) * NS_PER_MS
    noises: dict[str, Noise | TracedNoise] = {
        "normal": ParametricNoise(kind="normal", size_ns=NS_PER_MS),
        "pareto": ParametricNoise(kind="pareto", size_ns=NS_PER_MS),
        "residuals": ResampledNoise(residual_ns=residual_ns),
        "trace": TracedNoise(begin_ns=np.arange(1, 1001) * 1e7, duration_ns=np.full(1000, 5e4), period_ns=1.1e10),
    }
    for name, noise in noises.items():
        job = SimulatedJob(
            num_ranks=args.ranks, num_steps=args.steps, work_ns=100 * NS_PER_MS, transfer_ns=1e6, noise=noise
        )
        alone = "normal" if isinstance(noise, TracedNoise) else name
        drawing, simulating = partial(draw, noises[alone], args.ranks, args.steps), partial(simulate, job)
        drawing_s, simulating_s = (
            min(repeat(action, number=1, repeat=args.repeats, timer=time.process_time))
            for action in (drawing, simulating)
        )
        print(
            f"simulation, {args.ranks} ranks x {args.steps} steps, {name} noise: {simulating_s:.2f} s of processor "
            f"time, {simulating_s / drawing_s:.1f} times the drawing of {alone} noise (best of {args.repeats})"
        )


def draw(noise: Noise | TracedNoise, num_ranks: int, num_steps: int) -> None:
    assert not isinstance(noise, TracedNoise)
    noise.draw(num_ranks, num_steps, np.random.default_rng(0))


if __name__ == "__main__":
    main()
