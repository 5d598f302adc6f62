"""Ranks of jobs of which one host dies, or loses its network, during their session; survivors tell how it was.

Over gloo one process on each host imports everything once and forks each rank; over MPI srun starts each rank. All get
ready and then go on together, so that one stroke hits every job at its moment. As in faulty_job.py, whose moments these
are, ranks communicate nothing of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcpace

FIRST, LAST, CUT = "n1", "n4", "n5"
"""Hosts that die, with the first rank or with the last one, and the host whose network is cut."""
START_TIMEOUT_S, CLOCK_TIMEOUT_S = 10.0, 6.0
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "HPCPACE_TRACE_START_TIMEOUT_S": f"{START_TIMEOUT_S}",
    "HPCPACE_CLOCK_TIMEOUT_S": f"{CLOCK_TIMEOUT_S}",
    "HPCPACE_CLOCK_INTERVAL_S": "0.1",
    # Of 15 jobs at once on two cores they would take longer than the start may.
    "HPCPACE_TRACE_SNAPSHOT": "false",
}
_FIRST_PORT = 29_600
_NUM_STEPS = 6
_STEP_S = 0.1
_POLL_INTERVAL_S = 0.02
_LAUNCHERS = ("SLURM", "PMI", "MPI", "SRUN")


@dataclass(frozen=True)
class Case:
    """A job with a rank on each of some hosts, and the moment at which it is hit."""

    way: str
    moment: str
    hosts: tuple[str, ...]

    @property
    def victim(self) -> int:
        """The rank on the host that is hit."""
        return next(rank for rank, host in enumerate(self.hosts) if host in (FIRST, LAST, CUT))

    @property
    def is_cut(self) -> bool:
        """Whether the host lives on without its network."""
        return CUT in self.hosts

    @property
    def survivors(self) -> list[int]:
        """The ranks that live on."""
        return [rank for rank in range(len(self.hosts)) if self.is_cut or rank != self.victim]

    @property
    def name(self) -> str:
        """What the case is called."""
        return f"{self.way}-{self.moment}-{self.hosts[self.victim]}"


MOMENTS = ("before", "start", "clock", "end")
CASES = (
    *(Case("gloo", moment, hosts) for moment in MOMENTS for hosts in ((FIRST, "n2", "n3"), ("n2", "n3", LAST))),
    *(Case("gloo", moment, ("n2", "n3", CUT)) for moment in MOMENTS[1:]),
    *(Case("mpi", moment, ("n2", LAST)) for moment in MOMENTS),
)


def _wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(_POLL_INTERVAL_S)


def _fall_silent(place: Path, case: Case) -> None:
    """Wait for the stroke at the moment of the case; who survives it goes on."""
    (place / f"hit-{case.name}").touch()
    _wait_for(place / "struck")
    while not case.is_cut:
        signal.pause()


def run_rank(place: Path, case: Case, rank: int, comm: Any) -> None:
    """Enter a session, step, leave, and tell how long each took."""
    import faulty_job

    # Some have imported torch much earlier than others.
    (place / f"come-{case.name}-{rank}").touch()
    _wait_for(*(place / f"come-{case.name}-{other}" for other in range(len(case.hosts))))
    is_victim = rank == case.victim
    if is_victim:
        faulty_job.go_wrong = lambda fault: _fall_silent(place, case)
        faulty_job.arm("host", case.moment)
    session = hpcpace.session(run_dir=place / f"run-{case.name}", comm=comm)
    took_s = {"start": 0.0, "clock": 0.0, "end": 0.0}

    def enter() -> None:
        begin_s = time.monotonic()
        session.__enter__()
        took_s["start"] = time.monotonic() - begin_s

    is_late = case.moment in ("clock", "end")
    if is_late:
        enter()
    (place / f"ready-{case.name}-{rank}").touch()
    _wait_for(place / "go")
    if not is_late:
        if is_victim and case.moment == "before":
            _fall_silent(place, case)
        enter()
    was_recording = session.is_recording
    for _ in range(_NUM_STEPS):
        time.sleep(_STEP_S)
        begin_s = time.monotonic()
        session.step()
        took_s["clock"] = max(took_s["clock"], time.monotonic() - begin_s)
    begin_s = time.monotonic()
    session.__exit__(None, None, None)
    took_s["end"] = time.monotonic() - begin_s
    told = place / f"told-{case.name}-{rank}"
    told.write_text(json.dumps({"was_recording": was_recording, **took_s}))
    told.rename(told.with_suffix(".json"))
    # What torch and MPI do at the end of a process is theirs.
    os._exit(0)


def _gloo_rank(place: Path, case: Case, rank: int) -> None:
    import torch.distributed as dist

    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    os.environ |= {
        "MASTER_ADDR": case.hosts[0],
        "MASTER_PORT": f"{_FIRST_PORT + CASES.index(case)}",
        "WORLD_SIZE": f"{len(case.hosts)}",
        "RANK": f"{rank}",
        "LOCAL_RANK": "0",
    }
    dist.init_process_group("gloo")
    run_rank(place, case, rank, None)


def main(place: Path, name: str) -> None:
    """Be all ranks over gloo of this host, or this rank of the case of a name."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "mpi"))
    if name != "gloo":
        from concurrent.futures import ThreadPoolExecutor

        # As docs/slurm.md says: else Slurm's pmi2 may misread the start.
        ThreadPoolExecutor(1).submit(__import__, "mpi4py.MPI").result()
        from mpi4py import MPI

        run_rank(place, next(case for case in CASES if case.name == name), MPI.COMM_WORLD.rank, MPI.COMM_WORLD)
    importlib.import_module("faulty_job")  # with torch, once for all that are forked

    host, children = socket.gethostname(), []
    for case in CASES:
        if case.way == "gloo" and host in case.hosts:
            child = os.fork()
            if not child:
                try:
                    _gloo_rank(place, case, case.hosts.index(host))
                finally:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
