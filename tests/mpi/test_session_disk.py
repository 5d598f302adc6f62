"""A session whose disk is full to the end, or whose run cannot be reached then: one line, and the job ends well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from hpcpace.trace.reader import read_trace

Run = Callable[..., CompletedProcess[str]]

_JOB = """
import os, resource, shutil, sys, threading
from pathlib import Path
import hpcpace
from hpcpace.trace.recorder import Recorder

run, num_steps = Path(sys.argv[1]), 300
with hpcpace.session(run_dir=run, name="job") as session:
    for step in range(num_steps):
        with session.phase("forward"):
            pass
        session.step(samples=1)
        if step == 200:
            assert session._active.recording.recorder.flush()
            {happens}
print("trained", num_steps)
"""


def _job(python: Run, run: Path, happens: str, **variables: str) -> CompletedProcess[str]:
    result = python(
        "-W", "error", "-c", _JOB.format(happens=happens), run, HPCPACE_TRACE_FLUSH_INTERVAL_S="600", **variables
    )
    assert (result.returncode, result.stdout) == (0, "trained 300\n"), result.stderr
    return result


def test_a_disk_that_stays_full_costs_rows_that_stderr_file_and_report_count(python: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))"
    result = _job(python, run, full)
    trace = read_trace(run / "attempt-0" / "trace" / "rank-00000.h5")
    num_lost = int(trace.tables["account"]["dropped"].sum())
    assert trace.tables["steps"]["step"].tolist() == list(range(len(trace.tables["steps"])))
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(
        rf"hpcpace: rank 0: warning: {num_lost} rows of \S+/rank-00000\.h5 are lost \(.*of phases.*; "
        r"steps \d+ to 299\): File too large; make room there, or name another disk in trace\.trace_dir",
        line,
    ), line
    assert len(trace.tables["steps"]) >= 200 and 0 < num_lost < 300
    report = python("-m", "hpcpace", "report", run)
    assert f"{num_lost} records dropped by the recorder" in report.stdout, report.stdout + report.stderr
    assert report.returncode in (1, 3)


def _assert_the_trace_stays(result: CompletedProcess[str], local: Path, reason: str) -> None:
    (path,) = local.glob("*/rank-00000.h5")
    trace = read_trace(path)
    assert trace.closed_cleanly and len(trace.tables["steps"]) == 300
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"hpcpace: rank 0: warning: the trace stays in {path}: copying it to ")
    assert reason in line


def test_a_local_trace_stays_and_is_named_where_the_run_is_gone(python: Run, tmp_path: Path) -> None:
    result = _job(python, tmp_path / "run", "shutil.rmtree(run)", HPCPACE_TRACE_TRACE_DIR=str(tmp_path / "local"))
    _assert_the_trace_stays(result, tmp_path / "local", "No such file or directory")


def test_a_local_trace_stays_and_is_named_where_the_runs_file_system_hangs(python: Run, tmp_path: Path) -> None:
    # The recorder itself syncs its own file, which is on the local disk.
    hang = "sync = os.fsync; os.fsync = lambda file: sync(file) if '/local/' in os.readlink(f'/proc/self/fd/{file}') "
    result = _job(
        python,
        tmp_path / "run",
        hang + "else threading.Event().wait()",
        HPCPACE_TRACE_TRACE_DIR=str(tmp_path / "local"),
        HPCPACE_TRACE_COPY_TIMEOUT_S="1",
    )
    _assert_the_trace_stays(result, tmp_path / "local", "it took longer than 1 s")


def test_a_planted_link_on_the_local_disk_is_not_followed_and_the_job_goes_on(python: Run, tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
import hpcpace
time.time_ns = lambda: 17
with hpcpace.session(run_dir=Path(sys.argv[1]), name="job") as session:
    session.step()
print("trained")
"""
    (tmp_path / "local").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "local" / "run-attempt-0-17").symlink_to(tmp_path / "elsewhere")
    result = python("-c", code, tmp_path / "run", HPCPACE_TRACE_TRACE_DIR=str(tmp_path / "local"))
    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
    first, last = result.stderr.splitlines()
    assert "File exists" in first and "training goes on" in first
    assert "are lost" in last
