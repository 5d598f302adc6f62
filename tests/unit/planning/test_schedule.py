"""Pipelines as graphs: what is walked and what follows from it."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpace.planning.steps import pipeline_s, walk_s


def test_equal_stages_take_their_work_and_a_fill() -> None:
    stages, micro = 4, 10
    took = pipeline_s(
        np.full((1, stages), 1.0), np.full((1, stages), 2.0), np.zeros((1, stages - 1)), np.array([micro])
    )
    assert took.tolist() == [(micro + stages - 1) * 3.0]  # Narayanan et al. 2019


def test_one_stage_takes_its_work() -> None:
    assert pipeline_s(np.array([[1.0]]), np.array([[2.0]]), np.zeros((1, 0)), np.array([5])).tolist() == [15.0]


def test_a_step_of_one_microbatch_passes_all_stages_and_back() -> None:
    took = pipeline_s(np.array([[1.0, 2.0, 3.0]]), np.array([[4.0, 5.0, 6.0]]), np.array([[0.5, 0.25]]), np.array([1]))
    assert took.tolist() == [21.0 + 2 * 0.75]


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
def test_what_is_not_walked_costs_what_the_slowest_stage_works(stages: int) -> None:
    random = np.random.default_rng(stages)
    forward_s, backward_s = random.uniform(0.5, 2.0, (2, 20, stages))
    transfer_s = random.uniform(0.0, 0.2, (20, stages - 1))
    micro = np.full(20, 12 * stages)
    whole_s = walk_s(forward_s, backward_s, transfer_s, 12 * stages)
    assert np.abs(pipeline_s(forward_s, backward_s, transfer_s, micro) / whole_s - 1).max() < 0.01


def test_very_deep_pipelines_are_not_walked() -> None:
    stages, micro = 512, 1000
    took = pipeline_s(
        np.full((1, stages), 1.0), np.full((1, stages), 2.0), np.zeros((1, stages - 1)), np.array([micro])
    )
    assert took.tolist() == [(micro + stages - 1) * 3.0]


def test_fewer_microbatches_than_stages_are_walked() -> None:
    took = pipeline_s(np.ones((1, 4)), np.ones((1, 4)), np.zeros((1, 3)), np.array([2]))
    assert took.tolist() == [(2 + 3) * 2.0]
