"""Programs that know nothing of hpcpace, through a real Slurm: with `hpcpace trace`, or with a site's TaskProlog."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cases import only_nightly

from experiments.labs import JobQueue
from hpcpace.core.rundir import open_run
from hpcpace.lab.lab import Lab
from hpcpace.trace.reader import read_trace

SCRIPT = str(Path(__file__).with_name("traced_job.py"))
TRACE = ("-m", "hpcpace", "trace", "--")
# Which of a host's addresses gloo takes, none of these tests is about.
GLOO = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
SRUN = ("timeout", "100", "srun", "--mpi=none", "-N2")
TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
RULE = "[trace]\nenabled = false\n[[rollout]]\npartitions = ['traced']\ntrace.enabled = true\n"


@pytest.fixture
def site(lab: Lab, queue: JobQueue, tmp_path: Path) -> Iterator[None]:
    """A Slurm whose TaskProlog is `hpcpace task-prolog`, at a site that traces the jobs of the partition `traced`."""
    (tmp_path / "site.toml").write_text(RULE)
    prolog = tmp_path / "task-prolog"
    variable = f"export HPCPACE_SITE_FILE={tmp_path / 'site.toml'}"
    prolog.write_text(f"#!/bin/bash\n{variable}\n{sys.executable} -m hpcpace task-prolog\n")
    prolog.chmod(0o755)
    before = lab.files.slurm_conf.read_text()
    partition = "PartitionName=traced Nodes=ALL State=UP"
    lab.files.slurm_conf.write_text(f"{before}TaskProlog={prolog}\n{partition}\n")
    assert queue.run("scontrol", "reconfigure").returncode == 0
    yield
    queue.cancel_all()
    lab.files.slurm_conf.write_text(before)
    assert queue.run("scontrol", "reconfigure").returncode == 0


def recorded(folder: Path) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """Return the runs in a folder by name, and of each its ranks, hosts and steps."""
    found = []
    for path in sorted((folder / "runs").iterdir()):
        (attempt,) = open_run(path).attempts()
        traces = [read_trace(file) for file in attempt.trace_files().values()]
        assert all(trace.closed_cleanly for trace in traces)
        rows = [(trace.header.rank, trace.header.node, len(trace.tables["steps"])) for trace in traces]
        found.append((path.name.partition("-")[2], rows))
    return found


def last_lines(done: CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("hpcpace: ")]


FOUR = [(0, 0, 6), (1, 0, 6), (2, 1, 6), (3, 1, 6)]


def test_a_script_under_srun_is_one_run_with_its_own_exit_code(queue: JobQueue, tmp_path: Path) -> None:
    srun = (*SRUN, "--ntasks-per-node=2", sys.executable)
    done = queue.run(*srun, *TRACE, SCRIPT, "29521", "3", cwd=tmp_path, environ=GLOO, timeout_s=120)
    assert done.returncode == 3, done.stderr
    assert len(set(done.stdout.splitlines())) == 1 and done.stdout.count("loss ") == 4
    assert recorded(tmp_path) == [("traced_job", FOUR)]
    (line,) = last_lines(done)
    assert line.startswith("hpcpace: recorded 4 ranks, 6 steps (")


def test_a_job_says_behind_its_own_comment_how_fast_it_was(queue: JobQueue, tmp_path: Path) -> None:
    srun = (*SRUN, "--comment=of the user", "--ntasks-per-node=2", sys.executable)
    environ = GLOO | {"HPCPACE_METRICS_JOB_COMMENT": "true"}
    done = queue.run(*srun, *TRACE, SCRIPT, "29524", "0", cwd=tmp_path, environ=environ, timeout_s=120)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    shown = queue.run("scontrol", "show", "job", run.name.partition("-")[0].partition(".")[0]).stdout
    assert re.search(r"Comment=of the user; hpcpace: 6 steps of .*, see hpcpace report", shown), shown


@pytest.mark.parametrize(
    "is_below", only_nightly([True], [False]), ids=lambda is_below: "trace torchrun" if is_below else "torchrun trace"
)
def test_torchrun_under_srun_is_one_run(queue: JobQueue, tmp_path: Path, is_below: bool) -> None:
    torchrun = (*TORCHRUN, "--rdzv-endpoint", f"n1:{29522 + is_below}")
    program = (*TRACE, *torchrun, SCRIPT, "0") if is_below else (*torchrun, *TRACE, SCRIPT, "0")
    srun = (*SRUN, "--ntasks-per-node=1", sys.executable)
    done = queue.run(*srun, *program, cwd=tmp_path, environ=GLOO, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path) == [("traced_job", FOUR)]
    (line,) = last_lines(done)
    assert line.startswith("hpcpace: recorded 4 ranks, 6 steps (")


@pytest.mark.nightly
def test_a_site_traces_the_steps_of_its_rolled_out_partition(queue: JobQueue, site: None, tmp_path: Path) -> None:
    train = f"srun --mpi=none {sys.executable} {SCRIPT}"
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{train} 29524\nHPCPACE_OPT_OUT=1 {train} 29525\n{train} 29526\n")
    options = ("-p", "traced", "-N2", "--ntasks-per-node=1", "--job-name=mine", "job.sh")
    job = queue.wait(queue.submit(*options, cwd=tmp_path, environ=GLOO), timeout_s=120)
    log = job.output.read_text()
    assert job.state == "COMPLETED", log
    assert log.count("loss ") == 6 and "hpcpace" not in log
    # The second step has opted out.
    assert recorded(tmp_path) == [("mine", [(0, 0, 6), (1, 1, 6)])] * 2
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        f"{job.job_id}.{step}-mine" for step in (0, 2)
    ]


def test_a_site_leaves_alone_what_does_not_train_or_is_not_rolled_out(
    queue: JobQueue, site: None, tmp_path: Path
) -> None:
    seen = "import os; print(sorted(name for name in os.environ if name.startswith('HPCPACE_LAUNCH')))"
    for partition, shown in (("traced", "['HPCPACE_LAUNCH']\n"), ("lab", "[]\n")):
        done = queue.run("srun", "-p", partition, "-n1", sys.executable, "-c", seen, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")
    assert not (tmp_path / "runs").exists()
