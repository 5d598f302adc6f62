"""`hpcpace train` under what srun of a site may offer, and under torchrun within srun, over two hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from cases import only_nightly

from experiments.labs import JobQueue
from hpcpace.core.rundir import open_run
from hpcpace.core.text import NS_PER_S
from hpcpace.lab.lab import Lab
from hpcpace.trace.reader import read_trace

TRAIN = ("train", "gpt2", "--steps", "8", "--seq-len", "16", "--progress", "off")
TWO_HOSTS = ("-N2", "--ntasks-per-node=2", "--kill-on-bad-exit=1")
OPEN_MPI = {"MPI4PY_MPIABI": "openmpi"}
NOT_USED = ", rendezvous n1:PORT, clocks over gloo; MPI not used: "


@pytest.fixture
def no_mpi4py(tmp_path: Path) -> Mapping[str, str]:
    """An environment whose mpi4py cannot be imported."""
    (tmp_path / "stub" / "mpi4py").mkdir(parents=True)
    (tmp_path / "stub" / "mpi4py" / "__init__.py").write_text("raise ImportError('no mpi4py here')")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "stub"), os.environ.get("PYTHONPATH", "")])}


def first_line(queue: JobQueue, run: Path, *options: str, environ: Mapping[str, str]) -> str:
    """Train over two hosts; return what the log says of the world, with the port of the rendezvous as PORT."""
    command = (sys.executable, "-m", "hpcpace", *TRAIN, "--run-dir", str(run))
    done = queue.run(
        *("timeout", "150", "srun", *TWO_HOSTS, *options, *command),
        # The limit of the lab's other tests is for starts that are repeated.
        environ={"OMP_NUM_THREADS": "1", "HPCPACE_WORLD_START_TIMEOUT_S": "120", **environ},
        timeout_s=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(open_run(run).attempts()[0].trace_files()) == [0, 1, 2, 3]
    line = done.stdout.splitlines()[0]
    before, found, after = line.partition(" n1:")
    return f"{before}{found}PORT{after.lstrip('0123456789')}" if found else line


@pytest.mark.parametrize(
    ("mpi", "environ", "said"),
    only_nightly(
        [
            ("pmi2", {}, "ranks from Slurm (srun --mpi=pmi2), clocks over MPI (MPICH "),
            ("pmix", OPEN_MPI, "ranks from Slurm (srun --mpi=pmix), clocks over MPI (Open MPI "),
        ],
        [
            ("pmix", {}, f"ranks from Slurm (srun --mpi=pmix){NOT_USED}MPICH "),
            ("none", {}, f"ranks from Slurm (srun --mpi=none){NOT_USED}MPICH "),
            ("none", OPEN_MPI, f"ranks from Slurm (srun --mpi=none){NOT_USED}Open MPI "),
            ("pmi2", OPEN_MPI, f"ranks from Slurm (srun --mpi=pmi2){NOT_USED}Open MPI "),
        ],
    ),
)
def test_training_runs_with_each_mpi_and_each_srun(
    queue: JobQueue, tmp_path: Path, mpi: str, environ: dict[str, str], said: str
) -> None:
    assert first_line(queue, tmp_path / "run", f"--mpi={mpi}", environ=environ).startswith(said)


@pytest.mark.parametrize("mpi", only_nightly(["pmi2"], ["none"]))
def test_training_needs_no_mpi4py(
    lab: Lab, queue: JobQueue, tmp_path: Path, no_mpi4py: Mapping[str, str], mpi: str
) -> None:
    line = first_line(queue, tmp_path / "run", f"--mpi={mpi}", environ=no_mpi4py)
    assert line == f"ranks from Slurm (srun --mpi={mpi}){NOT_USED}mpi4py is not installed"


@pytest.mark.nightly
@pytest.mark.parametrize(("coordination", "clocks"), [("torch", "gloo"), ("mpi", "MPI")])
def test_a_setting_forces_what_connects_the_ranks(
    queue: JobQueue, tmp_path: Path, coordination: str, clocks: str
) -> None:
    environ = {"HPCPACE_WORLD_COORDINATION": coordination}
    assert f"clocks over {clocks}" in first_line(queue, tmp_path / "run", "--mpi=pmi2", environ=environ)


@pytest.mark.nightly
def test_gloo_finds_the_true_offset_of_every_host(lab: Lab, queue: JobQueue, tmp_path: Path) -> None:
    run = tmp_path / "run"
    environ = {"HPCPACE_WORLD_COORDINATION": "torch", "HPCPACE_CLOCK_INTERVAL_S": "0.1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "hpcpace", *TRAIN, "--steps", "150", "--run-dir", str(run))
    done = queue.run("timeout", "200", "srun", "-N4", "-n4", *command, environ=environ, timeout_s=240)
    assert "clocks over gloo" in done.stdout, done.stderr
    offset_s = {host.name: host.clock_offset_s for host in lab.plan.hosts}
    errors_ns, halfwidths_ns = [], []
    for path in open_run(run).attempts()[0].trace_files().values():
        trace = read_trace(path)
        if trace.header.host != "n1":
            truth_ns = (offset_s[trace.header.host] - offset_s["n1"]) * NS_PER_S
            errors_ns.append(np.abs(trace.tables["clock"]["offset_ns"] - truth_ns))
            halfwidths_ns.append(trace.tables["clock"]["halfwidth_ns"])
    assert [len(errors) > 30 for errors in errors_ns] == [True] * 3
    error_ns, halfwidth_ns = np.concatenate(errors_ns), np.concatenate(halfwidths_ns)
    inside = float(np.mean(error_ns <= halfwidth_ns))
    print(
        f"\n{len(error_ns)} samples over gloo, {inside:.1%} within their half-width; error median "
        f"{np.median(error_ns):.0f} ns, half-width median {np.median(halfwidth_ns):.0f} ns"
    )
    assert inside >= 0.99


def test_torchrun_within_srun_gives_the_right_world(queue: JobQueue) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:29512", "--rdzv-id", "lab")
    job = str(Path(__file__).with_name("world_job.py"))
    done = queue.run(
        *("timeout", "150", "srun", "--mpi=none", "-N2", "--ntasks-per-node=1", *torchrun, *rendezvous, job),
        environ={"OMP_NUM_THREADS": "1"},
        timeout_s=200,
    )
    places = sorted(done.stdout.splitlines())
    hosts = [place.split(", ")[3] for place in places]
    assert sorted(hosts) == ["n1", "n1", "n2", "n2"], done.stderr
    assert places == [
        f"{rank} of 4, {rank % 2} of 2, node {rank // 2} of 2, {hosts[rank]}, torchrun, sum 6" for rank in range(4)
    ]
    assert hosts[0] == hosts[1]


def test_a_host_that_cannot_resolve_the_first_one_is_named(queue: JobQueue, tmp_path: Path) -> None:
    # n2 alone is told a name that nobody knows, as if it lacked an entry of /etc/hosts.
    script = tmp_path / "rank.sh"
    script.write_text(
        'if [ "$SLURM_NODEID" = 1 ]; then export HPCPACE_WORLD_RENDEZVOUS=nowhere.invalid; fi\n'
        f"exec {sys.executable} -m hpcpace {' '.join(TRAIN)} --run-dir {tmp_path / 'run'}\n"
    )
    environ = {"HPCPACE_WORLD_START_TIMEOUT_S": "30", "OMP_NUM_THREADS": "1"}
    command = ("srun", "--mpi=none", *TWO_HOSTS, "bash", str(script))
    done = queue.run("timeout", "150", *command, environ=environ, timeout_s=200)
    errors = [line for line in done.stderr.splitlines() if "error: " in line and not line.startswith(("srun", "slurm"))]
    assert len(errors) == 1, done.stderr
    assert "[rank 2] error: n2 cannot resolve nowhere.invalid, where the ranks meet" in errors[0]
    assert "n2: task 2: Exited with exit code 2" in done.stderr
