"""The truth on jobs of all layouts on devices: what is found, and what it costs against the same job without it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import chosen, only_nightly

from experiments.score.generator import traces_of
from experiments.score.layouts import MS, US, Layout
from experiments.score.scenario import Scenario
from hpcpace.core.rundir import RunDirectory
from hpcpace.diagnosis import devices
from hpcpace.diagnosis.analyze import examine
from hpcpace.diagnosis.summary import Mode, Verdict
from hpcpace.metrics.host_waits import Stretches
from hpcpace.metrics.issue_leads import Issued
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase

HALF_A_POINT = 0.006


def judged(job: Layout, folder: Path, **sound: object) -> tuple[Verdict, float]:
    """Return the verdict on a job, and the share of its step that it would take less with other attributes."""
    step_ns = job.write(folder)
    attempt = RunDirectory(folder).attempts()[0]
    verdict = examine(read_attempt(attempt, progress=lambda done, of: None).traces)
    return verdict, 1 - replace(job, **sound).step_ns() / step_ns


def culprits(verdict: Verdict) -> list[str]:
    return [culprit.id for culprit in verdict.culprits]


@pytest.mark.parametrize("factor", only_nightly([1.1, 1.5], [1.3]))
def test_a_straggler_of_fsdp_costs_what_it_costs_and_makes_no_second_finding(tmp_path, factor):
    verdict, cost = judged(Layout(kind="fsdp", slow={5: factor}), tmp_path, slow={})
    assert (verdict.mode, culprits(verdict), len(verdict.findings)) == (Mode.STRAGGLER, ["5"], 1)
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


def test_a_slow_host_among_tensor_slots_without_replicas_is_found(tmp_path):
    job = Layout(kind="tensor", num_ranks=8, tp=8, per_node=2, slow={2: 1.3, 3: 1.3})
    verdict, cost = judged(job, tmp_path, slow={})
    assert (verdict.mode, culprits(verdict)) == (Mode.STRAGGLER, ["g1"])
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


@pytest.mark.parametrize("kind", only_nightly(["experts"], ["tensor"]))
def test_noise_between_the_operations_of_a_step_is_found(tmp_path, kind):
    job = Layout(kind=kind, tp=4, per_node=8, num_ranks=16, noise=0.2, transfer_ns=100 * US)
    verdict, cost = judged(job, tmp_path, noise=0.0)
    assert verdict.mode == Mode.AMPLIFICATION
    assert verdict.loss_share == pytest.approx(cost, abs=3 * HALF_A_POINT)


@pytest.mark.parametrize("factor", [4.0, 10.0])
@pytest.mark.parametrize(
    "job",
    [
        Layout(kind="pipeline", num_ranks=4, per_node=1, pp=4, num_layers=2),
        Layout(kind="pipeline", num_ranks=16, per_node=2, pp=4, tp=2, num_layers=2),
    ],
    ids=["plain", "with data parallelism"],
)
def test_a_slow_link_of_a_pipeline_is_found_by_messages_and_costs_what_it_costs(tmp_path, job, factor):
    verdict, cost = judged(replace(job, slow_links={2: factor}), tmp_path, slow_links={})
    assert (verdict.mode, culprits(verdict)) == (Mode.CONTENTION, ["g2"])
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


def test_a_straggler_hidden_behind_a_slow_link_is_named_with_what_it_costs_later(tmp_path):
    job = Layout(kind="pipeline", num_ranks=16, per_node=2, pp=4, tp=2, num_layers=2, slow_links={2: 10.0})
    verdict, cost = judged(replace(job, slow={14: 1.15}), tmp_path, slow={})
    assert (verdict.mode, culprits(verdict), cost) == (Mode.CONTENTION, ["g2", "14"], 0.0)
    without = replace(job, slow_links={})
    later_ns = replace(without, slow={14: 1.15}).step_ns() - without.step_ns()
    later = later_ns / replace(job, slow={14: 1.15}).step_ns()
    assert verdict.findings[1].numbers["later_share"] == pytest.approx(later, abs=HALF_A_POINT)
    assert "costs nothing by computation while the job waits for its other faults" in verdict.also[0]


def test_messages_of_both_ways_at_once_make_no_slow_link_of_a_healthy_pipeline(tmp_path):
    job = Layout(kind="pipeline", num_ranks=4, per_node=1, pp=4, num_layers=2, num_microbatches=8, num_steps=24)
    verdict, _ = judged(replace(job, noise=0.03, transfer_ns=100 * US, seed=11), tmp_path)
    assert verdict.mode == Mode.HEALTHY


def test_all_slow_stages_of_a_pipeline_are_named_with_their_cost(tmp_path):
    job = Layout(kind="pipeline", pp=4, num_layers=2, slow={2: 1.25, 3: 1.25, 6: 1.25, 7: 1.25})
    verdict, cost = judged(job, tmp_path, slow={})
    assert (verdict.mode, sorted(culprits(verdict))) == (Mode.IMBALANCE, ["pp2", "pp3"])
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


@pytest.mark.parametrize(("stage", "factor", "forward_ns"), [(2, 1.1, 150 * US), (0, 1.25, 400 * US)])
def test_a_slow_stage_costs_what_its_passes_take_longer_and_its_optimizer_does_not(tmp_path, stage, factor, forward_ns):
    job = Layout(kind="pipeline", num_ranks=4, pp=4, num_layers=1, forward_ns=forward_ns, transfer_ns=30 * US)
    verdict, cost = judged(replace(job, slow={stage: factor}), tmp_path, slow={})
    assert (verdict.mode, culprits(verdict)) == (Mode.IMBALANCE, [f"pp{stage}"])
    assert verdict.loss_share == pytest.approx(cost, abs=0.001)


def test_a_slow_link_whose_messages_hold_their_senders_costs_what_it_costs(tmp_path):
    job = Layout(kind="pipeline", num_ranks=4, per_node=1, pp=4, num_layers=2, forward_ns=200 * US)
    verdict, cost = judged(replace(job, slow_links={2: 10.0}), tmp_path, slow_links={})
    assert (verdict.mode, culprits(verdict)) == (Mode.CONTENTION, ["g2"])
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


@pytest.mark.parametrize(("host_noise", "kind"), chosen(itertools.product([0.02, 0.0], ["ddp", "fsdp", "tensor"]), 3))
def test_hosts_that_issue_too_slowly_are_found_by_what_is_left_when_they_are_done(tmp_path, kind, host_noise):
    job = Layout(kind=kind, tp=4 if kind == "tensor" else 1, issue=1.5, host_noise=host_noise, transfer_ns=100 * US)
    verdict, cost = judged(job, tmp_path, issue=0.02)
    (finding,) = verdict.findings
    low, high = finding.loss_interval
    assert verdict.mode == Mode.HOST
    assert low - HALF_A_POINT <= cost <= high + HALF_A_POINT
    # Nothing between the marks of DDP shows how many operations there are.
    assert ("cannot tell how much" in verdict.headline) == (kind == "ddp")
    assert kind == "ddp" or finding.loss_share == pytest.approx(cost, abs=10 * HALF_A_POINT)


@pytest.mark.parametrize(
    ("kind", "tp", "issue"), only_nightly([("tensor", 4, 1.4), ("experts", 16, 1.3)], [("experts", 4, 1.4)])
)
def test_hosts_that_are_too_slow_by_turns_are_no_rank_s_fault(tmp_path, kind, tp, issue):
    job = Layout(kind=kind, num_ranks=16, tp=tp, issue=issue, host_noise=0.04, transfer_ns=100 * US)
    verdict, cost = judged(job, tmp_path, issue=0.02)
    assert [finding.mode for finding in verdict.findings] == [Mode.HOST]
    assert verdict.loss_share == pytest.approx(cost, abs=3 * HALF_A_POINT)


@pytest.mark.parametrize(("kind", "issue", "slow"), [("experts", 1.2, 1.5), ("ddp", 1.2, 1.5), ("fsdp", 1.2, 1.5)])
def test_a_straggler_costs_no_more_than_the_hosts_of_the_others_leave(tmp_path, kind, issue, slow):
    job = Layout(kind=kind, num_ranks=4, tp=4, num_layers=4, num_steps=28, issue=issue, slow={3: slow}, host_noise=0.02)
    verdict, cost = judged(replace(job, transfer_ns=100 * US), tmp_path, slow={})
    (finding,) = verdict.findings
    low, high = finding.loss_interval
    assert (verdict.mode, culprits(verdict)) == (Mode.STRAGGLER, ["3"])
    assert finding.loss_share == pytest.approx(cost, abs=4 * HALF_A_POINT) and low <= cost <= high
    assert "once hosts issue work faster" in verdict.headline


@pytest.mark.parametrize("kind", ["experts", "fsdp"])
def test_what_a_straggler_costs_is_bounded_where_hosts_wait_for_their_devices_in_each_step(tmp_path, kind):
    job = Layout(kind=kind, num_ranks=4, tp=4, num_layers=4, num_steps=23, issue=0.9, slow={3: 1.1}, host_noise=0.02)
    verdict, cost = judged(replace(job, transfer_ns=100 * US, reads_loss=True), tmp_path, slow={})
    low, high = verdict.findings[0].loss_interval
    assert (verdict.mode, culprits(verdict)[0]) == (Mode.STRAGGLER, "3")
    assert low <= cost <= high
    assert verdict.loss_share == pytest.approx(cost, abs=3 * HALF_A_POINT)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_a_straggler_costs_is_open_where_it_fills_the_launch_queues_of_slower_hosts(tmp_path, kind):
    job = Layout(kind=kind, num_ranks=4, issue=1.3, slow={3: 2.0}, queue=60, host_noise=0.02, transfer_ns=100 * US)
    verdict, cost = judged(job, tmp_path, slow={})
    low, high = verdict.findings[0].loss_interval
    assert (verdict.mode, culprits(verdict)) == (Mode.STRAGGLER, ["3"])
    assert low <= cost <= high


@pytest.mark.parametrize("noise", only_nightly(["normal", "per_node"], ["lognormal"]))
def test_hosts_that_begin_each_step_anew_and_get_far_ahead_are_no_second_finding_beside_a_slow_node(noise):
    job = Scenario(seed=3, num_ranks=16, num_steps=60, noise=noise, level=0.05, device="synchronised")
    verdict = examine(list(traces_of(replace(job, fault="slow_node", size=0.5, target=1))))
    assert ([finding.mode for finding in verdict.findings], culprits(verdict)) == ([Mode.STRAGGLER], ["n2"])


@pytest.mark.parametrize("kind", ["tensor", "fsdp"])
def test_idle_time_that_looks_like_work_beside_host_bound_ranks_makes_no_straggler(tmp_path, kind):
    job = Layout(kind=kind, num_ranks=8, tp=4, num_layers=4, num_steps=28, issue=1.5, slow={3: 1.5}, host_noise=0.04)
    verdict, _ = judged(replace(job, transfer_ns=100 * US), tmp_path)
    assert {culprit.id for culprit in verdict.culprits if culprit.kind == "rank"} <= {"3"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_slow_host_that_fills_the_launch_queues_of_all_others_is_named(tmp_path, kind):
    """The other hosts are held up at its pace, so that nothing shows whether these are slow, too."""
    job = Layout(kind=kind, issue=1.0, slow_hosts={3: 1.3}, queue=24, host_noise=0.02, transfer_ns=100 * US)
    verdict, cost = judged(job, tmp_path, slow_hosts={})
    assert (verdict.mode, verdict.loss_share) == (Mode.HOST, pytest.approx(cost, abs=HALF_A_POINT))
    assert culprits(verdict)[0] == "3"
    assert verdict.headline.startswith("host-bound: devices of rank 3 on g0 wait for their hosts")
    assert verdict.next[0].startswith("look at rank 3 on g0 first")
    assert "whether they would keep up is not known" in " ".join(verdict.why)


def test_a_host_that_is_slower_than_others_near_their_limit_is_that_of_its_rank(tmp_path):
    job = Layout(kind="experts", num_ranks=16, tp=16, issue=0.9, host_noise=0.02, transfer_ns=100 * US)
    verdict, cost = judged(replace(job, slow_hosts={5: 1.5}), tmp_path, slow_hosts={})
    assert (verdict.mode, culprits(verdict)) == (Mode.STRAGGLER, ["5"])
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


@pytest.mark.parametrize(
    ("issue", "pp", "microbatches", "host_noise"),
    only_nightly([(1.5, 4, 8, 0.02), (1.3, 2, 8, 0.0)], [(1.5, 4, 8, 0.0), (1.3, 2, 8, 0.02)]),
)
def test_hosts_that_are_too_slow_in_a_pipeline_are_no_stage_s_fault(tmp_path, issue, pp, microbatches, host_noise):
    job = Layout(
        kind="pipeline", pp=pp, num_layers=6, forward_ns=500 * US, issue=issue, host_noise=host_noise,
        num_microbatches=microbatches, transfer_ns=100 * US,
    )  # fmt: skip
    verdict, cost = judged(job, tmp_path, issue=0.02)
    assert [finding.mode for finding in verdict.findings] == [Mode.HOST]
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


STAGES = Layout(
    kind="pipeline", num_ranks=4, pp=4, num_steps=40, num_layers=4, host_noise=0.03, num_microbatches=8, reads_loss=True
)


def test_a_slow_stage_costs_no_more_than_the_hosts_of_the_others_leave(tmp_path):
    verdict, cost = judged(replace(STAGES, issue=1.45, slow={1: 1.5}), tmp_path, slow={})
    low, high = verdict.loss_interval
    assert (verdict.mode, culprits(verdict)) == (Mode.IMBALANCE, ["pp1"])
    assert low <= cost <= high


def test_a_stage_whose_device_waits_for_a_host_like_the_others_is_not_named_beside_a_slow_one(tmp_path):
    verdict, _ = judged(replace(STAGES, issue=1.3, slow={1: 1.5}, slow_hosts={1: 1.5}), tmp_path)
    assert (verdict.mode, culprits(verdict)) == (Mode.IMBALANCE, ["pp1"])


def test_one_slow_host_of_a_pipeline_is_that_of_its_stage(tmp_path):
    job = Layout(kind="pipeline", num_ranks=4, pp=4, num_layers=6, forward_ns=500 * US, slow_hosts={2: 100.0})
    job = replace(job, num_microbatches=8)
    verdict, cost = judged(job, tmp_path, slow_hosts={})
    assert (verdict.mode, culprits(verdict)) == (Mode.IMBALANCE, ["pp2"])
    assert verdict.findings[0].stages[0].stages == ("waiting for the host",)
    assert verdict.loss_share == pytest.approx(cost, abs=2 * HALF_A_POINT)


@pytest.mark.parametrize(
    ("reads_loss", "host_noise", "issue"), chosen(itertools.product([False, True], [0.0, 0.02], [0.5, 0.9, 0.97]), 3)
)
def test_hosts_that_keep_up_are_healthy(tmp_path, issue, host_noise, reads_loss):
    job = Layout(kind="ddp", issue=issue, host_noise=host_noise, reads_loss=reads_loss)
    assert judged(job, tmp_path)[0].mode == Mode.HEALTHY


def test_transfers_that_end_before_they_begin_are_not_judged(tmp_path):
    job = Layout(kind="experts", tp=4, num_ranks=16, noise=0.02, clock_error_ns={1: 900 * US, 2: -700 * US})
    verdict, _ = judged(job, tmp_path)
    assert verdict.mode == Mode.CANNOT_TELL
    assert "ranks leave operations before others enter them" in verdict.headline


@pytest.mark.parametrize(("rank", "error_ns"), [(0, -3 * MS), (1, 3 * MS)])
def test_what_a_straggler_costs_does_not_depend_on_a_wrong_clock(tmp_path, rank, error_ns):
    job = Layout(kind="fsdp", num_ranks=4, per_node=1, num_layers=6, forward_ns=3 * MS, transfer_ns=1 * MS)
    job = replace(job, noise=0.02, slow={rank: 1.3}, clock_error_ns={1: error_ns})
    verdict, cost = judged(job, tmp_path, slow={})
    assert (verdict.mode, culprits(verdict)) == (Mode.STRAGGLER, [str(rank)])
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


def test_what_a_straggler_of_a_pipeline_costs_rests_on_its_work_where_a_clock_is_wrong(tmp_path):
    job = Layout(kind="pipeline", num_ranks=8, per_node=1, pp=2, num_layers=1, num_steps=28, transfer_ns=100 * US)
    verdict, cost = judged(replace(job, slow={1: 1.3}, clock_error_ns={3: 1_500 * US}), tmp_path, slow={})
    low, high = verdict.findings[0].loss_interval
    assert (verdict.mode, culprits(verdict)) == (Mode.STRAGGLER, ["1"])
    assert verdict.loss_share == pytest.approx(cost, abs=HALF_A_POINT) and low <= cost <= high


def test_garbage_collection_that_hits_other_ranks_in_other_steps_has_its_estimate_in_its_interval(tmp_path):
    job = Layout(kind="ddp", collected_ns=lambda rank, step: 20 * MS * (step % 8 == rank), reads_loss=True)
    verdict, _ = judged(job, tmp_path)
    (collection,) = [one for finding in verdict.findings for one in finding.culprits if one.id == "gc"]
    low, high = collection.interval
    assert low - 1e-9 <= collection.effect <= high + 1e-9


@pytest.mark.parametrize("name", ["collected_ns", "saved_ns"])
def test_what_one_rank_of_a_pipeline_does_now_and_then_costs_what_others_wait_for_it(tmp_path, name):
    job = Layout(kind="pipeline", num_ranks=4, pp=4, num_layers=1, num_steps=28, reads_loss=True)
    job = replace(job, **{name: lambda rank, step: 20 * MS * (rank == 1 and step % 4 == 0)})
    verdict, cost = judged(job, tmp_path, **{name: lambda rank, step: 0})
    (finding,) = verdict.findings
    low, high = finding.loss_interval
    assert verdict.mode == Mode.RUNTIME
    assert finding.loss_share == pytest.approx(cost, abs=HALF_A_POINT) and low <= cost <= high


def test_ranks_that_collect_every_few_steps_are_named_with_what_all_collections_cost(tmp_path):
    job = Layout(kind="tensor", num_ranks=4, tp=2, per_node=2, num_layers=2, num_steps=60, reads_loss=True)
    job = replace(job, collected_ns=lambda rank, step: 8 * MS * (rank < 2 and step % 8 == 3 * rank))
    verdict, cost = judged(job, tmp_path, collected_ns=lambda rank, step: 0)
    (finding,) = verdict.findings
    assert (finding.mode, finding.variety, culprits(verdict)) == (Mode.RUNTIME, "periodic", ["0", "1"])
    assert finding.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


def test_a_checkpoint_of_a_straggler_is_no_part_of_its_cost_and_no_jitter(tmp_path):
    job = Layout(kind="experts", num_ranks=4, tp=4, num_layers=3, num_steps=28, slow={1: 1.2})
    job = replace(job, saved_ns=lambda rank, step: 30 * MS * (step % 8 == rank == 1))
    verdict, cost = judged(job, tmp_path, slow={})
    late, event = sorted(verdict.findings, key=lambda finding: finding.mode)
    assert (late.mode, event.mode) == (Mode.STRAGGLER, Mode.RUNTIME)
    assert late.loss_share == pytest.approx(cost, abs=HALF_A_POINT)


def test_stretches_with_a_collection_say_nothing_about_the_pace_of_hosts(monkeypatch):
    rows = np.arange(40)
    collected = np.where(rows % 4 == 0, 60 * MS, 0)
    none, zeros = np.zeros(40, np.bool_), np.zeros(40, np.int64)
    stretches = Stretches(
        step=rows, phase=np.full(40, Phase.FORWARD), piece=zeros, begin_ns=100 * MS * rows,
        end_ns=100 * MS * rows + collected, is_dry_before=none, is_dry_after=none, collected_ns=collected,
        host_ns=collected, lead_before_ns=zeros, lead_after_ns=zeros,
    )  # fmt: skip
    nothing = np.zeros(0, np.int64)
    issued = Issued(issue_ns=nothing, enter_ns=nothing, exit_ns=nothing, blocked_ns=nothing)
    monkeypatch.setattr(devices, "issued_operations", lambda trace, step=None: issued)
    (pieces,) = devices._sampled_pieces([None], [stretches], [0]).values()
    assert len(pieces.own_ns) == 30 and not pieces.idle_ns.any()


def test_what_is_judged_ends_where_a_trace_does(tmp_path):
    verdict, _ = judged(Layout(kind="ddp", kept_steps={3: 20}), tmp_path)
    assert verdict.headline.endswith("; judged are steps 3 to 19 of 50: the trace of rank 3 ends there")
    assert verdict.next[0].startswith("find out why a trace ends before the others")


@pytest.mark.parametrize(("factor", "num_ranks", "is_said"), [(2.6, 8, True), (1.05, 8, False), (2.6, 2, False)])
def test_a_rank_that_is_slowest_in_each_of_three_steps_is_a_preliminary_finding(tmp_path, factor, num_ranks, is_said):
    job = Layout(kind="ddp", num_ranks=num_ranks, num_steps=6, slow={1: factor})
    verdict, _ = judged(job, tmp_path)
    assert verdict.mode == Mode.CANNOT_TELL and verdict.headline.startswith("cannot tell: 3 steps are too few")
    assert ("preliminary: rank 1 on g0 works 2." in verdict.headline) == is_said
    if is_said:
        assert verdict.headline.endswith("with a probability of 0.016")
        assert "active=20" in verdict.next[0]


def test_a_cost_has_in_its_interval_that_sound_ranks_are_not_equally_fast(tmp_path):
    sound = {0: 1.008, 1: 1.01, 2: 0.994, 3: 1.003, 4: 0.997, 5: 1.006, 6: 0.992}
    job = Layout(kind="ddp", num_layers=2, num_steps=24, transfer_ns=100 * US)
    verdict, cost = judged(replace(job, slow={**sound, 1: 1.2}), tmp_path, slow=sound)
    low, high = verdict.findings[0].loss_interval
    assert low <= cost <= high and high - low < 0.03


def test_a_cost_that_rests_on_waits_which_blocked_nobody_has_their_error_in_its_interval(tmp_path):
    job = Layout(kind="fsdp", num_layers=12, forward_ns=500 * US, transfer_ns=600 * US, slow={5: 1.1})
    verdict, cost = judged(job, tmp_path, slow={})
    (low, high) = next(each.loss_interval for each in verdict.findings if each.mode == Mode.STRAGGLER)
    assert low <= cost <= high
