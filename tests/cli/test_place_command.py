"""`hpcpace place`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.synthetic_run import SyntheticRun
from tests.placed_run import PlacedRun, layout_operations

LEAVES = [1, 1, 2, 2]
PIPELINE = layout_operations(2, 4, "pp", large=4_000_000, small=1000)
GOOD = np.repeat(np.arange(4), 2)
SCATTERED = np.array([0, 2, 1, 3, 2, 0, 3, 1])
CONF = "SwitchName=leaf1 Nodes=n[0-1]\nSwitchName=leaf2 Nodes=n[2-3]\nSwitchName=spine Switches=leaf[1-2]\n"


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "run"
    return PlacedRun(operations=PIPELINE, host=SCATTERED, leaves=LEAVES).write(path).path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "run"
    return PlacedRun(operations=PIPELINE, host=GOOD, leaves=LEAVES).write(path).path


def test_says_what_would_change(hpcpace, bad: Path) -> None:
    code, out, err = hpcpace("place", bad)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "bytes over uplinks: 48.0 MB to 8.00 kB a step"
    assert "step time: at most " in out and " ranks of 8 would change their host" in out
    assert "next: --output FILE writes it" in out and all(f"\nn{host}: ranks " in out for host in range(4))


def test_json_has_the_place_of_each_rank(hpcpace, bad: Path) -> None:
    code, out, _ = hpcpace("place", bad, "--json")
    found = json.loads(out)
    assert (code, found["is_kept"]) == (0, False)
    assert found["uplink_bytes_per_step"]["before"] == pytest.approx(48e6, rel=0.01)
    leaf = {place["rank"]: LEAVES[int(place["host"][1:])] for place in found["ranks"]}
    assert len({leaf[rank] for rank in range(4)}) == len({leaf[rank] for rank in range(4, 8)}) == 1
    places = [(place["host"], place["local_rank"]) for place in found["ranks"]]
    assert sorted(places) == [(f"n{host}", local) for host in range(4) for local in range(2)]


def test_a_placement_that_is_good_is_kept(hpcpace, good: Path, tmp_path: Path) -> None:
    code, out, _ = hpcpace("place", good, "-o", tmp_path / "hosts")
    assert code == 0 and out.startswith("as good as found: 8.00 kB over uplinks")
    assert (tmp_path / "hosts").read_text().split() == [f"n{host}" for host in GOOD]


@pytest.mark.parametrize(("kind", "usage"), [("slurm", "--distribution=arbitrary"), ("openmpi", "--map-by seq")])
def test_writes_the_host_of_each_rank(hpcpace, bad: Path, tmp_path: Path, kind: str, usage: str) -> None:
    code, out, _ = hpcpace("place", bad, "--format", kind, "-o", tmp_path / "hosts")
    hosts = (tmp_path / "hosts").read_text().splitlines()
    assert (code, usage in out) == (0, True)
    assert hosts == [place["host"] for place in json.loads(hpcpace("place", bad, "--json")[1])["ranks"]]


def test_writes_an_order_of_the_ranks_that_torchrun_starts(hpcpace, bad: Path, tmp_path: Path) -> None:
    assert hpcpace("place", bad, "--format", "torchrun", "-o", tmp_path / "order")[0] == 0
    order = [int(line) for line in (tmp_path / "order").read_text().split()]
    places = json.loads(hpcpace("place", bad, "--json")[1])["ranks"]
    numbers: dict[str, int] = {}  # torchrun numbers hosts as the run did
    for rank in range(8):
        numbers.setdefault(f"n{SCATTERED[rank]}", len(numbers))
    assert order == [2 * numbers[place["host"]] + place["local_rank"] for place in places]


@pytest.mark.parametrize(("host", "change"), [(GOOD, "48.0 MB to 8.00 kB"), (SCATTERED[::-1], "48.0 MB to 48.0 MB")])
def test_judges_a_placement_of_the_users(hpcpace, bad: Path, tmp_path: Path, host, change: str) -> None:
    (tmp_path / "mine").write_text("".join(f"n{at}\n" for at in host))
    code, out, err = hpcpace("place", bad, "--placement", tmp_path / "mine")
    assert (code, err) == (0, "") and f"bytes over uplinks: {change} a step" in out and "next:" not in out


def test_a_worse_placement_is_no_gain_of_nothing(hpcpace, good: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("".join(f"n{at}\n" for at in SCATTERED))
    code, out, _ = hpcpace("place", good, "--placement", tmp_path / "mine")
    assert code == 0 and "bytes over uplinks: 8.00 kB to 48.0 MB a step" in out and "step time: cannot tell" in out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("n0\nn1\n", "has hosts for 2 ranks, and the run has 8"),
        ("n0 n0 n1 n1 n2 n2 m3 m3", "and the run have different hosts: m3,n3"),
        ("n0 n0 n0 n1 n2 n2 n3 n3", "gives n[0-1] another number of ranks"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_refuses_placements_of_other_jobs(hpcpace, bad: Path, tmp_path: Path, text, reason: str) -> None:
    if text is not None:
        (tmp_path / "mine").write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = hpcpace("place", bad, "--placement", tmp_path / "mine")
    assert (code, out) == (2, "") and f"--placement {tmp_path / 'mine'} " in err and reason in err


def test_writes_a_trial(hpcpace, bad: Path, tmp_path: Path) -> None:
    (bad / "attempt-0" / "run.json").write_text(json.dumps({"launcher": "slurm", "command": ["train.py"]}))
    code, out, err = hpcpace("place", bad, "--try", tmp_path / "trial")
    assert (code, err) == (0, "") and "next: check the job in it, then sbatch " in out
    assert {path.name for path in (tmp_path / "trial").iterdir()} == {"before.txt", "after.txt", "trial.sh"}
    code, _, err = hpcpace("place", bad, "--try", tmp_path / "trial" / "trial.sh")
    assert code == 2 and "cannot make the folder" in err and "name another one with --try" in err
    (bad / "attempt-0" / "run.json").write_text(json.dumps({"launcher": "torchrun", "command": ["train.py"]}))
    code, out, err = hpcpace("place", bad, "--try", tmp_path / "other")
    assert (code, out) == (3, "") and "started by torchrun, not by srun" in err and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (SyntheticRun(noise=0.02), "had one host"),
        (SyntheticRun(hosts=("n0", "n1", "n2", "n3")), "leaf switches of its hosts are not known"),
        (SyntheticRun(hosts=("n0", "n1"), missing=(2,)), "rank 2 left no trace"),
    ],
)
def test_refuses_runs_that_do_not_show_it(hpcpace, tmp_path: Path, made: SyntheticRun, reason: str) -> None:
    code, out, err = hpcpace("place", made.write(tmp_path / "run").path)
    assert (code, out) == (3, "") and reason in err


def test_refuses_a_run_that_hung(hpcpace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPCPACE_DIAGNOSIS_HANG_S", "1")
    run = SyntheticRun(hosts=("n0", "n1"), hangs=True).write(tmp_path / "run").path
    code, out, err = hpcpace("place", run)
    assert (code, out) == (3, "") and "the run hung" in err


def test_a_topology_file_gives_the_switches(hpcpace, tmp_path: Path) -> None:
    run = SyntheticRun(hosts=("n0", "n1", "n2", "n3")).write(tmp_path / "run").path
    (tmp_path / "topology.conf").write_text(CONF)
    code, out, _ = hpcpace("place", run, "--topology", tmp_path / "topology.conf")
    assert code == 0 and out.startswith("as good as found")


def test_a_topology_of_other_hosts_is_no_topology(hpcpace, tmp_path: Path) -> None:
    run = SyntheticRun(hosts=("n0", "n1", "n2", "n3")).write(tmp_path / "run").path
    (tmp_path / "topology.conf").write_text(CONF.replace("=n[", "=other["))
    code, _, err = hpcpace("place", run, "--topology", tmp_path / "topology.conf")
    assert code == 3 and "knows none of the hosts" in err
