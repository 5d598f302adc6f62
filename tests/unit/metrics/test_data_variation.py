"""Work that varies with the data, against work of known truth."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.roles import data_variation

STAGES, REPLICAS = np.array([0, 1, 2] * 4), np.repeat(np.arange(4), 3)


def work(*, data: float = 0.0, noise: float = 0.0, of_steps: float = 0.0, schedule: float = 0.0) -> np.ndarray:
    """Return the work of 12 ranks, (12, 2, 30, 4), with what makes it vary, each a standard deviation of logarithms."""
    rng = np.random.default_rng(3)
    logs = np.tile(np.array([12.0, 12.5])[None, :, None, None], (12, 1, 30, 4))
    logs = logs + data * rng.normal(size=(4, 1, 30, 4))[REPLICAS]
    logs = logs + noise * rng.normal(size=logs.shape)
    logs = logs + of_steps * rng.normal(size=(4, 1, 30, 1))[REPLICAS]  # a host that is slow in a step, with all stages
    return np.exp(logs + schedule * np.arange(4) * np.array([1, -1, 2] * 4)[:, None, None, None])


def test_what_comes_with_the_microbatch_is_shared_by_stages() -> None:
    found = data_variation(work(data=0.2, noise=0.02), STAGES, REPLICAS)
    assert found is not None
    assert found.shared == pytest.approx(0.2**2 / (0.2**2 + 0.02**2), abs=0.05)
    assert found.spread == pytest.approx(0.2 * np.sqrt(3 / 4), rel=0.1)


@each_case("kind", ["noise", "of_steps", "schedule"])
def test_noise_slow_steps_and_the_schedule_are_not_the_data(kind: str) -> None:
    found = data_variation(work(**{"noise": 0.01, kind: 0.3}), STAGES, REPLICAS)
    assert found is not None and abs(found.shared) < 0.15


@each_case(
    ("own_ns", "stage", "replica"),
    [
        (work(data=0.2), np.zeros(12, np.int64), np.arange(12)),
        (work(data=0.2)[..., :1], STAGES, REPLICAS),
        (work(data=0.2)[:, :, :5], STAGES, REPLICAS),
        (work(data=0.2) * 0, STAGES, REPLICAS),
    ],
)
def test_without_stages_microbatches_or_enough_passes_nothing_is_said(
    own_ns: np.ndarray, stage: np.ndarray, replica: np.ndarray
) -> None:
    assert data_variation(own_ns, stage, replica) is None
