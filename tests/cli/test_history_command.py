"""`hpcpace history`: exit codes, output and wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.synthetic_run import SyntheticRun

Call = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parents[1] / "data" / "history"
RUN = SyntheticRun(num_ranks=4, num_steps=12, hosts=("n0", "n1", "n2", "n3"))


def _csv(path: Path, times: list[float]) -> Path:
    lines = "".join(f"2026-01-{day:02},r{day},train,{value}\n" for day, value in enumerate(times, 1))
    path.write_text(f"date,run,job,step_time_s\n{lines}")
    return path


def test_a_history_of_a_folder_has_a_line_a_run(hpcpace: Call, tmp_path: Path) -> None:
    RUN.write(tmp_path / "a")
    RUN.write(tmp_path / "b")
    code, out, _ = hpcpace("history", tmp_path)
    assert code == 0 and "nothing changed beyond noise" in out and "2 runs in 1 series" in out
    assert "37.0 ms" in out or "36.0 ms" in out
    assert (tmp_path / "hpcpace-history.json").is_file()


def test_a_change_is_told_with_its_date(hpcpace: Call, tmp_path: Path) -> None:
    code, out, _ = hpcpace("history", _csv(tmp_path / "runs.csv", [0.1] * 6 + [0.11] * 6))
    told = " ".join(out.split())
    assert code == 0 and "1 lasting change" in told
    assert "train is 10.0 % slower since Wed 2026-01-07 00:00 (100 ms to 110 ms), in 6 runs" in told
    assert "▁▁▁▁▁▁██████" in out and "changed +10 %" in out


def test_json_is_for_programs(hpcpace: Call, tmp_path: Path) -> None:
    code, out, _ = hpcpace("history", _csv(tmp_path / "runs.csv", [0.1] * 6 + [0.11] * 6), "--json")
    content = json.loads(out)
    assert code == 0 and content["schema"] == "hpcpace-history/1"
    (event,) = content["events"]
    assert (event["duration"], event["num_runs"]) == ("lasting", 6) and len(content["series"][0]["rows"]) == 12


def test_the_page_has_plots(hpcpace: Call, tmp_path: Path) -> None:
    code, out, _ = hpcpace(
        "history", _csv(tmp_path / "runs.csv", [0.1] * 6 + [0.11] * 6), "--html", tmp_path / "h.html"
    )
    assert code == 0 and str(tmp_path / "h.html") in out
    assert "Save history.json" in (tmp_path / "h.html").read_text()


def test_a_width_of_80_columns_is_enough(hpcpace: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcpace.cli.options.MAX_WIDTH", 80)
    monkeypatch.chdir(DATA)
    _, out, _ = hpcpace("history", "megatron-lm.csv")
    assert max(map(len, out.splitlines())) <= 80


def test_a_long_name_of_a_job_leaves_room_for_the_other_columns(
    hpcpace: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcpace.cli.options.MAX_WIDTH", 80)
    job = "gpt2-tiny (2 ranks, dp=2,pp=1,tp=1, 1024 tokens, float32) " * 2
    (tmp_path / "runs.csv").write_text(
        f'run,job,date,step_time_s\na,"{job}",2026-05-07,0.1\nb,"{job}",2026-05-08,0.1\n'
    )
    _, out, _ = hpcpace("history", tmp_path / "runs.csv")
    assert "2026-05-07 2026-05-08   100 ms  100 ms" in out and "…" not in out


def test_a_run_without_a_date_has_none_in_the_table(hpcpace: Call, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("run,nodes,step_time_s\na,1,0.1\nb,2,0.1\n")
    _, out, _ = hpcpace("history", tmp_path / "runs.csv")
    assert "unknown date" not in out and "all (1 node)" in out


def test_older_runs_are_counted(hpcpace: Call, tmp_path: Path) -> None:
    _, out, _ = hpcpace("history", _csv(tmp_path / "runs.csv", [0.1] * 12), "--runs", "5")
    assert "7 older runs" in out


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["missing"], 2, "cannot read missing"),
        (["missing.csv"], 2, "cannot read missing.csv"),
        (["empty"], 3, "empty has no run that can be used"),
        (["runs.csv", "--job", "other"], 3, "no run of that job or host that can be used"),
        (["wrong.csv"], 2, "line 2: step_time_s is 'x'"),
        (["runs.csv", "--runs", "-1"], 2, "-1"),
    ],
)
def test_wrong_input_is_told(
    hpcpace: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    _csv(tmp_path / "runs.csv", [0.1, 0.1])
    (tmp_path / "wrong.csv").write_text("run,step_time_s\nr,x\n")
    found, out, error = hpcpace("history", *words)
    assert found == code and told in " ".join((out + error).split())


def test_what_was_not_searched_is_told(hpcpace: Call, tmp_path: Path) -> None:
    RUN.write(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs" / "1" / "2" / "3" / "4").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "runs" / name).symlink_to(tmp_path / "elsewhere" / "a")
    code, out, error = hpcpace("history", tmp_path / "runs")
    told = " ".join((out + error).split())
    assert code == 3 and "2 links to folders elsewhere not followed" in told
    assert "1 folder more than three deep not searched" in told


def test_a_file_of_settings_says_how_many_runs_a_level_has(hpcpace: Call, tmp_path: Path) -> None:
    runs, file = _csv(tmp_path / "runs.csv", [0.1] * 6 + [0.11] * 6), tmp_path / "hpcpace.toml"
    file.write_text("[thresholds.history]\nmin_runs = 7\n")
    _, out, _ = hpcpace("history", runs, "--config", file)
    assert "lasting change" not in out
    file.write_text("[thresholds.history]\nmin_runs = 1\n")
    code, _, err = hpcpace("history", runs, "--config", file)
    assert code == 2 and "thresholds.history.min_runs is 1: it must be a number at least 2" in " ".join(err.split())
