"""Small training jobs on forks of this process, which has torch in memory, and the faults that hang them.

Gloo and no model, but what hangs are made of is real: process groups, their operations, blocked threads, signals.
Computing takes a few milliseconds. A fault strikes once, on one rank, at one place of one step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import hpcpace
from experiments.jobs import fork, free_port
from hpcpace.hang.views import HangKind
from hpcpace.observe.session import Session

FAULT_STEP = 12
"""Before it there is a usual step time; divisible by four, so that a barrier and no checkpoint belongs to it."""
Slow = Mapping[tuple[int, str, int], float]
"""What makes a rank slower, by step, place and rank."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault on a rank, at a place of a step."""

    rank: int
    fault: str
    place: str
    step: int = FAULT_STEP


@dataclass(frozen=True, kw_only=True)
class Job:
    """A small job that hangs, or a healthy one that looks like that for a while.

    Attributes:
        name: what happens.
        program: the layout, a key of `PROGRAMS`.
        width: ranks of the inner group, or stages of a pipeline.
        num_steps: after which the loop ends.
        strikes: what happens, the last one is the cause of the hang; none in a healthy job.
        kinds: the right answers.
        slowed: seconds that a rank takes longer.
        slow_steps: usual steps that it takes longer.
        hang_s: seconds that an operation must last to hang; in a healthy job less than what is unusual takes.
    """

    name: str
    program: str
    num_ranks: int = 4
    width: int = 2
    num_steps: int = 1000
    strikes: tuple[Strike, ...] = ()
    kinds: tuple[HangKind, ...] = ()
    slowed: Slow = field(default_factory=dict)
    slow_steps: Slow = field(default_factory=dict)
    hang_s: float = 3.0

    @property
    def key(self) -> str:
        """Its name on the command line and in results."""
        return f"{self.name} {self.program} {self.num_ranks} ranks".replace(" ", "-") if self.strikes else self.name


class SwallowedError(Exception):
    """Raised in a step, and swallowed by the loop around it."""


