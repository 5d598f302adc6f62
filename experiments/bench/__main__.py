"""Runs all benchmarks one after the other: `make bench`; each in a small size: `make bench-quick`.

Each is a module with its own main and prints its figures. Those of `--quick` mean nothing: it shows that the benchmarks
still run. `--gpu` runs those that measure on a GPU, on one GPU; no GPU has been at hand to run it yet.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time


def _rows(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the words of each line."""
    return tuple(tuple(line.split()) for line in text.strip().splitlines())


FULL = _rows("""
    startup
    recorder
    simulation
    trace_size
    file_system
    collective
    device_marks
    session_step
    session_step --watchdog
    flows
    overhead
    overhead --preset small --seq-len 64 --batch-size 2 --block-steps 2 --settle-steps 1 --pairs 20
    training tokens
    training compiled
    training images
    floor
    report_speed --all --numpy --repeats 1
    page
    pack
    watch
    scaling_model
    other_tools --records 40000
    audit
    many_runs
""")
QUICK = _rows("""
    startup --rounds 2 --runs 20
    recorder --pairs 2 --events 5000
    simulation --ranks 512 --steps 100 --repeats 1
    trace_size --steps 2000 --rates 200
    file_system --steps 20
    collective --rounds 4 --calls 200
    device_marks --rounds 4
    session_step --rounds 2 --steps 30
    session_step --watchdog --rounds 2 --steps 30 --seconds 5
    flows --ranks 2 --sockets 8 --seconds 3
    overhead --pairs 2 --block-steps 2 --batch-size 2 --seq-len 32
    training tokens --pairs 2 --preset tiny --seq-len 64
    training compiled --pairs 2 --preset tiny --seq-len 64
    training images --pairs 2 --batch-size 2
    floor --steps 100 --repeats 1
    report_speed --ranks 8 --records 20000 --numpy --repeats 1
    page --ranks 4 --steps 20 --repeats 1 --quiet-ms 200
    pack --ranks 8 --steps 50 --repeats 1
    watch --ranks 16 --seconds 2
    scaling_model --quick
    other_tools --records 2000 --repeats 1
    audit --hosts 16 --repeats 1
    many_runs --records 40000 --runs 20 --repeats 1
""")
# With `overhead` the steps before a block take more than a second, so that marks are read in it, and blocks end before
# 5 s, when device and host are tied together again: a step was guessed at 45 ms.
GPU = _rows(
    "device_marks\n"
    "collective --on-device\n"
    "overhead --device cuda --dtype bf16 --preset small --seq-len 1024 --batch-size 16 --settle-steps 40 "
    "--block-steps 40 --pairs 15\n"
    "training tokens --device cuda --dtype bf16 --seq-len 1024 --batch-size 12 --block-steps 10 --pairs 10\n"
    "training images --device cuda --dtype bf16 --batch-size 512 --block-steps 10 --pairs 10\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="run each benchmark once in a small size")
    which.add_argument("--gpu", action="store_true", help="run the benchmarks for one GPU, on it")
    parser.add_argument(
        "--nanogpt", metavar="PATH", help="with --gpu: compare tokens/s with a checkout of nanoGPT, too"
    )
    args = parser.parse_args()
    if args.nanogpt and not args.gpu:
        parser.error("--nanogpt goes with --gpu")
    if args.gpu:
        from experiments.bench.models import require_gpus  # loads torch

        require_gpus(1)
    failed = []
    for row in QUICK if args.quick else GPU if args.gpu else FULL:
        words = [*row, *(["--nanogpt", args.nanogpt] if args.nanogpt and "tokens" in row else [])]
        print(f"== python -m experiments.bench.{' '.join(words)}", flush=True)
        begin_s = time.perf_counter()
        name, *options = words
        if subprocess.run([sys.executable, "-m", f"experiments.bench.{name}", *options], check=False).returncode:
            failed.append(" ".join(row[:2]))
        print(f"   {time.perf_counter() - begin_s:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
