"""`hpcpace study` with wrong input: one line that says what is wrong, and no plan."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path

import pytest

from hpcpace.core.errors import EXIT_OK, EXIT_USAGE
from hpcpace.studies.jobs import SCHEMA, ScalingFolder, ScalingRun

RUN = ScalingRun(nodes=2, ranks_per_node=2)


@pytest.fixture
def study(hpcpace, monkeypatch):
    """Run a command with this stdin, and return its exit code, stdout and stderr."""

    def call(*arguments: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", StringIO(stdin))
        return hpcpace("study", *arguments)

    return call


@pytest.fixture
def planned(tmp_path) -> Path:
    ScalingFolder(tmp_path / "study").write_plan([RUN])
    return tmp_path / "study"


@pytest.mark.parametrize(
    ("command", "option", "value", "word"),
    [
        ("nano-cluster", "--batches", "", ""),
        ("nano-cluster", "--batches", "4,,8", ""),
        ("nano-cluster", "--batches", "4,x", ""),
        ("nano-cluster", "--batches", "0", ""),
        ("nano-cluster", "--image-batches", ",", ""),
        ("nano-cluster", "--preset", "huge", ""),
        ("nano-cluster", "--layouts", "", "layout ''"),
        ("scaling", "--nodes", "", ""),
        ("scaling", "--oversubscriptions", "", ""),
        ("scaling", "--placements", "", "placement ''"),
        ("pacing", "--nodes", "", ""),
        ("pacing", "--policies", "", "policy ''"),
    ],
)
def test_refuses_a_value_that_plans_nothing(study, tmp_path, command, option, value, word):
    code, out, err = study(command, tmp_path / "study", option, value)
    assert (code, out) == (EXIT_USAGE, "")
    assert (word or option) in err
    assert not (tmp_path / "study").exists()


def test_a_study_can_do_without_images(study, tmp_path):
    code, _, err = study("nano-cluster", tmp_path, "--image-batches", "", "--batches", "4", "--layouts", "1x1")
    assert code == EXIT_OK
    assert "5 runs" in err
    models = {row["setup"]["model"] for row in json.loads((tmp_path / "plan.json").read_text())["runs"]}
    assert models == {"gpt2"}


@pytest.mark.parametrize("stdin", ["", "no lab is up", "null", "[]", "{}", '{"hosts": [{}]}', '{"hosts": 2}'])
def test_the_network_of_a_run_needs_the_status_of_a_lab(study, planned, stdin):
    code, out, err = study("scaling-network", planned, RUN.name, stdin=stdin)
    assert (code, out) == (EXIT_USAGE, "")
    assert "hpcpace lab status --json" in err
    assert len(err.splitlines()) == 1


def test_verdicts_say_that_no_run_is_done_yet(study, planned):
    code, out, err = study("verdicts", planned)
    assert (code, err) == (EXIT_OK, "")
    assert out == f"{planned}/plan.json: none of the 1 runs is done yet\n"


@pytest.mark.parametrize("command", ["scaling", "verdicts"])
@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": "hpcpace-study/1", "runs": []}'])
def test_a_plan_of_something_else_is_named_as_such(study, tmp_path, command, text):
    (tmp_path / "plan.json").write_text(text)
    code, out, err = study(command, tmp_path)
    assert (code, out) == (EXIT_USAGE, "")
    assert f"plan.json is not a plan of {SCHEMA}: name the folder of a scaling study" in err
    assert (tmp_path / "plan.json").read_text() == text
