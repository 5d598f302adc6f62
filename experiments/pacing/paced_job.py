"""Small synchronous jobs under sessions, one after the other on the same ranks, started by mpiexec or srun.

Its arguments are the jobs, as JSON, and a folder, in which each job has its run: 0, 1, ... Rank 0 prints what it
measured as one line of JSON for each job.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the job does; times are in milliseconds.

    Attributes:
        policy: of pacing, or none.
        pace: further settings of pacing.
        steps: of the job.
        work_ms: processor time of a step on each rank; emulated work sleeps instead.
        is_emulated: whether work sleeps.
        straggle_ms: what one random rank of each step has more to do, the same rank for all.
        slow_rank, slow_ms: a rank that always has more to do.
        event_share, event_ms: probability of an event in a step, for each rank by itself, and how long it takes.
        tick_period_ms, tick_ms: how often a service of each rank's host runs, at a time of its own, and for how long
            the rank then waits.
        memory_mb: megabytes that each rank copies in a step, in addition to its work.
        collect_ms: emulated cost of a full garbage collection; with it, ranks make cyclic garbage.
        collect_steps: steps between two full collections of a rank, about.
        transport: mpi (its collectives poll) or gloo (they sleep).
        collective: of gloo: all_reduce, gather to rank 0, or barrier.
        message_kb: its size, of gather that of each rank.
        parts: the message is sent in that many parts, one after the other.
        is_bound: whether each rank has its own core.
        seed: of stragglers and garbage.
    """

    policy: str = "none"
    pace: dict[str, Any] = field(default_factory=dict)
    steps: int = 400
    work_ms: float = 5.0
    is_emulated: bool = False
    straggle_ms: float = 0.0
    slow_rank: int = -1
    slow_ms: float = 0.0
    event_share: float = 0.0
    event_ms: float = 0.0
    tick_period_ms: float = 0.0
    tick_ms: float = 0.0
    memory_mb: float = 0.0
    collect_ms: float = 0.0
    collect_steps: int = 20
    transport: str = "mpi"
    collective: str = "all_reduce"
    message_kb: float = 0.5
    parts: int = 1
    is_bound: bool = False
    seed: int = 0


def specs_json(specs: Sequence[JobSpec]) -> str:
    """Return the argument with which this program runs some jobs."""
    return json.dumps([asdict(spec) for spec in specs])


def work(duration_ms: float, *, is_emulated: bool) -> None:
    """Use that much processor time, or sleep for as long."""
    if is_emulated:
        time.sleep(duration_ms / 1e3)
        return
    end_ns = time.thread_time_ns() + round(duration_ms * 1e6)
    values = np.ones((64, 64))
    while time.thread_time_ns() < end_ns:
        values = values @ values / 64


class Garbage:
    """Cyclic garbage, so much that Python collects all of it about every so many steps, by itself."""

    _OBJECTS_OF_A_COLLECTION = 200 * 6 * 5

    def __init__(self, spec: JobSpec, rank: int) -> None:
        self._cost_s = spec.collect_ms / 1e3
        self._per_step = self._OBJECTS_OF_A_COLLECTION // spec.collect_steps
        self._random = np.random.default_rng([spec.seed, rank, 3])
        self._alive: deque[list[Any]] = deque(maxlen=self._OBJECTS_OF_A_COLLECTION // 2)
        # Python skips a full collection while new objects are few compared with those it has kept before.
        gc.freeze()
        gc.collect()
        gc.set_threshold(200, 5, 4)
        gc.callbacks.insert(0, self._take_time)  # its time counts as that of the collection
        self.make(self._random.integers(self._OBJECTS_OF_A_COLLECTION))

    def make_of_step(self) -> None:
        self.make(self._random.poisson(self._per_step))

    def make(self, count: int) -> None:
        for _ in range(count):
            circle: list[Any] = []
            circle.append(circle)
            # What dies young never gets as far as a full collection.
            self._alive.append(circle)

    def _take_time(self, moment: str, info: dict[str, int]) -> None:
        if moment == "stop" and info["generation"] == 2:
            time.sleep(self._cost_s)


class Ticks:
    """The service of a rank's host: it runs periodically, and then the rank waits for it."""

    def __init__(self, spec: JobSpec, rank: int) -> None:
        self._cost_ms = spec.tick_ms
        self._period_ns = round(1e6 * spec.tick_period_ms)
        phase = np.random.default_rng([spec.seed, rank, 7]).random()
        self._next_ns = time.monotonic_ns() + round(phase * self._period_ns)

    def wait(self) -> None:
        """Wait for the runs since the last call."""
        late_ns = time.monotonic_ns() - self._next_ns
        if self._period_ns and late_ns >= 0:
            count = 1 + late_ns // self._period_ns
            self._next_ns += count * self._period_ns
            time.sleep(count * self._cost_ms / 1e3)


def main() -> None:
    specs = [JobSpec(**spec) for spec in json.loads(sys.argv[1])]
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for number, spec in enumerate(specs):
        if spec.is_bound:
            os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank]})
        run_dir = Path(sys.argv[2]) / str(number)
        times_ns = run_gloo(spec, run_dir, comm) if spec.transport == "gloo" else run_mpi(spec, run_dir, comm)
        if comm.rank == 0:
            print(json.dumps({"step_ns": times_ns}), flush=True)


