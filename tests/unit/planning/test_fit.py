"""Constants from measured steps, and how far off predictions are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments.machine_fit import Measured, conformal_half_width, fit
from hpcpace.planning.engine import Job
from hpcpace.planning.layouts import Layouts
from hpcpace.planning.machine import Machine
from hpcpace.planning.model import Transformer
from hpcpace.planning.steps import steps_of

MODEL = Transformer(name="m", num_layers=24, hidden=2048, num_heads=16, sequence=2048, vocabulary=50000)
PRIOR = Machine(
    name="m",
    gpus_per_node=8,
    memory_bytes=80e9,
    flops=2e14,
    memory_rate=1.5e12,
    layer_s=5e-4,
    node_rate=1e11,
    network_rate=5e10,
)
LAYOUTS = Layouts.of(
    dp=[8, 16, 32, 4, 8, 2, 1, 4, 8, 1], tp=[1, 2, 1, 8, 4, 8, 8, 2, 1, 16], pp=[2, 1, 1, 1, 1, 2, 4, 4, 4, 2],
    micro_batch=[1, 4, 8, 2, 1, 1, 2, 1, 4, 2], num_micro=[8, 1, 2, 4, 8, 8, 16, 8, 8, 4],
)  # fmt: skip


def _planted(noise: float) -> tuple[Machine, Measured]:
    true = PRIOR.scaled(flops=1.4, memory_rate=0.8, node_rate=0.5, network_rate=0.5)
    job = Job(model=MODEL, machine=PRIOR)
    random = np.random.default_rng(1).normal(0, noise, len(LAYOUTS))
    return true, Measured(job=job, layouts=LAYOUTS, step_s=steps_of(job.on(true), LAYOUTS).step_s * np.exp(random))


def test_planted_constants_predict_steps_that_were_left_out() -> None:
    true, measured = _planted(0.0)
    found = fit([measured], PRIOR)
    assert np.abs(found.errors).max() < 0.06
    others = Layouts.of(dp=[32, 64], tp=[4, 1], pp=[2, 1], micro_batch=[2, 2], num_micro=[8, 4])
    true_s, found_s = (steps_of(measured.job.on(machine), others).step_s for machine in (true, found.machine))
    assert np.abs(found_s / true_s - 1).max() < 0.05


def test_noise_shows_in_the_interval_and_an_outlier_does_not_move_the_rest() -> None:
    true, measured = _planted(0.05)
    assert 0.03 < fit([measured], PRIOR).half_width < 0.3
    step_s = measured.step_s.copy()
    step_s[3] *= 3
    moved = fit([Measured(job=measured.job, layouts=LAYOUTS, step_s=step_s)], PRIOR)
    assert moved.machine.flops == pytest.approx(true.flops, rel=0.25)
    assert abs(moved.errors[3]) > 0.8


def test_few_steps_do_not_say_how_far_off_predictions_are() -> None:
    assert conformal_half_width(np.zeros(8)) == math.inf
    assert conformal_half_width(np.array([*np.zeros(8), 0.5])) == 0.5
