"""Runs all benchmarks one after the other: `make bench`; each in a small size: `make bench-quick`.

Each is a module with its own main and prints its figures. Those of `--quick` mean nothing: it shows that the benchmarks
still run, as many at a time as there are cores, and prints the output of each once it has ended. `--gpu` runs those
that measure on a GPU, on one GPU; no GPU has been at hand to run it yet.

Options:
  --quick        run each benchmark once in a small size
  --gpu          run the benchmarks for one GPU, on it
  --nanogpt TEXT  with --gpu: compare tokens/s with a checkout of nanoGPT, too
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from experiments.options import command_line
from experiments.pages import read_toml

_LISTS = read_toml(__file__, "benches")
FULL, QUICK, GPU = (
    tuple(tuple(line.split()) for line in _LISTS[name].strip().splitlines()) for name in ("full", "quick", "gpu")
)


def main() -> None:
    args = command_line(__doc__)
    if args.quick and args.gpu:
        sys.exit("--quick goes without --gpu")
    if args.nanogpt and not args.gpu:
        sys.exit("--nanogpt goes with --gpu")
    if args.gpu:
        from experiments.bench.models import require_gpus  # loads torch

        require_gpus(1)
    rows = QUICK if args.quick else GPU if args.gpu else FULL
    benches = [[*row, *(["--nanogpt", args.nanogpt] if args.nanogpt and "tokens" in row else [])] for row in rows]
    # What is measured has the machine for itself.
    num_at_once = len(os.sched_getaffinity(0)) if args.quick else 1
    with ThreadPoolExecutor(num_at_once) as pool:
        codes = list(pool.map(partial(_run, is_shown_live=not args.quick), benches))
    failed = [" ".join(row[:2]) for row, code in zip(rows, codes, strict=True) if code]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(bench: Sequence[str], *, is_shown_live: bool) -> int:
    """Run a benchmark, show its output while it runs or once it has ended, and return its exit code."""
    title, begin_s = f"== python -m experiments.bench.{' '.join(bench)}", time.perf_counter()
    name, *options = bench
    command = [sys.executable, "-m", f"experiments.bench.{name}", *options]
    if is_shown_live:
        print(title, flush=True)
        done = subprocess.run(command, check=False)
        print(f"   {time.perf_counter() - begin_s:.0f} s", flush=True)
    else:
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(f"{title}\n{done.stdout}   {time.perf_counter() - begin_s:.0f} s", flush=True)
    return done.returncode


if __name__ == "__main__":
    main()
