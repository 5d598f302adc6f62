"""Distributions that tests and intervals need, on arrays, a median, least squares, and numbers of all statistics.

Distributions have the names and arguments of `scipy.special`. They are here because scipy is larger than all else that
hpcpace installs together, and takes longer to load than a small report to compute. Arguments broadcast; what is outside
of a function's domain is NaN. They agree with scipy to 10 digits (`tests/unit/metrics/test_special.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import erfc, inf, pi, sqrt
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from hpcpace.metrics import Bools, Floats

__all__ = ["bdtrc", "betainc", "gammaincc", "gammaln", "ndtri", "pdtr", "pdtrc", "stdtr", "stdtrit"]

ENDS_95 = (0.025, 0.975)  # statistics: quantiles that bound a 95 % interval
UPPER_95 = ENDS_95[1]
Z_95 = 1.96  # statistics: half of a 95 % interval of a normal distribution, in standard errors
NORMAL_MAD = 1.4826  # statistics: standard deviation of a normal distribution over its median absolute deviation
TINY = 1e-12  # statistics: relative size below which a difference is rounding; avoids division by zero
ROUNDING = 1e-9  # statistics: relative error that sums of many rounded values may have

_PRECISION = 2.0**-50  # statistics: relative, of sums; the last two bits may never settle
_TINY = 1e-300  # statistics: in the place of a zero that a continued fraction would divide by (Lentz)
_MAX_TERMS = 100_000
"""Statistics: of a series or fraction, enough for counts of 10^8, as it takes some square roots of them."""
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360_360)
"""Statistics: coefficients of 1/z, 1/z^3 and so on (DLMF 5.11.1)."""
_MIN_STIRLING = 10.0  # statistics: from here on that series has 15 digits
_HALF_STEP = (-1 / 640, 0, 1 / 192, 0, -1 / 8, 0)
"""Statistics: the logarithm of gamma(a + 1/2) / gamma(a) / sqrt(a) in powers of 1/a (DLMF 5.11.13)."""
_NEAR_MEAN, _NUM_NEAR_TERMS = 0.1, 8
"""Statistics: where the series of a deviance replaces its logarithm (Loader 2000), and its terms, for 16 digits."""
_MANY_FREEDOM = 1000.0
"""Statistics: from here on Hill's series has 11 digits up to 10 standard errors, and the fraction loses some."""
# statistics: polynomials of algorithm 395 (Hill 1970, Communications of the ACM 13)
_HILL_SCALE, _HILL_FIRST, _HILL_SECOND = 48, (1, 0, 3, 0), (4, 0, 33, 0, 240, 0, 855, 0)
_HILL_LEAD, _HILL_BELOW = 10, (8, 0, 0, 0, 1000)  # statistics: of the same
_HASTINGS = (0.010328, 0.802853, 2.515517), (0.001308, 0.189269, 1.432788, 1)
"""Statistics: polynomials above and below, of a normal quantile to 3 digits (Hastings 1955)."""
_MAX_EXPONENT = 600.0  # statistics: of the first guess; above, numbers overflow
_MAX_FREEDOM = 1e15  # statistics: the normal distribution, to the last digit
_FAR_TAIL = 0.25
"""Statistics: below, the logarithm of a tail is nearly linear in that of t; above, the tail is nearly linear in t."""
_NUM_KEPT = 1024  # memory: quantiles; a report asks for some ten again and again
_MAX_STEPS, _MAX_STEP = 60, 1e-10
"""Statistics: of Newton's method, which takes 2 to 8; it doubles the digits, so after the last step all are right."""


def gammaln(z: ArrayLike) -> Floats:
    """Return the logarithm of the gamma function for z > 0 (Stirling's series, DLMF 5.11.1)."""
    z = np.asarray(z, np.float64)
    is_small = z < _MIN_STIRLING
    with np.errstate(all="ignore"):
        large = np.where(is_small, z + _MIN_STIRLING, z)
        found = (large - 0.5) * np.log(large) - large + 0.5 * np.log(2 * pi) + _stirling_series(large)
        shift = np.prod(z[..., None] + np.arange(_MIN_STIRLING), axis=-1)  # gamma(z + n) / gamma(z)
        return cast(Floats, np.where(z > 0, np.where(is_small, found - np.log(shift), found), np.nan)[()])


def ndtri(p: ArrayLike) -> Floats:
    """Return the quantile of the standard normal distribution."""
    return _quantile(inf, p)


