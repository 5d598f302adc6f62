"""Whether a rank that holds up others sleeps or computes, by /proc and by what it recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from cases import each_case
from written_job import SECOND, WrittenJob

from hpcpace.core.rundir import Attempt
from hpcpace.core.text import shortened
from hpcpace.hang.activity import with_activity
from hpcpace.hang.from_traces import hang_in, read_records
from hpcpace.hang.views import Activity, FoundHang, ProcessState
from hpcpace.trace.schema import TABLES, Op

CODE = """
import sys, time
journal = open(sys.argv[1], "rb")
print("ready", flush=True)
while True:
    time.sleep(60) if sys.argv[2] == "sleep" else None
"""


def waiting_job() -> WrittenJob:
    """Return a job in which rank 1 does not come to the all_reduce of step 20, from second 2 to 60."""
    job = WrittenJob(num_ranks=2)
    job.all_steps(20)
    job.ranks[0].call(Op.ALL_REDUCE, 2.05, step=20)
    return job


def seen(attempt: Attempt, *, is_running: bool = False) -> Activity | None:
    found = hang_in(read_records(attempt), hang_s=5.0)
    assert found is not None and found.hang.culprits == (1,)
    return with_activity(found, attempt, is_running=is_running).job.ranks[1].activity


@each_case(
    ("does", "number", "state"),
    [
        ("sleep", None, ProcessState.ASLEEP),
        ("spin", None, ProcessState.RUNNING),
        ("sleep", signal.SIGSTOP, ProcessState.STOPPED),
    ],
)
def test_a_process_on_this_host_is_found_by_its_open_journal(
    tmp_path: Path, does: str, number: signal.Signals | None, state: ProcessState
) -> None:
    attempt = waiting_job().write(tmp_path / "run")
    journal = attempt.trace_file(1).with_suffix(".journal")
    with subprocess.Popen([sys.executable, "-c", CODE, str(journal), does], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            if number is not None:
                process.send_signal(number)
            activity = seen(attempt, is_running=True)
            assert activity is not None
            assert (activity.state, activity.is_now, activity.pid) == (state, True, process.pid)
            assert seen(attempt) is None  # nothing is known of a process where the run has ended
        finally:
            process.kill()


PIPES = """
import os, sys
journal = open(sys.argv[1], "rb")
print("ready", flush=True)
if sys.argv[2] == "open":
    open(sys.argv[3], "wb")
pipe = os.open(sys.argv[3], os.O_RDWR)
os.read(pipe, 1) if sys.argv[2] == "read" else os.write(pipe, bytes(1 << 20))
"""


@each_case(
    ("does", "waits"),
    [
        ("open", "to open a pipe, as nobody has its other end open"),
        ("write", "in a write to the pipe {pipe}"),
        ("read", "in a read from the pipe {pipe}"),
    ],
)
def test_a_process_that_waits_for_a_pipe_waits_for_that_one(tmp_path: Path, does: str, waits: str) -> None:
    attempt, pipe = waiting_job().write(tmp_path / "run"), tmp_path / "p\x1b[31m\n"
    journal = attempt.trace_file(1).with_suffix(".journal")
    os.mkfifo(pipe)
    command = [sys.executable, "-c", PIPES, journal, does, pipe]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            activity = seen(attempt, is_running=True)
            assert (
                activity is not None
                and str(activity) == f"waiting {waits.format(pipe=shortened(str(pipe), max_letters=200))}"
            )
            assert str(activity).isprintable()
        finally:
            process.kill()


@each_case(
    ("cores", "waits", "state"),
    [
        (0.0, 0.0, ProcessState.ASLEEP),
        (1.0, 0.0, ProcessState.RUNNING),
        (0.2, 0.7, ProcessState.RUNNING),
        (0.3, 0.0, None),
    ],
)
def test_elsewhere_the_processor_time_that_the_rank_recorded_says_it(
    tmp_path: Path, cores: float, waits: float, state: ProcessState | None
) -> None:
    job, names = waiting_job(), TABLES["host"].dtype.names or ()
    for second in range(61):
        used = {"cpu_time_ns": SECOND + round(cores * second * SECOND), "run_wait_ns": round(waits * second * SECOND)}
        row = dict.fromkeys(names, 0) | {"time_ns": job.ranks[1].ns(second)} | used
        job.ranks[1].rows.append(("host", tuple(row.values())))
    activity = seen(job.write(tmp_path / "run"))
    assert (None if activity is None else activity.state) is state


def test_a_rank_that_has_just_come_where_it_is_says_nothing(tmp_path: Path) -> None:
    attempt = waiting_job().write(tmp_path / "run")
    found = hang_in(read_records(attempt), hang_s=5.0)
    assert found is not None
    view = replace(found.job.ranks[1], doing_since_ns=found.job.now_ns - 1)
    job = replace(found.job, ranks={**found.job.ranks, 1: view})
    assert with_activity(FoundHang(hang=found.hang, job=job), attempt).job.ranks[1].activity is None
