"""What the experiments conclude from jobs, with jobs made by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cases import each_case

from experiments.pacing.experiment import Ran, Scene, Series, at_most, never_kept_in_vain, spelled
from experiments.pacing.on_cores import COLLECTING, collecting_scenes, expected, late_change
from experiments.pacing.paced_job import JobSpec, specs_json
from hpcpace.metrics.resampling import Estimate


def _ran(*, off_ms=100.0, on_ms=None, last_ms=100.0, is_on=False, outcome="no effect"):
    trial = {
        "outcome": outcome,
        "step_off_ns": off_ms * 1e6,
        "step_on_ns": None if on_ms is None else on_ms * 1e6,
        "variation_off": 0.2,
        "variation_on": None if on_ms is None else 0.1,
    }
    return Ran(
        step_ns=np.concatenate([np.full(100, off_ms * 1e6), np.full(100, last_ms * 1e6)]).astype(np.int64),
        trial={"is_on": is_on, "sentence": "pacing off", "trial": trial},
    )


def _series(*ran, num_ranks=4):
    return Series(scene=Scene(name="a", spec=JobSpec(), num_ranks=num_ranks, policies={}), policy="slack", ran=ran)


@each_case(("low", "high", "holds"), [(-0.01, 0.004, True), (-0.01, 0.02, None), (0.006, 0.02, False)])
def test_a_limit_is_held_to_by_the_whole_interval(low, high, holds):
    assert at_most(Estimate(value=(low + high) / 2, low=low, high=high), 0.005) is holds


def test_the_change_of_a_series_is_over_its_jobs_that_were_paced():
    series = _series(_ran(on_ms=90.0), _ran(on_ms=80.0), _ran())
    assert series.change is not None
    assert series.change.value == pytest.approx(-0.15)
    assert series.row()[1:6] == ["slack", "3", "100.0 ms", series.change.as_percent(), "0.20 to 0.10"]
    assert spelled(_series(_ran()).change) == "never paced"


def test_what_is_left_on_shows_in_the_last_steps():
    assert late_change(_series(_ran(last_ms=80.0), _ran(last_ms=90.0))) == pytest.approx(-0.15)


def test_a_policy_that_is_on_at_the_end_is_seen():
    assert never_kept_in_vain([_series(_ran(), _ran())])
    assert not never_kept_in_vain([_series(_ran(), _ran(is_on=True))])


def test_the_model_of_collections_gains_more_with_more_ranks():
    def change(num_ranks):
        ran = _ran(off_ms=COLLECTING.work_ms)
        counted = {**ran.trial, "collections": {"off": {"num_steps": 300, "num_full": 15}}}
        return expected(_series(Ran(step_ns=ran.step_ns, trial=counted), num_ranks=num_ranks))

    # One rank in twenty collects, as long as a step takes: 1 + P(any of 4 collects) against 1 + 1/20.
    assert change(4) == pytest.approx(1.05 / (1 + 1 - 0.95**4) - 1, abs=0.02)
    assert change(32) < change(8) < change(4) < 0


def test_collections_are_tried_on_4_to_32_ranks():
    assert [scene.num_ranks for scene in collecting_scenes() if "coschedule" in scene.policies] == [4, 8, 16, 32]


def test_jobs_are_passed_on_as_they_are():
    specs = [JobSpec(policy="slack", pace={"trial": False}, steps=7, collect_ms=3.0), JobSpec()]
    assert [JobSpec(**spec) for spec in json.loads(specs_json(specs))] == specs
