from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import each_case

from hpcpace.diagnosis.finding import Case, DiagnosisFinding, Panels
from hpcpace.diagnosis.host_pace import HostPace
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.summary import Mode
from hpcpace.diagnosis.topics.beside_hosts import cost_of
from hpcpace.diagnosis.topics.idle import HostEvidence
from hpcpace.diagnosis.verdict import NOTHING_COMPARED, WRONG_CLOCK, diagnose, too_few_steps, verdict_of
from hpcpace.hang.from_traces import hang_now
from hpcpace.hang.views import Call, Channel, FoundHang, GroupView, JobView, RankView
from hpcpace.metrics.issue_leads import StepPace
from hpcpace.metrics.resampling import Estimate
from hpcpace.metrics.stragglers import Straggler

MS = 1e6


def diagnosed(steps, **facts):
    return diagnose(Case(panels=steps, **facts))


def panels(num_ranks=16, num_steps=200, *, noise=0.02, per_node=4, stages=1, seed=1, **changed):
    """Return panels of a healthy job: 100 ms of own work, 5 ms of transfer, ranks wait for their slowest."""
    random = np.random.default_rng(seed)
    rank = np.arange(num_ranks)
    work = 100 * MS * random.normal(1.0, noise, (num_ranks, num_steps))
    work = changed.pop("work_ns", lambda work: work)(work)
    transfer = changed.pop("transfer_ns", lambda transfer: transfer)(np.full((num_ranks, num_steps), 5 * MS))
    slowest = work.max(axis=0)
    times = slowest + transfer.mean(axis=0)
    nothing = np.zeros((num_ranks, num_steps))
    node = rank // per_node
    return Panels(
        rank=rank,
        host=tuple(f"n{n}" for n in node),
        node=node,
        role=rank % stages,
        stage=rank % stages if stages > 1 else np.full(num_ranks, -1),
        times_ns=times,
        since_ns=np.cumsum(times),
        work_ns=work,
        reach_ns=work,
        data_ns=changed.pop("data_ns", nothing),
        gc_ns=changed.pop("gc_ns", nothing),
        wait_ns=slowest - work,
        transfer_ns=transfer,
        **changed,
    )


def slowed(rows, factor, steps=slice(None)):
    def change(work):
        work[rows, steps] *= factor
        return work

    return change


def test_a_healthy_run_has_no_finding():
    found = diagnosed(panels())
    assert (found.findings, found.obstacle) == ((), None)
    assert found.smallest_effect is not None and found.smallest_effect < 0.05


def test_a_slow_rank_is_a_persistent_straggler_with_its_loss():
    first = diagnosed(panels(work_ns=slowed([5], 1.2))).findings[0]
    assert first.mode == Mode.STRAGGLER
    assert [(c.kind, c.id) for c in first.culprits] == [("rank", "5")]
    assert first.culprits[0].effect == pytest.approx(0.2, abs=0.01)
    assert first.loss_share == pytest.approx(0.135, abs=0.02)


def test_a_node_that_comes_and_goes_in_a_few_stretches_makes_no_healthy_job():
    stretches = np.concatenate([np.arange(*of) for of in ((3, 17), (30, 41), (60, 80), (90, 106))])

    def change(work):
        work[4:8, stretches] *= 1.25
        return work

    found = diagnosed(panels(num_steps=118, noise=0.01, work_ns=change))
    assert not found.findings and found.obstacle is not None
    assert "rank" in found.obstacle.words and "on n1 works longer than its role by" in found.obstacle.words


def test_transfers_that_others_see_while_a_rank_is_late_are_no_bursts():
    late = slice(100, 200)

    def transfers(transfer):
        transfer[np.arange(16) != 5, late] *= 3
        return transfer

    found = diagnosed(panels(work_ns=slowed([5], 1.3, late), transfer_ns=transfers))
    assert [(each.mode, each.variety) for each in found.findings] == [(Mode.STRAGGLER, "transient")]


