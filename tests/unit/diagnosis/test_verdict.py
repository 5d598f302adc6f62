from __future__ import annotations

from dataclasses import replace

import pytest
from cases import each_case

from hpcpace.core.thresholds import ThresholdValues
from hpcpace.diagnosis.finding import DiagnosisFinding, culprit_name
from hpcpace.diagnosis.summary import Causes, Culprit, PipelineBubble
from hpcpace.diagnosis.topics.communication import BurstEvidence, TransferEvidence
from hpcpace.diagnosis.topics.events import CollectionEvidence, EventEvidence
from hpcpace.diagnosis.topics.idle import InputEvidence
from hpcpace.diagnosis.topics.jitter import JitterEvidence
from hpcpace.diagnosis.topics.links import LocalityEvidence, SlowLinkEvidence
from hpcpace.diagnosis.topics.pipeline import ImbalanceEvidence
from hpcpace.diagnosis.topics.run_end import HangEvidence
from hpcpace.diagnosis.topics.straggler import LatenessEvidence, LatePattern
from hpcpace.diagnosis.verdict import (
    ABSENT_RANKS,
    NOTHING_COMPARED,
    WRONG_CLOCK,
    Diagnosis,
    Obstacle,
    remarks_of,
    too_few_steps,
    too_much_noise,
    unmatched_operations,
    verdict_of,
)
from hpcpace.hang.views import Call, Channel, FoundHang, GroupView, Hang, HangKind, JobView, RankView
from hpcpace.metrics.roles import PhaseExcess, Stage, StageComparison

HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def culprit(kind, name, *aliases, effect=0.2):
    return Culprit(
        kind=kind, id=name, aliases=(f"{kind} {name}", *aliases), effect=effect, interval=(effect - 0.01, effect + 0.01)
    )


def finding(evidence, *culprits, share=0.1):
    return DiagnosisFinding(evidence=evidence, loss_share=share, confidence=0.99, culprits=culprits)


def late(pattern=LatePattern.FIXED, **figures):
    return LatenessEvidence(pattern=pattern, effect=0.2, p_value=0.001, late_share=1.0, share=0.1, **figures)


def straggler(*culprits, pattern=LatePattern.FIXED):
    return finding(late(pattern), *culprits)


def told(*findings, obstacle=None, smallest=0.03, remarks=()):
    diagnosis = Diagnosis(findings=findings, obstacle=obstacle, smallest_effect=smallest)
    return verdict_of(diagnosis, hosts=HOSTS, remarks=remarks)


def hang(hang_kind=HangKind.NEVER_CALLED, culprits=(), **changed):
    """Return the evidence of a hang of ranks 0 to 3 in an all_reduce of step 7."""
    call = Call(channel=Channel(0), seq=9, op="all_reduce", entered_ns=1_000_000_000, is_open=True, step=7)
    ranks = {rank: RankView(rank=rank, host=host, seen_ns=6_000_000_000) for rank, host in HOSTS.items()}
    job = JobView(groups=(GroupView(name="dp", members=(0, 1, 2, 3)),), ranks=ranks, now_ns=10_000_000_000)
    found = Hang(kind=hang_kind, culprits=culprits, call=call, since_ns=1_000_000_000, **changed)
    numbers = {"op": "all_reduce", "age_ns": 9_000_000_000, "step": 7, "inside": 3, "absent": 1, "completed": 0}
    return HangEvidence(found=FoundHang(hang=found, job=job), **numbers)


