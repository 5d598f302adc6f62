"""`hpcpace scale`: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from experiments.synthetic_run import SyntheticRun

TABLE = "run,nodes,throughput,batch\na,1,100,64\nb,2,190,128\nc,4,340,256\nd,8,560,512\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs of 1, 2 and 4 nodes, whose batch grows with them."""
    folder = tmp_path_factory.mktemp("scale")
    made = {}
    for nodes in (1, 2, 4):
        hosts = tuple(f"n{host}" for host in range(nodes))
        run = SyntheticRun(num_ranks=nodes, num_steps=30, hosts=hosts, noise=0.02, samples_per_step=64 * nodes)
        made[nodes] = run.write(folder / f"n{nodes}").path
    return made


def test_the_output_fits_80_columns_and_begins_with_what_matters(hpcpace, runs: dict[int, Path]) -> None:
    code, out, err = hpcpace("scale", *runs.values())
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("Scaling    weak (the batch of a unit is 64 at every size): ")
    for word in (
        "Knee ",
        "Stopped by",
        "Sizes",
        "Where the step goes",
        "Larger sizes",
        "rests on",
        "8 nodes (2 times)",
    ):
        assert word in out
    assert "beyond 16 nodes nothing is predicted" in out


def test_a_host_that_is_always_slower_costs_more_nodes_no_more(hpcpace, tmp_path: Path) -> None:
    for nodes in (1, 2, 4):
        slow = {nodes - 1: 1.2} if nodes > 1 else {}
        hosts = tuple(f"n{host}" for host in range(nodes))
        run = SyntheticRun(
            num_ranks=nodes, num_steps=102, hosts=hosts, noise=0.02, samples_per_step=64 * nodes, slow=slow
        )
        run.write(tmp_path / f"n{nodes}")
    _, out, _ = hpcpace("scale", *(tmp_path / f"n{nodes}" for nodes in (1, 2, 4)), "--json")
    content = json.loads(out)
    assert content["stop"]["part"] == "imbalance"
    for size in content["predictions"]:
        low, high = size["step_interval_ns"]
        assert low < 42.0e6 < high and size["step_ns"] == pytest.approx(42.0e6, rel=0.03)


def test_json_and_csv_have_the_same_figures(hpcpace, runs: dict[int, Path], tmp_path: Path) -> None:
    code, out, _ = hpcpace("scale", *runs.values(), "--json", "--csv", tmp_path / "out.csv")
    content = json.loads(out)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert code == 0 and content["schema"] == "hpcpace-scale/1"
    assert [int(row["units"]) for row in rows] == [1, 2, 4, 8, 16]
    for row, size in zip(rows, content["sizes"], strict=False):
        assert float(row["scaling_factor"]) == pytest.approx(size["scaling_factor"], rel=1e-4)


FLAT = Path(__file__).parents[1] / "data" / "scale" / "flat-throughput.csv"


def test_a_throughput_that_stays_the_same_is_asked_about_and_not_judged(hpcpace, tmp_path: Path) -> None:
    code, out, err = hpcpace("scale", FLAT)
    assert (code, out) == (3, "") and "--throughput gpu" in err and "0.94" in err and "0.06" in err
    factors = {}
    for per in ("gpu", "total"):
        code, out, _ = hpcpace("scale", FLAT, "--throughput", per, "--json")
        factors[per] = round(json.loads(out)["sizes"][-1]["scaling_factor"], 2)
    named = tmp_path / "named.csv"
    named.write_text(FLAT.read_text().replace("throughput", "samples/s/GPU"))
    factors["named"] = round(json.loads(hpcpace("scale", named, "--json")[1])["sizes"][-1]["scaling_factor"], 2)
    assert factors == {"gpu": 0.94, "total": 0.06, "named": 0.94}
    assert hpcpace("scale", named, "--throughput", "total")[0] == 2


