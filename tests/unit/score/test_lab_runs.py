"""Cases of the lab and verdicts made by hand: what is right to say, what is judged, and how it is written down."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from experiments.score.lab_cases import CASES, NUM_RANKS, Case, truth_of_case
from experiments.score.lab_runs import Outcome, change, judged, keep, kept, line, missing, table
from hpcpace.diagnosis.summary import Mode
from hpcpace.train.plan import plan_training
from hpcpace.train.settings import TrainConfig

BY_NAME = {case.name: case for case in CASES}
RUN = Path("run")
RANK_2 = {"kind": "rank", "id": "2", "aliases": ["rank 2", "node n3"], "effect": 0.5, "interval": [0.4, 0.6]}
RANK_1 = {"kind": "rank", "id": "1", "aliases": ["rank 1", "node n2"], "effect": 0.5, "interval": [0.4, 0.6]}
LINK_OF_N1_OR_N3 = {"kind": "link", "id": "n1", "aliases": ["link n1", "link n3"], "effect": 3.0, "interval": [2, 4]}


def _begun(kind: str, **settings: Any) -> list[dict[str, Any]]:
    return [{"event": "lab"}, {"event": "fault-begin", "kind": kind, "settings": settings}]


def _summary(*modes: str, culprits: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    first = modes[0] if modes else "healthy"
    verdict = {
        "mode": first,
        "variety": "",
        "culprits": list(culprits),
        "confidence": 0.9,
        "headline": f"{first}: so it is",
        "findings": [{"mode": mode} for mode in modes],
    }
    return {"verdict": verdict, "throughput": {"p50_ns": 150_000_000, "cv": 0.1}}


def _outcome(name: str, summary: dict[str, Any], events: list[dict[str, Any]] | None = None) -> Outcome:
    case = BY_NAME[name]
    return judged(case, truth_of_case(case, events or []), summary, RUN)


@each_case("case", [pytest.param(case, id=case.name) for case in CASES])
def test_training_of_a_case_is_accepted(case: Case) -> None:
    words = case.training
    options = list(zip(words[::2], words[1::2], strict=True))
    inject = tuple(value for option, value in options if option == "--inject")
    mesh = next(value for option, value in options if option == "--mesh")
    plan = plan_training(TrainConfig(mesh=mesh, inject=inject, steps=case.num_steps), NUM_RANKS)
    assert plan.mesh.pp == case.stages


def test_injected_rank_is_the_culprit_by_all_its_names() -> None:
    truth = truth_of_case(BY_NAME["slow-rank"], [])
    assert set(truth.culprits) == {"rank 2", "node n3"}
    assert (truth.ranks, truth.modes) == ((2,), ("persistent straggler",))


def test_what_slows_all_ranks_is_nobodys_fault() -> None:
    assert truth_of_case(BY_NAME["random-jitter"], []).culprits == ()


def test_input_bound_may_name_the_phase() -> None:
    assert truth_of_case(BY_NAME["input-bound"], []).tolerated == ("phase data",)


def test_both_ranks_of_a_stage_are_its_slot() -> None:
    assert set(truth_of_case(BY_NAME["slow-stage"], []).culprits) == {"slot pp1"}


def test_host_is_the_one_that_the_log_of_truth_has() -> None:
    assert set(truth_of_case(BY_NAME["slow-host"], _begun("slow-host", host="n4")).culprits) == {"rank 3", "node n4"}


def test_rank_is_the_one_that_the_log_of_truth_has() -> None:
    assert truth_of_case(BY_NAME["hang"], _begun("kill-rank", job=1, rank=1)).ranks == (1,)


@pytest.mark.parametrize(("case", "kind"), [("slow-link-one-group", "slow-link"), ("flapping-link", "flap-link")])
def test_link_of_one_group_of_all_ranks_is_told_by_its_connections(case: str, kind: str) -> None:
    truth = truth_of_case(BY_NAME[case], _begun(kind, link="n3"))
    assert truth.is_identifiable
    assert truth.culprits == ("link n3",)


def test_fault_that_did_not_happen_is_an_error() -> None:
    with pytest.raises(ValueError, match="no slow-host"):
        truth_of_case(BY_NAME["slow-host"], [{"event": "lab"}])


def test_right_rank_is_found() -> None:
    outcome = _outcome("slow-rank", _summary("persistent straggler", culprits=(RANK_2,)))
    assert outcome.judgement is not None
    assert outcome.judgement.is_found and outcome.judgement.is_right and outcome.is_mode_found


def test_right_mode_behind_another_one_is_found_and_not_first() -> None:
    outcome = _outcome("slow-rank", _summary("communication-bound", "persistent straggler", culprits=(RANK_2,)))
    assert outcome.judgement is not None
    assert outcome.is_mode_found and not outcome.judgement.is_mode_right


def test_another_rank_is_somebody_else() -> None:
    outcome = _outcome("slow-rank", _summary("persistent straggler", culprits=(RANK_2, RANK_1)))
    assert outcome.judgement is not None
    assert outcome.judgement.is_wrong


def test_rank_named_in_a_healthy_job_is_a_false_alarm() -> None:
    outcome = _outcome("healthy", _summary("persistent straggler", culprits=(RANK_1,)))
    assert outcome.judgement is not None
    assert outcome.judgement.is_false_alarm and not outcome.is_mode_found


def test_healthy_needs_no_finding() -> None:
    outcome = _outcome("healthy", _summary())
    assert outcome.judgement is not None
    assert outcome.judgement.is_right and outcome.is_mode_found


def test_set_of_links_that_holds_the_slow_one_is_found() -> None:
    events = _begun("slow-link", link="n3")
    outcome = _outcome("slow-link", _summary("fabric contention", culprits=(LINK_OF_N1_OR_N3,)), events)
    assert outcome.judgement is not None
    assert outcome.judgement.is_found and not outcome.judgement.is_wrong


def test_line_says_what_went_wrong() -> None:
    text = line(_outcome("slow-rank", _summary("persistent straggler", culprits=(RANK_1,))))
    assert text == (
        "slow-rank: right mode, culprit NOT found, WRONG CULPRIT; said persistent straggler, names rank 1; "
        "step 150 ms, CV 0.10"
    )


def test_line_of_a_job_without_a_verdict_says_why() -> None:
    assert line(Outcome(case=BY_NAME["hang"], error="no\nsummary")) == "hang: FAILED: no summary"


def test_table_counts_jobs_that_failed_as_not_right() -> None:
    right = _outcome("slow-rank", _summary("persistent straggler", culprits=(RANK_2,)))
    failed = dataclasses.replace(right, judgement=None, is_mode_found=False, error="no summary")
    assert table([right, failed]).splitlines()[2] == (
        "| slow-rank | 2 | 1 of 2 | 1 of 2 | 1 of 1 | 0 of 2 | 150 ms | 0.10 |"
    )


def test_outcomes_are_read_as_they_were_kept(tmp_path: Path) -> None:
    right = _outcome("slow-rank", _summary("persistent straggler", culprits=(RANK_2,)))
    outcomes = [dataclasses.replace(right, load=2.5, commit="abc"), Outcome(case=BY_NAME["hang"], error="no summary")]
    for outcome in outcomes:
        keep(outcome, tmp_path)
    assert kept(tmp_path) == outcomes
    change(tmp_path, lambda outcome: dataclasses.replace(outcome, is_same_without_lab=True))
    assert kept(tmp_path) == [dataclasses.replace(outcome, is_same_without_lab=True) for outcome in outcomes]
    assert kept(tmp_path / "none") == []


def test_a_campaign_goes_on_with_the_jobs_that_are_missing() -> None:
    cases = [BY_NAME["healthy"], BY_NAME["hang"]]
    done = [Outcome(case=cases[0])] * 2
    assert missing(cases, done, 3) == [cases[1], cases[1], cases[0], cases[1]]
    assert missing(cases, done, 1) == [cases[1]]
    assert missing(cases, [Outcome(case=case) for case in cases], 1) == []


def test_expected_modes_are_all_but_those_that_the_lab_cannot_make() -> None:
    shown = {case.modes[0] for case in CASES}
    # A job that ends early needs no cluster (tests/mpi/test_ends_of_jobs.py). Hosts of a lab have no devices.
    # Links that are full, varying work and growing memory have tests without a lab (tests/unit/diagnosis).
    others = {Mode.LOCALITY, Mode.CANNOT_TELL, Mode.ENDED, Mode.HOST, Mode.COMMUNICATION, Mode.DATA, Mode.MEMORY}
    assert set(Mode) - shown == others
