"""The knee of a scaling series: the size from which on doubling does not pay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcpace.runs.scaling.forms import NUM_DRAWS
from hpcpace.runs.scaling.law import Predicted
from hpcpace.runs.scaling.sizes import Kind, Series

HALF = 0.5
"""Share of its ideal gain below which a doubling does not pay."""
_NUM_POINTS = 256


@dataclass(frozen=True, kw_only=True)
class Knee:
    """From where on doubling gives less than half of its ideal gain.

    Attributes:
        num_units: the least such size; None where there is none up to `searched`.
        low, high: its 95 % interval over repeats and laws; None where that end is beyond `searched`.
        searched: the largest size whose doubling was looked at.
        is_measured: whether the doubled size was measured, and not predicted.
    """

    num_units: int | None
    low: int | None
    high: int | None
    searched: int
    is_measured: bool


def knee_of(series: Series, speeds: NDArray[np.float64], predicted: Predicted | None) -> Knee | None:
    """Return the knee among the measured sizes, or, where there is none, the one that the law expects.

    Sizes whose work neither stays the same nor grows with them have none: what a doubling gives there is of the work.
    """
    if series.kind is Kind.UNKNOWN:
        return None
    units = np.array([size.num_units for size in series.sizes], np.float64)
    errors = np.array([size.error for size in series.sizes])
    noise = np.random.default_rng(0).standard_normal((NUM_DRAWS, len(units)))
    drawn = speeds * np.exp(errors * noise)
    found = _first_knee(units, speeds, drawn, is_measured=True)
    if found is None or found.num_units is not None or predicted is None:
        return found
    later = predicted.num_units.astype(np.float64)
    work = later if series.kind is Kind.WEAK else np.ones_like(later)
    scale = speeds[-1] / ((units[-1] if series.kind is Kind.WEAK else 1) / (series.sizes[-1].mean("step_ns") or 1.0))
    all_units = np.concatenate([units, later])
    center = np.concatenate([speeds, work / predicted.step_ns * scale])
    draws = np.concatenate([drawn, (work / predicted.draws_ns * scale)], axis=1)
    return _first_knee(all_units, center, draws, is_measured=False) or found


def _first_knee(
    units: NDArray[np.float64], speeds: NDArray[np.float64], draws: NDArray[np.float64], *, is_measured: bool
) -> Knee | None:
    """Return the least size from which a doubling gives less than half of its ideal gain; None without a doubling."""
    searched = int(units[-1] // 2)
    if searched < units[0]:
        return None
    grid = np.unique(np.rint(np.geomspace(units[0], searched, _NUM_POINTS)))
    grid = np.unique(np.concatenate([grid, units[units <= searched]]))
    sizes = [_first_below(units, row, grid) for row in np.concatenate([speeds[np.newaxis], draws])]
    spread = np.sort([np.inf if size is None else size for size in sizes[1:]])
    low, high = (float(spread[round(share * (len(spread) - 1))]) for share in (0.025, 0.975))
    return Knee(
        num_units=sizes[0],
        low=int(low) if np.isfinite(low) else None,
        high=int(high) if np.isfinite(high) else None,
        searched=searched,
        is_measured=is_measured,
    )


def _first_below(units: NDArray[np.float64], speeds: NDArray[np.float64], grid: NDArray[np.float64]) -> int | None:
    """Return the first size of a grid whose doubling gains less than half; speeds are interpolated in logarithms."""
    at, values = np.log(units), np.log(speeds)
    gain = np.exp(np.interp(np.log(2 * grid), at, values) - np.interp(np.log(grid), at, values)) - 1
    below = np.flatnonzero(gain < HALF)
    return int(grid[below[0]]) if len(below) else None
