"""Paced runs beside each other, and the model behind the published table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cases import each_case

from experiments.synthetic_run import SyntheticRun
from hpcpace.core.errors import DataError
from hpcpace.frames.run import load
from hpcpace.metrics.resampling import Estimate
from hpcpace.pace.settings import PaceSettings
from library.estimates import mean_of, share_of, throughput_of_steps, variation_of_steps
from library.paced_jobs import CAUSES, Scene, Target, fit, paced
from library.pacing import (
    PacedRun,
    Simulation,
    is_as_calm,
    pacing_rows,
    ratio_less_one,
    read_paced_run,
    read_published_pacing,
    strengths_needed,
)

PUBLISHED = Path(__file__).parents[2] / "data" / "published" / "pacing_table.csv"
SMALL = Target(nodes=4, samples_per_s=1000.0, variation=0.02, paced_samples_per_s=1000.0, paced_variation=0.02)
LARGE = Target(nodes=16, samples_per_s=3500.0, variation=0.1, paced_samples_per_s=3850.0, paced_variation=0.05)


def _estimate(value):
    return Estimate(value=value, low=value, high=value)


def _run(nodes, policy, speed, variation=0.1):
    return PacedRun(
        name="a",
        nodes=nodes,
        num_ranks=nodes,
        policy=policy,
        samples_per_s=_estimate(speed),
        variation=_estimate(variation),
        sentence=f"pacing {policy}",
    )


def test_the_published_table_is_read_by_number_of_nodes():
    rows = read_published_pacing(PUBLISHED)
    assert [row.nodes for row in rows] == [4, 8, 16, 32, 64]
    assert rows[-1].gain == pytest.approx(9100 / 8200 - 1)
    assert (rows[-1].variation, rows[-1].paced_variation) == (0.22, 0.09)


@each_case("content", ["", "nodes,metric\n4,x\n", "nodes,metric,baseline,coordination\nx,y,1,2\n"])
def test_another_table_is_refused(content, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(content + "4,cv_iteration_time,1,1\n" if content else "nodes,metric\n4,1\n")
    with pytest.raises(DataError, match="does not have the published values"):
        read_published_pacing(path)


def test_repetitions_of_a_policy_are_one_row_and_the_gain_is_over_the_baseline_of_as_many_nodes():
    runs = [_run(2, "slack", 120.0), _run(2, "none", 100.0), _run(2, "slack", 124.0), _run(1, "none", 60.0)]
    rows = pacing_rows([*runs, _run(2, "none", 104.0)])
    assert [(row.nodes, row.policy, row.num_runs) for row in rows] == [(1, "none", 1), (2, "none", 2), (2, "slack", 2)]
    slack = rows[2]
    assert slack.gain is not None and slack.gain.value == pytest.approx(122 / 102 - 1)
    assert slack.gain.low < 0 < slack.gain.high
    assert rows[1].gain is None
    assert slack.sentences == ("pacing slack",)


def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(4)
    hits = 0
    for _ in range(400):
        above, below = (mean_of(generator.normal(mean, 5.0, 6).tolist()) for mean in (110.0, 100.0))
        found = ratio_less_one(above, below)
        hits += found.low <= 0.1 <= found.high
    assert hits / 400 >= 0.94


@each_case(("count", "low", "high"), [(0, 0.0, 0.04), (100, 0.96, 1.0), (50, 0.40, 0.60)])
def test_the_interval_of_a_share(count, low, high):
    found = share_of(count, 100)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


def test_one_run_says_nothing_about_its_repetitions():
    found = mean_of([3.0])
    assert (found.value, found.low, found.high) == (3.0, float("-inf"), float("inf"))


def test_throughput_and_variation_of_one_run_have_intervals_over_its_steps():
    step_ns = 1e8 * (1 + 0.1 * np.random.default_rng(0).standard_normal(400))
    speed = throughput_of_steps(step_ns, np.full(400, 64))
    variation = variation_of_steps(step_ns)
    assert speed.low < 640 < speed.high
    assert speed.high - speed.low < 20
    assert variation.low < 0.1 < variation.high
    assert variation.high - variation.low < 0.04


def test_a_run_is_read_with_its_policy_and_what_its_trial_says(tmp_path):
    run = SyntheticRun(num_ranks=4, hosts=("a", "b"), noise=0.05).write(tmp_path / "run")
    attempt = run.attempts()[-1]
    attempt.run_json.write_text(json.dumps({"config": {"pace": {"policy": "slack"}}}))
    attempt.trial_json.write_text(json.dumps({"sentence": "pacing off: nothing"}))
    found = read_paced_run(load(run.path, warns=False))
    assert (found.nodes, found.num_ranks, found.policy, found.sentence) == (2, 4, "slack", "pacing off: nothing")
    assert found.samples_per_s is not None and found.samples_per_s.low < found.samples_per_s.value


def test_a_run_from_before_pacing_is_a_baseline(tmp_path):
    run = SyntheticRun(num_ranks=2).write(tmp_path / "run")
    assert read_paced_run(load(run.path)).policy == "none"


@pytest.mark.parametrize("cause", CAUSES)
def test_a_fitted_job_has_the_step_time_and_the_variation_of_its_row(cause):
    fitted = fit(LARGE, SMALL, Scene(coupling="none", strength=0.0, cause=cause), num_steps=200)
    assert fitted.is_fit
    outcome = paced(fitted, PaceSettings(policy="slack", max_delay_share=0.3), nodes=16)
    assert outcome.gain <= 1e-9


def test_a_row_that_no_job_has_is_no_fit():
    wild = Target(nodes=16, samples_per_s=3900.0, variation=2.0, paced_samples_per_s=4000.0, paced_variation=1.0)
    assert not fit(wild, SMALL, Scene(coupling="none", strength=0.0, cause="rotating"), num_steps=100).is_fit


def test_the_strength_that_a_gain_needs_lies_between_those_that_give_less_and_more():
    def simulation(strength, gain, variation):
        job = fit(LARGE, SMALL, Scene(coupling="poll stealing", strength=strength, cause="lasting"), num_steps=100)
        outcome = paced(job, PaceSettings(policy="slack"), nodes=16)
        outcome = type(outcome)(nodes=16, gain=gain, variation=variation, baseline_variation=0.1)
        scene = Scene(coupling="poll stealing", strength=strength, cause="lasting")
        return Simulation(scene=scene, policy="slack", outcomes=(outcome,), fits=(True,))

    found = [simulation(0.25, 0.0, 0.1), simulation(0.5, 0.2, 0.09), simulation(1.0, 0.4, 0.05)]
    ((one, strength),) = strengths_needed(found, LARGE)
    assert one is found[0]
    assert strength == pytest.approx(0.375)
    assert [is_as_calm(one, [LARGE]) for one in found] == [False, False, True]
