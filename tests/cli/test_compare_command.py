"""`hpcpace compare`: exit codes, output and wrong input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from experiments.synthetic_run import SyntheticRun

Call = Callable[..., tuple[int, str, str]]
HOSTS = ("n0", "n1", "n2", "n3")
RUN = SyntheticRun(num_ranks=4, num_steps=20, hosts=HOSTS)
SLOW = SyntheticRun(num_ranks=4, num_steps=20, hosts=HOSTS, slow={3: 1.1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: a and a2 are alike, in b a host is slow, batch has another batch, warmup has no steps, broken no trace."""
    made = tmp_path_factory.mktemp("runs")
    RUN.write(made / "a")
    SyntheticRun(num_ranks=4, num_steps=20, hosts=HOSTS, noise=0.001).write(made / "a2")
    SLOW.write(made / "b")
    SyntheticRun(num_ranks=4, num_steps=20, hosts=HOSTS, samples_per_step=128).write(made / "batch")
    SyntheticRun(num_ranks=4, num_steps=5, hosts=HOSTS).write(made / "short")
    SyntheticRun(num_ranks=4, num_steps=2, num_warmup=2, hosts=HOSTS).write(made / "warmup")
    for file in RUN.write(made / "broken").last_attempt().trace_dir.iterdir():
        file.write_bytes(b"no trace")
    return made


def test_a_slower_run_exits_with_1_and_says_where(hpcpace: Call, folder: Path) -> None:
    code, out, _ = hpcpace("compare", folder / "a", folder / "b")
    assert code == 1
    assert "B is 8.3 % slower than A" in out and "n3 is 8.8 % slower in B by its own work" in out
    assert "exposed wait: for n3" in out and "nothing that the runs record" in out


@pytest.mark.parametrize(("pair", "word"), [(("a", "a2"), "no difference"), (("b", "a"), "faster")])
def test_a_run_that_is_not_slower_exits_with_0(hpcpace: Call, folder: Path, pair: tuple[str, str], word: str) -> None:
    code, out, _ = hpcpace("compare", folder / pair[0], folder / pair[1])
    assert code == 0 and word in out


def test_groups_stand_on_both_sides_of_two_dashes(hpcpace: Call, folder: Path) -> None:
    code, out, _ = hpcpace("compare", folder / "a", folder / "a2", "--", folder / "b")
    assert code == 1 and "2 runs of A and 1 of B" in out


def test_the_page_has_both_runs_side_by_side(hpcpace: Call, folder: Path, tmp_path: Path) -> None:
    code, out, _ = hpcpace("compare", folder / "a", folder / "b", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert code == 1 and str(tmp_path / "page.html") in out
    assert "B is 8.3 % slower than A" in page and "<h3>A</h3>" in page and "<h3>B</h3>" in page
    assert 'id="parts"' in page and 'id="blocks"' in page and "Save comparison.json" in page


def test_json_is_for_programs(hpcpace: Call, folder: Path) -> None:
    code, out, _ = hpcpace("compare", folder / "a", folder / "b", "--json")
    content = json.loads(out)
    assert code == 1 and content["schema"] == "hpcpace-compare/1"
    parts = sum(part["after_ns"] - part["before_ns"] for part in content["parts"])
    assert parts == pytest.approx(content["after"][0]["p50_ns"] - content["before"][0]["p50_ns"])


def test_a_width_of_80_columns_is_enough(hpcpace: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.cli.options.MAX_WIDTH", 80)
    monkeypatch.chdir(folder)
    _, out, _ = hpcpace("compare", "a", "b")
    assert max(map(len, out.splitlines())) <= 80
    (row,) = (line for line in out.splitlines() if line.startswith("n3"))
    assert re.search(r"\+8\.8 % \+[0-9.]+ to \+[0-9.]+ ", row)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["a"], 2, "1 run named: give two"),
        (["a", "b", "a2"], 2, "two groups with -- between them"),
        (["a", "--"], 2, "a side of -- has no run"),
        (["--", "a", "b"], 2, "a side of -- has no run"),
        (["a", "--", "b", "--", "a2"], 2, "three groups"),
        (["a", "a"], 2, "named twice"),
        (["a", "missing"], 2, "no run directory at"),
        (["a", "broken"], 2, "no trace can be read in broken"),
        (["a", "warmup"], 3, "none of the 2 common steps"),
        (["a", "short"], 3, "8 are needed"),
        (["a", "batch"], 2, "the runs do different work (a step has 64 and 128 tokens)"),
        (["a", "missing.csv"], 2, "cannot read missing.csv"),
        (["a", "b", "--run-cv", "nan"], 2, "nan is not in the range"),
        (["a", "b", "--html", "nowhere/page.html"], 2, "cannot write nowhere/page.html"),
    ],
)
def test_wrong_input_is_told(
    hpcpace: Call, folder: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], code: int, told: str
) -> None:
    monkeypatch.chdir(folder)
    found, out, error = hpcpace("compare", *words)
    assert found == code and told in " ".join((out + error).split())