def test_sizes_that_scale_better_than_they_can_are_remarked_on(hpcpace, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("run,nodes,throughput,batch\na,1,100,64\nb,2,260,128\n")
    assert "super-linear (scaling factor 1.30)" in hpcpace("scale", table)[1]
    table.write_text(TABLE)
    assert "super-linear" not in hpcpace("scale", table)[1]


def test_a_csv_file_of_another_tool_is_read(hpcpace, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(TABLE)
    code, out, _ = hpcpace("scale", tmp_path / "runs.csv")
    assert code == 0 and "not known: a table has speeds alone" in out and "16 nodes (2 times)" in out


def test_the_interval_of_repeats_that_agree_has_a_width(hpcpace, tmp_path: Path) -> None:
    lines = [f"{nodes}-{row},{nodes},{rate},{64 * nodes}" for nodes, rate in ((1, 100), (2, 190)) for row in range(3)]
    (tmp_path / "runs.csv").write_text("\n".join(["run,nodes,throughput,batch", *lines]))
    code, out, _ = hpcpace("scale", tmp_path / "runs.csv")
    assert code == 0 and "0.95 0.948-0.952" in out


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_the_user_can_say_how_the_work_grows(hpcpace, tmp_path: Path, kind: str) -> None:
    (tmp_path / "runs.csv").write_text("run,nodes,step_time_s\na,1,1.0\nb,2,0.6\nc,4,0.4\n")
    code, out, _ = hpcpace("scale", tmp_path / "runs.csv", "--scaling", kind)
    assert code == 0 and f"Scaling    {kind} (as told)" in out


def test_work_that_neither_grows_nor_stays_the_same_has_no_knee(hpcpace, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("run,nodes,throughput,batch\na,1,100,64\nb,2,190,128\nc,4,200,64\n")
    code, out, _ = hpcpace("scale", tmp_path / "runs.csv")
    assert code == 0 and "Knee       not known: neither weak nor strong scaling" in out


def test_a_broken_run_and_one_named_twice_are_left_out_with_a_warning(
    hpcpace, runs: dict[int, Path], tmp_path: Path
) -> None:
    (tmp_path / "broken" / "attempt-0").mkdir(parents=True)
    code, out, err = hpcpace("scale", *runs.values(), runs[1], tmp_path / "broken")
    assert code == 1 and "warning" in err and "broken" in err
    assert "n1 is named twice, and counts once" in " ".join(out.split())


def test_a_run_that_cannot_be_read_is_named_even_if_too_few_are_left(
    hpcpace, runs: dict[int, Path], tmp_path: Path
) -> None:
    (tmp_path / "broken" / "attempt-0").mkdir(parents=True)
    code, _, err = hpcpace("scale", runs[2], tmp_path / "broken")
    assert code == 3 and "add runs of other sizes" in err and str(tmp_path / "broken") in err


def test_one_size_cannot_tell(hpcpace, runs: dict[int, Path]) -> None:
    code, _, err = hpcpace("scale", runs[2])
    assert code == 3 and "all runs are of one size, 2 nodes: add runs of other sizes" in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (TABLE.replace("340", "fast"), "write a number"),
        (TABLE.replace("nodes", "hosts"), "column 'hosts'"),
        ("run,throughput\na,100\nb,190\n", "neither nodes nor ranks"),
        ("", "neither a column step_time_s nor throughput in its first line"),
        ("run,nodes,throughput\n", "no runs below its header"),
        ("run,nodes,throughput\na,0,5\nb,2,6\n", "nodes"),
    ],
)
def test_a_csv_file_with_mistakes_is_refused(hpcpace, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "runs.csv").write_text(content)
    code, out, err = hpcpace("scale", tmp_path / "runs.csv")
    assert (code, out) == (2, "") and said in err


def test_runs_and_tables_are_not_mixed(hpcpace, runs: dict[int, Path], tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(TABLE)
    code, _, err = hpcpace("scale", runs[1], tmp_path / "runs.csv")
    assert code == 2 and "name it alone" in err


@pytest.mark.parametrize("path", ["nothing", "empty"])
def test_a_path_without_a_run_is_refused(hpcpace, tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = hpcpace("scale", tmp_path / path)
    assert code == 2 and "no run can be read" in err


def test_a_file_that_is_no_probe_is_refused(hpcpace, runs: dict[int, Path], tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text("{}")
    code, _, err = hpcpace("scale", *runs.values(), "--probe", tmp_path / "probe.json")
    assert code == 2 and "no saved probe" in err


@pytest.mark.parametrize("target", ["runs.csv", "./sub/../runs.csv", "link.csv", "hard.csv", "probe.json"])
def test_a_file_that_is_read_is_not_replaced(hpcpace, tmp_path: Path, target: str) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in (("runs.csv", TABLE), ("probe.json", "{}")):
        (tmp_path / name).write_text(content)
    (tmp_path / "link.csv").symlink_to(tmp_path / "runs.csv")
    (tmp_path / "hard.csv").hardlink_to(tmp_path / "runs.csv")
    call = ("scale", tmp_path / "runs.csv", "--probe", tmp_path / "probe.json", "--csv", tmp_path / target)
    code, out, err = hpcpace(*call)
    assert (code, out) == (2, "") and "would be lost: name another file with --csv" in err
    assert (tmp_path / "runs.csv").read_text() == TABLE and (tmp_path / "link.csv").is_symlink()
    assert hpcpace("scale", tmp_path / "link.csv", "--csv", tmp_path / "runs.csv")[0] == 2
    assert (tmp_path / "runs.csv").read_text() == TABLE


def test_what_a_run_has_recorded_is_not_replaced_and_an_earlier_table_is(hpcpace, runs: dict[int, Path]) -> None:
    trace = runs[1] / "attempt-0" / "trace" / "rank-00000.h5"
    code, _, err = hpcpace("scale", *runs.values(), "--csv", trace)
    assert code == 2 and "is what a run has recorded and would be lost" in err
    for folder in (runs[1], runs[1] / "attempt-0", runs[1], runs[1] / "attempt-0"):
        assert hpcpace("scale", *runs.values(), "--csv", folder / "sizes.csv")[0] == 0


def test_a_table_that_cannot_be_written_is_told(hpcpace, runs: dict[int, Path]) -> None:
    code, _, err = hpcpace("scale", *runs.values(), "--csv", "/nonexistent/x.csv")
    assert code == 2 and "cannot write /nonexistent/x.csv" in err


def test_a_smaller_size_whose_parts_are_not_known_leaves_the_law_of_the_whole_step(hpcpace, tmp_path: Path) -> None:
    SyntheticRun(num_ranks=4, pipeline=2, noise=0.02).write(tmp_path / "small")
    SyntheticRun(num_ranks=8, hosts=("n1", "n2"), noise=0.02).write(tmp_path / "large")
    code, out, _ = hpcpace("scale", tmp_path / "small", tmp_path / "large")
    assert code in (0, 1, 3) and "step times at 2 sizes alone" in " ".join(out.split())
