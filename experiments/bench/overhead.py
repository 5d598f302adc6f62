"""What tracing costs a training step: blocks of steps with a session around them against blocks without, in turn.

Two ranks in data parallelism train GPT-2; all columns, counters and flushes are on, and clocks are compared every
second instead of every 30 s, so that comparisons fall inside the blocks.

`python -m experiments.bench.overhead`
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--block-steps", type=int, default=30)
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
    settings = TrainConfig(preset=args.preset, batch_size=args.batch_size, seq_len=args.seq_len)
    plan = plan_training(settings, info.world_size)
    text = open_text(None, plan.seq_len)
    place = plan.mesh.coordinates(info.rank)
    with init_process_group(info, comm, device=torch.device("cpu")):
        replica = build_replica(plan, rank=info.rank, device=torch.device("cpu"))
        optimizer = build_optimizer(replica.parameters(), learning_rate=1e-4)
        rows = text.batch(0, seed=0, batch_size=args.batch_size, seq_len=plan.seq_len, rows=plan.rows(place))
        tokens = torch.from_numpy(rows)

        processor_s: dict[bool, list[float]] = {True: [], False: []}

        def block(session: Any) -> float:
            comm.Barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(args.block_steps):
                with session.phase("data") if session is not None else nullcontext():
                    batch = tokens.clone()
                replica.forward_backward(batch[:, :-1], batch[:, 1:])
                optimizer.step()
                optimizer.zero_grad()
                if session is not None:
                    session.step(samples=1)
            processor_s[session is not None].append(time.process_time() - begin_cpu)
            return time.perf_counter() - begin

        compare(args, comm, block, replica.watched, Config(train=settings), processor_s)


def compare(
    args: argparse.Namespace, comm: Any, block: Any, watched: Any, config: Any, processor_s: dict[bool, list[float]]
) -> None:
    import hpcpace
    from experiments.bench.pairs import Pairs, alternate
    from hpcpace.trace.reader import read_trace

    config = dataclasses.replace(config, clock=dataclasses.replace(config.clock, interval_s=1.0))
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    accounted: list[float] = []

    def traced() -> float:
        with hpcpace.session(run_dir=folder / "run", config=config, comm=comm) as session:
            for part in watched:
                session.watch(part)
            duration_s = block(session)
        if comm.rank == 0:
            account = read_trace(session.attempt.trace_file(0)).tables["account"]
            accounted.append(account["cost_ns"].sum() / 1e9 / duration_s)
        return duration_s

    num_warmups = 2
    pairs = alternate(traced, lambda: block(None), num_pairs=args.pairs, num_warmups=num_warmups)
    processor = Pairs(np.array(processor_s[True][num_warmups:]), np.array(processor_s[False][num_warmups:]))
    if comm.rank == 0:
        shutil.rmtree(folder)
        step_ms = float(np.median(pairs.b)) / args.block_steps * 1e3
        print(
            f"tracing on against off, GPT-2 {args.preset}, dp=2, {args.pairs} pairs of {args.block_steps} steps of "
            f"{step_ms:.0f} ms: {_percent(pairs)} of step time, {_percent(processor)} of processor time with all "
            f"threads; the recorder's own account: {float(np.median(accounted)) * 100:.2f} %"
        )


def _percent(pairs: Any) -> str:
    median, low, high = pairs.ratio()
    return f"{(median - 1) * 100:+.2f} % [{(low - 1) * 100:+.2f}, {(high - 1) * 100:+.2f}]"


if __name__ == "__main__":
    main()
