"""A placement takes bytes off the uplinks of a real cluster, as many as `hpcpace place` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lab_status import status_of

from experiments.labs import JobQueue
from hpcpace.lab.lab import Lab

pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).parents[2] / "sbatch" / "gpt2_pp.sh"
TOPOLOGY = "SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\nSwitchName=spine Switches=leaf[1-2]\n"
FEW, MANY = 10, 50
MOST_OVERHEAD = 0.06
"""Headers and acknowledgements, of small messages too."""


@pytest.fixture
def uplink_bytes_per_step(lab: Lab, queue: JobQueue, tmp_path: Path):
    """Train over a number of steps and over more, and return what these have sent over the uplinks, in bytes a step."""

    def sent_bytes() -> int:
        return sum(link.tx_bytes + link.rx_bytes for link in status_of(lab).links if link.name == "leaf1")

    def call(name: str, **environ: str) -> float:
        sent = []
        for steps in (FEW, MANY):
            before = sent_bytes()
            arguments = ("--steps", str(steps), "--run-dir", tmp_path / f"{name}-{steps}")
            options = ("-N4", "--ntasks-per-node=1", SCRIPT, *arguments)
            job_id = queue.submit(*options, cwd=tmp_path, environ={"HPCPACE_AUDIT": "off", **environ})
            job = queue.wait(job_id, timeout_s=240)
            assert job.state == "COMPLETED", job.output.read_text()
            sent.append(sent_bytes() - before)
        return (sent[1] - sent[0]) / (MANY - FEW)

    return call


def test_uplinks_carry_the_bytes_that_a_placement_predicts(lab: Lab, uplink_bytes_per_step, tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    placement = tmp_path / "placement.txt"
    hpcpace = (sys.executable, "-P", "-m", "hpcpace", "place", tmp_path / f"block-{MANY}", "--json")
    before = uplink_bytes_per_step("block")
    done = lab.run(*map(str, (*hpcpace, "--topology", tmp_path / "topology.conf", "--output", placement)))
    assert done.returncode == 0, done.stderr
    predicted = json.loads(done.stdout)["uplink_bytes_per_step"]
    after = uplink_bytes_per_step("placed", HPCPACE_PLACEMENT=str(placement))
    print(f"uplinks: {before:.0f} to {after:.0f} bytes a step, predicted {predicted}")
    assert 1 <= before / predicted["before"] < 1 + MOST_OVERHEAD
    assert 1 <= after / predicted["after"] < 1 + MOST_OVERHEAD
    assert predicted["after"] < 0.5 * predicted["before"]


def test_a_trial_runs_the_job_with_both_placements(lab: Lab, queue: JobQueue, tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(TOPOLOGY)
    arguments = ("--steps", "16", "--mesh", "dp=2,pp=2", "--run-dir", tmp_path / "block")
    options = ("-N4", "--ntasks-per-node=1", SCRIPT, *arguments)
    first = queue.wait(queue.submit(*options, cwd=tmp_path, environ={"HPCPACE_AUDIT": "off"}), timeout_s=240)
    assert first.state == "COMPLETED", first.output.read_text()
    hpcpace = (sys.executable, "-P", "-m", "hpcpace", "place", tmp_path / "block")
    done = lab.run(*map(str, (*hpcpace, "--topology", tmp_path / "topology.conf", "--try", tmp_path / "trial")))
    assert done.returncode == 0, done.stderr
    job = queue.wait(queue.submit(tmp_path / "trial" / "trial.sh", cwd=tmp_path), timeout_s=600)
    log = job.output.read_text()
    assert "hpcpace compare" in log and "3 repeats" not in log.partition("hpcpace compare")[2], log
    runs = tmp_path / "trial" / str(job.job_id)
    for side in ("before", "after"):
        hosts = (tmp_path / "trial" / f"{side}.txt").read_text().split()
        for number in (1, 2, 3):
            record = json.loads((runs / f"{side}-{number}" / "attempt-0" / "run.json").read_text())
            assert [one["host"] for one in sorted(record["ranks"], key=lambda one: one["rank"])] == hosts
