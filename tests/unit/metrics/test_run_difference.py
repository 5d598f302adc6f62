"""The interval of a difference between groups of runs holds at its nominal rate."""

from __future__ import annotations

import numpy as np
import pytest
from cases import each_case

from hpcpace.metrics.run_difference import PRIOR_CV, log_difference, spread_of_places, spread_of_repeats


def test_a_single_run_a_side_has_the_spread_of_the_prior() -> None:
    found = log_difference([0.0], [0.02], before_errors=[0.0], after_errors=[0.0])
    assert not found.from_repeats and found.value == pytest.approx(0.02)
    assert found.half_width == pytest.approx(1.96 * PRIOR_CV * 2**0.5, rel=1e-3)
    assert not found.is_beyond_noise


def test_noise_within_runs_widens_the_interval() -> None:
    narrow = log_difference([0.0], [0.0], before_errors=[0.0], after_errors=[0.0])
    wide = log_difference([0.0], [0.0], before_errors=[0.01], after_errors=[0.01])
    assert wide.half_width == pytest.approx(2**0.5 * narrow.half_width)


def test_three_repeats_a_side_measure_the_spread() -> None:
    found = log_difference([0.0, 0.01, -0.01], [0.1, 0.11, 0.09], before_errors=[0.0] * 3, after_errors=[0.0] * 3)
    assert found.from_repeats and found.spread == pytest.approx(0.01) and found.low > 0.07


def test_repeats_that_agree_by_chance_are_as_uncertain_as_their_steps() -> None:
    found = log_difference([0.0] * 3, [0.0] * 3, before_errors=[0.01] * 3, after_errors=[0.01] * 3)
    assert found.half_width > 0.01


def test_rounded_repeats_are_not_known_exactly() -> None:
    found = log_difference([0.0] * 3, [0.02] * 3, before_errors=[0.0] * 3, after_errors=[0.0] * 3)
    assert 0.002 < found.half_width < 0.003


def test_more_comparisons_need_more_evidence() -> None:
    one, many = (
        log_difference([0.0], [0.03], before_errors=[0.0], after_errors=[0.0], num_compared=number)
        for number in (1, 99)
    )
    assert one.is_beyond_noise and not many.is_beyond_noise


@each_case("num_runs", [1, 3, 5])
def test_equal_groups_are_called_different_at_the_nominal_rate(num_runs: int) -> None:
    random = np.random.default_rng(num_runs)
    called = 0
    for _ in range(1000):
        before, after = random.normal(0.0, PRIOR_CV, (2, num_runs)).tolist()
        none = [0.0] * num_runs
        called += log_difference(before, after, before_errors=none, after_errors=none).is_beyond_noise
    assert called <= 68  # 5 % and 2.6 standard errors


def test_the_scatter_of_many_places_weighs_against_the_prior() -> None:
    random = np.random.default_rng(0)
    quiet = random.normal(0.0, 0.001, 64).tolist()
    assert spread_of_places(quiet, PRIOR_CV).value < 0.5 * PRIOR_CV
    assert spread_of_places([*quiet[:63], 0.2], PRIOR_CV).value < 0.5 * PRIOR_CV  # one that really changed
    assert spread_of_places(random.normal(0.0, 0.05, 64).tolist(), PRIOR_CV).value > 2 * PRIOR_CV
    assert spread_of_places(quiet[:7], PRIOR_CV).value == PRIOR_CV


@each_case("num_places", [8, 16, 64])
def test_the_scatter_of_places_is_known_as_well_as_it_says_and_outliers_do_not_count(num_places: int) -> None:
    changes = np.random.default_rng(0).normal(0.0, 0.02 * 2**0.5, (2_000, num_places))
    found = np.array([spread_of_places(of_pair, 1e-6).value for of_pair in changes.tolist()])
    freedom = spread_of_places(changes[0].tolist(), 1e-6).freedom - 3  # those of the prior
    assert found.mean() ** 2 / (2 * found.var()) == pytest.approx(freedom, rel=0.4)  # of a standard deviation
    changes[:, 0] = 0.5
    assert np.mean([spread_of_places(of_pair, 1e-6).value for of_pair in changes.tolist()]) < 1.15 * found.mean()


def test_repeats_of_many_places_say_together_how_much_one_differs() -> None:
    groups = np.random.default_rng(0).normal(0.0, 0.02, (2, 30, 3)) + np.arange(30)[:, np.newaxis]
    found = spread_of_repeats(groups.tolist())
    assert found.value == pytest.approx(0.02, rel=0.15) and found.freedom == 120
    three = [0.0, 0.0, 0.0]
    apart = log_difference(three, three, before_errors=three, after_errors=three, spread=found)
    assert apart.half_width == pytest.approx(1.98 * 0.02 * (2 / 3) ** 0.5, rel=0.15) and apart.from_repeats


@each_case("sizes", [(6, 2), (2, 2), (2, 1), (8, 1)])
@each_case("spread", [0.005, 0.01, 0.03, 0.08])
def test_few_repeats_that_differ_by_more_than_the_prior_are_believed(sizes: tuple[int, int], spread: float) -> None:
    random = np.random.default_rng(1)
    called = 0
    for _ in range(2_000):
        before, after = (random.normal(0.0, spread, size).tolist() for size in sizes)
        found = log_difference(
            before, after, before_errors=[0.0] * sizes[0], after_errors=[0.0] * sizes[1], prior_cv=PRIOR_CV
        )
        assert not found.from_repeats and found.spread >= PRIOR_CV
        called += found.is_beyond_noise
    # The prior weighs as much as three differences, so that one or two of those that there are do not outweigh it.
    most = 0.06 if spread <= PRIOR_CV else 0.13 if max(sizes) > 2 else 0.26 if spread == 0.03 else 0.4
    assert called / 2_000 <= most
