"""The notebooks of the guide run as scripts, on runs with the faults of `make demo`, and find them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from experiments.synthetic_run import SyntheticRun

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SyntheticRun(noise=0.05).write(tmp_path / "runs/demo/clean")
    SyntheticRun(noise=0.05, slow={2: 2.0}).write(tmp_path / "runs/demo/slow-rank-2")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("demo")
def test_a_straggler_is_found_in_the_frames(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(ROOT / "docs/notebooks/straggler.py"))
    assert "rank 2" in capsys.readouterr().out
    assert found["by_rank"]["excess, ms"].idxmax() == 2
    assert found["late"].mode().tolist() == [2]
    assert found["waits"].sum(axis=1).idxmax() == 2


@pytest.mark.usefixtures("demo")
def test_jitter_is_what_lasting_differences_leave(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(ROOT / "docs/notebooks/jitter.py"))
    values = dict(re.findall(r"^(.*): +([\d.]+)$", capsys.readouterr().out, re.M))
    assert float(values["A of whole steps"]) == pytest.approx(float(values["A of the report"]), abs=0.01)
    assert 1 < float(values["of jitter proper"]) < 1.2
    assert found["work_ms"].shape == found["jitter_ms"].shape == (38, 4)


@pytest.mark.usefixtures("demo")
def test_the_difference_of_two_runs_has_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(ROOT / "docs/notebooks/several_runs.py"))
    assert found["low"] > 1.2 and "95 %" in capsys.readouterr().out
    assert (found["table"]["difference"].filter(regex="forward|backward") > 0).all()


def test_each_notebook_is_in_the_navigation_and_has_a_kernel() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        assert f"notebooks/{path.name}\n" in nav
        assert "kernelspec" in path.read_text().partition("# %%")[0]