def stdtr(freedom: ArrayLike, t: ArrayLike) -> Floats:
    """Return the chance that Student's t with some degrees of freedom, which may be infinite, is at most `t`."""
    freedom, t = np.broadcast_arrays(np.asarray(freedom, np.float64), np.asarray(t, np.float64))
    tail = _student_tail(freedom, np.abs(t))
    return cast(Floats, np.where(t > 0, 1 - tail, tail)[()])


def stdtrit(freedom: ArrayLike, p: ArrayLike) -> Floats:
    """Return the quantile of Student's t, the inverse of `stdtr`."""
    return _quantile(freedom, p)


def betainc(a: ArrayLike, b: ArrayLike, x: ArrayLike) -> Floats:
    """Return the regularised incomplete beta function of a, b > 0 and x from 0 to 1 (DLMF 8.17.22)."""
    a, b, x = np.broadcast_arrays(*(np.asarray(one, np.float64) for one in (a, b, x)))
    with np.errstate(all="ignore"):
        # x^a (1-x)^b / B(a, b), by deviances (Loader 2000): differences of large logarithms would lose digits.
        n, y = a + b, 1 - x
        factor = np.sqrt(a * (b / n) / (2 * pi)) * np.exp(
            _stirling_error(n) - _stirling_error(a) - _stirling_error(b) - _deviance(a, n * x) - _deviance(b, n * y)
        )
        found = _incomplete_beta(a, b, x, y, factor)
        found = np.where(x <= 0, 0.0, np.where(x >= 1, 1.0, found))
        return cast(Floats, np.where((a > 0) & (b > 0) & (x >= 0) & (x <= 1), found, np.nan)[()])


def bdtrc(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> Floats:
    """Return the chance of more than k successes in n trials of chance p; k and n are whole numbers."""
    k, n, p = np.broadcast_arrays(*(np.asarray(one, np.float64) for one in (k, n, p)))
    is_inside = (k >= 0) & (k < n)
    found = betainc(np.where(is_inside, k + 1, 1), np.where(is_inside, n - k, 1), p)
    return cast(Floats, np.where(is_inside, found, np.where(k < 0, 1.0, np.where(k >= n, 0.0, np.nan)))[()])


def gammaincc(a: ArrayLike, x: ArrayLike) -> Floats:
    """Return the upper regularised incomplete gamma function of a > 0 and x >= 0."""
    return _incomplete_gammas(a, x)[1][()]


def pdtr(k: ArrayLike, mean: ArrayLike) -> Floats:
    """Return the chance of at most k events of a Poisson distribution; k is a whole number."""
    return gammaincc(np.asarray(k, np.float64) + 1, mean)


def pdtrc(k: ArrayLike, mean: ArrayLike) -> Floats:
    """Return the chance of more than k events of a Poisson distribution; k is a whole number."""
    return _incomplete_gammas(np.asarray(k, np.float64) + 1, mean)[0][()]


def _stirling_series(z: Floats) -> Floats:
    total = np.zeros_like(z)
    for coefficient in reversed(_STIRLING):
        total = total / (z * z) + coefficient
    return total / z


def _stirling_error(z: Floats) -> Floats:
    """Return by how much Stirling's formula of log gamma(z + 1) is too small."""
    exact = gammaln(z + 1) - (z + 0.5) * np.log(z) + z - 0.5 * np.log(2 * pi)
    return np.where(z < _MIN_STIRLING, exact, _stirling_series(z))


def _deviance(x: Floats, mean: Floats) -> Floats:
    """Return x log(x / mean) + mean - x without loss of digits where both are close (Loader 2000)."""
    share = (x - mean) / (x + mean)
    series = (x - mean) * share + 2 * x * sum(share ** (2 * j + 1) / (2 * j + 1) for j in range(1, _NUM_NEAR_TERMS + 1))
    return np.where(np.abs(share) < _NEAR_MEAN, series, np.where(x > 0, x * np.log(x / mean), 0) + mean - x)


def _incomplete_beta(a: Floats, b: Floats, x: Floats, y: Floats, factor: Floats) -> Floats:
    """Return the function at x = 1 - y, given x^a y^b / B(a, b)."""
    is_swapped = x > (a + 1) / (a + b + 2)  # the fraction converges fast below
    first, second, at = np.where(is_swapped, b, a), np.where(is_swapped, a, b), np.where(is_swapped, y, x)

    def coefficient(term: int) -> Floats:
        m = term // 2
        if term % 2:
            found = -(first + m) * (first + second + m) * at / ((first + 2 * m) * (first + 2 * m + 1))
        else:
            found = m * (second - m) * at / ((first + 2 * m - 1) * (first + 2 * m))
        return np.asarray(found)

    part = factor / first / _fraction(coefficient, lambda _: np.ones_like(at), at)
    return np.where(is_swapped, 1 - part, part)


def _fraction(over: Callable[[int], Floats], plus: Callable[[int], Floats], like: Floats) -> Floats:
    """Return plus(0) + over(1) / (plus(1) + over(2) / (plus(2) + ...)) by Lentz's method (Thompson, Barnett 1986)."""
    found = upper = _not_zero(plus(0) + np.zeros_like(like))
    lower = np.zeros_like(like)
    for term in range(1, _MAX_TERMS):
        over_now, plus_now = over(term), plus(term)
        lower = 1 / _not_zero(plus_now + over_now * lower)
        upper = _not_zero(plus_now + over_now / upper)
        change = upper * lower
        found = found * change
        if not (np.abs(change - 1) > _PRECISION).any():  # nor where it is NaN
            break
    return found


def _not_zero(x: Floats) -> Floats:
    return np.where(x == 0, _TINY, x)


def _incomplete_gammas(a: ArrayLike, x: ArrayLike) -> tuple[Floats, Floats]:
    """Return the lower and the upper regularised incomplete gamma function (DLMF 8.11.4 and 8.9.2)."""
    a, x = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(x, np.float64))
    is_low = x < a + 1
    with np.errstate(all="ignore"):
        factor = np.exp(-_deviance(a, x) - _stirling_error(a)) / np.sqrt(2 * pi * a)  # x^a e^-x / gamma(a + 1)
        low_x, high_x = np.where(is_low, x, 0.0), np.where(is_low, a + 1, np.minimum(x, 1 / _TINY))
        term = total = np.ones(x.shape)
        for k in range(1, _MAX_TERMS):
            term = term * low_x / (a + k)
            total = total + term
            if not (term > _PRECISION * total).any():
                break
        lower = factor * total
        fraction = _fraction(lambda k: -k * (k - a), lambda k: high_x + 2 * k + 1 - a, x)
        is_inside = (a > 0) & (x >= 0)
        upper = np.where(is_low, 1 - lower, np.where(x < inf, factor * a / fraction, 0.0))
        lower = np.where(is_low, lower, 1 - upper)
        return np.where(is_inside, lower, np.nan), np.where(is_inside, upper, np.nan)


