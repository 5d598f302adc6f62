"""Starts the ranks of a small job as forks of a process that has torch in memory, and ends them whatever they do."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import hpcpace
from experiments.hangs.faults import FAULTS, HOLD, SkippedError, SwallowedError
from experiments.hangs.programs import PROGRAMS, Groups, Place

RUN, STRUCK = "run", "struck"


@dataclass(frozen=True, kw_only=True)
class Blow:
    """What strikes a rank: `fault` at a place of a step."""

    step: int
    place: str
    fault: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """A small job.

    Attributes:
        folder: a new one, for the run and what the ranks say.
        slowed: seconds that a rank takes longer at a place, by step, place and rank.
        slow_steps: how many usual steps it takes longer there.
    """

    folder: Path
    program: str
    num_ranks: int
    width: int
    num_steps: int
    blows: dict[int, Blow]
    slowed: dict[tuple[int, str, int], float]
    slow_steps: dict[tuple[int, str, int], float]

    @property
    def run(self) -> Path:
        """The run that it records."""
        return self.folder / RUN

    def struck_ns(self) -> int | None:
        """Return when the last fault struck, on CLOCK_MONOTONIC; None before that."""
        with suppress(OSError, ValueError):
            return max(int(path.read_text()) for path in self.folder.glob(f"{STRUCK}-*"))
        return None


@contextmanager
def started(job: Job) -> Iterator[list[int]]:
    """Start the ranks of a job; yields their processes, and kills what is left of them at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = [_forked(lambda rank=rank: _run_rank(job, rank, port)) for rank in range(job.num_ranks)]
    try:
        yield pids
    finally:
        held = [int(path.name.rpartition("-")[2]) for path in job.folder.glob(f"{HOLD}-*")]
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


def _forked(function: Callable[[], None]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run_rank(job: Job, rank: int, port: int) -> None:
    log = os.open(job.folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.num_ranks), "MASTER_ADDR": "127.0.0.1",
        "LOCAL_WORLD_SIZE": str(job.num_ranks), "MASTER_PORT": str(port), "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "hangs", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups, step_of = Groups(job.width), PROGRAMS[job.program]()
    with hpcpace.session(run_dir=job.run, warmup_steps=2) as session:
        times_s: list[float] = []
        for step in range(job.num_steps):
            begin_s = time.monotonic()
            usual_s = median(times_s) if times_s else 0.0
            at = partial(_at, job, groups, step, usual_s)
            with suppress(SkippedError, SwallowedError):
                step_of(Place(session=session, step=step, at=at), groups)
            session.step(samples=1)
            times_s.append(time.monotonic() - begin_s)
    dist.destroy_process_group()


def _at(job: Job, groups: Groups, step: int, usual_s: float, name: str) -> None:
    """Strike this rank where it has come to the place, or make it slow there."""
    here = (step, name, groups.rank)
    time.sleep(job.slowed.get(here, 0.0) + job.slow_steps.get(here, 0.0) * usual_s)
    blow = job.blows.get(groups.rank)
    marker = job.folder / f"{STRUCK}-{groups.rank}"
    if blow is None or (blow.step, blow.place) != (step, name) or marker.exists():
        return
    marker.write_text(str(time.monotonic_ns()))
    FAULTS[blow.fault](job.folder, groups)
