"""A job in which one rank goes wrong at some moment of its session, and the others tell how long theirs held them up.

It communicates nothing of its own, so that whatever a survivor waits for is the session's.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hpcpace
from hpcpace.observe import session as session_module
from hpcpace.observe.recording import Recording
from hpcpace.world.clock import ClockSync

MOMENTS = ("before", "start", "clock", "end")
_CODE = 3
_NUM_STEPS = 6
_STEP_S = 0.1
_PAUSE_S = 3.0


def go_wrong(fault: str) -> None:
    if fault == "exception":
        raise KeyError("the victim's own error")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "pause":
        # Longer than the others wait for a comparison of clocks.
        waker = f"import os, signal, time; time.sleep({_PAUSE_S}); os.kill({os.getpid()}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-S", "-c", waker])
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        os._exit(_CODE)


def arm(fault: str, moment: str) -> None:
    """Let the fault happen at a moment: right after all ranks have come, at the second clock comparison, at the end."""

    def before(original: Callable[..., Any], *, at_call: int = 1) -> Callable[..., Any]:
        calls = 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at_call:
                go_wrong(fault)
            return original(*args, **kwargs)

        return wrapped

    if moment == "start":
        session_module.host_identity = before(session_module.host_identity)
    elif moment == "clock":
        ClockSync.sync = before(ClockSync.sync, at_call=2)
    elif moment == "end":
        Recording._close_trace = before(Recording._close_trace)


def run(run_dir: Path, fault: str, moment: str, *, rank: int, victim: int, comm: Any) -> None:
    """Enter a session, step, leave, and print how long each took."""
    is_victim = rank == victim
    if is_victim:
        arm(fault, moment)
        if moment == "before":
            go_wrong(fault)
        if fault == "no mpi":
            comm = None
    took_s = {}
    begin_s = time.monotonic()
    session = hpcpace.session(run_dir=run_dir, comm=comm).__enter__()
    took_s["start"] = time.monotonic() - begin_s
    was_recording = session.is_recording
    longest_s = 0.0
    for _ in range(_NUM_STEPS):
        time.sleep(_STEP_S)
        begin_s = time.monotonic()
        session.step()
        longest_s = max(longest_s, time.monotonic() - begin_s)
    took_s["clock"] = longest_s
    begin_s = time.monotonic()
    session.__exit__(None, None, None)
    took_s["end"] = time.monotonic() - begin_s
    told = run_dir.with_name(f"told-{rank}")
    told.write_text(json.dumps({"rank": rank, "was_recording": was_recording, **took_s}))
    told.rename(told.with_suffix(".json"))


def fork_ranks(num_ranks: int) -> None:
    """Return in a process for each rank, with the variables that torchrun sets: to import torch takes the longest."""
    importlib.import_module("torch.distributed")

    for rank in range(num_ranks):
        if os.fork() == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            return
    while True:
        try:
            os.wait()
        except ChildProcessError:
            os._exit(0)


def wait_until_connected(num_ranks: int) -> None:
    """Wait until torch has the group on every rank: where one ends sooner, the others fail in torch itself."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.add("connected", 1)
    while store.add("connected", 0) < num_ranks:
        time.sleep(0.01)


def main(way: str, run_dir: Path, fault: str, moment: str, num_ranks: int) -> None:
    comm: Any = None
    victim = num_ranks - 1
    if way == "mpi":
        from mpi4py import MPI

        comm, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
    else:
        fork_ranks(num_ranks)
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        wait_until_connected(num_ranks)
    if fault == "bad config" and rank == victim:
        os.environ["HPCPACE_TRACE_MAX_ROWS"] = "5"
    run(run_dir, fault, moment, rank=rank, victim=victim, comm=comm)
    # MPI_Finalize waits for all ranks, with hpcpace or without.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
