"""Measures what tracing costs a training step: blocks of steps with a session alternate with blocks without.

Two ranks in data parallelism train GPT-2, each on a core of its own; all columns, counters and flushes are on. Each
block begins with steps that are not measured, so that opening a session is not in the figures. Wall time has the noise
of everything else on the machine in it, processor time of all threads much less. Clocks are compared in a thread, at
the start and after 0.5, 1, 2 s and so on; what a comparison takes is measured for itself as well.

With `--device cuda`, which has not been run on a GPU yet, there is one rank unless `--ranks` says otherwise: NCCL does
not let two ranks share a GPU. DDP reduces gradients all the same. The device is waited for at both ends of a block
alone. In place of processor time, of which the host spends most on waiting for room in the device's queue, the time on
the device is compared. Steps before a block must take more than a second, for marks are not read before that.

`python -m experiments.bench.overhead`

Options:
  --preset NAME     [tiny]
  --pairs N         [120]
  --block-steps N   [20]
  --settle-steps N  [3]
  --batch-size N    [8]
  --seq-len N       [128]
  --step-ms X       choose the batch size, so that a step takes about this long
  --ranks N         default: 2 on CPUs, 1 on a GPU
  --inside-mpi      be a rank that mpiexec has started
  --device cpu|cuda  compute on the CPU, or on one GPU [cpu]
  --dtype float32|bfloat16|fp32|bf16  compute in float32, or in bf16 by autocast with parameters in float32 [float32]
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
import torch
import torch.distributed as dist
from torch import nn

import hpcpace
from experiments.bench.device_marks import EventUse, counted
from experiments.bench.models import require_gpus, words
from experiments.bench.pairs import Pairs, alternate, median_interval
from experiments.options import command_line
from hpcpace.core.config import Config
from hpcpace.core.environment import process_environ, rank_info
from hpcpace.observe.settings import ClockConfig, TraceConfig
from hpcpace.train.data import open_text
from hpcpace.train.data_parallel import build_optimizer, replicate
from hpcpace.train.parallel import build_replica
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import SHORT_DTYPES, TrainConfig
from hpcpace.world.clock import ClockSync
from hpcpace.world.mpi import mpi_world
from hpcpace.world.process_group import init_process_group

_THREADS = ("hpcpace-flush", "hpcpace-counters")
# Of the settled device clock, and how long the first marks of a session wait to be read (hpcpace.observe.device.clock).
_ANCHOR_INTERVAL_S, _MARKS_UNREAD_S = 30, 1.0
_MAX_PLAIN_SETTLE_STEPS = 5
_NUM_GUESSES, _CLOSE_ENOUGH = 6, 0.2


def main() -> None:
    args = command_line(__doc__)
    args.ranks = args.ranks or (1 if args.device == "cuda" else 2)
    args.dtype = SHORT_DTYPES.get(args.dtype, args.dtype)
    if args.device == "cuda":
        require_gpus(args.ranks)
    if args.inside_mpi or args.ranks == 1:
        measure(args)
    else:
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        program = [sys.executable, "-m", "experiments.bench.overhead", *sys.argv[1:], "--inside-mpi"]
        sys.exit(subprocess.run([mpiexec, "-n", str(args.ranks), *program], check=False).returncode)


def measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    info = rank_info(process_environ())
    comm = mpi_world(info)
    if args.device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[info.rank % len(cores)]})
    settings = TrainConfig(preset=args.preset, batch_size=args.batch_size, seq_len=args.seq_len, dtype=args.dtype)
    plan = plan_training(settings, info.world_size)
    text = open_text(None, plan.seq_len)
    place = plan.mesh.coordinates(info.rank)
    with init_process_group(info, comm, device=args.device) as device:
        model = build_replica(plan, rank=info.rank, device=device).watched[0]
        if info.world_size == 1:
            model = replicate(model, group=dist.group.WORLD, settings=settings)
        optimizer = build_optimizer(model.parameters(), learning_rate=1e-4)
        rows = text.batch(0, seed=0, batch_size=args.batch_size, seq_len=plan.seq_len, rows=plan.rows(place))
        tokens = torch.from_numpy(rows).to(device)

        def train(batch: torch.Tensor) -> None:
            model(batch[:, :-1], batch[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

        if args.step_ms is not None:
            tokens = tokens.repeat(_num_repeats(train, tokens, args.step_ms), 1)

        def step(session: Any) -> None:
            with session.phase("data") if session is not None else nullcontext():
                batch = tokens.clone()
            train(batch)
            if session is not None:
                session.step(samples=1)

        # On devices comparisons of clocks would choose the steps in which device and host are tied together.
        clock = ClockConfig(enabled=device.type == "cpu")
        # The card is made after a session, and not in the figures.
        compare(args, comm, step, model, Config(settings, clock, TraceConfig(summary=False)))


def _num_repeats(train: Callable[[torch.Tensor], None], batch: torch.Tensor, step_ms: float) -> int:
    """Return how often a batch makes a step of about that length; small ones may take a GPU equally long."""
    number = 1
    for _ in range(_NUM_GUESSES):
        repeated, times_s = batch.repeat(number, 1), []
        for _ in range(4):
            begin_s = time.perf_counter()
            train(repeated)
            if batch.is_cuda:
                torch.cuda.synchronize()
            times_s.append(time.perf_counter() - begin_s)
        ratio = step_ms / 1e3 / min(times_s)
        if abs(ratio - 1) < _CLOSE_ENOUGH:
            break
        number = max(round(number * ratio), 1)
    return number


class Alone:
    """The communicator of a world of one, which has no MPI."""

    rank = 0

    def Barrier(self) -> None:
        """Return at once."""

    def bcast(self, value: Any) -> Any:
        """Return the value."""
        return value

    def allreduce(self, value: Any) -> Any:
        """Return the value."""
        return value


class ProcessorTime:
    """Measures processor time of all threads."""

    name = "processor time of all threads"

    def start(self) -> None:
        """Begin."""
        self._begin_s = time.process_time()

    def stop(self) -> float:
        """Return the seconds since the begin."""
        return time.process_time() - self._begin_s


class DeviceTime:
    """Measures time on the current stream of a GPU, and waits for the device at both ends."""

    name = "time on the device"

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        """Begin."""
        torch.cuda.synchronize()
        self._begin.record()

    def stop(self) -> float:
        """Return the seconds since the begin."""
        self._end.record()
        torch.cuda.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


@dataclass(frozen=True)
class Block:
    """What blocks of steps took, with or without a session, in seconds.

    Attributes:
        step: runs a step in a session or None.
        watch: measures a block besides its wall time.
        num_steps: of a block.
        num_settle_steps: steps before a block that are not measured.
        watch_s: what the watch measured, block by block.
        threads_s: processor time of each thread of the session, block by block.
    """

    comm: Any
    step: Callable[[Any], None]
    watch: ProcessorTime | DeviceTime
    num_steps: int
    num_settle_steps: int
    watch_s: list[float] = field(default_factory=list)
    threads_s: list[list[float]] = field(default_factory=list)

    def run(self, session: Any) -> float:
        """Return the wall time of a block. Collective: every rank calls this."""
        for _ in range(self.num_settle_steps):
            self.step(session)
        self.comm.Barrier()
        begin_threads = _threads_s()
        self.watch.start()
        begin = time.perf_counter()
        for _ in range(self.num_steps):
            self.step(session)
        passed_s = self.watch.stop()
        duration_s = time.perf_counter() - begin
        self.watch_s.append(passed_s)
        self.threads_s.append([now - then for now, then in zip(_threads_s(), begin_threads, strict=True)])
        return duration_s


def compare(
    args: argparse.Namespace, mpi: Any | None, step: Callable[[Any], None], model: nn.Module, config: Config
) -> None:
    comm = mpi or Alone()
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    watch = ProcessorTime() if args.device == "cpu" else DeviceTime()
    # What a session needs before its marks are read, steps without one do not.
    settle_steps = (args.settle_steps, min(args.settle_steps, _MAX_PLAIN_SETTLE_STEPS))
    on, off = (Block(comm, step, watch, args.block_steps, number) for number in settle_steps)
    comparisons: list[tuple[float, float]] = []
    synchronise = ClockSync.sync

    def timed_sync(*args: Any, **options: Any) -> Any:
        # In a thread beside the job: what it takes of a core is what it costs.
        begin, begin_processor = time.perf_counter(), time.thread_time()
        sample = synchronise(*args, **options)
        comparisons.append((time.perf_counter() - begin, time.thread_time() - begin_processor))
        return sample

    ClockSync.sync = timed_sync

    def traced(run: Callable[[Any], float] = on.run) -> float:
        with hpcpace.session(run_dir=folder / "run", config=config, comm=mpi) as session:
            session.watch(model)
            return run(session)

    num_warmups = 2
    pairs = alternate(traced, lambda: off.run(None), num_pairs=args.pairs, num_warmups=num_warmups)
    watched = Pairs(np.array(on.watch_s[num_warmups:]), np.array(off.watch_s[num_warmups:]))
    # All ranks together, pair by pair: they wait for each other, and what one of them saves is the other's noise.
    pairs, watched = (
        Pairs(*(comm.allreduce(times) / args.ranks for times in (both.a, both.b))) for both in (pairs, watched)
    )
    use = EventUse()
    if args.device == "cuda":
        with counted() as use:
            traced(Block(comm, step, watch, args.block_steps, args.settle_steps).run)
    if comm.rank == 0:
        shutil.rmtree(folder)
        _print(args, pairs, watched, watch.name)
        threads_s = np.array(on.threads_s[num_warmups:])
        if args.device == "cpu":
            _print_threads("processor time", watched, threads_s)
            _print_comparisons(np.array(comparisons), config.of(ClockConfig).interval_s)
        else:
            _print_threads("step time", pairs, threads_s)
            _print_events(args, use, step_s=float(np.median(pairs.b)) / args.block_steps)


def _print(args: argparse.Namespace, pairs: Pairs, watched: Pairs, name: str) -> None:
    step_ms, watched_ms = (float(np.median(times)) / args.block_steps * 1e3 for times in (pairs.b, watched.b))
    where = "a rank on each core" if args.device == "cpu" else words(torch.device("cuda"))
    print(
        f"tracing on against off, GPT-2 {args.preset} {args.dtype}, dp={args.ranks}, {args.pairs} pairs of "
        f"{args.block_steps} steps, {where}, load {os.getloadavg()[1]:.1f}:\n"
        f"  step time {_percent(pairs)} of {step_ms:.1f} ms, {name} {_percent(watched)} of {watched_ms:.1f} ms"
    )


def _print_threads(of: str, pairs: Pairs, threads_s: np.ndarray) -> None:
    shares = np.mean(threads_s, axis=0) / np.median(pairs.b) * 100
    parts = ", ".join(f"{name} {share:.3f} %" for name, share in zip(_THREADS, shares, strict=True))
    print(f"  of the {of}, threads of rank 0: {parts}")


def _print_comparisons(comparisons_s: np.ndarray, interval_s: float) -> None:
    wall, used = np.median(comparisons_s, axis=0)
    print(
        f"  a clock comparison: {wall * 1e3:.2f} ms, processor time {used * 1e3:.2f} ms, "
        f"which is {used / interval_s * 100:.3f} % of a core at one every {interval_s:g} s"
    )


def _print_events(args: argparse.Namespace, use: EventUse, *, step_s: float) -> None:
    print(f"  {use.words(args.block_steps + args.settle_steps)}")
    wall_s = max(use.anchors_s, default=0.0)
    print(
        f"  tying the device's clock to the host's waits up to {wall_s * 1e3:.1f} ms for the device, at most "
        f"{wall_s / _ANCHOR_INTERVAL_S * 100:.3f} % at one every {_ANCHOR_INTERVAL_S} s"
    )
    if args.settle_steps * step_s < _MARKS_UNREAD_S:
        print(f"  marks were not read in the blocks: {args.settle_steps} --settle-steps take less than a second")


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
