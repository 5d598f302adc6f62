"""Measures what tracing adds to the length of steps that sleep: `python -m experiments.attach.delay`.

Steps of a known length show each delay, whatever takes the processor meanwhile. Two ranks of DistributedDataParallel
over gloo, in real time (root), without tracing and with it in turn.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from experiments.jobs import clean_environ, free_port
from experiments.pages import ROOT

_FORWARD_S, _BACKWARD_S = 0.010, 0.008
_WARMUP_STEPS, _INTERVAL_S = 100, "5"  # of comparisons of clocks: 30 s by default
_AHEAD = ("chrt", "--rr", "1")
_MS = 1e-6


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        """Return the input, later."""
        time.sleep(_FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient, later."""
        time.sleep(_BACKWARD_S)
        return gradient


def _train(num_steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.ones(4, 8)
    ends_ns = np.empty(num_steps, np.int64)
    for step in range(num_steps):
        optimizer.zero_grad()
        _Sleeps.apply(model(x)).sum().backward()
        optimizer.step()
        ends_ns[step] = time.monotonic_ns()
    np.save(folder / f"{dist.get_rank()}.npy", ends_ns)
    dist.destroy_process_group()


def _run(num_steps: int, *, is_traced: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the lengths of the steps of both ranks in milliseconds, (2, num_steps - warm-up)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [f"--master-port={free_port()}", "--nproc-per-node=2", "-m", "experiments.attach.delay"]
        trace = ["hpcpace", "trace", "--run-dir", str(folder / "run"), "--", sys.executable, "-m"] if is_traced else []
        launch = [*_AHEAD, sys.executable, "-m", *trace, "torch.distributed.run", *words]
        environ = clean_environ(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HPCPACE_CLOCK_INTERVAL_S=_INTERVAL_S)
        log = subprocess.run([*launch, "--rank-of", name, "--steps", str(num_steps)], env=environ, capture_output=True)
        if log.returncode:
            raise SystemExit(log.stderr.decode())
        return np.array([np.diff(np.load(folder / f"{rank}.npy")[_WARMUP_STEPS:]) * _MS for rank in (0, 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        _train(args.steps, args.rank_of)
        return
    for turn in range(args.repeats):
        for is_traced in (False, True) if turn % 2 else (True, False):
            ms = _run(args.steps, is_traced=is_traced)
            figures = ", ".join(f"{q:g} %: {np.percentile(ms, q):.2f}" for q in (50, 99, 99.9))
            print(
                f"{'traced' if is_traced else 'plain ':6}  steps in ms: mean {ms.mean():.3f}, {figures}, "
                f"largest {ms.max():.2f}; load {os.getloadavg()[0]:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