@each_case(
    ("found", "headline"),
    [
        (
            straggler(culprit("rank", "2")),
            "persistent straggler: rank 2 on n2 costs 10.0 % of the step time",
        ),
        (
            straggler(culprit("node", "n2"), pattern=LatePattern.TRANSIENT),
            "transient straggler: node n2 costs 10.0 % of the step time",
        ),
        (
            straggler(culprit("slot", "local1")),
            "persistent straggler: local rank 1 of every node costs 10.0 % of the step time",
        ),
        (
            finding(ImbalanceEvidence(effect=0.2), culprit("slot", "pp1", "rank 2")),
            "pipeline imbalance: pipeline stage 1 (or rank 2 on n2: not distinguishable here) has more work",
        ),
        (
            finding(hang(culprits=(2,)), culprit("rank", "2")),
            "hang: all_reduce 9 of group dp (step 7) waits for rank 2 on n2, which never called it; 9.00 s so far",
        ),
        (
            finding(hang(HangKind.UNKNOWN, reason="of 4 ranks, 3 are recorded")),
            "hang: all_reduce 9 of group dp (step 7) does not finish, and the records do not show why: of 4 ranks, 3",
        ),
        (
            finding(hang(HangKind.NETWORK)),
            "hang: all members are in all_reduce 9 of group dp (step 7), and nothing moves; 9.00 s so far",
        ),
        (
            finding(hang(HangKind.GONE, culprits=(2,)), culprit("rank", "2")),
            "all_reduce 9 of group dp (step 7) waits for rank 2 on n2, which has shown no sign of life for 4.00 s",
        ),
        (
            finding(hang(HangKind.PEERS_LEFT, culprits=(2,)), culprit("rank", "2")),
            "hang: rank 2 on n2 is still in all_reduce 9 of group dp (step 7), which others have finished",
        ),
        (
            finding(SlowLinkEvidence(effect=0.2, share=0.3), culprit("link", "n1", "link n2")),
            "fabric contention: one of the links n1 and n2 is slow",
        ),
        (finding(BurstEvidence(share=0.1, bursts=0.2)), "fabric contention: bursts of slow transfers cost 10.0 %"),
        (
            finding(EventEvidence(events=5, share=0.1, period_ns=2e9)),
            "something that recurs every 2.00 s costs 10.0 %",
        ),
        (
            finding(late(LatePattern.PERIODIC, period_ns=2e9), culprit("rank", "2")),
            "something that recurs every 2.00 s on rank 2 on n2 costs 10.0 %",
        ),
        (finding(EventEvidence(events=5, share=0.1), culprit("node", "n2")), "something that recurs on node n2"),
        (finding(CollectionEvidence(share=0.1), culprit("phase", "gc")), "garbage collection costs 10.0 %"),
        (finding(LocalityEvidence(factor=2.5, share=0.3)), "locality: groups that cross switches"),
        (
            finding(InputEvidence(share=0.1), culprit("phase", "data")),
            "input-bound: waiting for data costs 10.0 % of the step time",
        ),
        (
            finding(TransferEvidence(share=0.1, of_work=0.2, are_links_compared=True)),
            "communication-bound: exposed transfers take 10.0 % of the step time; no link or burst explains it",
        ),
        (
            finding(TransferEvidence(share=0.1, of_work=0.2, are_links_compared=False)),
            "10.0 % of the step time; the job's groups cannot single out a slow link",
        ),
        (finding(JitterEvidence(share=0.1)), "synchronisation amplification: every step waits for its slowest rank"),
        (finding(late(LatePattern.ROTATING)), "synchronisation amplification: every step waits for its slowest rank"),
    ],
)
def test_every_mode_is_one_sentence_with_why_and_next(found, headline):
    verdict = told(found)
    assert headline in verdict.headline
    assert (verdict.mode, verdict.loss_share) == (str(found.mode), 0.1)
    assert all(verdict.why) and all(verdict.next) and verdict.why and verdict.next
    assert "{" not in " ".join((verdict.headline, *verdict.why, *verdict.next)), "a template that nobody filled in"


def test_where_not_all_transfer_is_steady_the_parts_add_up_to_the_share_above():
    evidence = TransferEvidence(
        share=0.097, of_work=0.152, are_links_compared=True, transfer=0.286, bursts=0.15, least=0.15
    )
    verdict = told(finding(evidence))
    assert "steady transfers take 10.0 % of the step time, of 28.6 % transfer in all; no link" in verdict.headline
    assert verdict.why == (
        "of own work and steady transfer, 15.2 % is transfer (threshold 15.0 %); transfer is 28.6 % of the step: "
        "9.7 % steady, 15.0 % bursts and 3.9 % senders held by their receivers",
    )


def test_a_slow_node_is_left_out_of_the_next_job():
    assert "#SBATCH --exclude=n2" in told(straggler(culprit("rank", "2"))).next[0]


@pytest.mark.parametrize("guilty", [("slot", "local1"), ("rank", "9")])
def test_no_innocent_node_is_left_out(guilty):
    assert "--exclude" not in told(straggler(culprit(*guilty))).next[0]


def test_nobody_leaves_out_all_nodes():
    both = (culprit("node", "n1"), culprit("node", "n2"))
    assert "--exclude" not in told(straggler(*both)).next[0]


def test_the_culprits_of_all_modes_are_named_those_of_the_first_first():
    verdict = told(finding(JitterEvidence(share=0.1)), straggler(culprit("rank", "2")))
    assert [c.id for c in verdict.culprits] == ["2"]
    assert len(verdict.also) == 1


def test_healthy_says_what_would_have_been_seen():
    verdict = told()
    assert verdict.mode == "healthy"
    assert verdict.why == ("a rank 3.0 % slower than its role would have been detected",)


@each_case(
    ("obstacle", "reason", "advice"),
    [
        (too_few_steps(5, 20), "5 steps are too few: at least 20 are needed", "use more steps"),
        (too_few_steps(1, 20), "1 step is too few: at least 20 are needed", "use more steps"),
        (
            WRONG_CLOCK,
            "a clock is wrong, so transfers cannot be judged; the ranks' own work shows no fault",
            "see the clock error below",
        ),
        (
            too_much_noise(0.3),
            "noise hides any rank that is less than 30% slower than its role",
            "use more steps",
        ),
        (ABSENT_RANKS, "nothing that is certain explains the step time", "use more steps"),
        (
            NOTHING_COMPARED,
            "ranks send to each other, and which of them do the same work is not known",
            "say how ranks are laid out",
        ),
        (
            unmatched_operations(0.31),
            "31.0 % of the step time is in operations that match no other rank's: whether ranks wait or transfer there "
            "is not known",
            "record groups, numbers and peers",
        ),
        (Obstacle(words="no step is left"), "no step is left", "use more steps"),
    ],
)
def test_what_cannot_be_told_has_its_reason_and_what_to_do(obstacle, reason, advice):
    verdict = told(obstacle=obstacle)
    assert (verdict.mode, verdict.headline) == ("cannot tell", f"cannot tell: {reason}")
    assert verdict.next[0].startswith(advice)


