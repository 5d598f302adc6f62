"""The figures of a scaling series: scaling_curve.py and scaling_factor.py."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

WEAK = "run,nodes,throughput,batch\na,1,100,64\nb,2,190,128\nc,4,340,256\nd,8,560,512\n"
BETTER = "run,nodes,throughput,batch\na,1,100,64\nb,2,230,128\n"  # as where caches hold less work
UNKNOWN = "run,nodes,throughput\na,2,100\nb,4,150\n"
FLAT = "run,nodes,throughput\na,2,100\nb,4,90\n"


@pytest.mark.parametrize("name", ["scaling_curve", "scaling_factor"])
@pytest.mark.parametrize("content", [WEAK, BETTER, UNKNOWN])
def test_each_script_writes_its_table_and_figures(script, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "runs.csv").write_text(content)
    code, out, err = script(name, tmp_path / "runs.csv", "--out", tmp_path / "out")
    assert (code, err) == (0, "") and f"{name}.png" in out
    with (tmp_path / "out" / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    measured = [row for row in rows if row["is_predicted"] == "0"]
    assert [row["units"] for row in measured] == [line.split(",")[1] for line in content.splitlines()[1:]]
    for ending in ("png", "svg"):
        assert (tmp_path / "out" / f"{name}.{ending}").stat().st_size > 5_000


@pytest.mark.parametrize("name", ["scaling_curve", "scaling_factor"])
def test_the_user_can_say_how_the_work_grows(script, tmp_path: Path, name: str) -> None:
    (tmp_path / "runs.csv").write_text("run,nodes,step_time_s\na,1,1\nb,2,1.05\nc,4,1.1\n")
    code, _, err = script(name, tmp_path / "runs.csv", "--out", tmp_path / "out")
    assert code == 3 and "--scaling weak or --scaling strong" in err
    code, out, _ = script(name, tmp_path / "runs.csv", "--scaling", "weak", "--out", tmp_path / "out")
    assert code == 0 and "weak" in out and "as told" in out


@pytest.mark.parametrize("name", ["scaling_curve", "scaling_factor"])
def test_the_user_can_say_whose_throughput_it_is(script, tmp_path: Path, name: str) -> None:
    (tmp_path / "runs.csv").write_text(FLAT)
    code, _, err = script(name, tmp_path / "runs.csv", "--out", tmp_path / "out")
    assert code == 3 and "--throughput gpu" in err and "--throughput total" in err
    code, out, _ = script(name, tmp_path / "runs.csv", "--throughput", "total", "--out", tmp_path / "out")
    assert code == 0 and f"{name}.png" in out


@pytest.mark.parametrize("name", ["scaling_curve", "scaling_factor"])
def test_runs_that_are_left_out_are_in_the_exit_code(script, tmp_path: Path, name: str) -> None:
    (tmp_path / "runs.csv").write_text(WEAK + "e,8,300,256\n")
    code, out, _ = script(name, tmp_path / "runs.csv", "--out", tmp_path / "out")
    assert code == 1 and "e is not pooled with the others of 8" in " ".join(out.split())


@pytest.mark.parametrize("name", ["scaling_curve", "scaling_factor"])
def test_a_table_that_is_read_is_not_replaced(script, tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.csv").write_text(WEAK)
    code, _, err = script(name, tmp_path / f"{name}.csv", "--out", tmp_path)
    assert code == 2 and "would be lost: name another file with --out" in err
    assert (tmp_path / f"{name}.csv").read_text() == WEAK


@pytest.mark.parametrize("name", ["scaling_curve", "scaling_factor"])
def test_one_size_is_refused(script, tmp_path: Path, name: str) -> None:
    (tmp_path / "runs.csv").write_text("run,nodes,throughput\na,2,100\n")
    code, _, err = script(name, tmp_path / "runs.csv", "--out", tmp_path / "out")
    assert code == 3 and "all runs are of one size" in err
