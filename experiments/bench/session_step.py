"""Measures what a session adds to every step, whatever the model: processor time on a step that does next to nothing.

A step of a tiny layer under DistributedDataParallel, in a world of one on one core: one all-reduce by DDP's reducer,
the phases data, forward, backward and optimizer, and the end of the step. Blocks without a session, with one, and with
one that lacks a part take turns. In a real model the same work meets cold caches and takes longer.
`python -m experiments.bench.session_step`
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcpace
from experiments.bench.pairs import median_interval, take_turns
from hpcpace.core.config import Config, TraceConfig
from hpcpace.observe.collectives.switched import find_layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    step = _training_step()
    measures: dict[str, Callable[[], float]] = {"off": partial(_block_us, step, args.steps, None)}
    if find_layer() is not None:
        measures["a session"] = partial(_traced_us, step, args.steps)
        measures["a session without phases"] = partial(_traced_us, step, args.steps, has_phases=False)
    measures["a session with the layer in Python"] = partial(_traced_us, step, args.steps, is_compiled=False)
    measures["a session outside of its steps"] = partial(_traced_us, step, args.steps, detail="steps")
    measures["the same where it finds the steps"] = partial(_traced_us, step, args.steps, detail="steps", finds=True)
    times = take_turns(measures, num_rounds=args.rounds, num_warmups=2)
    dist.destroy_process_group()
    off = times.pop("off")
    print(f"added to each step, processor time, {args.rounds} rounds of {args.steps} steps:")
    for name, values in times.items():
        median, low, high = median_interval(values - off)
        print(f"  {name}: {median:.0f} us [{low:.0f}, {high:.0f}]")


def _training_step() -> Callable[[Any], None]:
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.ones(4, 16)

    def step(session: Any) -> None:
        with nullcontext() if session is None else session.phase("data"):
            batch = inputs.clone()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None and not session.finds_steps:
            session.step(samples=1)

    step.model = model
    return step


def _traced_us(
    step: Any,
    num_steps: int,
    *,
    is_compiled: bool = True,
    has_phases: bool = True,
    detail: str = "full",
    finds: bool = False,
) -> float:
    # Without the threads that run once a second: see the bench `overhead`.
    trace = TraceConfig(compiled=is_compiled, detail=detail, counters=False, snapshot=False, flush_interval_s=1000.0)
    config = dataclasses.replace(Config(), trace=trace)
    with (
        tempfile.TemporaryDirectory() as folder,
        hpcpace.session(run_dir=Path(folder, "run"), config=config, step_from="auto" if finds else None) as session,
    ):
        session.finds_steps = finds
        if has_phases:
            session.watch(step.model)
        else:
            assert session._active is not None
            session._active.recording.phases.uninstall()
        return _block_us(step, num_steps, session)


def _block_us(step: Callable[[Any], None], num_steps: int, session: Any) -> float:
    for _ in range(num_steps // 10):
        step(session)
    begin_ns = time.thread_time_ns()
    for _ in range(num_steps):
        step(session)
    return (time.thread_time_ns() - begin_ns) / num_steps / 1e3


if __name__ == "__main__":
    main()
