"""`srun hpcpace audit` over the hosts of the lab finds what is injected for real, and nothing that is not so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from experiments.labs import JobQueue
from hpcpace.audit.snapshot_files import load_snapshots
from hpcpace.core.rundir import RunDirectory
from hpcpace.lab.lab import Lab

SBATCH = Path(__file__).parents[2] / "sbatch"
AUDIT = (sys.executable, "-m", "hpcpace", "audit", "--json")
# One thread a rank, since all hosts share the cores of this machine.
ENVIRON = {"OMP_NUM_THREADS": "1"}


def audit(lab: Lab, tmp_path: Path, *options: str, pinned: str = "") -> list[dict[str, Any]]:
    """Return the findings over four hosts; the ranks that a pattern of bash names are pinned to CPU 0."""
    step = ["bash", "-c", f'[[ $SLURM_PROCID != {pinned} ]] || taskset -pc 0 $$ >/dev/null; exec "$@"', "-", *AUDIT]
    done = lab.run("srun", "-N4", *options, *(step if pinned else AUDIT), cwd=tmp_path, environ=ENVIRON)
    answer = json.loads(done.stdout)
    assert (len(answer["hosts"]), answer["missing"], answer["problems"]) == (4, [], []), done.stderr
    # Load comes and goes: the machine below all hosts has other work, and they see each other's processes.
    return [found for found in answer["findings"] if found["rule"] not in ("S07", "S08")]


def bad(findings: list[dict[str, Any]]) -> set[tuple[str, str, str, tuple[str, ...]]]:
    return {
        (found["severity"], found["rule"], found["place"], tuple(found["hosts"]))
        for found in findings
        if found["severity"] != "I"
    }


@contextmanager
def fault(lab: Lab, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "hpcpace", "lab", "fault"]
    name = ["--name", lab.files.name]
    done = subprocess.run([*command, *arguments, *name], capture_output=True, text=True, timeout=60, check=True)
    try:
        yield
    finally:
        subprocess.run([*command, "undo", done.stdout.split()[0], *name], capture_output=True, timeout=60, check=True)


@pytest.fixture(scope="module")
def of_machine() -> set[str]:
    """Return the rules that find something on this machine itself, which is below all hosts of the lab."""
    done = subprocess.run(AUDIT, capture_output=True, text=True, timeout=60)
    return {found["rule"] for found in json.loads(done.stdout)["findings"]}


@pytest.fixture
def clean(lab: Lab, tmp_path: Path) -> set[tuple[str, str, str, tuple[str, ...]]]:
    """Return what is found on the four hosts without any fault."""
    return bad(audit(lab, tmp_path, "--ntasks-per-node=1"))


def test_a_clean_lab_has_nothing_that_its_machine_has_not(lab: Lab, tmp_path: Path, of_machine: set[str]) -> None:
    findings = audit(lab, tmp_path, "--ntasks-per-node=1")
    # Hosts on two leaves: that is so.
    assert {found["rule"] for found in findings} - of_machine == {"H02"}


def test_an_mtu_that_differs_is_found(
    lab: Lab, tmp_path: Path, clean: set[tuple[str, str, str, tuple[str, ...]]]
) -> None:
    with fault(lab, "mtu", "n2", "--size", "1400"):
        findings = audit(lab, tmp_path, "--ntasks-per-node=1")
    assert bad(findings) - clean == {("F", "N06", "eth0", ("n2",))}
    (found,) = [found for found in findings if found["rule"] == "N06"]
    assert found["seen"] == "has MTU 1400, but 1500 on 3 of 4 hosts"


def test_a_slow_link_is_found(lab: Lab, tmp_path: Path, clean: set[tuple[str, str, str, tuple[str, ...]]]) -> None:
    with fault(lab, "slow-link", "n3", "--rate", "100mbit"):
        findings = audit(lab, tmp_path, "--ntasks-per-node=1")
    assert bad(findings) - clean == {("F", "N05", "eth0", ("n3",))}
    (found,) = [found for found in findings if found["rule"] == "N05"]
    assert found["seen"] == "is shaped to 0.1 Gb/s, but to 1 on other hosts"


def test_overlapping_masks_are_found(lab: Lab, tmp_path: Path) -> None:
    options = ("--ntasks-per-node=2",)
    before = bad(audit(lab, tmp_path, *options))
    findings = audit(lab, tmp_path, *options, pinned="[67]")
    assert ("W", "A04", "local ranks 0,1", ("n4",)) in bad(findings) - before
    (found,) = [found for found in findings if found["rule"] == "A04"]
    assert (found["seen"], found["ranks"]) == ("share CPUs 0, which is all they have", [6, 7])
    assert {rule for _, rule, _, _ in bad(findings) - before} <= {"A04", "H01", "S04", "A05"}


def test_a_badly_pinned_rank_is_found(
    lab: Lab, tmp_path: Path, clean: set[tuple[str, str, str, tuple[str, ...]]]
) -> None:
    findings = audit(lab, tmp_path, "--ntasks-per-node=1", "-c2", pinned="2")
    new = bad(findings) - clean
    assert ("F", "A05", "local rank 0", ("n3",)) in new
    # Masks that differ between hosts are the other side of it.
    assert {rule for _, rule, _, _ in new} <= {"A05", "H01"}
    (found,) = [found for found in findings if found["rule"] == "A05"]
    assert (found["seen"], found["ranks"]) == ("has 1 CPU although SLURM_CPUS_PER_TASK=2", [2])


def test_a_dead_host_is_named(lab: Lab, tmp_path: Path) -> None:
    # The rank on n2 ends before it hands anything in, as one whose host has died.
    step = ["bash", "-c", '[[ $SLURM_PROCID == 1 ]] || exec "$@"', "-", *AUDIT, "--timeout-s", "3"]
    done = lab.run("srun", "-N4", "--ntasks-per-node=1", *step, cwd=tmp_path, environ=ENVIRON)
    answer = json.loads(done.stdout)
    assert answer["hosts"] == ["n1", "n3", "n4"]
    assert answer["missing"][0] == "n2 did not answer within 3 s"


def test_a_job_is_audited_before_it_trains_and_keeps_snapshots_of_its_ranks(
    lab: Lab, queue: JobQueue, tmp_path: Path
) -> None:
    environ = {"HPCPACE_MPI": "pmi2", "HPCPACE_AUDIT": "strict"}
    script = ("-N4", "--ntasks-per-node=1", SBATCH / "gpt2_dp.sh", "--steps", "6")
    with fault(lab, "mtu", "n2", "--size", "1400"):
        refused = queue.wait(queue.submit(*script, cwd=tmp_path, environ=environ), timeout_s=120)
    log = refused.output.read_text()
    assert (refused.state, refused.exit_code) == ("FAILED", 4), log
    assert "F N06      eth0, n2: has MTU 1400, but 1500 on 3 of 4 hosts" in log
    assert "gpt2_dp: not trained: the audit has found a failure (F)" in log

    job_id = queue.submit(*script, cwd=tmp_path, environ={**environ, "HPCPACE_AUDIT": "warn"})
    job = queue.wait(job_id, timeout_s=120)
    log = job.output.read_text()
    assert (job.state, job.exit_code) == ("COMPLETED", 0), log
    assert log.index("hpcpace audit n") < log.index("Phases by rank")
    for folder in (
        RunDirectory(tmp_path / "runs" / f"{job_id}-gpt2_dp-audit").attempt(0).snapshot_dir,
        RunDirectory(tmp_path / "runs" / f"{job_id}-gpt2_dp").attempt(0).snapshot_dir,
    ):
        snapshots, problems = load_snapshots(folder)
        assert problems == []
        assert {one.host: [rank.rank for rank in one.ranks] for one in snapshots} == {
            f"n{number + 1}": [number] for number in range(4)
        }
