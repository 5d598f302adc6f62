"""Measures what a session adds to every step, whatever the model: processor time on a step that does next to nothing.

A step of a tiny layer under DistributedDataParallel, in a world of one on one core: one all-reduce by DDP's reducer,
the phases data, forward, backward and optimizer, and the end of the step. Blocks without a session, with one, and with
one that lacks a part take turns. In a real model the same work meets cold caches and takes longer.

With `--watchdog`: what the watchdog of a session costs while all is well. The processor time of its own thread is read
while the world of one trains: each look, and the wake-up before it. Steps are then timed with and without a watchdog.
`python -m experiments.bench.session_step`

Options:
  --rounds N  [40]
  --steps N  [300]
  --watchdog   measure the watchdog instead
  --seconds X  train this long to measure its thread [60.0]
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcpace
from experiments.bench.models import alone_on_a_core
from experiments.bench.pairs import interval, take_turns
from experiments.options import command_line
from hpcpace.core.config import Config
from hpcpace.observe import watchdog as watchdog_module
from hpcpace.observe.collectives.observer import find_layer
from hpcpace.observe.settings import HangConfig, TraceConfig

# Without the threads that run once a second, see the bench `overhead`, and without the card, a report at the end.
_TRACE = TraceConfig(counters=False, snapshot=False, flush_interval_s=1000.0, summary=False)


def main() -> None:
    args = command_line(__doc__)
    with alone_on_a_core():
        if args.watchdog:
            _measure_watchdog(args)
            return
        step = TinyStep()
        measures: dict[str, Callable[[], float]] = {"off": partial(_block_us, step, args.steps, None)}
        if find_layer() is not None:
            measures["a session"] = partial(_traced_us, step, args.steps)
            measures["a session without phases"] = partial(_traced_us, step, args.steps, has_phases=False)
        measures["a session with the layer in Python"] = partial(_traced_us, step, args.steps, compiled=False)
        measures["a session outside of its steps"] = partial(_traced_us, step, args.steps, detail="steps")
        measures["the same where it finds the steps"] = partial(_traced_us, step, args.steps, finds=True)
        times = take_turns(measures, num_rounds=args.rounds, num_warmups=2)
    off = times.pop("off")
    print(f"added to each step, processor time, {args.rounds} rounds of {args.steps} steps:")
    for name, values in times.items():
        print(f"  {name}: {interval(values - off, '.0f', 'us ')}")


class TinyStep:
    """A training step of a tiny layer, in a session or without one."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(nn.Linear(16, 16))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._inputs = torch.ones(4, 16)

    def __call__(self, session: Any, *, finds_steps: bool = False) -> None:
        """Train; the session is told of the end of the step unless it finds steps."""
        with nullcontext() if session is None else session.phase("data"):
            batch = self._inputs.clone()
        self.model(batch).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if session is not None and not finds_steps:
            session.step(samples=1)


@contextmanager
def _session(on_hang: str = "", *, finds: bool = False, **trace: Any) -> Iterator[Any]:
    config = Config(dataclasses.replace(_TRACE, **trace), *([HangConfig(on_hang=on_hang)] if on_hang else []))
    with (
        tempfile.TemporaryDirectory() as folder,
        hpcpace.session(run_dir=Path(folder, "run"), config=config, step_from="auto" if finds else None) as session,
    ):
        yield session


def _traced_us(step: TinyStep, num_steps: int, *, has_phases: bool = True, finds: bool = False, **trace: Any) -> float:
    with _session(finds=finds, **({"detail": "steps"} if finds else trace)) as session:
        if has_phases:
            session.watch(step.model)
        else:
            assert session._recording is not None
            session._recording.phases.uninstall()
        return _block_us(step, num_steps, session, finds=finds)


def _block_us(step: TinyStep, num_steps: int, session: Any, *, finds: bool = False) -> float:
    for _ in range(num_steps // 10):
        step(session, finds_steps=finds)
    begin_ns = time.thread_time_ns()
    for _ in range(num_steps):
        step(session, finds_steps=finds)
    return (time.thread_time_ns() - begin_ns) / num_steps / 1e3


def _measure_watchdog(args: argparse.Namespace) -> None:
    step = TinyStep()
    looks = _looks_ns(step, args.seconds)
    share = 100 * sum(looks) / 1e9 / args.seconds
    each_us = median(looks) / 1e3
    print(f"thread: {len(looks)} looks in {args.seconds:g} s, median {each_us:.0f} us: {share:.4f} % of a core")
    measures = {way: partial(_watched_ns, step, args.steps, way) for way in ("off", "report")}
    times = take_turns(measures, num_rounds=args.rounds, num_warmups=2)
    added = interval(times["report"] - times["off"], "+.0f", "ns ")
    print(f"step: {added} of {median(times['off']) / 1e3:.0f} us")


def _looks_ns(step: TinyStep, seconds: float) -> list[int]:
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

    with patch.object(watchdog_module.Watchdog, "look", measured), _session("report") as session:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            step(session)
    return costs


def _watched_ns(step: TinyStep, num_steps: int, on_hang: str) -> float:
    with _session(on_hang) as session:
        begin_ns = time.process_time_ns()
        for _ in range(num_steps):
            step(session)
        return (time.process_time_ns() - begin_ns) / num_steps


if __name__ == "__main__":
    main()
