"""The figures of a study on runs whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from known_study import PEAK_BYTES, STEP_S, write_run, write_study

from hpcpace.core.errors import CannotTell
from hpcpace.diagnosis.measure import Measured
from hpcpace.studies.setups import PARALLELISMS, Setup, StudyFolder, parse_layout, repeated
from library.figures import SetupFigures, run_figures, study_figures
from library.published import BATCH, compute_spread, order_at, orders, read_published

PUBLISHED = Path(__file__).parents[2] / "data" / "published" / "nano_cluster_gpt2_small.csv"
TOKENS_PER_S = 64 / STEP_S


def setup(layout: str, parallelism: str = "data") -> Setup:
    return Setup(
        model="gpt2", preset="small", layout=parse_layout(layout), parallelism=parallelism, batch=16, stands_for=BATCH
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    path = tmp_path_factory.mktemp("study")
    return write_study(path, [setup("1x1", "none"), setup("2x1")], repetitions=2, bytes_per_s=1_000_000)


@pytest.fixture(scope="module")
def rows(study: StudyFolder) -> dict[str, SetupFigures]:
    found, problems = study_figures(study)
    assert problems == []
    return {str(row.setup.layout): row for row in found}


def test_throughput_is_that_of_the_steps_behind_the_warm_up(rows: dict[str, SetupFigures]) -> None:
    assert rows["2x1"].median("samples_per_s") == pytest.approx(TOKENS_PER_S, rel=1e-4)
    assert rows["2x1"].median("step_ms") == pytest.approx(1000 * STEP_S, rel=1e-4)


def test_a_scaling_factor_is_against_as_many_single_ranks(rows: dict[str, SetupFigures]) -> None:
    assert rows["1x1"].median("scaling_factor") == pytest.approx(1)
    # 64 tokens a step in both, 36 ms against 34 ms, over two ranks
    assert rows["2x1"].median("scaling_factor") == pytest.approx(34 / 36 / 2, rel=1e-3)


def test_traffic_is_that_of_the_busiest_interface_but_the_loopback(rows: dict[str, SetupFigures]) -> None:
    assert rows["2x1"].median("network_bps") == pytest.approx(8e6, rel=1e-3)
    assert rows["2x1"].median("network_bytes_per_sample") == pytest.approx(1e6 / TOKENS_PER_S, rel=1e-3)


def test_a_single_server_has_no_traffic(rows: dict[str, SetupFigures]) -> None:
    assert rows["1x1"].spreads["network_bps"] is None


def test_peak_memory_is_that_of_the_rank_that_had_most(rows: dict[str, SetupFigures]) -> None:
    assert rows["2x1"].median("peak_memory_bytes") == PEAK_BYTES + 1


def test_forward_computation_is_that_of_one_microbatch_wherever_it_ran(rows: dict[str, SetupFigures]) -> None:
    assert rows["1x1"].median("forward_ms") == pytest.approx(10, rel=1e-3)
    assert rows["2x1"].median("forward_ms") == pytest.approx(10, rel=1e-3)
    (line,) = compute_spread(list(rows.values()))
    assert line == (
        "forward computation of a microbatch of 16, gpt2: 10 ms (1x1 none) to 10 ms (2x1 data) over 2 set-ups"
    )


def test_what_rests_on_phases_is_not_known_where_they_are_host_times_of_devices(
    study: StudyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = next(run for run in study.runs() if str(run.setup.layout) == "2x1")
    monkeypatch.setattr(Measured, "host_timed", (0, 1))
    figures = run_figures(study, run)
    assert (figures.forward_ms, figures.communication_share) == (None, None)
    assert figures.samples_per_s == pytest.approx(TOKENS_PER_S, rel=1e-4)


def test_each_repetition_counts(rows: dict[str, SetupFigures]) -> None:
    assert rows["2x1"].states == {"finished": 2}
    found = rows["2x1"].spreads["samples_per_s"]
    assert found is not None and found.num == 2


def test_gpu_memory_comes_before_that_of_the_process(tmp_path: Path) -> None:
    study = write_study(tmp_path, [setup("1x1", "none")])
    result = study.run_dir(study.runs()[0]).attempt(0).result_json
    result.write_text(json.dumps({"outcome": "finished", "peak_memory": [{"rss_bytes": 9, "device_bytes": 5}]}))
    assert run_figures(study, study.runs()[0]).peak_memory_bytes == 5


def test_a_run_out_of_memory_is_counted_and_has_no_figures(tmp_path: Path) -> None:
    study = StudyFolder(tmp_path)
    study.write_plan("known", repeated([setup("1x1", "none"), setup("1x2")], 1))
    write_run(study, study.runs()[0])
    study.run_dir(study.runs()[1]).new_attempt().result_json.write_text('{"outcome": "out of memory"}')
    rows, problems = study_figures(study)
    assert problems == []
    assert rows[1].states == {"out of memory": 1}
    assert rows[1].median("samples_per_s") is None


def test_a_run_that_cannot_be_read_is_a_problem_with_its_name(tmp_path: Path) -> None:
    study = write_study(tmp_path, [setup("1x1", "none"), setup("1x2")])
    for path in study.run_dir(study.runs()[1]).attempt(0).trace_files().values():
        path.unlink()
    rows, problems = study_figures(study)
    assert len(problems) == 1 and problems[0].startswith("gpt2-small-1x2-data-b16-r0: ")
    assert rows[1].runs == ()


def test_a_study_without_a_finished_run_cannot_tell(tmp_path: Path) -> None:
    study = StudyFolder(tmp_path)
    study.write_plan("known", repeated([setup("1x1", "none")], 1))
    with pytest.raises(CannotTell, match="no run of"):
        study_figures(study)


def test_orders_are_held_against_the_published_ones(tmp_path: Path) -> None:
    setups = [setup("2x1", parallelism) for parallelism in PARALLELISMS[1:]]
    study = StudyFolder(tmp_path)
    study.write_plan("known", repeated(setups, 1))
    for run, rate in zip(study.runs(), (2_000_000, 3_000_000, 1_000_000), strict=True):
        write_run(study, run, bytes_per_s=rate)
    rows, _ = study_figures(study)
    assert order_at(rows, parse_layout("2x1"), "network_bytes_per_sample") == ["tensor", "data", "pipeline"]
    lines = orders(rows, read_published(PUBLISHED))
    assert lines[-1] == "network volume at 2x1, batch 16: tensor > data > pipeline (as published)"
