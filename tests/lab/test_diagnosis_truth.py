"""Verdicts on real jobs with injected faults, judged by what was injected or by the lab's log of truth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.labs import DrillJob, DrillSite, MisreadStart, truth_of
from experiments.score.scenario import Scenario
from experiments.score.truth import Judgement, Truth, judge, same_names
from hpcpace.core.codec import convert
from hpcpace.diagnosis.summary import Culprit
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

NAMES = ("slow-rank", "hang")
MODES = {"slow-rank": ("persistent straggler",), "hang": ("hang",)}
# One rank on each host, two hosts on a leaf switch.
SCENARIO = Scenario(seed=0, num_ranks=4, ranks_per_node=1, nodes_per_leaf=2, num_steps=120)
# As on a GPU, computation takes time and no cores, of which the lab's hosts have fewer than ranks.
SLEEPS = tuple(word for rank in range(4) for word in ("--inject", f"host=n{rank + 1},phase=forward,size=150ms"))
ENVIRON = {
    "HPCPACE_CLOCK_INTERVAL_S": "5",
    "HPCPACE_WORLD_START_TIMEOUT_S": "60",
    "HPCPACE_DIAGNOSIS_HANG_S": "3",
}
TIMEOUT_S, HANG_WAIT_S, MAX_STARTS = 300.0, 8.0, 5

Run = tuple[DrillJob, Truth]


@dataclass(frozen=True, kw_only=True)
class Said:
    """The verdict as summary.json has it, for the judge."""

    mode: str
    variety: str
    culprits: tuple[Culprit, ...]
    confidence: float


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrillSite]:
    """A lab with links so fast that a tiny model is not bound by them, and a folder that its hosts see."""
    folder = tmp_path_factory.mktemp("diagnosis")
    rates = {"link": "10gbit", "uplink": "10gbit"}
    with Lab.up(LabConfig(name="tests-truth", tmp_size="32MiB", share=(str(folder),), **rates)) as lab:
        yield DrillSite(lab, folder)


@pytest.fixture(scope="module")
def runs(site: DrillSite) -> Iterator[dict[str, Future[Run]]]:
    """The jobs, all at one time: they mostly sleep, and start in the time of one."""
    with ThreadPoolExecutor(len(NAMES)) as pool:
        yield {name: pool.submit(run_case, site, name) for name in NAMES}


def run_case(site: DrillSite, name: str) -> Run:
    """Run a job to its end, and return it with what is right to say about it."""
    for start in range(MAX_STARTS):
        try:
            job = slow_rank(site) if name == "slow-rank" else hang(site)
        except MisreadStart:
            if start == MAX_STARTS - 1:
                raise
            site.end_jobs()  # its ranks wait for each other for ever
            continue
        ranks = (2,) if name == "slow-rank" else stopped_rank(site, job)
        return job, Truth(
            modes=MODES[name],
            varieties=(),
            culprits=same_names(SCENARIO, ranks),
            ranks=ranks,
            tolerated=(),
            is_identifiable=True,
            effect=None,
            fault_share=0.0,
            noise_share=0.0,
        )
    raise AssertionError("unreachable")


def submitted(site: DrillSite, *words: str, steps: int) -> DrillJob:
    job = site.submit("--", "--mesh", "dp=4,pp=1", *SLEEPS, *words, steps=steps, environ=ENVIRON)
    job.wait_for_start()
    return job


def slow_rank(site: DrillSite) -> DrillJob:
    """Let rank 2 compute 50 ms longer."""
    job = submitted(site, "--inject", "rank=2,phase=forward,size=50ms", steps=SCENARIO.num_steps)
    job.wait(TIMEOUT_S)
    return job


def hang(site: DrillSite) -> DrillJob:
    """Stop rank 2 for good, and cancel the job a while later."""
    job = submitted(site, steps=100_000)
    job.wait_for_steps()
    deadline_s = time.monotonic() + TIMEOUT_S
    while "step 40/" not in job.log():
        assert time.monotonic() < deadline_s, job.log()[-1000:]
        time.sleep(0.3)
    site.fault("kill-rank", str(job.job_id), "2", "--signal", "STOP")
    time.sleep(HANG_WAIT_S)
    site.queue.run("scancel", str(job.job_id))
    job.wait(TIMEOUT_S)
    return job


def stopped_rank(site: DrillSite, job: DrillJob) -> tuple[int, ...]:
    """Return the rank that the log of truth says was stopped."""
    begun = [event for event in truth_of(site.lab) if event["event"] == "fault-begin" and event["kind"] == "kill-rank"]
    return (begun[-1]["settings"]["rank"],)


def verdict(runs: dict[str, Future[Run]], name: str) -> tuple[dict[str, Any], Judgement]:
    job, truth = runs[name].result()
    found: dict[str, Any] = job.summary()["verdict"]
    print(f"\n{name}: {found['headline']}", *found["also"], sep="\n  ")
    return found, judge(SCENARIO, truth, convert(found, Said))


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
