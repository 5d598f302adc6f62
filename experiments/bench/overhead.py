"""Measures what tracing costs a training step: blocks of steps with a session alternate with blocks without.

Two ranks in data parallelism train GPT-2, each on a core of its own; all columns, counters and flushes are on. Each
block begins with steps that are not measured, so that opening a session is not in the figures. Wall time has the noise
of everything else on the machine in it, processor time of all threads much less. Clocks are compared every 30 s, which
is not in a block: the cost of a comparison is measured for itself.

`python -m experiments.bench.overhead`
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.pairs import Pairs, alternate, median_interval

_THREADS = ("hpcpace-flush", "hpcpace-counters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--block-steps", type=int, default=20)
    parser.add_argument("--settle-steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--inside-mpi", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside_mpi:
        measure(args)
    else:
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        program = [sys.executable, "-m", "experiments.bench.overhead", *sys.argv[1:], "--inside-mpi"]
        sys.exit(subprocess.run([mpiexec, "-n", "2", *program], check=False).returncode)


def measure(args: argparse.Namespace) -> None:
    import torch

    from hpcpace.config import Config, TrainConfig
    from hpcpace.train.data import open_text
    from hpcpace.train.optimizer import build_optimizer
    from hpcpace.train.parallel import build_replica
    from hpcpace.train.plan import plan_training
    from hpcpace.world.environment import process_environ, rank_info
    from hpcpace.world.mpi import mpi_world
    from hpcpace.world.process_group import init_process_group

    torch.set_num_threads(1)
    info = rank_info(process_environ())
    comm = mpi_world(info)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[info.rank % len(cores)]})
    settings = TrainConfig(preset=args.preset, batch_size=args.batch_size, seq_len=args.seq_len)
    plan = plan_training(settings, info.world_size)
    text = open_text(None, plan.seq_len)
    place = plan.mesh.coordinates(info.rank)
    with init_process_group(info, comm, device=torch.device("cpu")):
        replica = build_replica(plan, rank=info.rank, device=torch.device("cpu"))
        optimizer = build_optimizer(replica.parameters(), learning_rate=1e-4)
        rows = text.batch(0, seed=0, batch_size=args.batch_size, seq_len=plan.seq_len, rows=plan.rows(place))
        tokens = torch.from_numpy(rows)

        def step(session: Any) -> None:
            with session.phase("data") if session is not None else nullcontext():
                batch = tokens.clone()
            replica.forward_backward(batch[:, :-1], batch[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.step(samples=1)

        compare(args, comm, step, replica.watched, Config(train=settings))


@dataclass(frozen=True)
class Block:
    """What blocks of steps took, with or without a session, in seconds.

    Attributes:
        step: runs a step in a session or None.
        num_steps: of a block.
        num_settle_steps: steps before a block that are not measured.
        processor_s: processor time of all threads, block by block.
        threads_s: processor time of each thread of the session, block by block.
    """

    comm: Any
    step: Callable[[Any], None]
    num_steps: int
    num_settle_steps: int
    processor_s: list[float] = field(default_factory=list)
    threads_s: list[list[float]] = field(default_factory=list)

    def run(self, session: Any) -> float:
        """Return the wall time of a block. Collective: every rank calls this."""
        for _ in range(self.num_settle_steps):
            self.step(session)
        self.comm.Barrier()
        begin_threads, begin_processor, begin = _threads_s(), time.process_time(), time.perf_counter()
        for _ in range(self.num_steps):
            self.step(session)
        duration_s = time.perf_counter() - begin
        self.processor_s.append(time.process_time() - begin_processor)
        self.threads_s.append([now - then for now, then in zip(_threads_s(), begin_threads, strict=True)])
        return duration_s


def compare(args: argparse.Namespace, comm: Any, step: Callable[[Any], None], watched: Any, config: Any) -> None:
    import hpcpace
    from hpcpace.world.clock import ClockSync

    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    on, off = (Block(comm, step, args.block_steps, args.settle_steps) for _ in range(2))
    comparisons: list[tuple[float, float]] = []
    synchronise = ClockSync.sync

    def timed_sync(clock_sync: Any, step: int) -> Any:
        begin, begin_processor = time.perf_counter(), time.process_time()
        sample = synchronise(clock_sync, step)
        comparisons.append((time.perf_counter() - begin, time.process_time() - begin_processor))
        return sample

    ClockSync.sync = timed_sync

    def traced() -> float:
        with hpcpace.session(run_dir=folder / "run", config=config, comm=comm) as session:
            for part in watched:
                session.watch(part)
            return on.run(session)

    num_warmups = 2
    pairs = alternate(traced, lambda: off.run(None), num_pairs=args.pairs, num_warmups=num_warmups)
    processor = Pairs(np.array(on.processor_s[num_warmups:]), np.array(off.processor_s[num_warmups:]))
    # All ranks together, pair by pair: they wait for each other, and what one of them saves is the other's noise.
    pairs, processor = (Pairs(*(comm.allreduce(times) for times in (both.a, both.b))) for both in (pairs, processor))
    if comm.rank == 0:
        shutil.rmtree(folder)
        _print(args, pairs, processor)
        _print_parts(processor, np.array(on.threads_s[num_warmups:]), np.array(comparisons), config.clock.interval_s)


def _print(args: argparse.Namespace, pairs: Pairs, processor: Pairs) -> None:
    step_ms, processor_ms = (float(np.median(times)) / 2 / args.block_steps * 1e3 for times in (pairs.b, processor.b))
    print(
        f"tracing on against off, GPT-2 {args.preset}, dp=2, {args.pairs} pairs of {args.block_steps} steps, a rank on "
        f"each core, load {os.getloadavg()[1]:.1f}:\n"
        f"  step time {_percent(pairs)} of {step_ms:.1f} ms, "
        f"processor time of all threads {_percent(processor)} of {processor_ms:.1f} ms"
    )


def _print_parts(processor: Pairs, threads_s: np.ndarray, comparisons_s: np.ndarray, interval_s: float) -> None:
    shares = np.mean(threads_s, axis=0) / (np.median(processor.b) / 2) * 100
    parts = ", ".join(f"{name} {share:.3f} %" for name, share in zip(_THREADS, shares, strict=True))
    print(f"  of the processor time, threads of rank 0: {parts}")
    wall, used = np.median(comparisons_s, axis=0)
    print(
        f"  a clock comparison: {wall * 1e3:.2f} ms, processor time {used * 1e3:.2f} ms, "
        f"which is {wall / interval_s * 100:.3f} % at one every {interval_s:g} s"
    )


def _threads_s() -> list[float]:
    """Return the processor time of each of the session's threads so far."""
    found = dict.fromkeys(_THREADS, 0.0)
    for thread in threading.enumerate():
        if thread.name in found:
            schedstat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            found[thread.name] += int(schedstat.read_text().split()[0]) / 1e9
    return list(found.values())


def _percent(pairs: Pairs) -> str:
    median, low, high = median_interval((pairs.a / pairs.b - 1) * 100)
    return f"{median:+.2f} % [{low:+.2f}, {high:+.2f}]"


if __name__ == "__main__":
    main()
