"""The scripts of analysis/ over studies whose truth is known."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from known_study import write_study

pytest.importorskip("matplotlib")

from hpcpace.studies.setups import NanoCluster, Setup, model_size_setups, parse_layout

FOLDER = Path(__file__).parents[2] / "analysis"
NAMES = ("nano_cluster", "model_size")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    layouts = tuple(map(parse_layout, ("1x1", "2x1")))
    sweep = NanoCluster(batches=(16,), image_batches=(32,), layouts=layouts)
    return write_study(tmp_path_factory.mktemp("study"), sweep.setups(), bytes_per_s=1_000_000).path


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_nano_cluster_is_a_table_and_a_plot_beside_the_published_values(script, study, tmp_path):
    code, out, err = script("nano_cluster", study, "--out", tmp_path)
    assert (code, err) == (0, "")
    assert sorted(os.listdir(tmp_path)) == [f"nano_cluster.{ending}" for ending in ("csv", "png", "svg")]
    assert (tmp_path / "nano_cluster.png").read_bytes().startswith(b"\x89PNG")
    rows = {(row["model"], row["servers"], row["parallelism"]): row for row in _rows(tmp_path / "nano_cluster.csv")}
    assert len(rows) == 1 + 3 + 2
    data = rows["gpt2", "2", "data"]
    assert float(data["samples_per_s"]) == pytest.approx(64 / 0.036, rel=1e-3)
    assert float(data["network_bytes_per_sample"]) == pytest.approx(1e6 * 0.036 / 64, rel=1e-3)
    assert [data["published_samples_per_s"], data["published_scaling_factor"]] == ["6730", "0.11"]
    assert rows["resnet18", "2", "data"]["published_samples_per_s"] == ""
    assert max(len(line) for line in out.splitlines() if not line.startswith("written")) <= 100


def test_the_nano_cluster_says_what_is_not_done(script, tmp_path):
    setups = NanoCluster(batches=(16,), image_batches=(), layouts=(parse_layout("1x1"), parse_layout("1x2"))).setups()
    made = write_study(tmp_path / "study", setups)
    made.run_dir(made.runs()[0]).attempt(0).result_json.write_text('{"outcome": "out of memory"}')
    _, out, _ = script("nano_cluster", made.path, "--out", tmp_path)
    assert "1 run not finished" in out
    assert "out of memory" in out
    assert _rows(tmp_path / "nano_cluster.csv")[0]["num_out_of_memory"] == "1"


def test_model_sizes_are_a_table_beside_the_published_line(script, tmp_path):
    made = write_study(tmp_path / "study", model_size_setups(batch=16, shrink=16), bytes_per_s=1_000_000)
    code, out, err = script("model_size", made.path, "--out", tmp_path)
    assert (code, err) == (0, "")
    rows = _rows(tmp_path / "model_size.csv")
    assert [(row["preset"], row["num_layers"], row["width"]) for row in rows] == [
        *(("small", "12", "48"), ("medium", "24", "64"), ("large", "36", "80"), ("xl", "48", "100"))
    ]
    assert [round(float(row["published_volume_relative"]), 3) for row in rows] == [1, 1.299, 1.598, 1.897]
    assert {row["volume_relative"] for row in rows} == {"1"}
    assert float(rows[0]["s_per_million_tokens"]) == pytest.approx(1e6 * 0.036 / 64, rel=1e-3)
    assert "divided by 16" in " ".join(out.split())


def test_a_study_without_pipelines_has_no_model_sizes(script, study, tmp_path):
    single = Setup(model="gpt2", preset="small", layout=parse_layout("1x1"), parallelism="none", batch=4)
    made = write_study(tmp_path / "study", [single])
    code, _, err = script("model_size", made.path, "--out", tmp_path)
    assert code == 2
    assert "no pipeline runs of gpt2" in err


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_is_no_study_is_one_line_and_exit_code_2(script, tmp_path, name):
    code, _, err = script(name, tmp_path, "--out", tmp_path / "out")
    assert code == 2
    assert err == f"hpcpace: no study at {tmp_path}, which has no plan.json: plan one with sbatch/nano_cluster.sh\n"
