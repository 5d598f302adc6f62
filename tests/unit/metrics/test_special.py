"""The distributions that metrics use agree with those of scipy, which the base installation does without."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import scipy.special
from numpy.typing import NDArray
from scipy.optimize import nnls

from hpcpace.metrics import special
from hpcpace.metrics.special import nonnegative_least_squares

_NUM = 2000
_DIGITS = 2e-10
_INF, _NAN = np.inf, np.nan


def _cases() -> Iterator[tuple[str, NDArray[np.float64], ...]]:
    random = np.random.default_rng(7)

    def over(lowest: float, highest: float) -> NDArray[np.float64]:
        return 10 ** random.uniform(lowest, highest, _NUM)

    share = random.uniform(0, 1, _NUM)
    yield "gammaln", np.arange(3, _NUM)
    yield "gammaln", over(-8, -0.1)
    yield "ndtri", share
    yield "ndtri", over(-200, -1)
    yield "stdtr", random.integers(1, 60, _NUM), -over(-3, 4)
    yield "stdtr", over(-1, 3.5), random.uniform(-12, 12, _NUM)
    yield "stdtr", over(3, 12), random.uniform(-12, 5, _NUM)
    yield "stdtrit", over(-0.3, 9), share
    yield "stdtrit", random.integers(1, 60, _NUM), over(-14, -0.4)
    yield "betainc", over(-2, 3), over(-2, 1), share
    yield "bdtrc", (trials := random.integers(1, 3000, _NUM)) * share // 1, trials, np.clip(share + 0.02, 0, 1)
    yield "pdtr", random.integers(0, 500, _NUM), over(-6, 2.5)
    yield "pdtrc", random.integers(0, 500, _NUM), over(-6, 2.5)
    yield "gammaincc", over(-2, 3), over(-2, 3)


def test_ten_digits_are_those_of_scipy() -> None:
    worst = []
    for name, *values in _cases():
        with np.errstate(all="ignore"):
            expected = getattr(scipy.special, name)(*values)
            error = np.abs(getattr(special, name)(*values) / expected - 1)
        # Scipy itself is without digits near the smallest numbers.
        worst.append((name, float(np.where((np.abs(expected) > 1e-250) & (expected != 0), error, 0).max())))
    assert [one for one in worst if not one[1] < _DIGITS] == []


def test_large_counts_are_those_of_higher_precision() -> None:
    """Where scipy is wrong by 6e-6 and by a fifth; mpmath with 40 digits, and the normal limit of the binomial."""
    assert special.pdtrc(914_863, 910_546.2015427256) == pytest.approx(3.0773062038008178e-6, rel=1e-11)
    assert special.bdtrc(5 * 10**7, 10**8, 0.5) == pytest.approx(0.5 - 0.5 / np.sqrt(np.pi * 5 * 10**7), rel=1e-9)


@pytest.mark.parametrize(
    ("function", "values", "expected"),
    [
        (special.stdtr, (_INF, -2.0), 0.02275013194817921),
        (special.stdtr, (5, _INF), 1.0),
        (special.stdtr, (5, -_INF), 0.0),
        (special.stdtr, (5, _NAN), _NAN),
        (special.stdtr, (0, 1.0), _NAN),
        (special.stdtr, (5, 0), 0.5),
        (special.stdtrit, (5, 0), -_INF),
        (special.stdtrit, (5, 1), _INF),
        (special.stdtrit, (5, 0.5), 0.0),
        (special.stdtrit, (5, 2), _NAN),
        (special.stdtrit, (0, 0.9), _NAN),
        (special.ndtri, (0,), -_INF),
        (special.ndtri, (-1,), _NAN),
        (special.pdtr, (3, 0), 1.0),
        (special.pdtr, (0, 1e9), 0.0),
        (special.pdtrc, (3, _INF), 1.0),
        (special.pdtrc, (_NAN, 2.0), _NAN),
        (special.betainc, (1, 2, 0), 0.0),
        (special.betainc, (1, 2, 1), 1.0),
        (special.betainc, (1, 2, 1.5), _NAN),
        (special.bdtrc, (-1, 10, 0.3), 1.0),
        (special.bdtrc, (10, 10, 0.3), 0.0),
        (special.bdtrc, (3, 10, 1), 1.0),
        (special.gammaln, (1,), 0.0),
        (special.gammaln, (0,), _NAN),
    ],
)
def test_ends_of_the_domain(function: Callable[..., float], values: tuple[float, ...], expected: float) -> None:
    assert function(*values) == pytest.approx(expected, abs=1e-14, nan_ok=True)


def test_arguments_broadcast() -> None:
    assert special.stdtr(np.array([[1.0], [2.0]]), np.zeros(3)).shape == (2, 3)
    assert special.stdtrit(np.array([1.0, 2.0]), 0.9) == pytest.approx([special.stdtrit(f, 0.9) for f in (1.0, 2.0)])
    assert special.pdtr(np.zeros(0), 1.0).shape == (0,)


def test_nonnegative_least_squares_are_those_of_scipy() -> None:
    random = np.random.default_rng(3)
    for num_values, num_terms in ((4, 1), (5, 3), (9, 5), (3, 5)):
        for scale in (1.0, 1e9):
            matrix = random.normal(size=(num_values, num_terms)) * scale ** random.uniform(-1, 1, num_terms)
            values = random.normal(size=num_values) * scale
            found, left = nonnegative_least_squares(matrix, values)
            _, least = nnls(matrix, values)
            assert (found >= 0).all()
            assert left == pytest.approx(least, rel=1e-8, abs=1e-8 * scale)
    assert nonnegative_least_squares(np.zeros((3, 2)), np.ones(3))[0].tolist() == [0, 0]
    assert nonnegative_least_squares(np.ones((3, 2)), np.ones(3))[1] == pytest.approx(0, abs=1e-12)