def test_a_rank_alone_on_its_node_is_that_node():
    first = diagnosed(panels(per_node=1, work_ns=slowed([5], 1.2))).findings[0]
    assert set(first.culprits[0].aliases) == {"rank 5", "node n5"}


def test_a_slow_node_is_named_and_not_its_ranks():
    first = diagnosed(panels(work_ns=slowed([4, 5, 6, 7], 1.1))).findings[0]
    assert [(c.kind, c.id) for c in first.culprits] == [("node", "n1")]


def test_a_stage_with_more_work_is_an_imbalance():
    first = diagnosed(panels(stages=4, work_ns=slowed(slice(2, None, 4), 1.2))).findings[0]
    assert (first.mode, first.culprits[0].id) == (Mode.IMBALANCE, "pp2")
    assert first.culprits[0].aliases == ("slot pp2",)


def test_a_stage_of_one_rank_may_as_well_be_the_rank():
    first = diagnosed(panels(4, stages=4, per_node=1, work_ns=slowed([2], 1.2))).findings[0]
    assert set(first.culprits[0].aliases) == {"slot pp2", "rank 2", "node n2"}


def test_ranks_of_unknown_roles_are_not_compared():
    found = diagnosed(panels(work_ns=slowed([5], 1.2), is_role_known=False))
    assert found.findings == () and found.obstacle == NOTHING_COMPARED


def test_ranks_of_unknown_roles_in_known_stages_are_compared_by_stage():
    assert diagnosed(panels(stages=4, is_role_known=False)).obstacle is None


def test_jitter_that_everybody_waits_for_is_amplification():
    first = diagnosed(panels(64, noise=0.08)).findings[0]
    assert (first.mode, first.culprits) == (Mode.AMPLIFICATION, ())


def test_events_at_equal_distances_are_the_control_plane():
    def change(work):
        work[3, ::10] *= 1.5
        return work

    first = diagnosed(panels(work_ns=change)).findings[0]
    assert (first.mode, first.variety) == (Mode.RUNTIME, "periodic")
    assert first.evidence.period_ns == pytest.approx(10 * 115 * MS, rel=0.1)


@each_case(("every", "factor", "noise"), [(8, 7.4, 0.02), (20, 4.0, 0.02), (8, 9.0, 0.5)])
@each_case("num_ranks", [2, 3, 4])
def test_a_rank_that_stalls_at_equal_distances_is_named_among_few(every, factor, noise, num_ranks):
    def change(work):
        work[1, every - 1 :: every] *= factor
        return work

    first = diagnosed(panels(num_ranks, work_ns=change, noise=noise)).findings[0]
    assert (first.mode, first.variety) == (Mode.RUNTIME, "periodic")
    assert [culprit.id for culprit in first.culprits] == ["1"]
    assert first.evidence.period_steps == every


@each_case("slow_start", [False, True])
@each_case("num_ranks", [2, 4])
def test_a_rank_that_stalls_four_times_by_number_of_steps_is_named(num_ranks, slow_start):
    def change(work):
        work[1, 6::8] *= 6
        if slow_start:
            work[:, 0] *= 2
        return work

    first = diagnosed(panels(num_ranks, num_steps=37, work_ns=change)).findings[0]
    assert ([culprit.id for culprit in first.culprits], first.evidence.period_steps) == (["1"], 8)


def test_ranks_that_stall_in_turn_by_number_of_steps_are_not_named():
    def change(work):
        work[[1, 0, 1, 1], [6, 14, 22, 30]] *= 6
        return work

    found = diagnosed(panels(2, num_steps=37, work_ns=change)).findings
    assert all(culprit.kind != "rank" for finding in found for culprit in finding.culprits)


def test_bursts_of_long_transfers_are_contention():
    def change(transfer):
        transfer[:, np.random.default_rng(3).random(200) < 0.2] *= 6
        return transfer

    assert [f.mode for f in diagnosed(panels(transfer_ns=change)).findings] == [Mode.CONTENTION]


