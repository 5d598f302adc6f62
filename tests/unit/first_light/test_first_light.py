"""First light on a GPU: limits, what a runner keeps of steps that fail, and the page."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cases import each_case

from experiments.gpu import page
from experiments.gpu.place import ROOT, Place
from experiments.gpu.runner import LOGS, RESULTS, SETUP_S, STEPS, TOTAL_S, Result, Runner, Step, limits, line

FACTS = {"rehearsal": False, "device": "a GPU", "versions": {"torch": "2.11"}, "cores": 16}
PROGRAM = """
import json, os, pathlib, subprocess, sys
name, folder = sys.argv[2], pathlib.Path(sys.argv[3])
if name == "fails":
    (folder / name / "figures.json").write_text(json.dumps({"first": "measured"}))
    sys.exit("no such device")
if name == "leaves":
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    (folder / name / "figures.json").write_text(json.dumps({"pid": child.pid}))
print("all went well")
"""
LEAVES = """
import sys
from pathlib import Path
from experiments.gpu.runner import Runner, adopt_orphans
from experiments.gpu.runner import Step
adopt_orphans()
folder, program = Path(sys.argv[1]), (sys.executable, "-c", sys.argv[2])
runner = Runner(out=folder / "out", work=folder, options=[str(folder)], budget_s=600, program=program)
(result,) = runner.run([Step(name="leaves", measure="", title="", limit_s=60, cells={})], {})
print(result.status, result.figures["pid"])
"""


def _step(name: str, limit_s: int = 60) -> Step:
    return Step(name=name, measure="", title="", limit_s=limit_s, cells={})


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    work = tmp_path / "work"
    return Runner(
        out=tmp_path / "out",
        work=work,
        options=[str(work)],
        budget_s=600,
        program=(sys.executable, "-c", PROGRAM),
    )


def test_all_steps_and_the_installation_fit_into_the_limit() -> None:
    assert SETUP_S + sum(step.limit_s for step in STEPS) <= TOTAL_S <= 9 * 60
    assert limits(["--only", "a"]) == (TOTAL_S, SETUP_S)


@each_case("step", STEPS, ids=lambda step: step.name)
def test_a_step_has_a_function_that_measures_every_cell(step: Step) -> None:
    module = importlib.import_module("experiments.gpu.measures")
    measure = module.MEASURES[step.measure]
    assert callable(measure)
    parts = [measure, *(getattr(module, name, None) for name in measure.__code__.co_names)]
    own = [part for part in parts if inspect.isfunction(part) and part.__module__ == module.__name__]
    source = "".join(map(inspect.getsource, own))
    assert [name for name in step.cells if not re.search(rf'\b{name}=|"{name}"', source)] == []


def test_a_step_that_fails_leaves_its_figures_and_the_other_steps(runner: Runner) -> None:
    results = runner.run([_step("fails"), _step("works")], FACTS)
    assert [(result.status, result.figures) for result in results] == [("failed", {"first": "measured"}), ("ok", {})]
    assert results[0].reason == "no such device"
    kept = json.loads((runner.out / RESULTS).read_text())
    assert kept["steps"]["fails"]["figures"] == {"first": "measured"} and kept["device"] == "a GPU"
    with tarfile.open(runner.out / LOGS) as archive:
        assert sorted(archive.getnames()) == ["fails.log", "works.log"]


def test_a_step_beyond_its_limit_is_ended(runner: Runner) -> None:
    (result,) = runner.run([_step("works", limit_s=0)], FACTS)
    assert (result.status, result.reason) == ("timeout", "not finished after 0 s")


def test_what_a_step_leaves_running_is_ended(tmp_path: Path) -> None:
    """In a process of its own, which becomes the parent of orphans."""
    command = [sys.executable, "-c", LEAVES, str(tmp_path), PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    status, pid = done.stdout.splitlines()[-1].split()
    assert status == "ok" and not psutil.pid_exists(int(pid))


def test_steps_are_skipped_once_the_budget_is_used(runner: Runner) -> None:
    times_s: Iterator[float] = iter([0.0, 0.0, 1.0, 2.0, 599.0])
    late = Runner(
        out=runner.out, work=runner.work, options=runner.options, budget_s=600, program=runner.program,
        clock=lambda: next(times_s),
    )  # fmt: skip
    first, second = late.run([_step("works"), _step("others")], FACTS)
    assert (first.status, second.status, second.reason) == ("ok", "skipped", "the budget of 600 s is used up")


def test_the_results_of_other_steps_are_kept(runner: Runner) -> None:
    runner.run([_step("works")], FACTS)
    runner.run([_step("others")], FACTS)
    assert list(json.loads((runner.out / RESULTS).read_text())["steps"]) == ["others", "works"]


def test_a_line_fits_a_terminal() -> None:
    result = Result(step="a", status="ok", seconds=12.3, figures={"versions": "torch " * 40})
    assert len(line(result)) == 80


def test_figures_are_kept_as_they_are_found(tmp_path: Path) -> None:
    place = Place(name="a", folder=tmp_path, is_rehearsal=True)
    place.note(first=1)
    place.note(second="2")
    assert json.loads((tmp_path / "figures.json").read_text()) == {"first": 1, "second": "2"}


def test_a_program_that_fails_is_an_error_with_its_last_line(tmp_path: Path) -> None:
    place = Place(name="a", folder=tmp_path, is_rehearsal=True)
    with pytest.raises(RuntimeError, match="ended with 1: no GPU"):
        place.run(sys.executable, "-c", "import sys; sys.exit('no GPU')")


def test_the_page_is_what_the_kept_results_make_of_it() -> None:
    text = page.DOCUMENT.read_text()
    assert text == page.with_results(text, page.kept_results()), "run: experiments/gpu/first_light.sh --write FOLDER"


def test_the_page_explains_each_step() -> None:
    assert re.findall(r"^- \*\*(\w)\*\*", page.DOCUMENT.read_text(), re.MULTILINE) == [step.name for step in STEPS]


def _cells(results: dict[str, Any] | None) -> list[str]:
    return [row.split("|")[4].strip() for row in page.table(results).splitlines() if row.startswith("| ")][1:]


def test_without_results_each_cell_says_so() -> None:
    assert set(_cells(None)) == {"not yet measured"}
    assert len(_cells(None)) == sum(len(step.cells) for step in STEPS)


def test_a_cell_has_its_figure_or_the_reason_why_there_is_none() -> None:
    steps = {
        "a": {"figures": {"versions": "torch | CUDA"}, "reason": ""},
        "b": {"figures": {}, "reason": "not finished after 85 s"},
    }
    cells = _cells({**FACTS, "date": "2026-11-27", "steps": steps})
    assert cells[:4] == [
        "torch CUDA",
        *["not yet measured: step a left it out"] * 2,
        "not yet measured: not finished after 85 s",
    ]
    assert set(cells[5:]) == {"not yet measured"}


def _folder(path: Path, **facts: Any) -> Path:
    path.mkdir()
    steps = {"a": {"figures": {"versions": f"from {path.name}"}, "reason": ""}}
    (path / RESULTS).write_text(json.dumps({**FACTS, "date": "2026-11-27", "steps": steps, **facts}))
    return path


def test_results_of_a_rehearsal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="say nothing about GPUs"):
        page.write_page([_folder(tmp_path / "one", rehearsal=True)])


def test_results_of_two_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="different devices do not go into one table: H100, a GPU"):
        page.write_page([_folder(tmp_path / "one"), _folder(tmp_path / "two", device="H100")])


def test_steps_that_ran_again_replace_those_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "gpu.md"
    document.write_text("<!-- first light -->\n<!-- end -->\n")
    monkeypatch.setattr(page, "DOCUMENT", document)
    monkeypatch.setattr(page, "KEPT", tmp_path / "kept.json")
    page.write_page([_folder(tmp_path / "one"), _folder(tmp_path / "two")])
    assert "| from two |" in document.read_text() and "from one" not in document.read_text()
    assert document.read_text() == page.with_results(document.read_text(), page.kept_results())


def test_the_script_carries_what_a_wheel_of_hpcpace_needs() -> None:
    import tomllib

    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    script = (ROOT / "experiments" / "gpu" / "first_light.sh").read_text()
    packages = script.partition("packages=(")[2].partition(")")[0].split()
    at_hand = {"h5py", "numpy"}
    assert {re.split(r"[<>=]", one)[0] for one in wanted} - at_hand <= set(packages)
