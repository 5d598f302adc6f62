"""Verdicts on real jobs with injected faults; `python -m experiments.score.lab_runs` scores more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from experiments.labs import DrillJob, DrillSite
from experiments.score.lab_cases import CASES
from experiments.score.lab_runs import lab_config, run_case, said
from experiments.score.truth import Judgement, Truth, judge
from hpcpace.lab.lab import Lab

NAMES = ("slow-rank", "hang")

Run = tuple[DrillJob, Truth]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrillSite]:
    """A lab with fast links, and a folder that its hosts see."""
    folder = tmp_path_factory.mktemp("diagnosis")
    with Lab.up(lab_config("tests-truth", share=(str(folder),))) as lab:
        yield DrillSite(lab, folder)


@pytest.fixture(scope="module")
def runs(site: DrillSite) -> Iterator[dict[str, Future[Run]]]:
    """The jobs, all at one time: they mostly sleep, and start in the time of one."""
    with ThreadPoolExecutor(len(NAMES)) as pool:
        yield {case.name: pool.submit(run_case, site, case) for case in CASES if case.name in NAMES}


def verdict(runs: dict[str, Future[Run]], name: str) -> tuple[dict[str, Any], Judgement]:
    job, truth = runs[name].result()
    found: dict[str, Any] = job.summary()["verdict"]
    case = next(case for case in CASES if case.name == name)
    print(f"\n{name}: {found['headline']}", *found["also"], sep="\n  ")
    return found, judge(case.scenario, truth, said(found))


def test_nobody_is_named_while_a_job_is_healthy(runs: dict[str, Future[Run]]) -> None:
    found, _ = verdict(runs, "hang")
    before = [finding for finding in found["findings"] if finding["mode"] != "hang"]
    assert runs["hang"].result()[0].summary()["steps"]["num_used"] >= 30
    assert [finding["culprits"] for finding in before if finding["culprits"]] == []


def test_slow_rank_is_the_one_persistent_straggler(runs: dict[str, Future[Run]]) -> None:
    # Ranks that share cores have noise of their own, of which other modes may speak.
    found, judgement = verdict(runs, "slow-rank")
    stragglers = [finding for finding in found["findings"] if finding["mode"] == "persistent straggler"]
    assert [[culprit["id"] for culprit in finding["culprits"]] for finding in stragglers] == [["2"]]
    assert judgement.is_found


def test_rank_that_stopped_is_named_as_the_cause_of_a_hang(runs: dict[str, Future[Run]]) -> None:
    _, judgement = verdict(runs, "hang")
    assert judgement.is_mode_right and judgement.is_found and not judgement.is_wrong
    log = " ".join(runs["hang"].result()[0].log().split())
    # Where in its step a rank is stopped is chance: before an all_reduce or inside it, it shows no sign of life.
    assert "hang: all_reduce" in log
    assert "waits for rank 2 on n3, which has shown no sign of life for" in log


def test_the_truth_lies_outside_of_every_run(site: DrillSite, runs: dict[str, Future[Run]]) -> None:
    folder: Path = site.folder.resolve()
    for name in NAMES:
        runs[name].result()
    assert folder not in site.lab.files.truth.resolve().parents
    assert [path for path in folder.rglob("*") if "truth" in path.name] == []
