"""Runs whose traces cannot carry a verdict: ranks are missing, of another job, or contradict themselves."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from cases import each_case
from click.testing import CliRunner

from experiments.score.generator import traces_of, with_losses, write_run
from experiments.score.scenario import Scenario
from hpcpace.cli import cli
from hpcpace.diagnosis.analyze import examine
from hpcpace.diagnosis.credible import absent_ranks, measure_credible_run
from hpcpace.diagnosis.measure import Selection
from hpcpace.diagnosis.records import AttemptRecords
from hpcpace.trace.attempt_reader import AttemptTraces

SLOW_RANK = Scenario(seed=1, num_ranks=8, num_steps=100, fault="slow_rank", size=0.4, target=5)
HEALTHY = Scenario(seed=1, num_ranks=8, num_steps=100)
CONTRADICTIONS = ("zero_times", "unknown_enums", "exits_before_enters", "overlapping_steps")


def report(folder, *options):
    """Return the exit code and the summary of a report."""
    result = CliRunner().invoke(cli, ["report", str(folder), "--json", *options])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    return write_run(SLOW_RANK, tmp_path_factory.mktemp("runs") / "slow").path


def without(run, folder, ranks):
    """Return a copy of a run that lacks the traces of some ranks."""
    copy = shutil.copytree(run, folder / "run")
    for rank in ranks:
        (copy / "attempt-0" / "trace" / f"rank-{rank:05d}.h5").unlink()
    return copy


def test_the_slow_rank_is_named_while_its_trace_is_there(slow_run):
    code, summary = report(slow_run)
    assert (code, summary["verdict"]["mode"]) == (1, "persistent straggler")
    assert [culprit["id"] for culprit in summary["verdict"]["culprits"]] == ["5"]


def test_without_the_trace_of_the_slow_rank_the_verdict_is_that_nobody_can_tell(slow_run, tmp_path):
    code, summary = report(without(slow_run, tmp_path, [5]))
    verdict = summary["verdict"]
    assert (code, verdict["mode"], verdict["confidence"], verdict["culprits"]) == (1, "cannot tell", 0, [])
    assert verdict["headline"].startswith("cannot tell: rank 5 of 8 has no usable trace")
    assert "find the trace of rank 5" in verdict["next"][0]


def test_a_slow_rank_that_has_a_trace_is_named_at_most_for_what_it_can_cost(slow_run, tmp_path):
    code, summary = report(without(slow_run, tmp_path, [2]))
    verdict = summary["verdict"]
    assert (code, verdict["mode"], [culprit["id"] for culprit in verdict["culprits"]]) == (
        1,
        "persistent straggler",
        ["5"],
    )
    assert "costs at most" in verdict["headline"]
    assert verdict["headline"].endswith("rank 2 of 8 has no usable trace")


def test_one_trace_of_many_carries_no_verdict(slow_run, tmp_path):
    code, summary = report(without(slow_run, tmp_path, [0, 1, 2, 4, 5, 6, 7]))
    assert (code, summary["verdict"]["mode"]) == (1, "cannot tell")
    assert "ranks 0-2, 4-7 of 8 have no usable trace" in summary["verdict"]["headline"]


def test_no_critical_path_is_told_while_traces_are_missing(slow_run, tmp_path):
    assert report(slow_run)[1]["causes"]["path"]
    assert report(without(slow_run, tmp_path, [5]))[1]["causes"] is None


@each_case("data", CONTRADICTIONS)
def test_a_run_that_contradicts_itself_everywhere_cannot_be_told(data):
    scenario = replace(HEALTHY, data=data, lost_share=1.0)
    verdict = examine(with_losses(scenario, traces_of(scenario), list), ())
    assert (verdict.mode, verdict.confidence) == ("cannot tell", 0)
    assert "no trace that can be believed" in verdict.headline


@each_case("data", [*CONTRADICTIONS, "wrong_clock", "other_start", "no_collectives"])
def test_a_rank_that_contradicts_itself_or_all_others_is_not_blamed(data):
    scenario = replace(HEALTHY, data=data, lost_share=0.0)
    (lost,) = scenario.lost_ranks
    verdict = examine(with_losses(scenario, traces_of(scenario), list), ())
    assert (verdict.mode, verdict.culprits) == ("cannot tell", ())
    assert f"rank {lost} of 8 has no usable trace" in verdict.headline


@each_case("data", CONTRADICTIONS)
def test_each_contradiction_is_listed_with_the_file(data):
    scenario = replace(HEALTHY, data=data, lost_share=0.0)
    (lost,) = scenario.lost_ranks
    found = AttemptTraces(with_losses(scenario, traces_of(scenario), list), ())
    run = measure_credible_run(found, Selection(), AttemptRecords())
    assert lost not in {trace.header.rank for trace in run.traces}
    (said,) = run.incomplete.problems
    assert f"nothing of rank {lost} is believed" in said


def test_traces_of_another_run_are_left_out():
    scenario = replace(HEALTHY, data="other_run", lost_share=0.25)
    other = replace(HEALTHY, seed=2, level=2 * HEALTHY.level)
    verdict = examine(with_losses(scenario, traces_of(scenario), lambda: traces_of(other)), ())
    assert (verdict.mode, verdict.culprits) == ("cannot tell", ())


def test_absent_are_the_ranks_with_which_the_others_communicate():
    traces = traces_of(HEALTHY)
    assert absent_ranks(traces, 8) == ()
    assert absent_ranks(traces[:5], 8) == (5, 6, 7)
