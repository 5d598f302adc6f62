"""Links that hold connections up, as findings: what they cost, what they explain, and how they are told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import each_case

from hpcpace.diagnosis.finding import Case, Said
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.summary import Mode
from hpcpace.diagnosis.topics.communication import TransferEvidence
from hpcpace.diagnosis.topics.links import FlowEvidence
from hpcpace.diagnosis.verdict import diagnose
from hpcpace.metrics.flow_figures import FlowFindings, LinkCause, LinkFault
from hpcpace.metrics.links import LinkCulprit, LinkFindings, Locality
from hpcpace.metrics.resampling import Estimate
from tests.unit.diagnosis.test_diagnose import MS, panels

HOSTS = {rank: f"n{rank // 4}" for rank in range(16)}
BROKEN = [LinkCause.LOSSY, LinkCause.REORDERING, LinkCause.SMALL_MTU]
OTHER_CAUSES = [cause for cause in LinkCause if cause not in BROKEN]


def words_of(finding):
    return finding.evidence.words(Said(finding=finding, hosts=HOSTS))


def fault(cause=LinkCause.SLOW, ids=("n2",), **changed):
    """Return a link whose connections get a quarter of the usual rate and are busy for half of the time."""
    figures = {
        "is_certain": True,
        "direction": "",
        "flows": ((1, 0), (2, 1)),
        "returning": (),
        "effect": Estimate(value=3.0, low=2.5, high=3.5),
        "p_value": 1e-6,
        "slow_bytes_per_s": 25e6 / 8,
        "usual_bytes_per_s": 100e6 / 8,
        "foreign_bytes_per_s": 40e6 / 8,
        "repeat_share": 0.011,
        "others_repeat_share": 0.0,
        "duplicate_share": 0.8 if cause is LinkCause.REORDERING else 0.0,
        "stall_share": 0.15,
        "busy_share": 0.5,
        "segment_bytes": 548,
        "usual_segment_bytes": 1448,
    }
    return LinkFault(cause=cause, ids=ids, **{**figures, **changed})


def flows(*faults, **changed):
    figures = {"is_compared": True, "reason": "", "crossing_factor": 1.0}
    return FlowFindings(faults=faults, **{**figures, **changed})


def diagnosed(steps, *, flows=None, **others):
    return diagnose(Case(panels=replace(steps, flows=flows), **others))


def busy(transfer_ms=100.0, **changed):
    """Return panels of a job of which half is transfer."""
    return panels(transfer_ns=lambda transfer: np.full_like(transfer, transfer_ms * MS), **changed)


def test_a_slow_link_costs_what_the_step_takes_beyond_that_at_the_other_links_rate():
    (found,) = diagnosed(busy(), flows=flows(fault())).findings
    assert (found.mode, found.variety) == (Mode.CONTENTION, "slow link")
    # The connections were busy for half of the time, of which three quarters would go at the other links' rate.
    assert found.loss_share == pytest.approx(0.49 * 0.75, abs=0.01)
    (culprit,) = found.culprits
    assert (culprit.kind, culprit.id, culprit.effect, culprit.interval) == ("link", "n2", 3.0, (2.5, 3.5))


def test_what_is_hidden_behind_work_costs_nothing():
    found = diagnosed(busy(transfer_ms=3.0), flows=flows(fault(busy_share=0.9))).findings
    assert all(each.loss_share <= 0.03 for each in found)


@each_case("cause", OTHER_CAUSES)
def test_a_link_that_costs_less_than_the_threshold_is_not_told(cause):
    small = fault(cause, busy_share=0.01, stall_share=0.01)
    assert not any(isinstance(each.evidence, FlowEvidence) for each in diagnosed(busy(), flows=flows(small)).findings)
    settings = DiagnosisConfig(contention_share=0.001)
    assert any(
        isinstance(each.evidence, FlowEvidence)
        for each in diagnosed(busy(), flows=flows(small), settings=settings).findings
    )


@pytest.mark.parametrize("cause", BROKEN)
def test_what_is_broken_is_told_however_little_it_costs(cause):
    found = diagnosed(panels(), flows=flows(fault(cause, busy_share=0.001))).findings
    assert [each.variety for each in found] == [str(cause)]


@each_case("cause", [LinkCause.SLOW, LinkCause.FOREIGN, LinkCause.UPLINK, LinkCause.LOSSY])
def test_transfers_that_connections_explain_are_not_told_again(cause):
    crossing = Locality(factor=Estimate(value=4.0, low=3.5, high=4.5), p_value=1e-9)
    culprit = LinkCulprit(ids=("n2",), effect=Estimate.around(3.0, 0.5), p_value=1e-9)
    links = LinkFindings(culprits=(culprit,), is_identifiable=True, reason="", candidates=())
    found = diagnosed(busy(), flows=flows(fault(cause)), links=links, crossing=crossing).findings
    assert [each.variety for each in found if each.mode is not Mode.AMPLIFICATION] == [str(cause)]


def test_a_flapping_link_explains_bursts():
    random = np.random.default_rng(1)
    bursty = panels(transfer_ns=lambda transfer: transfer * (1 + 20 * (random.random(transfer.shape[1]) < 0.1)))
    assert "bursts" in [each.variety for each in diagnosed(bursty, flows=flows()).findings]
    varieties = [each.variety for each in diagnosed(bursty, flows=flows(fault(LinkCause.FLAPPING))).findings]
    assert "flapping link" in varieties and "bursts" not in varieties


def test_groups_single_out_a_link_of_a_set():
    culprit = LinkCulprit(ids=("leaf2 uplink",), effect=Estimate.around(3.0, 0.5), p_value=1e-9)
    links = LinkFindings(culprits=(culprit,), is_identifiable=True, reason="", candidates=())
    both = fault(LinkCause.UPLINK, ids=("leaf1 uplink", "leaf2 uplink"))
    assert diagnosed(busy(), flows=flows(both)).findings[0].culprits[0].aliases == (
        "link leaf1 uplink",
        "link leaf2 uplink",
    )
    assert diagnosed(busy(), flows=flows(both), links=links).findings[0].culprits[0].aliases == ("link leaf2 uplink",)


def test_two_links_with_one_cause_are_one_finding_that_costs_what_the_worse_one_does():
    (found,) = diagnosed(busy(), flows=flows(fault(), fault(ids=("n6",), slow_bytes_per_s=50e6 / 8))).findings
    assert [culprit.id for culprit in found.culprits] == ["n2", "n6"]
    assert found.loss_share == pytest.approx(0.49 * 0.75, abs=0.01)


def test_links_with_different_causes_are_findings_of_their_own():
    found = diagnosed(busy(), flows=flows(fault(), fault(LinkCause.SMALL_MTU, ids=("n6",)))).findings
    assert [each.variety for each in found] == ["slow link", "small MTU"]


def test_rates_of_connections_need_no_common_clock():
    (found,) = diagnosed(busy(), flows=flows(fault()), is_clock_wrong=True).findings
    assert found.variety == "slow link"


def test_connections_of_one_rate_show_that_no_link_is_slow():
    unknown = next(each for each in diagnosed(busy()).findings if each.mode is Mode.COMMUNICATION)
    assert unknown.variety == "links not told"
    even = next(each for each in diagnosed(busy(), flows=flows()).findings if each.mode is Mode.COMMUNICATION)
    assert even.variety == "even"
    few = flows(is_compared=False, reason="fewer than two")
    untold = next(each for each in diagnosed(busy(), flows=few).findings if each.mode is Mode.COMMUNICATION)
    assert untold.variety == "links not told"


@each_case(
    ("cause", "headline", "why"),
    [
        (
            LinkCause.FOREIGN,
            "foreign traffic on link n2 costs",
            "get 25.0 Mb/s beside 40.0 Mb/s that is not this job's; alone",
        ),
        (LinkCause.SLOW, "link n2 is slow and costs", "2 connections through it get 25.0 Mb/s, others 100 Mb/s"),
        (LinkCause.UPLINK, "link n2 is slow, oversubscribed or shared, and costs", "4.0 times as long as others"),
        (LinkCause.FLAPPING, "link n2 comes and goes, which costs", "stand still for 15.0 % of the time"),
        (LinkCause.LOSSY, "link n2 loses packets, which costs", "send 1.1 % again, others 0.0 %"),
        (
            LinkCause.REORDERING,
            "on link n2 packets overtake each other",
            "1.1 % again, others 0.0 %; 80.0 % of that had",
        ),
        (LinkCause.SMALL_MTU, "link n2 has a smaller MTU than the others", "segments of 548 bytes, others 1448"),
    ],
)
def test_every_cause_is_one_sentence_with_why_and_next(cause, headline, why):
    found = next(each for each in diagnosed(busy(), flows=flows(fault(cause))).findings if each.variety == cause)
    words = words_of(found)
    assert words.headline.startswith("fabric contention: ") and headline in words.headline
    assert why in words.why and words.next


@each_case(
    ("changed", "words"),
    [
        ({"direction": "up"}, "link n2 (on the way up only) is slow"),
        ({"ids": ("leaf1 uplink", "leaf2 uplink")}, "one of the links leaf1 uplink and leaf2 uplink is slow"),
        ({"ids": ("n1", "n2", "between switches")}, "one of the links n1, n2 and between switches is slow"),
    ],
)
def test_what_is_not_told_apart_is_said(changed, words):
    (found,) = diagnosed(busy(), flows=flows(fault(**changed))).findings[:1]
    assert words in words_of(found).headline


@each_case(
    ("changed", "is_said"),
    [({}, True), ({"direction": "up"}, False), ({"flows": ((1, 0), (1, 2))}, False), ({"ids": ("n1", "n2")}, False)],
)
def test_a_direction_that_is_not_known_is_said(changed, is_said):
    (found,) = diagnosed(busy(), flows=flows(fault(**changed))).findings[:1]
    assert ("whether one way is slow or both is not known" in words_of(found).why) == is_said


def test_foreign_traffic_that_explains_only_a_part_is_said_to_be_so():
    (found,) = diagnosed(busy(), flows=flows(fault(LinkCause.FOREIGN, is_certain=False))).findings[:1]
    assert "foreign traffic on link n2, which may also be slow, costs" in words_of(found).headline


def test_links_at_their_line_rate_are_full_and_not_broken():
    (found,) = diagnosed(busy(), flows=flows(line_share=0.96)).findings
    assert isinstance(found.evidence, TransferEvidence)
    full = "the busiest connection reaches 96.0 % of the line rate: links are full, not broken"
    assert full in words_of(found).why
    (slower,) = diagnosed(busy(), flows=flows(line_share=0.5)).findings
    assert "line rate" not in words_of(slower).why