def test_transfers_that_always_take_most_of_the_step_are_no_fault():
    assert [f.mode for f in diagnosed(panels(transfer_ns=lambda t: t * 20)).findings] == [Mode.COMMUNICATION]


@pytest.mark.parametrize(
    ("transfer_ms", "modes"),
    [
        pytest.param(70, [Mode.STRAGGLER, Mode.COMMUNICATION], id="costs two thirds of what transfers take"),
        pytest.param(120, [Mode.COMMUNICATION, Mode.STRAGGLER], id="costs two fifths of what transfers take"),
    ],
)
def test_a_slow_rank_comes_before_steady_transfers_that_take_twice_as_much_at_most(transfer_ms, modes):
    slow = panels(work_ns=slowed([5], 1.5), transfer_ns=lambda transfer: transfer * (transfer_ms / 5))
    assert [finding.mode for finding in diagnosed(slow).findings] == modes


def test_transfers_are_not_judged_by_wrong_clocks():
    found = diagnosed(panels(transfer_ns=lambda t: t * 20), is_clock_wrong=True)
    assert (found.findings, found.obstacle) == ((), WRONG_CLOCK)


def test_waiting_for_data_is_input_bound():
    found = diagnosed(panels(data_ns=np.full((16, 200), 30 * MS)))
    assert [(f.mode, f.culprits[0].id) for f in found.findings] == [(Mode.INPUT, "data")]


def test_garbage_collection_is_the_runtime():
    collected = np.zeros((16, 200))
    collected[:, ::5] = 20 * MS
    assert [(f.mode, f.culprits[0].id) for f in diagnosed(panels(gc_ns=collected)).findings] == [(Mode.RUNTIME, "gc")]


def hang(age_s, absent=(2,), completed=(), silences_s=None):
    """Return what holds up a job whose ranks stand in an all_reduce, if anything does."""
    now_ns, world = int(1e12), Channel(0)
    ranks = {}
    for rank in range(16):
        seq = 8 if rank in absent else 9
        call = Call(
            channel=world,
            seq=seq,
            op="all_reduce",
            entered_ns=now_ns - int(age_s * 1e9),
            is_open=rank not in (*absent, *completed),
            step=200,
        )
        seen_ns = now_ns - int((silences_s or {}).get(rank, 0) * 1e9)
        ranks[rank] = RankView(rank=rank, entered={world: seq + 1}, calls=(call,), seen_ns=seen_ns)
    groups = (GroupView(name="0", members=tuple(range(16))),)
    job = JobView(groups=groups, ranks=ranks, now_ns=now_ns, usual_step_ns=int(0.1e9))
    found = hang_now(job, hang_s=5.0)
    return None if found is None else FoundHang(hang=found, job=job)


def test_the_rank_that_never_entered_is_named_in_a_hang():
    first = diagnosed(panels(), hang=hang(60)).findings[0]
    assert (first.mode, [c.id for c in first.culprits]) == (Mode.HANG, ["2"])
    assert (first.evidence.age_ns, first.evidence.step) == (60_000_000_000, 200)
    assert (first.evidence.inside, first.evidence.absent, first.evidence.completed) == (15, 1, 0)


@pytest.mark.parametrize("absent", [(2,), ()])
def test_an_operation_that_was_just_cut_off_is_no_hang(absent):
    assert diagnosed(panels(), hang=hang(1, absent=absent)).findings == ()


@each_case(("silences_s", "named"), [({}, []), ({3: 55, 4: 1}, ["3"]), (dict.fromkeys(range(16), 55), [])])
def test_of_a_hang_that_all_are_inside_the_silent_rank_is_named(silences_s, named):
    first = diagnosed(panels(), hang=hang(60, absent=(), silences_s=silences_s)).findings[0]
    assert (first.mode, [culprit.id for culprit in first.culprits]) == (Mode.HANG, named)