def _normal_tail(z: Floats) -> Floats:
    return 0.5 * np.asarray(np.frompyfunc(erfc, 1, 1)(z / sqrt(2)), np.float64)


def _student_tail(freedom: Floats, t: Floats) -> Floats:
    """Return the chance of more than t >= 0."""
    is_many = freedom >= _MANY_FREEDOM
    found = np.full(np.shape(t), np.nan)
    with np.errstate(all="ignore"):
        found[is_many] = _normal_tail(_normal_of(np.minimum(freedom[is_many], _MAX_FREEDOM), t[is_many]))
        few = ~is_many & (freedom > 0)
        a, ratio = freedom[few] / 2, t[few] ** 2 / freedom[few]
        x, y = 1 / (1 + ratio), 1 / (1 + 1 / ratio)
        factor = np.exp(-a * np.log1p(ratio)) * np.sqrt(y / pi) * _half_step(a)
        found[few] = 0.5 * _incomplete_beta(a, np.full_like(a, 0.5), x, y, factor)
    return found


def _student_density(freedom: Floats, t: Floats) -> Floats:
    scale = _half_step(freedom / 2) / np.sqrt(pi * freedom)
    return scale * np.exp(-(freedom + 1) / 2 * np.log1p(t**2 / freedom))


def _half_step(a: Floats) -> Floats:
    """Return gamma(a + 1/2) / gamma(a) (DLMF 5.11.13)."""
    near = np.minimum(a, 100.0)
    large = np.sqrt(a) * np.exp(np.polyval(_HALF_STEP, 1 / a))
    return np.where(a < 100, np.exp(gammaln(near + 0.5) - gammaln(near)), large)


