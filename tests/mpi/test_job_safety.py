"""One rank goes wrong, and the session holds the others up no longer than docs/slurm.md says, whenever that is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cases import only_nightly

from hpcpace.core.rundir import open_run
from hpcpace.diagnosis.analyze import examine
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.reader import read_trace

PROGRAM = Path(__file__).with_name("faulty_job.py")
START_TIMEOUT_S, CLOCK_TIMEOUT_S = 6.0, 1.5
# Beside the timeouts: two seconds in which ranks learn what one of them has decided, and a machine with other work.
SLACK_S = 2.0 + 5.0
MAX_S = {
    "start": 2 * START_TIMEOUT_S + CLOCK_TIMEOUT_S + SLACK_S,
    "clock": CLOCK_TIMEOUT_S + SLACK_S,
    "end": 2 * CLOCK_TIMEOUT_S + SLACK_S,
}
FAULTS = ("exception", "kill", "stop", "exit")
CASES = (
    ("bad config", "before"),
    ("no mpi", "before"),
    ("pause", "clock"),
    *((fault, moment) for moment in ("before", "start", "clock", "end") for fault in FAULTS),
)
WAYS, SIZES = ("mpi", "gloo"), (2, 4)


def is_chosen(way: str, num_ranks: int, fault: str, moment: str) -> bool:
    """Return whether each landing runs a job: any two values of way, ranks, fault and moment meet in one of these."""
    number = FAULTS.index(fault) if fault in FAULTS else 0
    moments = ("before", "start", "clock", "end")
    is_gloo, is_large = (number + moments.index(moment)) % 2, (number // 2 + moments.index(moment)) % 2
    return (way, num_ranks) == ("mpi" if fault == "no mpi" else WAYS[is_gloo], SIZES[is_large])


_ALL_JOBS = [
    (way, num_ranks, *case)
    for way in WAYS
    for num_ranks in SIZES
    for case in CASES
    if (way, case[0]) != ("gloo", "no mpi")  # over gloo nobody has MPI
]
JOBS = only_nightly([job for job in _ALL_JOBS if is_chosen(*job)], [job for job in _ALL_JOBS if not is_chosen(*job)])
_AT_ONCE = 4
_MAX_S = 100.0
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    # For each connection torch's store looks up a name, and a DNS that is asked by many ranks at once loses requests.
    "RES_OPTIONS": "timeout:1 attempts:1",
    "HPCPACE_TRACE_START_TIMEOUT_S": f"{START_TIMEOUT_S}",
    "HPCPACE_CLOCK_TIMEOUT_S": f"{CLOCK_TIMEOUT_S}",
    "HPCPACE_CLOCK_INTERVAL_S": "0.1",
}
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "SLURM_", "PMI", "MPI_", "OMPI_", "GLOO_", "HYDI", "MASTER_")


@dataclass(frozen=True)
class Ended:
    """What ranks told, by rank, and wrote to stderr; whether the launcher has ended them; and the run."""

    told: dict[int, dict[str, Any]]
    stderr: str
    is_ended: bool
    run: Path


def run_job(folder: Path, way: str, num_ranks: int, fault: str, moment: str) -> Ended:
    """Run a job whose last rank goes wrong, until all others have told how it was."""
    folder.mkdir()
    program = [sys.executable, str(PROGRAM), way, str(folder / "run"), fault, moment, str(num_ranks)]
    if way == "mpi":
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        # Else mpiexec ends the others itself as soon as one exits; where one is killed it does so anyway.
        command, variables = [mpiexec, "-disable-auto-cleanup", "-n", str(num_ranks), *program], {}
    else:
        # Not torchrun, whose agent ends all ranks when one dies.
        command, variables = program, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    with open(folder / "stderr", "wb") as stderr:
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stderr, env=_environ(variables), start_new_session=True
        )
    end_s = time.monotonic() + _MAX_S
    survivors, is_ended = set(range(num_ranks if fault == "pause" else num_ranks - 1)), False
    while not survivors <= _told(folder).keys() and not is_ended and time.monotonic() < end_s:
        time.sleep(0.1)
        is_ended = child.poll() is not None
    for number in (signal.SIGCONT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
    child.wait()
    return Ended(_told(folder), (folder / "stderr").read_text(), is_ended, folder / "run")


def _told(folder: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("told-*.json")]
    return {one["rank"]: one for one in found}


def _environ(variables: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)} | _SETTINGS | variables


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs, several at once, because they wait most of their time."""
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        ended = pool.map(lambda job: run_job(folder / "-".join(map(str, job)).replace(" ", "-"), *job), JOBS)
        return dict(zip(JOBS, ended, strict=True))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("way", "num_ranks", "fault", "moment"), JOBS)
def test_no_rank_is_held_up_for_longer_than_promised(jobs, way, num_ranks, fault, moment):
    job = jobs[way, num_ranks, fault, moment]
    survivors = range(num_ranks - 1)
    if way == "mpi" and fault == "kill" and job.is_ended:
        return  # by mpiexec, as without hpcpace
    assert set(survivors) <= set(job.told), job.stderr
    for rank in survivors:
        for what, most_s in MAX_S.items():
            assert job.told[rank][what] <= most_s, (rank, what, job.told[rank])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("way", "num_ranks", "fault", "moment"), [job for job in JOBS if job[3] == "before"])
def test_a_rank_that_does_not_take_part_leaves_nobody_recording(jobs, way, num_ranks, fault, moment):
    job = jobs[way, num_ranks, fault, moment]
    if way == "mpi" and fault == "kill" and job.is_ended:
        return
    assert not any(told["was_recording"] for told in job.told.values())
    assert job.stderr.count("warning") == 1 if fault == "bad config" else 1 <= job.stderr.count("warning") <= 2, (
        job.stderr
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("way", "num_ranks", "fault", "moment"), [job for job in JOBS if job[3] in ("clock", "end")])
def test_the_others_record_on_where_a_rank_goes_wrong_later(jobs, way, num_ranks, fault, moment):
    job = jobs[way, num_ranks, fault, moment]
    if way == "mpi" and fault == "kill" and job.is_ended:
        return
    assert all(job.told[rank]["was_recording"] for rank in range(num_ranks - 1))
    assert "Traceback" not in job.stderr, job.stderr


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("way", "num_ranks", "fault", "moment"),
    [job for job in JOBS if job[2] in ("kill", "stop", "pause") and job[3] == "clock"],
)
def test_the_others_have_whole_traces_and_the_rank_that_went_wrong_is_named(jobs, way, num_ranks, fault, moment):
    job = jobs[way, num_ranks, fault, moment]
    if way == "mpi" and fault == "kill" and job.is_ended:
        return
    victim = num_ranks - 1
    whole = set(range(num_ranks)) if fault == "pause" else set(range(victim))
    assert set(job.told) == whole, job.stderr
    warnings = [line for line in job.stderr.splitlines() if "warning" in line]
    # By ranks 0 and 1, as one of them may be dead.
    assert 1 <= len(warnings) <= 2 and all("clock comparisons stop" in line for line in warnings), job.stderr
    attempt = open_run(job.run).last_attempt()
    traces = {rank: read_trace(path) for rank, path in attempt.trace_files().items()}
    for rank in whole:
        assert (traces[rank].problems, traces[rank].closed_cleanly, len(traces[rank].tables["steps"])) == ((), True, 6)
    if fault != "pause":
        report = examine(read_attempt(attempt).traces)
        assert f"rank {victim}" in report.headline, report
