"""Ranks that share cores, and runs that only look like it; what waiting for a core may explain is no fault."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from cases import each_case
from report_sample import print_report
from rich.console import Console

from experiments.score.generator import write_run
from experiments.score.scenario import Scenario
from hpcpace.core.config import Config
from hpcpace.core.rundir import write_json
from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.analyze import analyze_traces
from hpcpace.diagnosis.finding import Case, CpuQuota, DiagnosisFinding, Panels
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.settings import DiagnosisConfig, ReportConfig
from hpcpace.diagnosis.summary import Culprit, Mode
from hpcpace.diagnosis.topics.core_waiting import CoreThresholds, excess_of, stages_beyond_waiting
from hpcpace.diagnosis.topics.cores import core_figures, find, rank_figures
from hpcpace.diagnosis.topics.links import SlowLinkEvidence
from hpcpace.diagnosis.topics.straggler import search_stragglers
from hpcpace.diagnosis.verdict import diagnose, verdict_of
from hpcpace.metrics.flow_figures import FlowFindings
from hpcpace.metrics.host_waits import CoreUse, held_up
from hpcpace.metrics.phase_cores import PARTS, WorkUse
from hpcpace.metrics.phases import Part
from hpcpace.metrics.roles import Stage
from hpcpace.metrics.stragglers import SearchObstacle
from hpcpace.report.run_report import page
from hpcpace.report.sections.hosts import core_cells
from hpcpace.trace.attempt_reader import read_attempt

MS = 1e6
RANKS, STEPS = 4, 200
HOSTS = dict.fromkeys(range(RANKS), "n0")


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


def modes(run, *, on_purpose=False):
    case = Case(panels=run, is_shared_on_purpose=on_purpose)
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
    verdict = verdict_of(diagnose(Case(panels=panels(cores(0.3, 0.7)), is_shared_on_purpose=True)), hosts=HOSTS)
    assert verdict.mode == "healthy"
    assert verdict.also[0].endswith("wait for a core for up to 70.0 % of the time (on purpose)")


@pytest.mark.parametrize("on_purpose", [False, True], ids=["a finding", "on purpose"])
def test_transfers_that_may_be_waiting_for_cores_are_not_bound_by_communication(on_purpose):
    assert modes(panels(transfer_ms=40)) == [Mode.COMMUNICATION]
    assert Mode.COMMUNICATION not in modes(panels(cores(0.4, 0.4), transfer_ms=40), on_purpose=on_purpose)


def test_the_time_that_bytes_need_at_the_line_rate_is_no_waiting_for_cores_unless_work_may_hide_it():
    run = replace(panels(cores(0.4, 0.4), transfer_ms=40), host=tuple(f"n{rank}" for rank in range(RANKS)))
    run_s = float(run.times_ns.sum()) / 1e9
    full = FlowFindings(faults=(), is_compared=False, reason="two hosts", line_share=0.6, line_s=0.25 * run_s)
    assert Mode.COMMUNICATION in modes(replace(run, flows=full))
    hidden = np.full((RANKS, STEPS), 0.25 * run.mean_length_ns)
    for other in (replace(run, flows=full, hidden_ns=hidden), replace(run, flows=replace(full, line_s=0.05 * run_s))):
        assert Mode.COMMUNICATION not in modes(other)


def test_transfers_beyond_all_waiting_are_bound_by_communication():
    assert Mode.COMMUNICATION in modes(panels(cores(0.4, 0.12), transfer_ms=100))


def test_jitter_that_waiting_for_cores_may_explain_is_not_amplified_jitter():
    assert modes(panels(noise=0.15)) == [Mode.AMPLIFICATION]
    assert modes(panels(cores(0.5, 0.4), noise=0.15), on_purpose=True) == []


def test_jitter_beyond_all_waiting_stays_amplified_jitter():
    assert Mode.AMPLIFICATION in modes(panels(cores(0.5, 0.06), noise=0.15))


SLOW = np.array([1.0, 1.0, 1.3, 1.0])


def test_a_slow_rank_that_only_waits_longer_is_no_straggler():
    assert modes(panels(work=SLOW)) == [Mode.STRAGGLER]
    use = cores(0.6, [0.1, 0.1, 0.35, 0.1], cpus=("0", "1", "2", "3"))
    assert modes(panels(use, work=SLOW)) == [Mode.CORES]


def test_a_slow_rank_that_computes_more_is_a_straggler_where_cores_are_shared():
    found = diagnose(
        Case(panels=panels(cores([0.4, 0.4, 0.6, 0.4], 0.4), work=SLOW), is_shared_on_purpose=True)
    ).findings
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
    assert search_stragglers(run, DiagnosisConfig(), ThresholdValues()).obstacle is SearchObstacle.TOO_MUCH_NOISE
    found = diagnose(Case(panels=run, is_shared_on_purpose=True))
    assert (found.findings, found.obstacle) == ((), None)
    assert "would have been detected" in verdict_of(found, hosts=HOSTS).why[0]


def test_a_rank_that_comes_and_goes_leaves_a_run_healthy_where_ranks_wait_for_cores():
    stretches = np.concatenate([np.arange(*of) for of in ((3, 27), (50, 71), (100, 134), (150, 177))])
    work = panels().work_ns.copy()
    work[3, stretches] *= 1.25
    runs = [replace(panels(use), work_ns=work, reach_ns=work) for use in (None, cores(0.3, 0.7))]
    alone, shared = (diagnose(Case(panels=run, is_shared_on_purpose=True)) for run in runs)
    assert alone.obstacle is not None and "comes and goes" in alone.obstacle.words
    assert (shared.findings, shared.obstacle) == ((), None)


@each_case(
    ("use", "words", "advice"),
    [
        (cores(0.48, 0.4), "4 ranks of this job on 2 CPUs of n0; ranks 0-3 wait", "srun -c"),
        (cores(0.5, 0.4, cpus=("0-7",) * RANKS), "other processes on n0 take them; ranks 0-3 wait", "--exclusive"),
        (cores(0.2, 0.8), "on 2 CPUs of n0, and other processes there; ranks 0-3 wait", "--exclusive"),
        (cores(0.5, 0.4, throttled=0.35), "the CPU quota of the cgroup on n0 is used up", "raise the quota"),
        (
            cores(0.5, [0.4, 0, 0, 0], cpus=("0-7",) * RANKS),
            "rank 0 on n0 waits for a core for 40.0 % of the time, the others",
            "squeue -w",
        ),
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
    found = diagnose(Case(panels=replace(run, **lengths, cores=cores(0.5, waiting).in_lab(run.node))))
    assert [finding.mode for finding in found.findings] == modes


def in_lab(use, **changed):
    run = panels(use, per_node=1, **changed)
    return replace(run, cores=use.in_lab(run.node))


def test_in_a_lab_cores_that_its_hosts_share_explain_who_is_late_and_are_no_finding():
    problems = []
    for queued in ([0.3, 0.3, 0.55, 0.3], [0.3, 0.2, 0.4, 0.3], [0.5, 0.5, 0.9, 0.6]):
        run = in_lab(cores(0.5, queued), work=np.array([1.0, 1.0, 1.4, 1.0]))
        verdict = verdict_of(diagnose(Case(panels=run)), hosts=HOSTS)
        is_said = any("the hosts of a lab share those of one machine" in line for line in verdict.also)
        if verdict.mode != Mode.HEALTHY or not is_said or "exclude" in str(verdict):
            problems.append((queued, verdict))
    assert problems == []


def test_in_a_lab_a_host_that_waits_far_longer_than_the_others_is_named_and_so_is_real_work():
    waits = in_lab(cores(0.4, [0.1, 0.12, 0.55, 0.1]), work=np.array([1.0, 1.0, 1.4, 1.0]))
    (found,) = diagnose(Case(panels=waits)).findings
    assert (found.mode, [culprit.id for culprit in found.culprits]) == (Mode.CORES, ["n2"])
    of_two = panels(cores(0.4, [0.1, 0.1, 0.55, 0.55]), per_node=2)
    assert modes(replace(of_two, cores=of_two.cores.in_lab(of_two.node))) == []  # either may wait for longer by chance
    works = in_lab(cores([0.4, 0.4, 0.6, 0.4], 0.3), work=np.array([1.0, 1.0, 1.4, 1.0]))
    assert modes(works) == [Mode.STRAGGLER]


QUOTA = CpuQuota("/sys/fs/cgroup/pod/cpu.max", 0.25)
FULL = CpuQuota("/sys/fs/cgroup/pod/cpu.max", 1.0)


def test_a_quota_is_named_with_its_file_and_the_hosts_that_it_stops_for_longer_than_others():
    work, problems = np.array([1.0, 1.0, 2.5, 1.0]), []
    uneven, even, one = [0.25, 0.25, 0.82, 0.25], [0.4] * 4, [0.0, 0.0, 0.6, 0.0]
    cases = [
        # Throttled, whether in a lab, quotas; then named hosts, and parts of the headline, the reasons and the advice.
        (
            uneven,
            False,
            (FULL, FULL, QUOTA, FULL),
            ["n2"],
            "n2 may use 0.25 cores (/sys/fs/cgroup/pod/cpu.max)",
            "1 core",
            "slice",
        ),
        (uneven, True, (FULL, FULL, QUOTA, FULL), ["n2"], "stops ranks there for up to 82.0 %", "25.0 %", "slice"),
        (one, False, (None, None, QUOTA, None), ["n2"], "n2 may use 0.25 cores", "0.0 % of the time", "slice"),
        (one, False, (), ["n2"], "the CPU quota of the cgroup on n2 is used up", "0.0 %", "raise the quota"),
        (even, False, (QUOTA,) * 4, [], "n0, n1, n2 and n3 may use 0.25 cores on n0", "throttled", "slice"),
    ]
    for throttled, is_lab, quotas, hosts, *parts in cases:
        use = cores(0.18, throttled, throttled=throttled)
        run = panels(use, per_node=1, work=work if throttled is not even else None)
        run = replace(run, cores=use.in_lab(run.node) if is_lab else use, quotas=quotas)
        verdict = verdict_of(diagnose(Case(panels=run)), hosts=dict(enumerate(run.host)))
        named = [culprit.id for culprit in verdict.findings[0].culprits]
        texts = (verdict.headline, "; ".join(verdict.why), verdict.next[0])
        is_right = (verdict.mode, verdict.variety, named) == (Mode.CORES, "quota", hosts)
        if not is_right or not all(part in text for part, text in zip(parts, texts, strict=True)):
            problems.append((throttled, is_lab, verdict))
    assert not problems, problems[0]


def test_a_quota_that_is_used_up_is_the_reason_however_long_ranks_wait_for_other_processes_as_well():
    use = cores([0.3, 0.3, 0.1, 0.3], [0.4, 0.4, 0.85, 0.4], throttled=[0.0, 0.0, 0.4, 0.0])
    for quota, variety in ((CpuQuota("/cpu.max", 0.1), "quota"), (None, "other processes"), (FULL, "other processes")):
        run = replace(panels(use, per_node=1), quotas=(None, None, quota, None))
        assert diagnose(Case(panels=run)).findings[0].variety == variety


def test_a_quota_that_ranks_use_up_whenever_they_compute_is_the_reason_though_they_compute_rarely():
    # All threads of a rank that is stopped wait: 0.16 of the time, but for 0.5 of it together.
    use = cores(0.1, [0.1, 0.1, 0.5, 0.1], throttled=[0.0, 0.0, 0.16, 0.0])
    for queued_ms, variety in ((30, "quota"), (38, "other processes")):  # it gets 0.25 cores when it computes, or 0.05
        work = split(40, queued=[2, 2, queued_ms, 2])
        run = panels(replace(use, work=work), per_node=1, work=np.array([1.0, 1.0, 2.5, 1.0]))
        run = replace(run, quotas=(None, None, QUOTA, None))
        assert diagnose(Case(panels=run)).findings[0].variety == variety


def test_a_quota_that_a_lab_gives_all_of_its_hosts_is_no_finding():
    use = cores(0.2, 0.5, throttled=0.5)
    run = panels(use, per_node=1)
    assert modes(replace(run, cores=use.in_lab(run.node))) == []


def test_a_link_is_not_slow_because_the_process_at_its_end_is_stopped_by_a_quota():
    use = cores(0.2, [0.0, 0.0, 0.8, 0.0], throttled=[0.0, 0.0, 0.8, 0.0])
    for link, is_kept in (("n2", False), ("n1", True)):
        culprit = Culprit(kind="link", id=link, aliases=(f"link {link}",), effect=1.0, interval=(0.9, 1.1))
        slow = DiagnosisFinding(
            evidence=SlowLinkEvidence(effect=1.0, share=0.3), loss_share=0.15, confidence=0.9, culprits=(culprit,)
        )
        case = Case(panels=panels(use, per_node=1), findings=[slow])
        find(case)
        assert (slow in case.findings) == is_kept


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


def split(own, *, queued=0.0, idle=0.0):
    """Return own work of a forward pass in milliseconds a step, and how much of it is waiting for a core or neither."""
    own, queued, idle = (np.broadcast_to(np.asarray(v, float), RANKS) * MS for v in (own, queued, idle))
    parts = np.zeros((3, RANKS, len(PARTS)))
    parts[:, :, PARTS.index(Part.FORWARD)] = own, own - queued - idle, queued
    return WorkUse(
        own_ns=parts[0],
        running_ns=parts[1],
        queued_ns=parts[2],
        error_ns=np.full(RANKS, 0.1 * MS),
        num_seconds=np.full(RANKS, 20),
        is_part_known=np.ones((RANKS, len(PARTS)), bool),
    )


def on_cores(work, *, queued, idle=0.0, share=0.4, **changes):
    """Return a case whose ranks share cores, with their own work and its waiting for cores in milliseconds."""
    work = np.asarray(work, float)
    use = replace(cores(0.5, share), work=split(work, queued=queued, idle=idle), **changes)
    run = panels(use, work=work / 100)
    others_ns = np.zeros(RANKS)
    parts_ns = np.zeros((RANKS, STEPS, len(Part)))
    parts_ns[:, :, Part.FORWARD] = run.work_ns
    return Case(panels=replace(run, parts_ns=parts_ns, cores=replace(use, queued=others_ns + share)))


@each_case(
    ("work", "queued", "idle", "first", "words"),
    [
        # The fault is in processor time, however long ranks wait.
        ([60, 60, 60, 100], 30, 0, Mode.STRAGGLER, "by computation"),
        ([60, 60, 60, 180], [30, 30, 30, 110], 0, Mode.STRAGGLER, "by computation"),
        # Neither running nor waiting.
        ([60, 60, 60, 110], [30, 30, 30, 40], [0, 0, 0, 40], Mode.STRAGGLER, "by waiting that uses no core"),
        # The rank only waits longer, or too little is left.
        ([60, 60, 60, 180], [30, 30, 30, 148], 0, Mode.CORES, "ranks share cores"),
        ([60, 60, 60, 70], [30, 30, 30, 40], 0, Mode.CORES, "ranks share cores"),
    ],
)
def test_a_fault_beyond_waiting_for_cores_is_the_verdict(work, queued, idle, first, words):
    verdict = verdict_of(diagnose(on_cores(work, queued=queued, idle=idle)), hosts=HOSTS)
    assert verdict.mode == first
    assert words in verdict.headline
    assert ([culprit.id for culprit in verdict.culprits] == ["3"]) == (first is Mode.STRAGGLER)
    assert sum("ranks share cores" in line for line in (verdict.headline, *verdict.also)) == 1


def test_the_cost_of_a_late_rank_is_without_its_waiting_for_cores():
    whole = diagnose(on_cores([60, 60, 60, 180], queued=[30, 30, 30, 30])).findings[0]
    found = diagnose(on_cores([60, 60, 60, 180], queued=[30, 30, 30, 90])).findings[0]
    assert found.loss_share == pytest.approx(whole.loss_share / 2, rel=0.02)
    case = on_cores([60, 60, 60, 180], queued=[30, 30, 30, 90])
    case.findings = [replace(whole, loss_interval=(whole.loss_share - 0.01, whole.loss_share + 0.01))]
    find(case)
    low, high = case.findings[0].loss_interval
    assert low < found.loss_share < high < whole.loss_share
    why = verdict_of(diagnose(on_cores([60, 60, 60, 180], queued=[30, 30, 30, 90])), hosts=HOSTS).why
    assert any(line.startswith("60.0 ms of the 120 ms more in each step is waiting for a core") for line in why)


def test_a_fault_of_which_few_seconds_were_read_is_no_waiting_that_is_far_shorter():
    case = on_cores([60, 60, 60, 180], queued=[30, 30, 30, 35], idle=[0, 0, 0, 115], share=0.06)
    work = replace(case.panels.cores.work, error_ns=np.full(RANKS, np.inf), num_seconds=np.full(RANKS, 2))
    case.panels = replace(case.panels, cores=replace(case.panels.cores, work=work))
    verdict = verdict_of(diagnose(case), hosts=HOSTS)
    assert verdict.mode == Mode.STRAGGLER and [culprit.id for culprit in verdict.culprits] == ["3"]


def test_threads_that_wait_for_a_core_while_the_main_one_is_idle_count_as_waiting():
    case = on_cores([60, 60, 60, 100], queued=0, idle=[0, 0, 0, 40])
    use = replace(case.panels.cores, queued=np.array([0.4, 0.4, 0.4, 2.0]))
    waits = replace(case.panels, cores=use)
    assert Mode.STRAGGLER in [each.mode for each in diagnose(Case(panels=waits)).findings]
    # Where other ranks lose as much by it, or the rank has fewer CPUs, that may be all.
    threaded = on_cores([100, 100, 100, 140], queued=0, idle=[60, 60, 60, 100])
    threaded = replace(threaded.panels, cores=replace(threaded.panels.cores, queued=use.queued))
    assert [each.mode for each in diagnose(Case(panels=threaded)).findings] == [Mode.CORES]
    narrow = replace(use, cpus=(*[frozenset({0, 1})] * 3, frozenset({1})))
    assert [each.mode for each in diagnose(Case(panels=replace(waits, cores=narrow))).findings] == [Mode.CORES]


def test_a_part_that_is_known_of_the_others_alone_is_no_work_of_other_threads_of_the_late_rank():
    case = on_cores([60, 60, 60, 100], queued=0, idle=[0, 0, 0, 40])
    run, backward = case.panels, PARTS.index(Part.BACKWARD)
    work, of_late = run.cores.work, np.arange(RANKS) == 3
    own_ns, running_ns, is_known = work.own_ns.copy(), work.running_ns.copy(), work.is_part_known.copy()
    own_ns[:, backward], running_ns[:, backward], is_known[3, backward] = 50 * MS, [50 * MS] * 3 + [0], False
    work = replace(work, own_ns=own_ns, running_ns=running_ns, is_part_known=is_known)
    use = replace(
        run.cores, work=work, running=np.full(RANKS, 110 * MS / run.mean_time_ns), running_error=np.zeros(RANKS)
    )
    found = excess_of(run, use, of_late)
    assert (found.idle_ns, found.running_ns) == (pytest.approx(40 * MS), pytest.approx(0))


@each_case(
    ("changes", "words", "advice"),
    [
        ({"nice": np.array([0, 0, 0, 19])}, "it runs at nice 19, the others at 0", "renice -n 0"),
        ({"nice": np.array([-5, -5, -5, 0])}, "it runs at nice 0, the others at -5", "renice -n -5"),
        ({"cpus": (*[frozenset({0, 1})] * 3, frozenset({1}))}, "it may use 1 CPU, the others 2", "unset OMP_PROC_BIND"),
    ],
)
@pytest.mark.parametrize("on_purpose", [False, True])
def test_a_rank_that_waits_because_of_its_place_is_named_alone(changes, words, advice, on_purpose):
    case = on_cores([60, 60, 60, 180], queued=[30, 30, 30, 148], **changes)
    case.panels = replace(case.panels, cores=replace(case.panels.cores, waiting=np.array([0.2, 0.2, 0.2, 0.8])))
    case.panels = replace(case.panels, bindings={3: ("OMP_PROC_BIND=true", "unset OMP_PROC_BIND")})
    case.is_shared_on_purpose = on_purpose
    verdict = verdict_of(diagnose(Case(panels=case.panels, is_shared_on_purpose=on_purpose)), hosts=HOSTS)
    assert [culprit.id for culprit in verdict.culprits] == ["3"]
    assert words in verdict.headline
    assert advice in verdict.next[0]
    assert ("because OMP_PROC_BIND=true" in verdict.headline) == ("cpus" in changes)
    assert not any("on purpose" in line for line in verdict.also)


def test_nice_values_that_differ_are_said_also_where_all_ranks_wait_alike():
    use = replace(cores(0.5, 0.9, cpus=("0-1",) * RANKS), nice=np.array([0, 0, 19, 0]))
    verdict = verdict_of(diagnose(Case(panels=panels(use))), hosts=HOSTS)
    assert verdict.culprits == () and "ranks 0-3 wait" in verdict.headline
    assert verdict.why[0].startswith("rank 2 runs at nice 19, the others at 0; on average")
    assert verdict.next[0].startswith("start rank 2 at nice 0")
    same = verdict_of(diagnose(Case(panels=panels(replace(use, nice=np.full(RANKS, 5))))), hosts=HOSTS)
    assert "nice" not in str(same) + " ".join(same.why + same.next)


def test_two_ranks_on_one_core_while_others_have_more_wait_for_each_other():
    use = cores([0.9, 0.5, 0.5, 0.9], [0.0, 0.5, 0.5, 0.0], cpus=("0-7", "0", "0", "0-7"))
    bindings = dict.fromkeys([1, 2], ("OMP_PLACES={0}", "unset OMP_PLACES"))
    verdict = verdict_of(diagnose(Case(panels=replace(panels(use), bindings=bindings))), hosts=HOSTS)
    assert (verdict.variety, [culprit.id for culprit in verdict.culprits]) == ("ranks", ["1", "2"])
    assert "2 ranks of this job on 1 CPU of n0, to which OMP_PLACES={0} narrowed them" in verdict.headline
    assert verdict.next[0].startswith("unset OMP_PLACES")


def test_openmp_that_puts_all_ranks_on_one_core_is_why_they_share_it():
    run = panels(cores(0.25, 0.6, cpus=("0",) * RANKS))
    bindings = dict.fromkeys(range(RANKS), ("OMP_PROC_BIND=close", "unset OMP_PROC_BIND"))
    verdict = verdict_of(diagnose(Case(panels=replace(run, bindings=bindings))), hosts=HOSTS)
    assert "4 ranks of this job on 1 CPU of n0, to which OMP_PROC_BIND=close narrowed them" in verdict.headline
    assert verdict.next[0].startswith("unset OMP_PROC_BIND")


@each_case(
    ("option", "record", "is_found"),
    [(None, False, True), (None, True, False), (True, False, False), (False, True, True)],
)
def test_a_report_may_say_that_cores_are_shared_on_purpose(tmp_path, option, record, is_found):
    scenario = Scenario(seed=3, num_ranks=8, num_steps=60, fault="shared_cores", size=1.0)
    run = write_run(scenario, tmp_path / "run")
    attempt = run.attempt(0)
    write_json(attempt.run_json, {"config": {"train": {"shared_cores": record}}})
    config = Config(ReportConfig(shared_cores=option))
    verdict = analyze_traces(run, attempt, read_attempt(attempt), Selection(), config).summary.verdict
    assert (verdict.mode == Mode.CORES) == is_found
    assert any("on purpose" in line for line in verdict.also) != is_found


def test_the_ranks_of_a_host_are_listed_with_nice_values_and_waiting_by_phase():
    case = on_cores([60, 60, 60, 180], queued=[30, 30, 30, 148], nice=np.array([0, 0, 0, 19]))
    first, *others = rank_figures(case.panels, CoreThresholds())
    shown = {row.rank: (row.nice, dict(row.phases)["forward"]) for row in (first, *others)}
    assert shown == {0: (0, 30 * MS), 1: (0, 30 * MS), 2: (0, 30 * MS), 3: (19, 148 * MS)}
    quiet = panels(replace(cores(1.0, 0.0), nice=np.array([0, 0, 0, 5])))
    assert [row.nice for row in rank_figures(quiet, CoreThresholds())] == [0, 0, 0, 5]
    assert rank_figures(panels(cores(1.0, 0.0)), CoreThresholds()) == ()


@each_case(
    ("idle", "running", "words"),
    [(0, 40, "by computation"), (40, 0, "by waiting that uses no core"), (2, 2, None)],
)
def test_a_rank_that_waits_hide_is_found_by_what_it_does_besides(idle, running, words):
    own = np.array([120.0, 120.0, 120.0, 120.0 + idle + running])
    case = on_cores(own, queued=60, idle=[0, 0, 0, idle])
    noise = np.random.default_rng(5).lognormal(0, 1.5, (RANKS, STEPS))
    work_ns = case.panels.work_ns.mean(axis=1, keepdims=True) * noise / noise.mean(axis=1, keepdims=True)
    run = replace(case.panels, work_ns=work_ns)
    assert search_stragglers(run, DiagnosisConfig(), ThresholdValues()).found == ()
    verdict = verdict_of(diagnose(Case(panels=run)), hosts=HOSTS)
    assert (verdict.mode == Mode.STRAGGLER) == (words is not None)
    if words is not None:
        assert [culprit.id for culprit in verdict.culprits] == ["3"]
        assert words in verdict.headline
        assert "without waiting for cores" in verdict.why[0]


@each_case(("others_ms", "stages"), [(48.0, (Stage.COMPUTE,)), (80.0, ())])
def test_a_phase_in_which_the_others_are_blocked_is_named_where_it_takes_more_than_all_of_theirs(others_ms, stages):
    """As where forward gathers from all ranks, so that it is not known what the others do of that work."""
    case = on_cores([others_ms, others_ms, others_ms, 100], queued=[0, 0, 0, 26], idle=[0, 0, 0, 54])
    work, forward = case.panels.cores.work, PARTS.index(Part.FORWARD)
    is_known, running_ns = work.is_part_known.copy(), work.running_ns.copy()
    is_known[:3, forward], running_ns[:3, forward] = False, 0.0
    found = stages_beyond_waiting(case.panels, replace(work, is_part_known=is_known, running_ns=running_ns), 3)
    assert found.stages == stages
    assert {each.phase: (each.own_ns, each.usual_ns) for each in found.phases}["forward"] == (
        (74 * MS, 48 * MS) if stages else (0, 0)
    )


def test_a_sleep_is_the_verdict_however_long_all_ranks_wait_for_cores():
    """It costs 6 % of these steps, and most of what they would take on idle cores."""
    case = on_cores([500, 500, 500, 530], queued=480, idle=[0, 0, 0, 30], share=0.9)
    verdict = verdict_of(diagnose(case), hosts=HOSTS)
    assert (verdict.mode, [culprit.id for culprit in verdict.culprits]) == (Mode.STRAGGLER, ["3"])
    assert any("ranks share cores" in line for line in verdict.also)


def test_a_rank_beside_one_that_sleeps_is_not_named_for_waiting_as_long():
    run = on_cores([60, 60, 60, 180], queued=[40, 10, 10, 10], idle=[0, 0, 0, 120], cpus=(frozenset(range(8)),) * RANKS)
    named = [culprit.id for each in diagnose(run).findings for culprit in each.culprits]
    assert named == ["3"]