def _normal_of(freedom: Floats, t: Floats) -> Floats:
    """Return the normal deviate that is exceeded as often as t (Hill 1970, algorithm 395 of CACM)."""
    a = freedom - 0.5
    b = _HILL_SCALE * a**2
    w = np.sqrt(a * np.log1p(t**2 / freedom))
    more = np.polyval(_HILL_SECOND, w) / (b * (_HILL_LEAD * b + np.polyval(_HILL_BELOW, w)))
    return np.asarray(w + np.polyval(_HILL_FIRST, w) / b - more)


def _quantile(freedom: ArrayLike, p: ArrayLike) -> Floats:
    if np.ndim(freedom) or np.ndim(p):
        return _quantiles(*np.broadcast_arrays(np.asarray(freedom, np.float64), np.asarray(p, np.float64)))
    return _one_quantile(float(cast(float, freedom)), float(cast(float, p)))


@lru_cache(maxsize=_NUM_KEPT)
def _one_quantile(freedom: float, p: float) -> Floats:
    return cast(Floats, _quantiles(np.array([freedom]), np.array([p]))[0])


def _quantiles(freedom: Floats, p: Floats) -> Floats:
    """Return quantiles by Newton's method, from below or above, whichever side the curve bends to."""
    is_inside = (p > 0) & (p < 1) & (freedom > 0)
    q = np.where(is_inside, np.minimum(p, 1 - p), 0.5)
    freedom = np.where(is_inside, np.minimum(freedom, _MAX_FREEDOM), 1.0)
    t = _near_quantile(freedom, q)
    is_far = q < _FAR_TAIL
    for _ in range(_MAX_STEPS):
        tail, density = _student_tail(freedom, t), _student_density(freedom, t)
        with np.errstate(all="ignore"):
            step = np.where(is_far, t * np.expm1(np.log(tail / q) * tail / (t * density)), (tail - q) / density)
        t, before = np.maximum(t + step, 0.0), t
        if not (np.abs(t - before) > _MAX_STEP * t).any():
            break
    found = np.where(p < 0.5, -t, t)
    return np.where(is_inside, found, np.where(p == 0, -inf, np.where(p == 1, inf, np.nan)))


def _near_quantile(freedom: Floats, q: Floats) -> Floats:
    """Return about the t that is exceeded with chance q: that of the normal deviate (Hastings 1955, then Hill 1970)."""
    w = np.sqrt(-2 * np.log(q))
    z = w - np.polyval(_HASTINGS[0], w) / np.polyval(_HASTINGS[1], w)
    a = np.maximum(freedom - 0.5, 0.5)
    return np.asarray(np.sqrt(freedom * np.expm1(np.minimum(np.maximum(z, 0) ** 2 / a, _MAX_EXPONENT))))


def lower_median(values: Floats) -> Floats:
    """Return the lower median along the first axis, float64, values.shape[1:]: of two values the smaller one."""
    middle = (len(values) - 1) // 2
    return np.asarray(np.partition(values, middle, axis=0)[middle])


_MAX_ROUNDS = 3  # statistics: for each term; more would mean that rounding lets one enter and leave again and again


def nonnegative_least_squares(matrix: Floats, values: Floats) -> tuple[Floats, float]:
    """Return the coefficients of at least 0 that fit best, (num_terms,), and the norm of what they leave.

    The active-set method of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.

    Args:
        matrix: float64, (num_values, num_terms).
        values: float64, (num_values,).
    """
    num_terms = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    found = np.zeros(num_terms)
    is_free = np.zeros(num_terms, bool)
    for _ in range(_MAX_ROUNDS * num_terms):
        gradient = matrix.T @ (values - matrix @ found)
        may_enter = ~is_free & (gradient > TINY * np.linalg.norm(values))
        if not may_enter.any():
            break
        is_free[np.argmax(np.where(may_enter, gradient, -np.inf))] = True
        best = _fit(matrix, values, is_free)
        while best[is_free].min(initial=1.0) <= 0:
            # Towards the best until the first coefficient is 0, which stays there.
            falls = np.flatnonzero(is_free & (best <= 0))
            share = found[falls] / np.maximum(found[falls] - best[falls], np.finfo(float).tiny)
            found = found + share.min() * (best - found)
            is_free[falls[share == share.min()]] = False
            found[~is_free] = 0.0
            best = _fit(matrix, values, is_free)
        found = best
    return found / scale, float(np.linalg.norm(values - matrix @ found))


def _fit(matrix: Floats, values: Floats, is_free: Bools) -> Floats:
    found = np.zeros(matrix.shape[1])
    found[is_free] = np.linalg.lstsq(matrix[:, is_free], values, rcond=None)[0]
    return found
