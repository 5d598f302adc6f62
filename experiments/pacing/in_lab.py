"""Runs jobs of an experiment on hosts of a lab, several at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.pacing.launch import JobFailed, Ran, what_came
from experiments.pacing.paced_job import JobSpec
from hpcpace.core.config import LabConfig
from hpcpace.lab.lab import Lab

REPOSITORY = Path(__file__).parents[2]
FOLDER = Path("/var/tmp")
"""Each host has its own /tmp; all hosts share this folder."""
_MOST_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class LabJob:
    """A job and where it runs."""

    spec: JobSpec
    hosts: tuple[str, ...]
    ranks_per_host: int = 1


@contextmanager
def slow_lab(rate: str) -> Iterator[Lab]:
    """Boot a lab of four hosts on two leaves, with links and uplinks of a rate: uplinks are oversubscribed two to one.

    Its hosts have one time of day, as those of a cluster have.
    """
    with Lab.up(LabConfig(name="pacing", link=rate, uplink=rate, clock_step_s=0)) as lab:
        yield lab


def run_together(lab: Lab, jobs: Sequence[LabJob], *, timeout_s: float = 120) -> list[Ran]:
    """Run jobs at the same time and return the result of each.

    Where one of them does not come through, all are started once more.

    Raises:
        JobFailed: they failed several times.
    """
    for start in range(_MOST_STARTS):
        with tempfile.TemporaryDirectory(prefix="hpcpace-pacing-", dir=FOLDER) as folder:
            try:
                return _run_once(lab, jobs, Path(folder), timeout_s)
            except JobFailed:
                if start == _MOST_STARTS - 1:
                    raise
    raise AssertionError("unreachable: the last start returns or raises")


def _run_once(lab: Lab, jobs: Sequence[LabJob], folder: Path, timeout_s: float) -> list[Ran]:
    environ = {**lab.environ(), "OMP_NUM_THREADS": "1", "HPCPACE_WORLD_START_TIMEOUT_S": "40"}
    children = []
    for number, job in enumerate(jobs):
        words = ["srun", "--nodelist", ",".join(job.hosts), "--ntasks", str(len(job.hosts) * job.ranks_per_host)]
        words += ["--nodes", str(len(job.hosts)), "--ntasks-per-node", str(job.ranks_per_host), "--kill-on-bad-exit=1"]
        program = [sys.executable, "-m", "experiments.pacing.paced_job", job.spec.to_json(), str(folder / str(number))]
        children.append(
            subprocess.Popen(
                lab.command([*words, *program], folder=REPOSITORY),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        said = [child.communicate(timeout=timeout_s) for child in children]
    except subprocess.TimeoutExpired:
        raise JobFailed(f"not done within {timeout_s:g} s") from None
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
                child.communicate()
    for child, (stdout, stderr) in zip(children, said, strict=True):
        if child.returncode:
            raise JobFailed(f"status {child.returncode}: {(stderr or stdout)[-800:]}")
    return [what_came(folder / str(number), stdout) for number, (stdout, _) in enumerate(said)]
