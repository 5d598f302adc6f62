"""`hpcpace probe` on the hosts of a lab, one of whose links is slow."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hpcpace.lab.lab import Lab

HPCPACE = (sys.executable, "-P", "-m", "hpcpace")
_SLOW_MBIT = 100


def test_the_probe_names_the_slow_link_and_sweeps_all_hosts(lab: Lab, tmp_path: Path) -> None:
    begun = lab.run(*HPCPACE, "lab", "fault", "slow-link", "n3", "--rate", f"{_SLOW_MBIT}mbit")
    assert begun.returncode == 0, begun.stderr
    file = tmp_path / "probe.json"
    try:
        words = ("probe", "--only", "sweep", "--only", "pairs", "--time", "60", "--json", str(file))
        done = lab.run("srun", "-N4", *HPCPACE, *words, cwd=tmp_path, timeout_s=240.0)
    finally:
        lab.run(*HPCPACE, "lab", "fault", "undo", begun.stdout.split()[0])
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["lost_hosts"] == []
    assert {row["num_nodes"] for row in record["sweep"]} == {2, 4}
    of_slow = [row for row in record["pairs"]["rows"] if "n3" in (row["first"], row["second"])]
    assert max(max(row["forward"], row["backward"]) for row in of_slow) < 1.1 * _SLOW_MBIT * 1e6 / 8
    # On a busy machine the finding may be "unclear" instead of "link", but it names the same host, and no other.
    assert {name for found in record["pairs"]["findings"] for name in found["names"]} == {"n3"}
