"""A session whose disk is full to the end, or whose run cannot be reached then: one line, and the job ends well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import chosen

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
            assert session._recording.recorder.flush()
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
        r"steps \d+ to 300\): File too large; make room there, or name another disk in trace\.trace_dir",
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
    (tmp_path / "local" / "hpcpace-run-attempt-0-rank-0-17").symlink_to(tmp_path / "elsewhere")
    result = python("-c", code, tmp_path / "run", HPCPACE_TRACE_TRACE_DIR=str(tmp_path / "local"))
    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
    _assert_it_is_written_into_the_run(result, tmp_path / "run", tmp_path / "local", "File exists")


def _assert_it_is_written_into_the_run(
    result: CompletedProcess[str], run: Path, trace_dir: Path | str, reason: str
) -> None:
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"hpcpace: rank 0: warning: trace.trace_dir is {trace_dir}, but the trace is written into ")
    assert reason in line
    assert read_trace(run / "attempt-0" / "trace" / "rank-00000.h5").closed_cleanly


@pytest.mark.parametrize(
    ("make", "reason"),
    chosen(
        [
            (lambda path: path.write_text("a file"), "it is no folder"),
            (lambda path: path.symlink_to("/dev/full"), "it is no folder"),
            (lambda path: path.symlink_to("/sys/kernel"), ""),
            (lambda path: path.symlink_to("nowhere/at/all"), ""),
        ],
        2,
    ),
)
def test_where_the_local_disk_cannot_be_used_the_trace_is_written_into_the_run(
    python: Run, tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    local = tmp_path / "local"
    make(local)
    result = _job(python, tmp_path / "run", "pass", HPCPACE_TRACE_TRACE_DIR=str(local))
    _assert_it_is_written_into_the_run(result, tmp_path / "run", local, reason)


@pytest.mark.nightly
def test_a_local_disk_with_blanks_in_its_name_is_one_like_others(python: Run, tmp_path: Path) -> None:
    local = tmp_path / "a disk\twith 'blanks'"
    result = _job(
        python,
        tmp_path / "the run",
        "assert list(Path(os.environ['LOCAL']).glob('hpcpace-*/rank-00000.h5'))",
        LOCAL=str(local),
        HPCPACE_TRACE_TRACE_DIR=str(local),
    )
    assert result.stderr == "" and list(local.iterdir()) == []
    assert len(read_trace(tmp_path / "the run/attempt-0/trace/rank-00000.h5").tables["steps"]) == 300


def test_a_local_disk_that_loses_the_trace_gets_it_again(python: Run, tmp_path: Path) -> None:
    local = tmp_path / "local"
    happens = "shutil.rmtree(os.environ['LOCAL'])"
    result = _job(python, tmp_path / "run", happens, LOCAL=str(local), HPCPACE_TRACE_TRACE_DIR=str(local))
    assert result.stderr == ""
    assert len(read_trace(tmp_path / "run/attempt-0/trace/rank-00000.h5").tables["steps"]) == 300
    assert list(local.iterdir()) == []


@pytest.mark.nightly
def test_auto_takes_the_disk_of_the_node(python: Run, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    happens = "assert list(Path(os.environ['TMPDIR']).glob('hpcpace-*/rank-00000.h5'))"
    result = _job(python, tmp_path / "run", happens, TMPDIR=str(local), HPCPACE_TRACE_TRACE_DIR="auto")
    assert result.stderr == "" and list(local.iterdir()) == []
    assert len(read_trace(tmp_path / "run/attempt-0/trace/rank-00000.h5").tables["steps"]) == 300


_KILLED = """
import os, signal, sys
import torch, torch.distributed as dist
import hpcpace

dist.init_process_group("gloo")
with hpcpace.session(run_dir=sys.argv[1], name="job") as session:
    for step in range(20):
        dist.all_reduce(torch.ones(3))
        session.step()
        if step == 10 and dist.get_rank() == 1:
            session._recording.recorder.flush()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_trace_of_a_killed_rank_is_brought_home_by_another_rank_of_the_node(torchrun: Run, tmp_path: Path) -> None:
    program, local = tmp_path / "program.py", tmp_path / "local"
    program.write_text(_KILLED)
    result = torchrun(2, program, tmp_path / "run", HPCPACE_TRACE_TRACE_DIR=str(local))
    assert result.returncode != 0
    traces = [read_trace(tmp_path / f"run/attempt-0/trace/rank-0000{rank}.h5") for rank in (0, 1)]
    assert [len(trace.tables["steps"]) for trace in traces] == [11, 11]
    assert list(local.iterdir()) == []