@pytest.mark.parametrize(("silences_s", "named"), [({}, []), ({4: 55}, ["4"])])
def test_of_a_hang_that_some_ranks_completed_the_silent_rank_is_named(silences_s, named):
    # One that was stopped, and woken up when the job was ended, counts as of before: see tests/unit/hang.
    first = diagnosed(panels(), hang=hang(60, absent=(), completed=(1, 3), silences_s=silences_s)).findings[0]
    assert (first.mode, [culprit.id for culprit in first.culprits]) == (Mode.HANG, named)
    assert (first.evidence.inside, first.evidence.completed) == (14, 2)


def test_few_steps_cannot_tell():
    found = diagnosed(panels(num_steps=8, work_ns=slowed([5], 1.5)))
    assert found.findings == () and found.obstacle.words.startswith(
        f"{too_few_steps(8, 20).words}; preliminary: rank 5 on "
    )
    alike = diagnosed(panels(num_steps=8, work_ns=slowed([5], 1.05)))
    assert (alike.findings, alike.obstacle) == ((), too_few_steps(8, 20))


def test_thresholds_are_settings():
    settings = DiagnosisConfig(straggler_share=0.5)
    assert Mode.STRAGGLER not in [
        f.mode for f in diagnosed(panels(work_ns=slowed([5], 1.2)), settings=settings).findings
    ]


def test_ranks_that_differ_by_one_percent_for_good_are_no_stragglers():
    random = np.random.default_rng(4)

    def change(work):
        return work * random.normal(1.0, 0.01, (len(work), 1))

    assert diagnosed(panels(64, noise=0.01, work_ns=change)).findings == ()


def test_events_on_one_node_name_it_though_they_have_no_period():
    def change(work):
        work[8:12, [7, 20, 61, 150, 170]] *= 2
        return work

    found = [f for f in diagnosed(panels(64, noise=0.01, work_ns=change)).findings if f.mode == Mode.RUNTIME]
    assert [(c.kind, c.id) for c in found[0].culprits] == [("node", "n2")]
    assert found[0].variety == "recurring"


def test_the_effect_of_a_slow_half_of_the_job_is_that_against_the_other_half():
    first = diagnosed(panels(8, work_ns=slowed([4, 5, 6, 7], 1.2))).findings[0]
    assert first.culprits[0].effect == pytest.approx(0.2, abs=0.01)


def test_a_rank_twice_as_slow_stands_out_among_three_that_are_starved():
    random = np.random.default_rng(5)

    def change(work):
        work *= random.lognormal(0.0, 0.8, work.shape) * np.array([1.0, 1.2, 1.0, 0.9])[:, None]
        work[2] *= 2.0
        return work

    found = diagnosed(panels(4, per_node=1, work_ns=change))
    assert [c.id for f in found.findings if f.mode == Mode.STRAGGLER for c in f.culprits] == ["2"]


@each_case("num_ranks", [2, 4, 16])
def test_ranks_that_all_take_turns_are_nobodys_fault(num_ranks):
    def change(work):
        for step in range(work.shape[1]):
            work[step % len(work), step] *= 1.5
        return work

    found = diagnosed(panels(num_ranks, per_node=1, noise=0.01, work_ns=change))
    assert not any(culprit.kind == "rank" for finding in found.findings for culprit in finding.culprits)


def test_large_events_of_one_node_are_told_from_small_ones_everywhere():
    random = np.random.default_rng(3)

    def change(work):
        for rank in range(len(work)):
            work[rank, random.choice(200, 20, replace=False)] *= 1.3
        work[8:12, 5::14] *= 2.5
        return work

    found = [f for f in diagnosed(panels(64, noise=0.01, work_ns=change)).findings if f.mode == Mode.RUNTIME]
    assert [(c.kind, c.id) for c in found[0].culprits] == [("node", "n2")]


def test_a_service_on_one_of_two_nodes_names_it():
    def change(work):
        work[4:, 5::14] *= 2
        return work

    found = [f for f in diagnosed(panels(8, noise=0.02, work_ns=change)).findings if f.mode == Mode.RUNTIME]
    assert [(c.kind, c.id) for c in found[0].culprits] == [("node", "n1")]