def run_mpi(spec: JobSpec, run_dir: Path, comm: Any) -> list[int]:
    values, total = np.ones(64), np.zeros(64)
    return steps(spec, run_dir, comm, lambda: comm.Allreduce(values, total))


def run_gloo(spec: JobSpec, run_dir: Path, comm: Any) -> list[int]:
    import torch
    import torch.distributed as dist

    from hpcpace.core.environment import process_environ, rank_info
    from hpcpace.world.process_group import init_process_group

    torch.set_num_threads(1)
    tensor = torch.ones(round(spec.message_kb * 250 / spec.parts))
    gathered = [torch.empty_like(tensor) for _ in range(comm.size)] if comm.rank == 0 else None

    def meet() -> None:
        for _ in range(spec.parts):
            if spec.collective == "gather":
                dist.gather(tensor, gathered)
            elif spec.collective == "barrier":
                dist.barrier()
            else:
                dist.all_reduce(tensor)

    with init_process_group(rank_info(process_environ()), comm, device=torch.device("cpu"), timeout_s=60):
        return steps(spec, run_dir, comm, meet)


def steps(spec: JobSpec, run_dir: Path, comm: Any, meet: Any) -> list[int]:
    """Run all steps and return their durations on this rank."""
    import hpcpace
    from hpcpace.core.config import Config
    from hpcpace.observe.settings import ClockConfig, TraceConfig
    from hpcpace.pace.settings import PaceSettings

    config = Config(
        TraceConfig(snapshot=False, counters=False),
        ClockConfig(enabled=False),
        PaceSettings(policy=spec.policy, **spec.pace),
    )
    late = np.random.default_rng([spec.seed, 1]).integers(comm.size, size=spec.steps)
    events = np.random.default_rng([spec.seed, comm.rank, 5]).random(spec.steps) < spec.event_share
    source = np.ones(round(spec.memory_mb * 125_000) + 1)
    copied = np.empty_like(source)
    times_ns = []
    with hpcpace.session(run_dir=run_dir, comm=comm, config=config) as session:
        # Inside, so that collections do not walk through what a session and its libraries keep.
        garbage = Garbage(spec, comm.rank) if spec.collect_ms else None
        ticks = Ticks(spec, comm.rank)
        last_ns = time.monotonic_ns()
        for step in range(spec.steps):
            extra_ms = spec.straggle_ms * (late[step] == comm.rank) + spec.slow_ms * (spec.slow_rank == comm.rank)
            work(spec.work_ms + extra_ms + spec.event_ms * events[step], is_emulated=spec.is_emulated)
            ticks.wait()
            if spec.memory_mb:
                np.copyto(copied, source)
            if garbage is not None:
                garbage.make_of_step()
            if spec.transport == "gloo":
                meet()
            else:
                with session.pacing_point("allreduce"):
                    meet()
            session.step(samples=1)
            now_ns = time.monotonic_ns()
            times_ns.append(now_ns - last_ns)
            last_ns = now_ns
    return times_ns


if __name__ == "__main__":
    main()
