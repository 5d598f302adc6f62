"""What the steps are bound by, and whether collectives slow down when their ranks arrive together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FEWEST_OPERATIONS = 10


@dataclass(frozen=True, kw_only=True)
class BoundSwitches:
    """What the steps are bound by.

    Attributes:
        compute_share: share of steps in the compute-bound regime.
        communication_share: share in the communication-bound regime; both 0 if no step is decided.
        num_switches: how often one regime follows the other.
    """

    compute_share: float
    communication_share: float
    num_switches: int


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How the transfer of collectives depends on the skew of their ranks.

    Attributes:
        slope: b, nanoseconds of transfer per nanosecond of skew; below 0 means contention when all arrive together.
        standard_error: of the slope, allowing for serial correlation and unequal variances.
        num_operations: collectives used, those with a skew of at least 3 clock errors.
    """

    slope: float
    standard_error: float
    num_operations: int


def bound_switches(
    compute_ns: NDArray[np.float64], communication_ns: NDArray[np.float64], *, hysteresis: float = 0.05
) -> BoundSwitches | None:
    """Return how many steps are compute-bound or communication-bound, and how often that changes; None without steps.

    A step is decided if one of the two exceeds the other by more than `hysteresis`. Other steps keep the regime of the
    previous step, the first ones that of the first decided step, so that noise around a balance causes no switches.

    Args:
        compute_ns, communication_ns: of each step, float64, (num_steps,).
        hysteresis: share by which the larger must exceed the smaller.
    """
    num_steps = len(compute_ns)
    if not num_steps:
        return None
    is_compute = compute_ns > (1 + hysteresis) * communication_ns
    is_communication = communication_ns > (1 + hysteresis) * compute_ns
    decided = np.flatnonzero(is_compute | is_communication)
    if not len(decided):
        return BoundSwitches(compute_share=0.0, communication_share=0.0, num_switches=0)
    last = np.maximum(np.searchsorted(decided, np.arange(num_steps), side="right") - 1, 0)
    compute = is_compute[decided[last]]
    share = float(compute.mean())
    return BoundSwitches(
        compute_share=share,
        communication_share=1.0 - share,
        num_switches=int((compute[1:] != compute[:-1]).sum()),
    )


def collective_sensitivity(
    transfer_ns: NDArray[np.float64],
    skew_ns: NDArray[np.float64],
    clock_error_ns: float | NDArray[np.float64],
    place: NDArray[np.int64] | None = None,
) -> Sensitivity | None:
    """Return how the transfer of collectives of one kind and size depends on the skew of their ranks.

    Least squares of transfer on skew, each less its mean over the operations of the same place, over operations with a
    skew of at least 3 clock errors: below that, the clock error enters both with opposite signs, which alone gives a
    negative slope. Standard error by Newey & West 1987 with Bartlett weights and 4 (n / 100)^(2/9) lags, times
    n / (n - 1 - places).

    Args:
        transfer_ns: of each operation, in order of time, float64, (num_operations,).
        skew_ns: largest own delay less the smallest one, float64, (num_operations,).
        clock_error_ns: half-width of the common clock, one or float64, (num_operations,).
        place: number of its process group and place in the step, between which transfers differ, int64,
            (num_operations,); one for all by default.

    Returns:
        None for fewer than 10 such operations, 9 more than places, or if the standard deviation of their skew does not
        exceed the clock error.
    """
    error_ns = np.broadcast_to(np.asarray(clock_error_ns, np.float64), skew_ns.shape)
    is_used = (skew_ns >= 3 * error_ns) & np.isfinite(error_ns)
    num_used = int(is_used.sum())
    of_place = np.zeros(num_used, np.int64)
    if place is not None:
        _, of_place = np.unique(place[is_used], return_inverse=True)
    num_places = int(of_place.max(initial=0)) + 1
    if num_used - num_places < _FEWEST_OPERATIONS - 1:
        return None
    most = float(np.abs(skew_ns[is_used]).max())
    skew, transfer = (_less_means(values[is_used], of_place) for values in (skew_ns, transfer_ns))
    spread = float(skew.std())
    if spread <= max(float(error_ns[is_used].mean()), 1e-9 * most):
        return None
    skew /= spread
    slope = float(skew @ transfer) / num_used
    variance = _long_run_variance(skew * (transfer - slope * skew)) / (num_used * (num_used - 1 - num_places))
    return Sensitivity(slope=slope / spread, standard_error=variance**0.5 / spread, num_operations=num_used)


def _less_means(values: NDArray[np.float64], place: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return values less the mean of those of the same place, float64, (num_values,)."""
    less: NDArray[np.float64] = values - (np.bincount(place, values) / np.bincount(place))[place]
    return less


def _long_run_variance(score: NDArray[np.float64]) -> float:
    """Return the variance of a sum of serially correlated scores, (num_scores,), with Bartlett weights."""
    num_lags = min(int(4 * (len(score) / 100) ** (2 / 9)), len(score) - 1)
    variance = float(score @ score)
    for lag in range(1, num_lags + 1):
        variance += 2 * (1 - lag / (num_lags + 1)) * float(score[lag:] @ score[:-lag])
    return max(variance, 0.0)