def test_names_from_files_cannot_steer_the_terminal():
    assert "\x1b" not in culprit_name(culprit("node", "\x1b[2J"), HOSTS)


def test_a_large_bubble_and_suspected_clocks_are_remarks():
    bubble = PipelineBubble(share=0.3, ideal_share=0.25, by_stage=(0.3, 0.3))
    causes = Causes(
        gains=(), rebuild_error=None, origins=(), traced_share=0.0, path=(), suspected_ranks=(2, 3), bubble=bubble
    )
    first, second = remarks_of(causes, HOSTS, ThresholdValues())
    assert first.startswith("pipeline bubble 30.0 % of the step (the schedule alone costs 25.0 %)")
    assert second.startswith("the clock of ranks 2-3 on n2 may be wrong")
    assert remarks_of(None, HOSTS, ThresholdValues()) == ()


def test_several_nodes_are_named_together():
    found = straggler(*(culprit("node", name) for name in ("n1", "n4")))
    assert told(found).headline == "persistent straggler: nodes n1 and n4 cost 10.0 % of the step time"


def test_a_host_that_is_called_by_its_domain_is_left_out_by_its_node_name():
    diagnosis = Diagnosis(findings=(straggler(culprit("rank", "1")),), obstacle=None, smallest_effect=0.03)
    verdict = verdict_of(diagnosis, hosts={0: "n1.example.org", 1: "n2.example.org"})
    assert verdict.next[0].endswith("#SBATCH --exclude=n2")


def test_missing_ranks_are_in_the_headline_and_what_others_can_cost_is_at_most():
    found = straggler(culprit("rank", "2"))
    diagnosis = Diagnosis(findings=(found,), obstacle=None, smallest_effect=0.03, absent=(0, 1), num_present=2)
    verdict = verdict_of(diagnosis, hosts=HOSTS)
    assert verdict.headline == (
        "persistent straggler: rank 2 on n2 costs at most 10.0 % of the step time; ranks 0-1 of 4 have no usable trace"
    )
    assert "find the traces of ranks 0-1" in verdict.next[-1]


def test_a_rank_on_which_no_step_was_seen_is_not_said_to_have_lost_its_trace():
    found = straggler(culprit("rank", "2"))
    diagnosis = Diagnosis(findings=(found,), obstacle=None, smallest_effect=0.03, absent=(0, 1), num_present=2)
    for stepless, headline, advice in (
        ((0, 1), "; no step was seen on ranks 0-1 of 4", "if ranks 0-1 train, call session.step() where a step ends"),
        ((1,), "; rank 0 of 4 has no usable trace; no step was seen on rank 1 of 4", "if rank 1 trains, call"),
    ):
        verdict = verdict_of(replace(diagnosis, stepless=stepless), hosts=HOSTS)
        assert verdict.headline.endswith(headline)
        assert advice in verdict.next[-1]
        assert any("find the trace of rank 0:" in sentence for sentence in verdict.next) == (0 not in stepless)


def test_where_missing_ranks_leave_nothing_to_say_what_is_still_certain_is_said():
    diagnosis = Diagnosis(findings=(), obstacle=ABSENT_RANKS, smallest_effect=0.03, absent=(3,), num_present=3)
    verdict = verdict_of(diagnosis, hosts=HOSTS)
    assert (
        verdict.headline
        == "cannot tell: rank 3 of 4 has no usable trace; nothing that is certain explains the step time"
    )
    assert verdict.why[-1].startswith("certain: none of the 3 ranks with a trace is 3.0 % slower")


def test_a_long_list_of_missing_ranks_is_shortened():
    diagnosis = Diagnosis(
        findings=(), obstacle=ABSENT_RANKS, smallest_effect=None, absent=tuple(range(0, 200, 2)), num_present=100
    )
    assert (
        "100 ranks (ranks 0, 2, 4, 6, ...) of 200 have no usable trace" in verdict_of(diagnosis, hosts=HOSTS).headline
    )


@each_case(
    ("stages", "advice"),
    [
        pytest.param((), "move layers", id="not known"),
        pytest.param((Stage.COMPUTE,), "move layers", id="computation"),
        pytest.param((Stage.DATA,), "check data loading there", id="data"),
    ],
)
def test_layers_are_moved_only_where_a_pipeline_stage_computes_more(stages, advice):
    phases = tuple(
        PhaseExcess(phase=phase, own_ns=2e6, usual_ns=1e6, interval_ns=(9e5, 11e5)) for phase in ("forward", "data")
    )
    compared = StageComparison(stages=stages, phases=phases, num_steps=40)
    verdict = told(finding(ImbalanceEvidence(effect=0.2, stages=(compared,)), culprit("slot", "pp1")))
    assert verdict.next[0].startswith(advice)