def test_different_work_says_what_it_means(hpcpace: Call, folder: Path) -> None:
    code, out, _ = hpcpace("compare", folder / "a", folder / "batch", "--anyway")
    assert code == 0
    assert "the work differs: a step has 64 and 128 tokens" in out and "scaled to the batch of A" in out


def test_times_of_a_step_are_not_compared_with_those_of_a_sample(hpcpace: Call, tmp_path: Path) -> None:
    lines = {"steps": "run,step_time_s\na,0.5\n", "rates": "run,throughput\na,128\n"}
    lines |= {"batches": "run,throughput,batch\na,128,64\n"}
    for name, content in lines.items():
        (tmp_path / f"{name}.csv").write_text(content)
    code, _, error = hpcpace("compare", tmp_path / "steps.csv", tmp_path / "rates.csv")
    assert code == 2 and "how many samples a step has is known of one of them alone" in error
    code, _, error = hpcpace("compare", tmp_path / "rates.csv", tmp_path / "batches.csv")
    assert code == 2 and "the batch is known of one of them alone, the other has a throughput without it" in error
    code, out, _ = hpcpace("compare", tmp_path / "rates.csv", tmp_path / "batches.csv", "--anyway")
    assert code == 0 and "no difference beyond noise" in out


def test_jobs_of_a_csv_file_are_different_work(hpcpace: Call, tmp_path: Path) -> None:
    for name, job in (("a", "train"), ("b", "tune")):
        (tmp_path / f"{name}.csv").write_text(f"run,step_time_s,job\nr,0.5,{job}\n")
    code, _, error = hpcpace("compare", tmp_path / "a.csv", tmp_path / "b.csv")
    assert code == 2 and "job is train and tune" in error


def test_a_link_to_a_run_is_no_other_run(hpcpace: Call, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder / "a")
    code, _, error = hpcpace("compare", folder / "a", tmp_path / "link")
    assert code == 2 and "named twice" in error


@pytest.mark.parametrize(
    ("column", "counts", "told"),
    [("nodes", (4, 8), "nodes: 4 -> 8"), ("ranks", (4, 8), "ranks: 4 -> 8"), ("nodes", ("n[1-4]", 8), "nodes: 4 -> 8")],
)
def test_a_csv_file_counts_nodes_or_ranks(
    hpcpace: Call, tmp_path: Path, column: str, counts: tuple[object, object], told: str
) -> None:
    for name, count in zip("ab", counts, strict=True):
        (tmp_path / f"{name}.csv").write_text(f"run,step_time_s,{column}\nr,0.5,{count}\n")
    code, out, _ = hpcpace("compare", tmp_path / "a.csv", tmp_path / "b.csv")
    layout = [" ".join(line.split()) for line in out.splitlines() if line.startswith("layout")]
    assert code == 0 and layout == [f"layout {told}"]


def test_runs_of_a_csv_file_are_a_group(hpcpace: Call, tmp_path: Path) -> None:
    for name, times in (("a", (0.50, 0.51, 0.505)), ("b", (0.60, 0.61, 0.605))):
        lines = "".join(f"r{number},{value}\n" for number, value in enumerate(times))
        (tmp_path / f"{name}.csv").write_text(f"run,step_time_s\n{lines}")
    code, out, _ = hpcpace("compare", tmp_path / "a.csv", tmp_path / "b.csv")
    assert code == 1 and "B is 19.8 % slower" in out and "so neither is where the difference comes" in out
