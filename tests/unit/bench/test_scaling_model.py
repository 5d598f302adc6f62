"""The model of large reports finds the costs that times were made of, and shares out what processes share."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.bench.scaling_model import PARTS, Fitted, Model, Size, fit, panel_bytes

SIZES = [
    Size(ranks, steps, ranks * steps * operations, ranks * ranges)
    for ranks, steps, operations, ranges in ((8, 40, 4, 1), (64, 100, 4, 5), (16, 500, 32, 9), (256, 30, 32, 2))
]


def _of(*values: float, part: str) -> Fitted:
    return Fitted(PARTS[part], np.array(values), np.zeros(1))


def test_finds_the_costs_that_times_are_made_of() -> None:
    truth = _of(1e-4, 2e-6, 3e-7, part="ranges")
    found = fit(PARTS["ranges"], SIZES, [truth(size) for size in SIZES])
    assert found.values == pytest.approx(truth.values) and np.abs(found.residuals).max() < 1e-6


def test_no_cost_is_negative_and_what_does_not_fit_is_said() -> None:
    found = fit(PARTS["ranges"], SIZES, [1.0, 2.0, 0.5, 0.1])
    assert (found.values >= 0).all() and np.abs(found.residuals).max() > 0.1


def test_only_what_processes_share_shrinks_with_their_number() -> None:
    parts = {name: _of(*(1e-3 for _ in features), part=name) for name, features in PARTS.items()}
    model = Model(parts, gather_s_per_byte=1e-9, peak_bytes=parts["read"], table_bytes=100)
    one, four = (model.predict(SIZES[2], number) for number in (1, 4))
    read, ranges, gather, first = one
    assert four[read] == one[read] and four[first] == one[first] and four[ranges] == one[ranges] / 4
    assert one[gather] == 0 and four[gather] == pytest.approx(panel_bytes(SIZES[2]) * 0.75e-9)


def test_figures_of_steps_are_many_float64_a_rank_and_step() -> None:
    assert panel_bytes(Size(2, 3, 0, 0)) % (2 * 3 * 8) == 0
