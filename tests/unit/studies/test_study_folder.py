"""The folder of a study: its plan, and which runs are still to be done."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import UsageError
from hpcpace.studies.setups import NanoCluster, StudyFolder, StudyRun, parse_layout, repeated


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    folder = StudyFolder(tmp_path / "study")
    sweep = NanoCluster(batches=(4,), image_batches=(), layouts=(parse_layout("1x1"), parse_layout("2x1")))
    folder.write_plan("nano-cluster", repeated(sweep.setups(), 2), facts={"link_bps": 1e6})
    return folder


def end(study: StudyFolder, run: StudyRun, outcome: str | None) -> None:
    attempt = study.run_dir(run).new_attempt()
    if outcome is not None:
        attempt.result_json.write_text(json.dumps({"outcome": outcome}))


def test_reads_the_plan_that_it_wrote(study: StudyFolder) -> None:
    sweep = NanoCluster(batches=(4,), image_batches=(), layouts=(parse_layout("1x1"), parse_layout("2x1")))
    assert study.runs() == repeated(sweep.setups(), 2)
    assert study.facts() == {"link_bps": 1e6}


def test_keeps_a_plan_that_is_there(study: StudyFolder) -> None:
    before = study.plan_json.read_bytes()
    assert not study.write_plan("nano-cluster", [])
    assert study.plan_json.read_bytes() == before


def test_runs_are_open_until_they_have_a_result(study: StudyFolder) -> None:
    run = study.runs()[0]
    assert study.state(run) == "open"
    end(study, run, None)
    assert study.state(run) == "open"
    end(study, run, "finished")
    assert study.state(run) == "finished"
    assert run not in study.open_runs()
    assert len(study.open_runs()) == len(study.runs()) - 1


def test_out_of_memory_is_a_result(study: StudyFolder) -> None:
    run = study.runs()[1]
    end(study, run, "out of memory")
    assert study.state(run) == "out of memory"


def test_a_run_that_ended_twice_without_a_result_has_failed(study: StudyFolder) -> None:
    run = study.runs()[0]
    end(study, run, None)
    end(study, run, "stopped")
    assert study.state(run) == "failed"
    assert run not in study.open_runs()


def test_what_is_left_takes_as_long_as_what_is_done(study: StudyFolder) -> None:
    assert study.left_s() is None
    for run, took_s in zip(study.runs(), (30, 50), strict=False):
        end(study, run, "finished")
        attempt = study.run_dir(run).last_attempt()
        attempt.run_json.write_text("{}")
        os.utime(attempt.run_json, (1e9, 1e9))
        os.utime(attempt.result_json, (1e9 + took_s, 1e9 + took_s))
    assert study.left_s() == pytest.approx(40 * (len(study.runs()) - 2))


def test_half_a_result_is_none(study: StudyFolder) -> None:
    run = study.runs()[0]
    study.run_dir(run).new_attempt().result_json.write_text('{"outcome": "fin')
    assert study.state(run) == "open"


def test_a_layout_has_its_own_open_runs(study: StudyFolder) -> None:
    assert {str(run.setup.layout) for run in study.open_runs(parse_layout("2x1"))} == {"2x1"}
    assert study.open_runs(parse_layout("2x2")) == []


@each_case("text", [None, "{", "[]", '{"schema": "other"}', '{"schema": "hpcpace-study/1", "runs": [{}]}'])
def test_refuses_what_is_no_study(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json"):
        StudyFolder(tmp_path).runs()
