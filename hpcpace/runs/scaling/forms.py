"""Functions of the number of units that a term of the law may consist of, and draws of those that the data allow.

A term is a sum of few functions with coefficients of at least 0, by least squares of relative errors (Lawson & Hanson
1974, chapter 23). Each draw of a bootstrap takes one of the candidates, those that explain the data in few functions
more often (weights exp(-BIC / 2), Schwarz 1978).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import percent

FloatArray = NDArray[np.float64]
Basis = Callable[[FloatArray], FloatArray]
Candidates = tuple[tuple[Basis, ...], ...]

NUM_DRAWS = 400
TINY = 1e-12
_MOST_FUNCTIONS = 3


def constant(n: FloatArray) -> FloatArray:
    """Return what does not depend on the number of units."""
    return np.ones_like(n)


def shared(n: FloatArray) -> FloatArray:
    """Return what is divided among the units."""
    return 1 / n


def ring(n: FloatArray) -> FloatArray:
    """Return the volume of a ring."""
    return (n - 1) / n


def several(n: FloatArray) -> FloatArray:
    """Return what comes with the second unit, and no other."""
    return np.asarray(n > 1, np.float64)


def log(n: FloatArray) -> FloatArray:
    """Return the depth of a tree."""
    return np.log2(n)


def root(n: FloatArray) -> FloatArray:
    """Return the diameter of a square mesh of units, without that of one."""
    return np.sqrt(n) - 1


def hops(n: FloatArray) -> FloatArray:
    """Return the hops of a ring."""
    return n - 1


_NAMES: dict[Basis, str] = {
    constant: "constant",
    shared: "1/n",
    ring: "(n - 1)/n, as a ring",
    several: "the same from two on",
    log: "log n, as a tree",
    root: "sqrt n, as a mesh",
    hops: "n - 1, as hops",
}


def drawn(
    n: FloatArray,
    values: FloatArray,
    errors: FloatArray,
    candidates: Candidates,
    targets: FloatArray,
    generator: np.random.Generator,
    floor: float = 0.0,
) -> tuple[FloatArray, str]:
    """Return draws of a term at the targets, (num_draws, num_points), and its form in words.

    Where even the best form is further from the values than their errors allow, the errors count as larger by that
    much (the ratio of Birge 1932).

    Args:
        n: sizes, (num_sizes,).
        values: of the term, (num_sizes,).
        errors: relative, (num_sizes,).
        candidates: functions of which the term may consist.
        targets: sizes asked for, (num_points,).
        generator: of the bootstrap.
        floor: smallest error that counts, in the unit of the values.
    """
    sigma = np.maximum(values * errors, max(floor, float(values.max(initial=0.0)) * 1e-6, TINY))
    usable = [
        basis for basis in candidates if len(basis) <= min(_MOST_FUNCTIONS, len(n)) and _is_determined(basis, n)
    ] or [candidates[0]]
    fits = [_fitted(basis, n, values, sigma) for basis in usable]
    misfits, sizes = np.array([misfit for _, misfit in fits]), np.array([len(basis) for basis in usable])
    best = int((misfits + sizes * np.log(len(n))).argmin())
    birge = max(float(misfits[best]) / max(len(n) - int(sizes[best]), 1), 1.0)
    scores = misfits / birge + sizes * np.log(len(n))
    weights = np.exp(-0.5 * (scores - scores.min()))
    chosen = generator.choice(len(usable), size=NUM_DRAWS, p=weights / weights.sum())
    draws = np.empty((NUM_DRAWS, len(targets)))
    for row, which in enumerate(chosen.tolist()):
        noisy = values + np.sqrt(birge) * sigma * generator.standard_normal(len(n))
        coefficients, _ = _fitted(usable[which], n, noisy, sigma)
        draws[row] = _evaluated(usable[which], coefficients, targets)
    best = int(weights.argmax())
    return draws, _words(usable[best], fits[best][0])


def _is_determined(basis: Sequence[Basis], n: FloatArray) -> bool:
    return bool(np.linalg.matrix_rank(np.column_stack([one(n) for one in basis])) == len(basis))


def _fitted(basis: Sequence[Basis], n: FloatArray, values: FloatArray, sigma: FloatArray) -> tuple[FloatArray, float]:
    """Return the coefficients, and the sum of squared errors in units of sigma."""
    from scipy.optimize import nnls  # takes longer to load than all that it does here

    matrix = np.column_stack([one(n) for one in basis]) / sigma[:, np.newaxis]
    coefficients, norm = nnls(matrix, values / sigma)
    return np.asarray(coefficients), float(norm) ** 2


def _evaluated(basis: Sequence[Basis], coefficients: FloatArray, n: FloatArray) -> FloatArray:
    return np.asarray(np.column_stack([one(n) for one in basis]) @ coefficients)


def _words(basis: Sequence[Basis], coefficients: FloatArray) -> str:
    found = dict(zip(basis, coefficients.tolist(), strict=True))
    words = " + ".join(_NAMES[one] for one, value in found.items() if value > 0) or "nothing"
    serial, divided = found.get(constant, 0.0), found.get(shared, 0.0)
    # Of the work that does not grow with n (Amdahl 1967): what remains of it with any number of units.
    return (
        f"{words}, serial share {percent(serial / (serial + divided))}"
        if shared in found and serial + divided
        else words
    )
