"""What is loaded of one run, from its summary or its traces, and what is reported of those that cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each_case

from experiments.synthetic_run import MS, SyntheticRun
from hpcpace.core.config import Config
from hpcpace.core.rundir import RunDirectory, json_text
from hpcpace.diagnosis.analyze import analyze
from hpcpace.diagnosis.measure import Selection
from hpcpace.metrics.resampling import log_error
from hpcpace.runs.load import LoadedRun, NotLoaded, load_run, load_runs

RUN = SyntheticRun(num_ranks=4, num_steps=20, hosts=("n0", "n1"), noise=0.01)


def _reported(run: RunDirectory, selection: Selection | None = None) -> RunDirectory:
    made = analyze(
        run, run.last_attempt(), selection or Selection(), Config(), begin_stage=lambda _: lambda done, total: None
    )
    assert made is not None
    run.write(run.summary_json.name, json_text(made.summary.to_json()))
    return run


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _reported(RUN.write(tmp_path_factory.mktemp("reported") / "run")).path


def _copied(path: Path, to: Path) -> RunDirectory:
    shutil.copytree(path, to)
    return RunDirectory(to)


def test_a_summary_and_its_traces_say_the_same(tmp_path: Path) -> None:
    run = RUN.write(tmp_path / "a")
    analysed = load_run(run.path).measured
    stored = load_run(_reported(run).path).measured
    assert analysed is not None and stored is not None
    assert (analysed.is_from_summary, stored.is_from_summary) == (False, True)
    assert replace(stored, is_from_summary=False) == analysed


def test_the_parts_of_a_rank_add_up_to_its_step(tmp_path: Path) -> None:
    measured = load_run(RUN.write(tmp_path / "a").path).measured
    assert measured is not None
    for rank in measured.ranks:
        assert rank.parts_ns is not None
        assert sum(rank.parts_ns.values()) == pytest.approx(measured.mean_ns, rel=1e-6)


def test_waits_are_counted_with_the_rank_at_which_they_began(tmp_path: Path) -> None:
    slow = SyntheticRun(num_ranks=4, num_steps=20, hosts=("n0", "n1"), slow={3: 1.1})
    measured = load_run(slow.write(tmp_path / "a").path).measured
    assert measured is not None
    # Three of four ranks wait for the 10 % of 30 ms that rank 3 computes longer.
    assert [rank.caused_wait_ns for rank in measured.ranks] == pytest.approx([0, 0, 0, 0.75 * 3 * MS], rel=0.01)


def test_ranks_that_are_missing_leave_the_batch_and_its_speed_unknown(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, num_steps=20, hosts=("n0", "n1"), missing=(2, 3))
    measured = load_run(run.write(tmp_path / "a").path).measured
    assert measured is not None
    assert (measured.num_missing, measured.samples_per_step, measured.samples_per_s) == (2, 0.0, None)


def test_waits_that_are_not_known_are_none_in_a_summary_and_in_its_traces(tmp_path: Path) -> None:
    run = SyntheticRun(num_ranks=4, num_steps=20, missing=(3,))
    analysed = load_run(run.write(tmp_path / "a").path).measured
    stored = load_run(_reported(RunDirectory(tmp_path / "a")).path).measured
    assert analysed is not None and stored is not None
    assert replace(stored, is_from_summary=False) == analysed
    assert not analysed.are_waits_known and analysed.shares is None
    for rank in analysed.ranks:
        assert rank.parts_ns is not None
        assert sum(rank.parts_ns.values()) == pytest.approx(analysed.mean_ns, rel=1e-6)


@each_case(
    "change",
    [
        lambda content: content.update(schema="hpcpace-summary/1"),
        lambda content: content.pop("comparable"),
        lambda content: content.update(comparable=None),
        lambda content: content.update(comparable=[]),
        lambda content: content["tracing"].update(files="0"),
        lambda content: content["comparable"].update(is_all=False),
        lambda content: content.update(attempt=3),
        lambda content: content["throughput"].update(p50_ns="fast"),
        lambda content: content["throughput"].update(mean_ns=1e-300),
        lambda content: content["throughput"].update(samples_per_s=-1),
        lambda content: content["comparable"].update(log_mean_error=1e18),
        lambda content: content["comparable"].update(samples_per_step=1e-300),
        lambda content: content["comparable"]["ranks"][0].update(work_error=-1),
        lambda content: content["comparable"].pop("overlap"),
        lambda content: content["comparable"].update(overlap=[{"phase": 1}]),
        lambda content: content["comparable"]["overlap"][0].update(window_ns=-1),
        lambda content: content["throughput"].update(p50_ns=-1.0),
        lambda content: content.update(ranks=3),
    ],
)
def test_a_summary_that_is_foreign_or_of_other_files_is_not_taken(
    tmp_path: Path, reported: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    run = _copied(reported, tmp_path / "a")
    content = json.loads(run.summary_json.read_text())
    change(content)
    run.summary_json.write_text(json.dumps(content))
    measured = load_run(run.path).measured
    assert measured is not None and not measured.is_from_summary


def test_a_summary_of_some_steps_is_not_taken(tmp_path: Path) -> None:
    run = _reported(RUN.write(tmp_path / "a"), Selection(first=5))
    measured = load_run(run.path).measured
    assert measured is not None and not measured.is_from_summary


def test_a_trace_that_has_grown_makes_a_summary_old(tmp_path: Path, reported: Path) -> None:
    run = _copied(reported, tmp_path / "a")
    with run.last_attempt().trace_file(0).open("ab") as file:
        file.write(b"\0")
    measured = load_run(run.path).measured
    assert measured is not None and not measured.is_from_summary


def test_a_summary_stands_for_traces_that_were_removed(tmp_path: Path, reported: Path) -> None:
    run = _copied(reported, tmp_path / "a")
    for file in run.last_attempt().trace_dir.iterdir():
        file.unlink()
    measured = load_run(run.path).measured
    assert measured is not None and measured.is_from_summary


def test_broken_runs_are_reported_and_the_others_loaded(tmp_path: Path) -> None:
    good = RUN.write(tmp_path / "good")
    removed = RUN.write(tmp_path / "removed")
    for file in removed.last_attempt().trace_dir.iterdir():
        file.unlink()
    damaged = RUN.write(tmp_path / "damaged")
    for file in damaged.last_attempt().trace_dir.iterdir():
        file.write_bytes(b"no trace")
    warmup = replace(RUN, num_warmup=RUN.num_steps).write(tmp_path / "warmup")
    missing = tmp_path / "missing"
    told: list[tuple[int, int]] = []
    paths = [good.path, removed.path, damaged.path, warmup.path, missing]
    found = load_runs(paths, progress=lambda done, total: told.append((done, total)))
    assert [run.why_not for run in found] == [
        None,
        NotLoaded.BROKEN,
        NotLoaded.BROKEN,
        NotLoaded.NO_STEPS,
        NotLoaded.BROKEN,
    ]
    assert [run.path for run in found] == paths
    assert all(run.problem for run in found[1:])
    assert told[-1] == (5, 5)


def test_the_reasons_why_a_run_cannot_be_measured_are_one_line(tmp_path: Path) -> None:
    lacking = SyntheticRun(num_ranks=4, num_steps=20, num_warmup=20, missing=(2, 3)).write(tmp_path / "a")
    problem = load_run(lacking.path).problem
    assert "use --include-warmup" in problem and "2 of 4 ranks have no readable trace" in problem
    assert len(problem.splitlines()) == 1 and "; " in problem and "- " not in problem


def test_a_run_that_still_records_is_reported_where_it_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether a journal is fresh depends on how busy the machine is.
    monkeypatch.setattr("hpcpace.runs.load.is_running", lambda *_: True)
    run = SyntheticRun(num_steps=20, lost_steps={1: 2}).write(tmp_path / "a")
    assert load_run(run.path, takes_running=False).why_not is NotLoaded.RUNNING
    loaded: LoadedRun = load_run(run.path)
    assert loaded.measured is not None and not loaded.measured.is_final


def test_the_error_of_a_median_is_that_of_repeated_runs() -> None:
    random = np.random.default_rng(0)
    runs = np.exp(random.normal(0.0, 0.05, (400, 200)))
    spread = float(np.log(np.median(runs, axis=1)).std(ddof=1))
    errors = [log_error(run, np.median) for run in runs[:60]]
    assert np.mean([error for error in errors if error is not None]) == pytest.approx(spread, rel=0.15)
    assert log_error(runs[0][:7], np.median) is None
