"""Arrays thinned out to what a screen can show and a page can hold.

A delay in one step of one rank is what the reader looks for, so a block of cells keeps its largest magnitude, and a bin
of steps its range, and neither is averaged away.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.diagnosis.plot_data import Values

MAX_POINTS = 1500
_NO_VALUE = -128


def rounded(values: NDArray[Any]) -> list[float | None]:
    """Return numbers with four significant digits; None for what is not finite."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in np.asarray(values, np.float64)]


def binned(values: Values, most_rows: int, most_columns: int) -> tuple[Values, int, int]:
    """Return a matrix thinned out to the largest magnitude of each block, and how many rows and columns a block has.

    Args:
        values: (num_rows, num_columns), at least one of each; what is not finite is ignored, NaN where nothing is left.
        most_rows, most_columns: of the result.
    """
    num_rows, num_columns = values.shape
    by_row, by_column = -(-num_rows // most_rows), -(-num_columns // most_columns)
    finite = np.where(np.isfinite(values), values, np.nan)
    rows, columns = np.arange(0, num_rows, by_row), np.arange(0, num_columns, by_column)
    high = np.fmax.reduceat(np.fmax.reduceat(finite, rows, axis=0), columns, axis=1)
    low = np.fmin.reduceat(np.fmin.reduceat(finite, rows, axis=0), columns, axis=1)
    return np.where(-low > high, low, high), by_row, by_column


def packed(values: Values) -> dict[str, Any]:
    """Return a matrix as one signed byte per value: the root of its share of the largest magnitude, -128 for NaN.

    The root spends the 127 levels on small values: one at 1 % of the largest is still known to within 8 %.
    """
    known = np.isfinite(values)
    scale = float(np.abs(values, where=known, out=np.zeros(values.shape)).max(initial=0.0))
    share = np.where(known, values, 0.0) / (scale or 1.0)
    codes = np.where(known, np.rint(127 * np.sign(share) * np.sqrt(np.abs(share))), _NO_VALUE).astype(np.int8)
    return {
        "bytes": base64.b64encode(codes.tobytes()).decode(),
        "columns": values.shape[1],
        "scale": float(f"{scale:.6g}"),
    }


@dataclass(frozen=True, kw_only=True)
class Bins:
    """A series in bins of consecutive values; each array (num_bins,).

    Attributes:
        size: values in a bin, 1 where nothing was thinned out.
        first: index of the first value of a bin, int64.
        low, middle, high: smallest, median and largest finite value; NaN where there is none.
    """

    size: int
    first: NDArray[np.int64]
    low: Values
    middle: Values
    high: Values


def bins(values: Values, most: int) -> Bins:
    """Return a series of any length, (num_values,), in at most so many bins."""
    size = max(-(-len(values) // most), 1)
    first = np.arange(0, len(values), size)
    whole = np.full(len(first) * size, np.nan)
    whole[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    ordered = np.sort(whole.reshape(len(first), size), axis=1)  # NaN last
    num_known = np.isfinite(ordered).sum(axis=1)
    rows = np.arange(len(first))
    last = np.maximum(num_known - 1, 0)
    return Bins(size=size, first=first, low=ordered[:, 0], middle=ordered[rows, last // 2], high=ordered[rows, last])
