"""Ranks that share cores, and runs that only look like it; what waiting for a core may explain is no fault."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from cases import each_case
from rich.console import Console

from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from hpcpace.core.config import DiagnosisConfig
from hpcpace.core.rundir import write_json
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.diagnose import diagnose
from hpcpace.diagnosis.finding import Case, Panels
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.summary import Mode
from hpcpace.diagnosis.topics.cores import CoreThresholds, core_figures
from hpcpace.diagnosis.topics.straggler import StragglerThresholds, search_stragglers
from hpcpace.diagnosis.verdict import verdict_of
from hpcpace.metrics.host_waits import CoreUse, held_up
from hpcpace.metrics.stragglers import SearchObstacle
from hpcpace.report.run_report import page, print_report
from hpcpace.report.sections.hosts import core_cells
from hpcpace.trace.attempt_reader import read_attempt

MS = 1e6
RANKS, STEPS = 4, 200
HOSTS = dict.fromkeys(range(RANKS), "n0")
ON_PURPOSE = DiagnosisConfig(core_share=1.0)


def cores(running=0.5, queued=0.0, *, cpus=("0-1",) * RANKS, throttled=0.0, error=0.0):
    """Return what ranks had of their cores; figures are for all ranks, or one a rank."""
    running, queued, throttled = (np.broadcast_to(np.asarray(v, float), RANKS) for v in (running, queued, throttled))
    waiting = held_up(running, queued)
    sets = tuple(frozenset(range(int(c[0]), int(c[-1]) + 1)) if c else frozenset() for c in cpus)
    return CoreUse(
        running=running,
        queued=queued,
        waiting=waiting,
        error=np.full(RANKS, error),
        pressure=np.where(np.isnan(waiting), np.nan, 0.9),
        throttled=throttled,
        switches=np.full(RANKS, 300.0),
        cpus=sets,
    )


def panels(use=None, *, work=None, transfer_ms=1.0, noise=0.02, per_node=RANKS, seed=1):
    random = np.random.default_rng(seed)
    work_ns = 100 * MS * random.normal(1.0, noise, (RANKS, STEPS)) * (np.ones(RANKS) if work is None else work)[:, None]
    transfer_ns = np.full((RANKS, STEPS), transfer_ms * MS)
    slowest = work_ns.max(axis=0)
    times = slowest + transfer_ms * MS
    nothing, node = np.zeros((RANKS, STEPS)), np.arange(RANKS) // per_node
    return Panels(
        rank=np.arange(RANKS),
        host=tuple(f"n{number}" for number in node),
        node=node,
        role=np.zeros(RANKS, np.int64),
        stage=np.full(RANKS, -1),
        times_ns=times,
        since_ns=np.cumsum(times),
        work_ns=work_ns,
        reach_ns=work_ns,
        data_ns=nothing,
        gc_ns=nothing,
        wait_ns=slowest - work_ns,
        transfer_ns=transfer_ns,
        cores=use,
    )


def modes(run, settings=None):
    case = Case(panels=run, settings=settings or DiagnosisConfig())
    return [finding.mode for finding in diagnose(case).findings]


def test_ranks_that_wait_for_cores_share_them_and_lose_that_share():
    (found,) = diagnose(Case(panels=panels(cores(0.5, 0.4)))).findings
    assert (found.mode, found.variety) == (Mode.CORES, "ranks")
    assert found.loss_share == pytest.approx(0.4)
    assert found.evidence.ranks == (0, 1, 2, 3)


@each_case(
    ("use", "cause"),
    [
        # More ranks than CPUs, which they keep busy.
        (cores(0.48, 0.40), "ranks"),
        # They would fit, and wait all the same.
        (cores(0.5, 0.4, cpus=("0-7",) * RANKS), "other processes"),
        (cores(0.5, 0.5, cpus=("0", "1", "2", "3")), "other processes"),
        # They do not fit, and use less than what they wait for.
        (cores(0.2, 0.8), "ranks and other processes"),
        # Their few threads wait so long that many are ready at a time.
        (cores([0.25, 0.25, 0.0, 0.0], [1.5, 1.5, 0.1, 0.1], cpus=("0-3",) * RANKS), "other processes"),
        # They fit, with far more threads than CPUs.
        (cores(2.0, 3.0, cpus=("0-7",) * RANKS), "ranks"),
        (cores(0.5, 0.4, throttled=0.35), "quota"),
        (cores(0.5, 0.4, cpus=("",) * RANKS), ""),
    ],
)
def test_who_has_the_cores_is_told_apart(use, cause):
    assert diagnose(Case(panels=panels(use))).findings[0].variety == cause


def test_a_host_is_named_where_only_its_ranks_wait():
    first = diagnose(Case(panels=panels(cores(0.5, [0.4, 0.4, 0.0, 0.0]), per_node=2))).findings[0]
    assert [(culprit.kind, culprit.id) for culprit in first.culprits] == [("node", "n0")]
    assert first.evidence.ranks == (0, 1)


@each_case(
    "use",
    [
        None,
        cores(1.0, 0.0),
        cores(1.0, 0.02),
        cores(np.nan, np.nan),
        cores(0.5, 0.2, error=0.1),  # in a few seconds only
    ],
    ids=["unknown", "no wait", "a little", "old traces", "once"],
)
def test_ranks_with_their_own_cores_share_none(use):
    found = diagnose(Case(panels=panels(use)))
    assert (found.findings, found.cores) == ((), None)


def test_below_its_threshold_it_is_a_remark_of_a_healthy_run():
    found = diagnose(Case(panels=panels(cores(0.5, 0.07))))
    assert CoreThresholds().notable_wait_share < 0.07 < DiagnosisConfig().core_share
    verdict = verdict_of(found, hosts=HOSTS)
    assert verdict.mode == "healthy"
    assert verdict.also == (
        "ranks share cores: 4 ranks of this job on 2 CPUs of n0; ranks 0-3 wait for a core for up to 7.0 % of the time "
        "(threshold 10.0 %)",
    )
    assert "change the job, not the cluster" not in verdict.next[0]


def test_where_it_is_on_purpose_it_is_a_remark_however_much_it_is():
    verdict = verdict_of(diagnose(Case(panels=panels(cores(0.3, 0.7)), settings=ON_PURPOSE)), hosts=HOSTS)
    assert verdict.mode == "healthy"
    assert verdict.also[0].endswith("wait for a core for up to 70.0 % of the time (on purpose)")


@pytest.mark.parametrize("settings", [None, ON_PURPOSE], ids=["a finding", "on purpose"])
def test_transfers_that_may_be_waiting_for_cores_are_not_bound_by_communication(settings):
    assert modes(panels(transfer_ms=40)) == [Mode.COMMUNICATION]
    assert Mode.COMMUNICATION not in modes(panels(cores(0.4, 0.4), transfer_ms=40), settings)


def test_transfers_beyond_all_waiting_are_bound_by_communication():
    assert Mode.COMMUNICATION in modes(panels(cores(0.4, 0.12), transfer_ms=100))


def test_jitter_that_waiting_for_cores_may_explain_is_not_amplified_jitter():
    assert modes(panels(noise=0.15)) == [Mode.AMPLIFICATION]
    assert modes(panels(cores(0.5, 0.4), noise=0.15), ON_PURPOSE) == []


def test_jitter_beyond_all_waiting_stays_amplified_jitter():
    assert Mode.AMPLIFICATION in modes(panels(cores(0.5, 0.06), noise=0.15))


SLOW = np.array([1.0, 1.0, 1.3, 1.0])


def test_a_slow_rank_that_only_waits_longer_is_no_straggler():
    assert modes(panels(work=SLOW)) == [Mode.STRAGGLER]
    use = cores(0.6, [0.1, 0.1, 0.35, 0.1], cpus=("0", "1", "2", "3"))
    assert modes(panels(use, work=SLOW)) == [Mode.CORES]


def test_a_slow_rank_that_computes_more_is_a_straggler_where_cores_are_shared():
    found = diagnose(Case(panels=panels(cores([0.4, 0.4, 0.6, 0.4], 0.4), work=SLOW), settings=ON_PURPOSE)).findings
    assert [(finding.mode, finding.culprits[0].id) for finding in found] == [(Mode.STRAGGLER, "2")]


@pytest.mark.parametrize(("slow", "first"), [(1.6, Mode.STRAGGLER), (1.2, Mode.CORES)])
def test_a_slow_rank_comes_before_cores_that_are_waited_for_twice_as_long_at_most(slow, first):
    use = cores([0.5, 0.5, 0.5 * slow, 0.5], 0.4)
    found = modes(panels(use, work=np.array([1.0, 1.0, slow, 1.0])))
    assert set(found) == {Mode.STRAGGLER, Mode.CORES}
    assert found[0] is first


def test_a_host_whose_ranks_wait_for_cores_and_are_late_waits_for_cores_first():
    use = cores([0.5, 0.5, 1.0, 1.0], [0.0, 0.0, 0.3, 0.3])
    run = panels(use, work=np.array([1.0, 1.0, 2.0, 2.0]), per_node=2)
    first, second = diagnose(Case(panels=run)).findings
    assert (first.mode, second.mode) == (Mode.CORES, Mode.STRAGGLER)
    assert {culprit.id for culprit in first.culprits} == {culprit.id for culprit in second.culprits} == {"n1"}
    assert first.loss_share >= second.loss_share > 0.3


def test_a_slow_rank_that_neither_computes_nor_waits_more_is_a_straggler_beyond_what_ranks_wait():
    assert Mode.STRAGGLER in modes(panels(cores(0.5, 0.12), work=np.array([1.0, 1.0, 1.5, 1.0])))


def test_a_slow_rank_of_whose_cores_nothing_is_known_stays_a_straggler():
    use = cores([0.5, 0.5, np.nan, 0.5], [0.3, 0.3, np.nan, 0.3])
    assert Mode.STRAGGLER in modes(panels(use, work=SLOW))


def test_noise_of_shared_cores_leaves_a_run_healthy_and_says_who_would_have_been_detected():
    noisy = {"noise": 0.8, "seed": 4}
    run = panels(cores(0.2, 0.8), **noisy)
    assert search_stragglers(run, ON_PURPOSE, StragglerThresholds()).obstacle is SearchObstacle.TOO_MUCH_NOISE
    found = diagnose(Case(panels=run, settings=ON_PURPOSE))
    assert (found.findings, found.obstacle) == ((), None)
    assert "would have been detected" in verdict_of(found, hosts=HOSTS).why[0]


@each_case(
    ("use", "words", "advice"),
    [
        (cores(0.48, 0.4), "4 ranks of this job on 2 CPUs of n0; ranks 0-3 wait", "srun -c"),
        (cores(0.5, 0.4, cpus=("0-7",) * RANKS), "other processes on n0 take them; ranks 0-3 wait", "--exclusive"),
        (cores(0.2, 0.8), "on 2 CPUs of n0, and other processes there; ranks 0-3 wait", "--exclusive"),
        (cores(0.5, 0.4, throttled=0.35), "the CPU quota of the cgroup on n0 is used up", "raise the quota"),
        (cores(0.5, [0.4, 0, 0, 0], cpus=("0-7",) * RANKS), "rank 0 waits for a core for up to 40.0 %", "squeue -w"),
    ],
)
def test_the_verdict_says_who_waits_for_whom_and_what_to_do(use, words, advice):
    verdict = verdict_of(diagnose(Case(panels=panels(use))), hosts=HOSTS)
    assert words in verdict.headline
    assert advice in verdict.next[0]
    assert "involuntary context switches" in verdict.why[0]


def test_of_several_hosts_the_one_that_waits_longest_is_counted_and_all_are_named():
    run = panels(cores(0.48, [0.35, 0.35, 0.4, 0.4], cpus=("0",) * RANKS), per_node=2)
    headline = verdict_of(diagnose(Case(panels=run)), hosts=dict(enumerate(run.host))).headline
    assert "2 ranks of this job on 1 CPU of n1; ranks on n1 and n0 wait for a core for up to 40.0 %" in headline


def test_what_ranks_wait_for_is_certain_without_the_others():
    found = diagnose(Case(panels=panels(cores(0.5, 0.4)), absent=(7,)))
    assert [finding.mode for finding in found.findings] == [Mode.CORES]


@each_case(
    ("record", "is_found"),
    [
        ({}, True),
        ({"config": {"train": {"shared_cores": True}}}, False),
        ({"environment": {"HPCPACE_LAB_NAME": "lab"}}, False),
    ],
    ids=["anywhere", "on purpose", "in a lab"],
)
def test_shared_cores_are_found_unless_on_purpose_or_in_a_lab(tmp_path, record, is_found):
    scenario = Scenario(seed=3, num_ranks=8, num_steps=60, fault="shared_cores", size=1.0)
    run = write_run(scenario, tmp_path / "run")
    attempt = run.attempt(0)
    write_json(attempt.run_json, record)
    verdict = analyze_traces(run, attempt, read_attempt(attempt), Selection()).summary.verdict
    assert (verdict.mode == Mode.CORES) == is_found
    assert any("on purpose" in line for line in verdict.also) == ("config" in record)


@pytest.mark.parametrize(("waiting", "modes"), [(0.0, [Mode.CONTENTION]), (0.4, [])])
def test_in_a_lab_waiting_for_cores_explains_bursts_of_slow_transfers_alone(waiting, modes):
    run = panels(transfer_ms=5.0, per_node=1)
    bursts = np.where(np.random.default_rng(3).random(STEPS) < 0.2, 25 * MS, 0.0)
    lengths = {"times_ns": run.times_ns + bursts, "transfer_ns": run.transfer_ns + bursts}
    found = diagnose(Case(panels=replace(run, **lengths, lab_cores=cores(0.5, waiting))))
    assert [finding.mode for finding in found.findings] == modes


def test_hosts_that_ranks_wait_on_are_listed_the_longest_waiting_first():
    use = cores([0.5, 0.5, 0.6, 0.5], [0.0, 0.0, 0.2, 0.4], cpus=("0", "1", "0-1", "0-1"))
    (row,) = core_figures(panels(use, per_node=2), CoreThresholds())
    assert (row.host, row.num_ranks, row.num_cpus) == ("n1", 2, 2)
    assert (row.running, row.ready) == (pytest.approx(1.1), pytest.approx(1.7))
    assert row.waiting == pytest.approx(0.4)
    assert core_figures(panels(cores(0.5, 0.0)), CoreThresholds()) == core_figures(panels(None), CoreThresholds()) == ()


def test_terminal_and_page_have_the_cores_of_the_hosts(tmp_path):
    run = write_run(Scenario(seed=3, num_ranks=8, num_steps=60, fault="shared_cores", size=1.0), tmp_path / "run")
    attempt = run.attempt(0)
    found = analyze_traces(run, attempt, read_attempt(attempt), Selection())
    (row, *_) = found.summary.cores
    console = Console(file=io.StringIO(), width=80)
    print_report(console, found.summary)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert " ".join(core_cells(row)).split() in lines
    text = re.sub(r"<[^>]+>", " ", page(found.summary, found.summary.verdict, found.plots))
    assert re.search(r"\s+".join(map(re.escape, core_cells(row))), text)
