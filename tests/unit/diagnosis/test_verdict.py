from __future__ import annotations

import pytest

from hpcpace.diagnosis.diagnose import Culprit, Diagnosis, Finding, Mode
from hpcpace.diagnosis.summary import Causes, PipelineBubble
from hpcpace.diagnosis.verdict import culprit_name, remarks_of, verdict_of

HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def culprit(kind, name, *aliases, effect=0.2):
    return Culprit(
        kind=kind, id=name, aliases=(f"{kind} {name}", *aliases), effect=effect, interval=(effect - 0.01, effect + 0.01)
    )


def finding(mode, *culprits, variety="", share=0.1, **numbers):
    return Finding(
        mode=mode,
        variety=variety,
        loss_share=share,
        confidence=0.99,
        culprits=culprits,
        numbers={"share": share, **numbers},
    )


def told(*findings, cannot_tell="", smallest=0.03, remarks=()):
    diagnosis = Diagnosis(findings=findings, cannot_tell=cannot_tell, smallest_effect=smallest)
    return verdict_of(diagnosis, hosts=HOSTS, remarks=remarks)


@pytest.mark.parametrize(
    ("found", "headline"),
    [
        (
            finding(Mode.STRAGGLER, culprit("rank", "2"), variety="fixed"),
            "persistent straggler: rank 2 on n2 costs 10.0 % of the step time",
        ),
        (
            finding(Mode.STRAGGLER, culprit("node", "n2"), variety="transient"),
            "transient straggler: node n2 costs 10.0 % of the step time",
        ),
        (
            finding(Mode.STRAGGLER, culprit("slot", "local1"), variety="fixed"),
            "persistent straggler: local rank 1 of every node costs 10.0 % of the step time",
        ),
        (
            finding(Mode.IMBALANCE, culprit("slot", "pp1", "rank 2")),
            "pipeline imbalance: pipeline stage 1 (or rank 2 on n2: the same here) has more work",
        ),
        (
            finding(Mode.HANG, culprit("rank", "2"), variety="all_reduce", step=7, inside=3, age_ns=9e9),
            "hang: all_reduce in step 7 never completed, because rank 2 on n2 never entered it",
        ),
        (
            finding(Mode.CONTENTION, culprit("link", "n1", "link n2"), variety="slow link"),
            "fabric contention: one of link n1 and link n2 is slow",
        ),
        (finding(Mode.CONTENTION, variety="bursts", bursts=0.2), "fabric contention: bursts in which transfers"),
        (finding(Mode.RUNTIME, variety="periodic", period_ns=2e9, events=5), "comes back every 2.00 s costs 10.0 %"),
        (
            finding(Mode.RUNTIME, culprit("node", "n2"), variety="recurring", events=5),
            "something that comes back on node n2",
        ),
        (
            finding(Mode.RUNTIME, culprit("phase", "gc"), variety="garbage collection"),
            "garbage collection costs 10.0 %",
        ),
        (finding(Mode.LOCALITY, factor=2.5), "locality: groups that cross switches"),
        (finding(Mode.INPUT, culprit("phase", "data")), "input-bound: ranks wait for their data"),
        (finding(Mode.COMMUNICATION, of_work=0.2), "communication-bound: exposed transfers take 10.0 %"),
        (finding(Mode.AMPLIFICATION), "synchronisation amplification: steps wait for the slowest"),
    ],
)
def test_every_mode_is_one_sentence_with_why_and_next(found, headline):
    verdict = told(found)
    assert headline in verdict.headline
    assert (verdict.mode, verdict.loss_share) == (str(found.mode), 0.1)
    assert all(verdict.why) and all(verdict.next) and verdict.why and verdict.next


def test_a_slow_node_is_left_out_of_the_next_job():
    assert "#SBATCH --exclude=n2" in told(finding(Mode.STRAGGLER, culprit("rank", "2"), variety="fixed")).next[0]


@pytest.mark.parametrize("guilty", [("slot", "local1"), ("rank", "9")])
def test_no_innocent_node_is_left_out(guilty):
    assert "--exclude" not in told(finding(Mode.STRAGGLER, culprit(*guilty), variety="fixed")).next[0]


