"""The nano-cluster study end to end, two small set-ups: plan, jobs, emulated computation, figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.studies.lab_set_up import run_study, study_lab
from hpcpace.lab.settings import LabConfig
from hpcpace.studies.setups import Setup, StudyFolder, parse_layout, planned, repeated
from hpcpace.trace.attempt_reader import read_attempt
from library.figures import SetupFigures, study_figures
from library.published import link_bytes_per_step

pytestmark = pytest.mark.nightly
COMPUTE_MS, LINK_BPS = 40.0, 20e6
STEPS, WARMUP = 9, 1
# A few seconds each over the slow link, so that counters that are read once a second tell enough; of one layout, so
# that ranks start once.
SETUPS = [
    Setup(
        model="gpt2",
        preset="small",
        layout=parse_layout("2x2"),
        parallelism=parallelism,
        batch=4,
        shrink=16,
        steps=STEPS,
        warmup_steps=WARMUP,
        compute_ms=COMPUTE_MS,
    )
    for parallelism in ("data", "pipeline")
]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudyFolder]:
    folder = StudyFolder(tmp_path_factory.mktemp("nano") / "study")
    folder.write_plan("test", repeated(SETUPS, 1))
    share = (str(tmp_path_factory.getbasetemp()),)
    with study_lab("nano-test", link_bps=LINK_BPS, share=share) as lab:
        assert lab.files.name != LabConfig().name
        run_study(lab, folder, timeout_s=280)
    yield folder


@pytest.fixture(scope="module")
def rows(study: StudyFolder) -> dict[str, SetupFigures]:
    found, problems = study_figures(study)
    assert problems == []
    return {row.setup.parallelism: row for row in found}


def test_each_set_up_ran_on_its_layout(study: StudyFolder) -> None:
    for run in study.runs():
        assert study.state(run) == "finished"
        traces = read_attempt(study.run_dir(run).attempts()[-1]).traces
        per_server = run.setup.layout.ranks_per_server
        assert [trace.header.host for trace in traces] == [f"n{1 + rank // per_server}" for rank in range(len(traces))]
        assert {len(trace.tables["steps"]) for trace in traces} == {STEPS}


def test_computation_took_its_time(rows: dict[str, SetupFigures]) -> None:
    forward_ms = rows["data"].median("forward_ms")
    assert forward_ms is not None and forward_ms >= 0.98 * COMPUTE_MS * rows["data"].setup.batch / 3


def test_the_link_carries_what_the_formula_says(rows: dict[str, SetupFigures]) -> None:
    row = rows["data"]
    plan = planned(row.setup)
    # Both servers send as much as they receive.
    expected = 2 * link_bytes_per_step(row.setup, plan) / plan.samples_per_step
    assert row.median("network_bytes_per_sample") == pytest.approx(expected, rel=0.15)


def test_the_link_is_as_slow_as_it_was_asked_for(rows: dict[str, SetupFigures]) -> None:
    measured = rows["data"].median("network_bps")
    assert measured is not None and 0.2 * LINK_BPS < measured <= 2.1 * LINK_BPS


def test_all_is_told_of_a_set_up(rows: dict[str, SetupFigures], tmp_path: Path) -> None:
    for row in rows.values():
        assert {name for name, found in row.spreads.items() if found is None} == {"scaling_factor"}
