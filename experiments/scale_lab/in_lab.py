"""The set-ups in a lab of 32 hosts on leaf switches of their own: one job a size, which does all that are left."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.jobs import MISREAD_START
from experiments.lab_jobs import JobQueue
from experiments.pages import ROOT
from experiments.scale_lab.judge import HELD_OUT, SIZES, UPLINK_MBIT, Setup
from hpcpace.core.config import LabConfig
from hpcpace.core.errors import HpcpaceError
from hpcpace.lab.lab import Lab

_NUM_HOSTS = max(HELD_OUT)
_MAX_STARTS, _MIN_S = 3, 30.0


def run_open(folder: Path, setups: Sequence[Setup], *, timeout_s: float) -> None:
    """Do the runs that are not there yet, the smallest sizes first, until the time is over.

    Args:
        folder: of the runs; all hosts see it, so it is not below /tmp.
        setups: which ones.
        timeout_s: for all of them.
    """
    deadline_s = time.monotonic() + timeout_s
    left = [size for size in (*SIZES, *HELD_OUT) if open_names(folder, setups, size)]
    if not left or timeout_s < _MIN_S:
        return
    size = {"hosts": _NUM_HOSTS, "leaves": _NUM_HOSTS, "cpus_per_host": 1, "tmp_size": "8MiB"}
    config = LabConfig(name="scale", link="1gbit", uplink=f"{UPLINK_MBIT}mbit", **size)
    with Lab.up(config) as lab:
        queue = JobQueue(lab)
        for size in left:
            for _ in range(_MAX_STARTS):
                names, room_s = open_names(folder, setups, size), deadline_s - time.monotonic()
                if not names or room_s < _MIN_S:
                    break
                _run(queue, folder, names, size, room_s)
                _remove_unfinished(folder, names, size)
                print(f"  {size} hosts, left: {open_names(folder, setups, size)}", flush=True)


def open_names(folder: Path, setups: Sequence[Setup], size: int) -> list[str]:
    """Return the names of the set-ups that have no whole run of a size."""
    return [setup.name for setup in setups if not (folder / f"{setup.name}-{size}").exists()]


def _run(queue: JobQueue, folder: Path, names: Sequence[str], size: int, timeout_s: float) -> None:
    program = f"{sys.executable} -m experiments.scale_lab.program {folder} {' '.join(names)}"
    environ = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HPCPACE_AUDIT": "off",
        "HPCPACE_WORLD_START_TIMEOUT_S": "120",
        "HPCPACE_CLOCK_INTERVAL_S": "5",
    }
    begin_s = time.monotonic()
    job_id = queue.submit(
        *(f"-N{size}", "--ntasks-per-node=1", "--no-requeue", "--output=%j.out"),
        f"--wrap=srun --mpi=pmi2 {program}",
        cwd=folder,
        environ=environ,
    )
    log = folder / f"{job_id}.out"
    while not queue.job(job_id).finished:
        said = log.read_text(errors="replace") if log.exists() else ""
        if MISREAD_START in said or time.monotonic() - begin_s > timeout_s:
            queue.run("scancel", str(job_id))
            break
        time.sleep(0.5)
    try:
        queue.wait(job_id, timeout_s=30)
    except HpcpaceError as error:
        print(f"  {error}", flush=True)


def _remove_unfinished(folder: Path, names: Sequence[str], size: int) -> None:
    """Put runs that a job left unfinished aside, so that the next one does them again."""
    for name in names:
        run = folder / f"{name}-{size}"
        if run.exists() and list(run.glob("attempt-0/trace/*.journal")):
            run.rename(folder / f"unfinished-{name}-{size}-{time.time_ns()}")