def test_nobody_leaves_out_all_nodes():
    both = (culprit("node", "n1"), culprit("node", "n2"))
    assert "--exclude" not in told(finding(Mode.STRAGGLER, *both, variety="fixed")).next[0]


def test_the_culprits_of_all_modes_are_named_those_of_the_first_first():
    verdict = told(finding(Mode.AMPLIFICATION), finding(Mode.STRAGGLER, culprit("rank", "2"), variety="fixed"))
    assert [c.id for c in verdict.culprits] == ["2"]
    assert len(verdict.also) == 1


def test_healthy_says_what_would_have_been_seen():
    verdict = told()
    assert verdict.mode == "healthy"
    assert verdict.why == ("a rank 3.0 % slower than its role would have been seen",)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [("5 steps are too few", "use more steps"), ("a clock is wrong", "see the clock error below")],
)
def test_what_cannot_be_told_has_its_reason_and_what_to_do(reason, advice):
    verdict = told(cannot_tell=reason)
    assert (verdict.mode, verdict.headline) == ("cannot tell", f"cannot tell: {reason}")
    assert verdict.next[0].startswith(advice)


def test_names_from_files_cannot_steer_the_terminal():
    assert "\x1b" not in culprit_name(culprit("node", "\x1b[2J"), HOSTS)


def test_a_large_bubble_and_suspected_clocks_are_remarks():
    bubble = PipelineBubble(share=0.3, ideal_share=0.25, by_stage=(0.3, 0.3))
    causes = Causes(gains=(), rebuild_error=None, origins=(), path=(), suspected_ranks=(2, 3), bubble=bubble)
    first, second = remarks_of(causes, HOSTS)
    assert first.startswith("pipeline bubble 30.0 % of the step (the schedule alone costs 25.0 %)")
    assert second.startswith("the clock of ranks 2-3 on n2 is suspected")
    assert remarks_of(None, HOSTS) == ()


def test_several_nodes_are_named_together():
    found = finding(Mode.STRAGGLER, *(culprit("node", name) for name in ("n1", "n4")), variety="fixed")
    assert told(found).headline == "persistent straggler: nodes n1 and n4 cost 10.0 % of the step time"


def test_a_host_that_is_called_by_its_domain_is_left_out_by_its_node_name():
    diagnosis = Diagnosis(
        findings=(finding(Mode.STRAGGLER, culprit("rank", "1"), variety="fixed"),), cannot_tell="", smallest_effect=0.03
    )
    verdict = verdict_of(diagnosis, hosts={0: "n1.example.org", 1: "n2.example.org"})
    assert verdict.next[0].endswith("#SBATCH --exclude=n2")


def test_missing_ranks_are_in_the_headline_and_what_others_can_cost_is_at_most():
    found = finding(Mode.STRAGGLER, culprit("rank", "2"), variety="fixed")
    diagnosis = Diagnosis(findings=(found,), cannot_tell="", smallest_effect=0.03, absent=(0, 1), num_present=2)
    verdict = verdict_of(diagnosis, hosts=HOSTS)
    assert verdict.headline == (
        "persistent straggler: rank 2 on n2 costs at most 10.0 % of the step time; "
        "ranks 0-1 of 4 have no trace that can be used"
    )
    assert "find the traces of ranks 0-1" in verdict.next[-1]


def test_where_missing_ranks_leave_nothing_to_say_what_is_still_certain_is_said():
    diagnosis = Diagnosis(
        findings=(), cannot_tell="nothing is certain", smallest_effect=0.03, absent=(3,), num_present=3
    )
    verdict = verdict_of(diagnosis, hosts=HOSTS)
    assert verdict.headline == "cannot tell: rank 3 of 4 has no trace that can be used; nothing is certain"
    assert verdict.why[-1].startswith("certain: of the 3 ranks with a trace none is 3.0 % slower")


def test_a_long_list_of_missing_ranks_is_shortened():
    diagnosis = Diagnosis(
        findings=(), cannot_tell="x", smallest_effect=None, absent=tuple(range(0, 200, 2)), num_present=100
    )
    assert "100 ranks (ranks 0, 2, 4, 6, ...) of 200 have no trace" in verdict_of(diagnosis, hosts=HOSTS).headline
