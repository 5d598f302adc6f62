"""The scripts of analysis/ on runs whose truth is known."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from cases import each_case

from experiments.synthetic_run import SyntheticRun
from tests.device_run import DeviceRun

pytest.importorskip("matplotlib")

from library.paced_jobs import fit

FOLDER = Path(__file__).parents[2] / "analysis"
NAMES = ("jitter_amplification", "topology_hotspots", "bottleneck_timeline")
HOSTS = ("n1", "n2", "n3", "n4")


@pytest.fixture(scope="module")
def slow_node(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "slow-node"
    return SyntheticRun(num_ranks=8, hosts=HOSTS, slow={4: 1.3, 5: 1.3}, noise=0.02).write(path).path


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "slow-rank"
    return SyntheticRun(num_ranks=8, hosts=HOSTS, slow={3: 1.3}, noise=0.02).write(path).path


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", NAMES)
def test_writes_a_table_and_a_plot_in_two_formats(script, slow_node, slow_rank, tmp_path, name):
    code, out, err = script(name, slow_node, slow_rank, "--out", tmp_path / "new")
    assert (code, err) == (0, "")
    assert sorted(os.listdir(tmp_path / "new")) == [f"{name}.csv", f"{name}.png", f"{name}.svg"]
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "new" / f"{name}.svg").read_text()
    assert {row["run"] for row in _rows(tmp_path / "new" / f"{name}.csv")} == {"slow-node", "slow-rank"}
    assert max(len(line) for line in out.splitlines() if not line.startswith("written")) <= 100


@pytest.mark.parametrize("name", NAMES)
def test_a_run_whose_phases_are_host_times_of_ranks_with_a_device_gets_no_figures(script, tmp_path, name):
    path = DeviceRun().write(tmp_path / "run").path
    code, out, err = script(name, path, "--out", tmp_path / "new")
    assert (code, out) == (3, "")
    assert err == f"hpcpace: {path}: not known: phases are host times of ranks with a device\n"
    assert not (tmp_path / "new").exists()


def test_the_same_run_twice_gives_the_same_files(script, slow_node, tmp_path):
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        script("bottleneck_timeline", slow_node, "--out", folder)
        found.append([(folder / f"bottleneck_timeline.{ending}").read_bytes() for ending in ("csv", "png", "svg")])
    assert found[0] == found[1]


def test_jitter_is_the_slow_nodes_and_not_amplified_beyond_it(script, slow_node, tmp_path):
    script("jitter_amplification", slow_node, "--out", tmp_path)
    (row,) = _rows(tmp_path / "jitter_amplification.csv")
    assert float(row["amplification"]) == pytest.approx(float(row["persistent"]) * float(row["transient"]), rel=1e-4)
    assert 1.15 < float(row["persistent"]) < 1.3
    assert 1.0 <= float(row["transient"]) < 1.05


def test_a_slow_node_is_the_first_hotspot_and_left_out_of_the_next_job(script, slow_node, tmp_path):
    _, out, _ = script("topology_hotspots", slow_node, "--out", tmp_path)
    row = _rows(tmp_path / "topology_hotspots.csv")[0]
    assert (row["position"], row["kind"], row["id"]) == ("1", "node", "n3")
    assert float(row["effect_low_ms"]) < 0.3 * 30 < float(row["effect_high_ms"])
    assert "slow-node: #SBATCH --exclude=n3" in out


def test_links_are_named_by_both_of_their_ends(script, slow_node, tmp_path):
    _, out, _ = script("topology_hotspots", slow_node, "--out", tmp_path)
    assert "one of the links n1<->switch, n2<->switch, n3<->switch, n4<->switch may be slow" in " ".join(out.split())


def test_links_end_at_the_switches_of_a_topology_file(script, slow_node, tmp_path):
    (tmp_path / "topology").write_text("n[1-2] left\nn[3-4] right\n")
    _, out, _ = script("topology_hotspots", slow_node, "--out", tmp_path, "--topology", tmp_path / "topology")
    assert "n1<->left, n2<->left, n3<->right, n4<->right" in " ".join(out.split())
    code, _, err = script("topology_hotspots", slow_node, "--out", tmp_path, "--topology", tmp_path / "none")
    assert code == 2
    assert "cannot read the topology" in err


def test_a_slow_rank_is_the_first_hotspot(script, slow_rank, tmp_path):
    script("topology_hotspots", slow_rank, "--out", tmp_path)
    assert [(row["kind"], row["id"]) for row in _rows(tmp_path / "topology_hotspots.csv")] == [("rank", "3")]


def test_a_run_without_hotspots_is_an_answer(script, tmp_path):
    run = SyntheticRun(num_ranks=4, hosts=("n1", "n2"), noise=0.02).write(tmp_path / "run").path
    code, out, _ = script("topology_hotspots", run, "--out", tmp_path)
    assert code == 0
    assert "run: no rank, node or leaf is slower than its peers beyond noise" in out
    assert _rows(tmp_path / "topology_hotspots.csv") == []


def test_the_timeline_has_the_slow_rank_first_with_the_parts_of_its_step(script, slow_rank, tmp_path):
    _, out, _ = script("bottleneck_timeline", slow_rank, "--out", tmp_path)
    rows = _rows(tmp_path / "bottleneck_timeline.csv")
    assert [len(rows), rows[0]["rank"], rows[0]["host"]] == [8, "3", "n2"]
    assert float(rows[0]["wait_ms"]) == pytest.approx(0, abs=0.1)
    assert all(float(row["wait_ms"]) > 5 for row in rows[1:])
    assert "most work beyond its role: rank 3" in out


def test_of_many_ranks_the_timeline_shows_sixteen_and_writes_all(script, tmp_path):
    run = SyntheticRun(num_ranks=18, num_steps=5, slow={7: 1.5}, noise=0.02).write(tmp_path / "run").path
    _, out, _ = script("bottleneck_timeline", run, "--out", tmp_path)
    assert "16 of 18 ranks shown" in out
    assert len(_rows(tmp_path / "bottleneck_timeline.csv")) == 18


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_one_rank_has_no_one_to_wait_for(script, tmp_path, name):
    run = SyntheticRun(num_ranks=1, num_steps=6).write(tmp_path / "run").path
    code, _, err = script(name, run, "--out", tmp_path)
    assert code == (3 if name == "jitter_amplification" else 0)
    assert err.count("\n") == (name == "jitter_amplification")


def test_names_from_files_break_neither_terminal_nor_plot(script, tmp_path):
    hosts = ("n\x1b[31m$x", "_n$y")
    run = SyntheticRun(num_ranks=4, num_steps=14, hosts=hosts, slow={2: 1.5, 3: 1.5}, noise=0.02)
    path = run.write(tmp_path / "_$a^{").path
    for name in NAMES[1:]:
        code, out, _ = script(name, path, "--out", tmp_path)
        assert code == 0
        assert "\x1b" not in out


def test_runs_of_one_name_are_told_apart(script, slow_rank, tmp_path):
    other = SyntheticRun(num_ranks=2, num_steps=14).write(tmp_path / "slow-rank").path
    script("bottleneck_timeline", slow_rank, other, "--out", tmp_path)
    assert {row["run"] for row in _rows(tmp_path / "bottleneck_timeline.csv")} == {str(slow_rank), str(other)}


@each_case("name", NAMES)
def test_a_missing_run_is_one_line_and_exit_code_2(tmp_path, name):
    # As users start it, without a display.
    environ = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "MPLBACKEND")}
    command = [sys.executable, str(FOLDER / f"{name}.py"), "nowhere", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == ("hpcpace: no run directory at nowhere: name the folder that holds attempt-0\n")
    assert os.listdir(tmp_path) == []


def test_a_run_without_common_steps_is_named_with_exit_code_3(script, tmp_path):
    run = SyntheticRun(num_ranks=2, num_steps=2, num_warmup=2).write(tmp_path / "run").path
    code, _, err = script("bottleneck_timeline", run, "--out", tmp_path)
    assert code == 3
    assert f"hpcpace: {run}: none of the 2 common steps" in err


def test_a_folder_that_cannot_be_written_is_one_line(script, slow_rank, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = script("bottleneck_timeline", slow_rank, "--out", tmp_path / "file")
    assert code == 2
    assert err.startswith(f"hpcpace: cannot write to {tmp_path / 'file'}")
    assert err.count("\n") == 1


def _paced(path: Path, policy: str, **run: object) -> Path:
    made = SyntheticRun(num_ranks=4, hosts=("n1", "n2"), noise=0.02, **run).write(path)
    attempt = made.attempts()[-1]
    attempt.run_json.write_text(json.dumps({"config": {"pace": {"policy": policy}}}))
    if policy != "none":
        attempt.trial_json.write_text(json.dumps({"sentence": "pacing off: waiting only"}))
    return made.path


def test_paced_runs_are_a_table_beside_the_published_one(script, tmp_path):
    runs = [_paced(tmp_path / f"none-{n}", "none", slow={1: 1.5}) for n in range(2)]
    runs += [_paced(tmp_path / f"slack-{n}", "slack") for n in range(2)]
    code, out, err = script("pacing_table", *runs, "--out", tmp_path / "new")
    assert (code, err) == (0, "")
    assert sorted(os.listdir(tmp_path / "new")) == [f"pacing_table.{ending}" for ending in ("csv", "png", "svg")]
    baseline, slack = _rows(tmp_path / "new" / "pacing_table.csv")
    assert (baseline["policy"], baseline["num_runs"], baseline["gain"]) == ("none", "2", "")
    assert float(slack["gain"]) > 0.3
    assert "2 nodes, slack: pacing off: waiting only" in out
    assert "Nothing was published for 2 nodes" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("written")) <= 100


def test_the_published_table_is_shown_for_as_many_nodes(script, tmp_path):
    hosts = ("n1", "n2", "n3", "n4")
    run = SyntheticRun(num_ranks=4, hosts=hosts, noise=0.02).write(tmp_path / "run").path
    script("pacing_table", run, "--out", tmp_path)
    (row,) = _rows(tmp_path / "pacing_table.csv")
    assert (row["nodes"], row["published_variation"], row["published_gain"]) == ("4", "0.02", "")


def test_pacing_without_runs_asks_for_them(script, tmp_path):
    code, _, err = script("pacing_table", "--out", tmp_path)
    assert code == 2
    assert "name runs" in err


@pytest.mark.slow
def test_the_model_says_what_the_published_table_requires(script, tmp_path, monkeypatch):
    monkeypatch.setattr("library.pacing.POLICIES", ("slack",))
    monkeypatch.setattr("library.pacing.STRENGTHS", {"none": (0.0,), "poll stealing": (0.25, 0.5)})
    monkeypatch.setattr("library.pacing.CAUSES", ("lasting",))
    monkeypatch.setattr("library.pacing.fit", partial(fit, num_steps=140))
    code, out, err = script("pacing_table", "--simulate", "--out", tmp_path)
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "Without a coupling the most that any policy gains is +0.0 %" in said
    assert "The published +11.0 % at 64 nodes: poll stealing of about 0.3" in said
    assert "Both at once: in none of the simulated jobs" in said
    rows = _rows(tmp_path / "pacing_table_model.csv")
    assert len(rows) == 3 * 5
    assert max(float(row["gain"]) for row in rows if row["coupling"] == "none") <= 1e-9


def test_a_host_that_is_named_like_a_formula_is_text_in_the_table(script, tmp_path):
    hosts = ("=cmd|'/C calc'!A0", "@n2")
    run = SyntheticRun(num_ranks=4, num_steps=14, hosts=hosts, noise=0.02).write(tmp_path / "run").path
    script("bottleneck_timeline", run, "--out", tmp_path)
    assert {row["host"] for row in _rows(tmp_path / "bottleneck_timeline.csv")} == {f"'{host}" for host in hosts}