def test_a_node_that_is_struck_by_random_events_somewhat_more_often_is_not_named():
    random = np.random.default_rng(0)

    def change(work):
        for rank, number in enumerate((12, 11, 13, 22)):
            work[rank, random.choice(120, number, replace=False)] *= 1.5
        return work

    found = diagnosed(panels(4, 120, per_node=1, noise=0.01, work_ns=change)).findings
    assert [(f.mode, f.culprits) for f in found] == [(Mode.AMPLIFICATION, ())]


def test_ranks_that_take_turns_in_any_order_have_no_period():
    random = np.random.default_rng(8)
    turns = [random.permuted(np.tile(np.arange(8), (25, 1)), axis=1).ravel() for _ in range(40)]
    found = [diagnosed(panels(8, per_node=1, work_ns=slowed(turn, 1.3, np.arange(200)))) for turn in turns]
    assert not [each for each in found if Mode.RUNTIME in {finding.mode for finding in each.findings}]


def test_a_period_that_all_nodes_have_is_no_node_s_though_some_events_are_too_small_to_count():
    named = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        is_late = (np.arange(50) + random.integers(10, size=(128, 1))) % 10 == 0
        noise = random.normal(0.0, 0.002, (128, 50))
        of_all = panels(128, 50, per_node=2, work_ns=lambda _, factor=1 + 0.06 * is_late + noise: 100 * MS * factor)
        named += [culprit.id for finding in diagnosed(of_all).findings for culprit in finding.culprits]
    assert named == []


def test_the_slowest_of_many_ranks_that_are_all_a_little_different_is_no_straggler():
    speed = np.random.default_rng(7).normal(1.0, 0.014, (128, 1))
    assert speed.max() / np.median(speed) > 1.03
    found = diagnosed(panels(128, noise=0.01, work_ns=lambda work: work * speed)).findings
    assert not [finding for finding in found if finding.mode == Mode.STRAGGLER]


def test_ranks_with_a_rhythm_count_among_those_that_tell_what_is_usual():
    speed = np.random.default_rng(7).normal(1.0, 0.014, (64, 1))

    def change(work):
        for rank in range(64):
            work[rank, rank % 10 :: 10] *= 1.1
        return work * speed

    found = diagnosed(panels(64, noise=0.005, work_ns=change)).findings
    assert not [finding for finding in found if finding.mode == Mode.STRAGGLER]


