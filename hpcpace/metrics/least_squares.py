"""Least squares whose coefficients must not be negative, for laws of a few terms."""

from __future__ import annotations

import numpy as np

from hpcpace.metrics import Bools, Floats
from hpcpace.metrics.special import TINY

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
