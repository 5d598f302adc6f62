"""Clocks of the lab's hosts differ by known offsets: what hpcpace finds is held against them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from experiments.labs import JobQueue, inject
from hpcpace.core.rundir import RunDirectory, open_run
from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.lab.lab import Lab
from hpcpace.trace.reader import read_trace
from hpcpace.trace.tables import RankTrace

SBATCH = Path(__file__).parents[2] / "sbatch"
JOB_TIMEOUT_S = 240
# Clocks are compared often, so that there are samples enough for a share of 99 %.
SETTINGS = {"HPCPACE_CLOCK_INTERVAL_S": "0.2"}


@pytest.fixture(scope="module")
def run(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline over four hosts."""
    folder = tmp_path_factory.mktemp("clock")
    queue = JobQueue(lab)
    arguments = ("-N4", "--ntasks-per-node=1", SBATCH / "gpt2_pp.sh", "--mesh", "pp=4", "--steps", "200")
    job_id = queue.submit(*arguments, "--seq-len", "32", cwd=folder, environ=SETTINGS)
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    assert job.state == "COMPLETED", job.output.read_text()
    return folder / "runs" / f"{job_id}-gpt2_pp"


def traces_of(run: Path) -> list[RankTrace]:
    return [read_trace(path) for path in open_run(run).attempts()[0].trace_files().values()]


def report(lab: Lab, run: Path) -> dict[str, Any]:
    done = lab.run("hpcpace", "report", "--json", str(run))
    assert done.stdout, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_every_hosts_true_offset_lies_within_the_half_width(lab: Lab, run: Path) -> None:
    offset_s = {host.name: host.clock_offset_s for host in lab.plan.hosts}
    errors_ns, halfwidths_ns = [], []
    for trace in traces_of(run):
        clock = trace.tables["clock"]
        truth_ns = (offset_s[trace.header.host] - offset_s["n1"]) * NS_PER_S
        errors_ns.append(np.abs(clock["offset_ns"] - truth_ns))
        halfwidths_ns.append(clock["halfwidth_ns"])
    assert [len(errors) > 30 for errors in errors_ns] == [True] * 4
    error_ns, halfwidth_ns = np.concatenate(errors_ns[1:]), np.concatenate(halfwidths_ns[1:])
    inside = float(np.mean(error_ns <= halfwidth_ns))
    print(
        f"\n{len(error_ns)} samples, {inside:.1%} within their half-width; error median {np.median(error_ns):.0f} ns, "
        f"largest {error_ns.max()} ns; half-width median {np.median(halfwidth_ns):.0f} ns, "
        f"largest {halfwidth_ns.max()} ns"
    )
    assert inside >= 0.99


def test_clean_run_has_no_violation_of_causality(lab: Lab, run: Path) -> None:
    clocks = report(lab, run)["clocks"]
    assert clocks["num_checked"] > 100
    assert (clocks["num_wrong"], sum(pair["num_unexplained"] for pair in clocks["pairs"])) == (0, 0)


@pytest.mark.parametrize(("host", "error_ms", "word"), [("n2", 1, "ahead"), ("n3", -1, "behind"), ("n1", 1, "ahead")])
def test_host_whose_samples_are_wrong_by_a_millisecond_is_named(
    lab: Lab, run: Path, tmp_path: Path, host: str, error_ms: int, word: str
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(run, wrong)
    for trace, path in zip(traces_of(wrong), RunDirectory(wrong).attempt(0).trace_files().values(), strict=True):
        # A clock that is ahead by more than was found has offsets that are too small, so that its times come out late.
        if trace.header.host == host:
            with h5py.File(path, "r+") as file:
                file["clock/offset_ns"][:] -= error_ms * NS_PER_MS
    clocks = report(lab, wrong)["clocks"]
    assert [suspect["host"] for suspect in clocks["suspects"]] == [host]
    bound_ns = clocks["suspects"][0][f"{word}_ns"]
    print(f"\n{host} is {word} by {bound_ns} ns at least")
    assert 0 < bound_ns <= NS_PER_MS * 1.01
    shown = lab.run("hpcpace", "report", str(wrong))
    assert shown.returncode == 1
    assert f"the clock of {host} is wrong" in " ".join(shown.stdout.split())


@pytest.mark.parametrize("step_s", [0.05, -0.05])
def test_host_whose_clock_is_stepped_during_a_job_is_named_and_no_rank(
    lab: Lab, queue: JobQueue, tmp_path: Path, step_s: float
) -> None:
    arguments = ("-N4", "--ntasks-per-node=1", SBATCH / "gpt2_pp.sh", "--mesh", "dp=4", "--steps", "150")
    job_id = queue.submit(*arguments, "--seq-len", "32", cwd=tmp_path, environ=SETTINGS)
    path = tmp_path / "runs" / f"{job_id}-gpt2_pp"
    while len(list(path.glob("attempt-0/trace/rank-*.h5"))) < 4:
        assert not queue.job(job_id).finished
        time.sleep(0.2)
    fault_id = inject(lab, "clock", "n3", "--step", str(step_s), "--start", "3")
    job = queue.wait(job_id, timeout_s=JOB_TIMEOUT_S)
    inject(lab, "undo", fault_id)
    assert job.state == "COMPLETED", job.output.read_text()
    summary = report(lab, path)
    ((hosts, size_ns),) = ((jump["hosts"], jump["size_ns"]) for jump in summary["clocks"]["jumps"])
    assert (hosts, abs(size_ns - step_s * NS_PER_S) < 10 * NS_PER_MS) == (["n3"], True)
    assert [one for finding in summary["verdict"]["findings"] for one in finding["culprits"]] == []