class Groups:
    """The process groups of a layout, made on all ranks in one order."""

    def __init__(self, width: int) -> None:
        """Make groups of neighbours (`inner`, of that width) and those across them (`outer`)."""
        self.rank, self.size, self.width = dist.get_rank(), dist.get_world_size(), width
        inner = [dist.new_group(list(range(first, first + width))) for first in range(0, self.size, width)]
        outer = [dist.new_group(list(range(first, self.size, width))) for first in range(width)]
        self.inner, self.outer = inner[self.rank // width], outer[self.rank % width]
        self.twin = dist.new_group(list(range(self.size)))


@dataclass(frozen=True)
class Place:
    """Where a rank is: its session and groups, the step, and what to call at each place where a fault may strike."""

    session: Session
    groups: Groups
    step: int
    at: Callable[[str], None]

    def work(self, phase: str, work_s: float = 0.01) -> None:
        """Compute for a moment."""
        with self.session.phase(phase):
            self.at(phase)
            time.sleep(work_s)

    def reduce(self, *more: tuple[int, dist.ProcessGroup]) -> None:
        """Reduce gradients over all ranks, then further numbers over groups."""
        with self.session.phase("backward"):
            self.at("reduce")
            dist.all_reduce(torch.ones(1000))
            for count, group in more:
                dist.all_reduce(torch.ones(count), group=group)


def _data_parallel(place: Place) -> None:
    place.work("data", 0.002)
    place.work("forward")
    place.reduce()


def _two_groups(place: Place) -> None:
    place.work("data", 0.002)
    place.work("forward")
    place.reduce((10, place.groups.twin))


def _tensor_parallel(place: Place) -> None:
    place.work("data", 0.002)
    for _ in range(2):
        place.work("forward")
        dist.all_reduce(torch.ones(1000), group=place.groups.inner)
    with place.session.phase("backward"):
        place.at("reduce")
        dist.all_reduce(torch.ones(1000), group=place.groups.outer)


def _pipeline(place: Place, stages: int) -> None:
    first, stage = divmod(place.groups.rank, stages)
    first *= stages
    message = torch.ones(1000)
    place.work("data", 0.002)
    for phase, source, target in (("forward", stage - 1, stage + 1), ("backward", stage + 1, stage - 1)):
        for _ in range(2):
            if 0 <= source < stages:
                dist.recv(message, first + source)
            place.work(phase)
            if 0 <= target < stages:
                dist.send(message, first + target)


def _pipeline_parallel(place: Place) -> None:
    _pipeline(place, place.groups.size)


def _data_and_pipeline(place: Place) -> None:
    _pipeline(place, place.groups.width)
    place.at("reduce")
    dist.all_reduce(torch.ones(1000), group=place.groups.outer)


def _rare_barrier(place: Place) -> None:
    _data_parallel(place)
    if place.step % 4 == 0:
        place.at("barrier")
        dist.barrier()


def _pausing(phase: str) -> Callable[[Place], None]:
    """Return a program whose rank 0 has a longer phase of its own in every fourth step."""

    def step(place: Place) -> None:
        _data_parallel(place)
        if place.step % 4 == 3 and place.groups.rank == 0:
            place.work(phase, 0.1)

    return step


def _sharded() -> Callable[[Place], None]:
    """Return the step of a model of two layers in FSDP2."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(place: Place) -> None:
        place.work("data", 0.002)
        with place.session.phase("forward"):
            place.at("forward")
            loss = model(torch.ones(4, 32)).sum()
        with place.session.phase("backward"):
            place.at("reduce")
            loss.backward()
        with place.session.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


PROGRAMS: Mapping[str, Callable[[], Callable[[Place], None]]] = {
    "dp": lambda: _data_parallel,
    "tp": lambda: _tensor_parallel,
    "pp": lambda: _pipeline_parallel,
    "dp x pp": lambda: _data_and_pipeline,
    "FSDP2": _sharded,
    "dp with a barrier": lambda: _rare_barrier,
    "dp with checkpoints": lambda: _pausing("checkpoint"),
    "dp with evaluations": lambda: _pausing("eval"),
    "dp in two groups": lambda: _two_groups,
}
"""By layout of process groups: makes the function that does one step."""


def _strike(fault: str, folder: Path, groups: Groups) -> None:
    """Do to this rank what holds up the others."""
    match fault:
        case "endless":  # computes without end
            while True:
                time.sleep(0.01)
                torch.eye(8) @ torch.eye(8)
        case "stuck":  # waits for something that never comes, such as the next batch or a disk
            threading.Event().wait()
        case "stop":  # by a debugger, or a host that suspends
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stop inside":  # a moment later, when it is inside an operation
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        case "late":  # so that others stand in an operation for a moment
            time.sleep(1.0)
        case "exit":
            _keep_connections(folder)
            sys.exit(7)
        case "exception":
            _keep_connections(folder)
            raise ValueError("a bad sample")
        case "kill":
            _keep_connections(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        case "swallow" | "skip":  # the rest of the step is left out
            raise SwallowedError(fault)
        case "other operation":
            dist.all_gather([torch.zeros(10) for _ in range(groups.size)], torch.ones(10))
        case "other order":
            dist.all_reduce(torch.ones(10), group=groups.twin)
        case _:
            raise ValueError(fault)


def _keep_connections(folder: Path) -> None:
    """Leave the connections of this process open when it ends, as those of a host that goes down stay open.

    Without that, gloo's peers would fail at once; NCCL's, and those of a dead host, do not.
    """
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            time.sleep(60)
    (folder / f"hold-{child}").touch()


@contextmanager
def started(job: Job, folder: Path) -> Iterator[list[int]]:
    """Start the ranks of a job, whose run is `run` in the folder; kills what is left of their processes at the end."""
    port = free_port()
    pids = [
        fork(lambda rank=rank: _run_rank(job, folder, rank, port), folder / f"rank-{rank}.log")
        for rank in range(job.num_ranks)
    ]
    try:
        yield pids
    finally:
        held = [int(path.name.rpartition("-")[2]) for path in folder.glob("hold-*")]
        for pid in (*pids, *held):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def have_ended(pids: list[int]) -> bool:
    """Return whether all ranks have ended."""
    states = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids]
    return all(state is not None for state in states)


def struck_ns(folder: Path) -> int | None:
    """Return when the last fault struck, on CLOCK_MONOTONIC; None before that."""
    with suppress(OSError, ValueError):
        return max(int(path.read_text()) for path in folder.glob("struck-*"))
    return None


def _run_rank(job: Job, folder: Path, rank: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.num_ranks), "MASTER_ADDR": "127.0.0.1",
        "LOCAL_WORLD_SIZE": str(job.num_ranks), "MASTER_PORT": str(port), "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "hangs", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups, run_step = Groups(job.width), PROGRAMS[job.program]()
    strikes = {strike.rank: strike for strike in job.strikes}
    times_s: list[float] = []
    with hpcpace.session(run_dir=folder / "run", warmup_steps=2) as session:
        for step in range(job.num_steps):
            begin_s = time.monotonic()
            usual_s = median(times_s) if times_s else 0.0

            def at(name: str, step: int = step, usual_s: float = usual_s) -> None:
                here, strike = (step, name, rank), strikes.get(rank)
                time.sleep(job.slowed.get(here, 0.0) + job.slow_steps.get(here, 0.0) * usual_s)
                marker = folder / f"struck-{rank}"
                if strike is not None and (strike.step, strike.place) == (step, name) and not marker.exists():
                    marker.write_text(str(time.monotonic_ns()))
                    _strike(strike.fault, folder, groups)

            with suppress(SwallowedError):
                run_step(Place(session, groups, step, at))
            session.step(samples=1)
            times_s.append(time.monotonic() - begin_s)
    dist.destroy_process_group()