@pytest.mark.parametrize("num_steps", [50, 200])
def test_a_rank_slow_for_a_quarter_of_a_short_run_is_transient(num_steps):
    steps = slice(num_steps // 2, num_steps // 2 + num_steps // 4)
    first = diagnosed(panels(64, num_steps, noise=0.05, work_ns=slowed([5], 1.5, steps))).findings[0]
    assert (first.variety, [c.id for c in first.culprits]) == ("transient", ["5"])
    assert (first.evidence.first, first.evidence.stop) == (steps.start, steps.stop)


def test_a_stage_without_replicas_that_is_slow_for_a_while_is_compared_with_itself():
    differ = np.array([[1.0], [0.98], [1.01], [1.0]])
    found = diagnosed(panels(4, 60, stages=4, work_ns=lambda work: slowed(1, 1.5, slice(20, 38))(work * differ)))
    (first,) = found.findings
    assert (first.mode, first.variety, [c.id for c in first.culprits]) == (Mode.STRAGGLER, "transient", ["1"])
    assert first.loss_share == pytest.approx(0.09, abs=0.02)


def test_stages_without_replicas_that_differ_are_no_stragglers():
    differ = np.array([[1.0], [1.3], [1.0], [0.9]])
    found = diagnosed(panels(4, 60, stages=4, work_ns=lambda work: work * differ))
    assert [finding.mode for finding in found.findings] == [Mode.IMBALANCE]


def test_a_short_spell_that_costs_next_to_nothing_is_not_named():
    spell = slowed([5], 1.3, slice(100, 106))
    assert diagnosed(panels(64, 1000, noise=0.02, work_ns=spell)).findings == ()


def test_the_effect_of_a_stage_is_the_truth_though_first_and_last_differ_for_good():
    misses = 0
    for seed in range(40):

        def change(work):
            work[[0, 7]] *= 1.002
            work[3] *= 1.1
            return work

        found = diagnosed(panels(8, stages=8, noise=0.01, seed=seed, work_ns=change)).findings[0].culprits[0]
        misses += not found.interval[0] <= 0.1 <= found.interval[1]
    assert misses <= 6  # of 40 intervals of 95 %, by chance no more often than in 1 of 100 cases


@each_case(("num_ranks", "num_events"), [(2, 7), (4, 5)])
def test_a_rank_that_stalls_at_equal_times_is_named_where_all_share_a_node(num_ranks, num_events):
    """Steps between two stalls vary by one, as where a script leaves an update out."""
    at = np.cumsum([5, 7, 6, 7, 6, 7, 7])[:num_events]
    steps = panels(num_ranks, at[-1] + 5, per_node=num_ranks, work_ns=slowed(1, 50, at))
    first = diagnosed(steps).findings[0]
    assert first.mode == Mode.RUNTIME
    assert [(c.kind, c.id) for c in first.culprits] == [("rank", "1")]


@each_case(("transfer_ms", "is_named"), [(3, False), (8, True)])
def test_a_healthy_verdict_names_what_takes_much_of_the_step(transfer_ms, is_named):
    """A slow network card may be behind it, which costs less than the thresholds."""
    verdict = verdict_of(
        diagnose(Case(panels=panels(noise=0.001, transfer_ns=lambda ns: np.full_like(ns, transfer_ms * MS)))), hosts={}
    )
    assert verdict.mode == Mode.HEALTHY
    assert ("exposed transfers take 7.4 % of the step" in verdict.headline) == is_named


def test_a_straggler_in_steps_that_are_not_rebuilt_costs_at_most_its_work_and_less_by_what_that_hides():
    def slow(work):
        work[3] *= 1.2
        return work

    hidden_ns = np.full((16, 200), 6 * MS)
    (found,) = diagnose(Case(panels=panels(noise=0.002, work_ns=slow, hidden_ns=hidden_ns))).findings
    low, high = found.loss_interval
    assert low < found.loss_share - 6 / 125 < found.loss_share < high
    (found,) = diagnose(Case(panels=panels(stages=2, noise=0.002, work_ns=slow))).findings
    assert found.loss_interval[0] == 0


def test_the_slowest_host_is_no_straggler_beside_one_that_it_limits():
    """Rank 1 sets the pace of all: its device is idle, which looks like work. Rank 3 works longer for sure."""
    own = replace(panels(8, noise=0.001), step=np.arange(200))

    def pace(step, rows):
        others = StepPace(
            least_ns=0.0, possible_ns=0.0, issue_ns=98 * MS, sure_ns=80 * MS, most_ns=80 * MS, waiting_ns=0.0
        )
        slowest = replace(others, least_ns=float(own.mean_time_ns), sure_ns=5 * MS, most_ns=100 * MS)
        works = replace(others, sure_ns=95 * MS, most_ns=95 * MS)
        return HostPace(row=np.arange(8), of=tuple({1: slowest, 3: works}.get(row, others) for row in range(8)))

    late = [
        Straggler(
            kind="rank",
            ids=(row,),
            pattern="fixed",
            ranks=(row,),
            effect=Estimate.around(0.1, 0.01),
            p_value=1e-6,
            late_share=1.0,
        )
        for row in (3, 1)
    ]
    hosts = DiagnosisFinding(evidence=HostEvidence(share=0.1), loss_share=0.1, confidence=0.9)
    case = Case(panels=own, pace=pace, findings=[hosts])
    cost = cost_of(case, late, lambda found: 0.1 * len(found))
    assert cost.found == late[:1] and cost.share == 0
    assert cost.interval == (0, 0.1) and cost.later_share == 0.1
