"""Measures what the watchdog of a session costs while all is well: processor time of its thread, and time of a step.

The thread's own processor time is read while a world of one trains under a session: each look, and the wake-up before
it. Steps are then timed with and without a watchdog, in turns, on one core.
`python -m experiments.bench.watchdog`
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcpace
from experiments.bench.pairs import median_interval, take_turns
from hpcpace.core.config import Config, HangConfig, TraceConfig
from hpcpace.observe import watchdog as watchdog_module

# Without the other threads, which the bench `overhead` measures.
_TRACE = TraceConfig(counters=False, snapshot=False, flush_interval_s=1000.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0, help="train this long to measure the thread")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    step = _training_step()
    looks = _thread_cost(step, args.seconds)
    share = 100 * sum(looks) / 1e9 / args.seconds
    each_us = median(looks) / 1e3
    print(f"thread: {len(looks)} looks in {args.seconds:g} s, median {each_us:.0f} us: {share:.4f} % of a core")
    measures = {way: partial(_step_ns, step, args.steps, way) for way in ("off", "report")}
    times = take_turns(measures, num_rounds=args.rounds, num_warmups=2)
    middle, low, high = median_interval(times["report"] - times["off"])
    print(f"step: {middle:+.0f} ns [{low:+.0f}, {high:+.0f}] of {median(times['off']) / 1e3:.0f} us")
    dist.destroy_process_group()


def _training_step() -> Callable[[Any], None]:
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.ones(4, 16)

    def step(session: Any) -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step(samples=1)

    return step


def _config(on_hang: str) -> Config:
    return dataclasses.replace(Config(), trace=_TRACE, hang=HangConfig(on_hang=on_hang))


def _thread_cost(step: Callable[[Any], None], seconds: float) -> list[int]:
    """Return the processor time of each look and the wait before it, ns."""
    costs: list[int] = []
    look = watchdog_module.Watchdog.look
    last_ns = 0

    def measured(watchdog: watchdog_module.Watchdog) -> None:
        nonlocal last_ns
        look(watchdog)
        now_ns = time.thread_time_ns()
        costs.append(now_ns - last_ns)
        last_ns = now_ns

    with (
        patch.object(watchdog_module.Watchdog, "look", measured),
        tempfile.TemporaryDirectory() as folder,
        hpcpace.session(run_dir=Path(folder, "run"), config=_config("report")) as session,
    ):
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            step(session)
    return costs


def _step_ns(step: Callable[[Any], None], num_steps: int, on_hang: str) -> float:
    with (
        tempfile.TemporaryDirectory() as folder,
        hpcpace.session(run_dir=Path(folder, "run"), config=_config(on_hang)) as session,
    ):
        begin_ns = time.process_time_ns()
        for _ in range(num_steps):
            step(session)
        return (time.process_time_ns() - begin_ns) / num_steps


if __name__ == "__main__":
    main()
