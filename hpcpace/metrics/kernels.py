"""Loops over rows that numpy needs many passes or sorts for, kernels.cpp, where a C++ compiler was at hand.

Each has a counterpart in numpy, here or beside its caller, with the same results to the last bit, which is used where
there is no library: `library` returns None then. Threads run beside a kernel.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.compat import load_compiled
from hpcpace.metrics import Bools, Bytes, Floats, Ints

_SOURCE = Path(__file__).with_suffix(".cpp")


class _Given:
    """A type of argument that a kernel reads: an array of a dtype, copied where its values do not lie side by side."""

    dtype: type

    @classmethod
    def from_param(cls, value: NDArray[Any]) -> Any:
        """Return what ctypes passes on, which keeps the array."""
        if value.dtype != cls.dtype:
            raise TypeError(f"array must have data type {cls.dtype.__name__}, not {value.dtype}")
        return np.ascontiguousarray(value).ctypes


class _Ints(_Given):
    dtype = np.int64


class _Int32s(_Given):
    dtype = np.int32


class _Bytes(_Given):
    dtype = np.uint8


class _Doubles(_Given):
    dtype = np.float64


_INT = ctypes.c_int64
_OUT = {dtype: np.ctypeslib.ndpointer(dtype, flags=("C_CONTIGUOUS", "WRITEABLE")) for dtype in "qiBd"}
_OUT_INTS, _OUT_INT32S, _OUT_BYTES, _OUT_DOUBLES = _OUT.values()
_FLOAT, _POINTER = ctypes.c_double, ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "count_order": (_INT, _Ints, _INT, _OUT_INTS),
    "others_median": (_INT, _INT, _Doubles, _OUT_DOUBLES),
    "medians_of_groups": (_INT, _Ints, _OUT_DOUBLES, _OUT_DOUBLES),  # it changes the order of the values
    "replay": (_INT, _INT, _Doubles, _Ints, _Doubles, _INT, _Ints, _Ints, _Ints, _INT, _Ints, _POINTER, _POINTER),
    "last_partner": (_INT, _INT, _Bytes, _Ints, _Ints, _Ints, _Ints, _Ints, _Ints, _Bytes, _Bytes, _OUT_INTS),
    "met_groups": (_INT, _Bytes, _Bytes, _Ints, _Bytes, _Ints, _OUT_INT32S, _OUT_BYTES),
    "delay_origins": (
        *(_INT, _INT, _Ints, _Ints, _Ints, _Ints, _INT, _Int32s, _Int32s, _Ints, _Ints, _Bytes),
        *(_INT, _INT, _INT, _FLOAT, _FLOAT, _OUT_DOUBLES, _OUT_DOUBLES),
    ),
    "waits": (
        *(_INT, _Ints, _INT, _INT, _Bytes, _Ints, _Ints, _Ints, _Ints, _Ints, _Ints, _Ints, _Bytes, _Bytes, _Bytes),
        *(_INT, _INT, _FLOAT, _OUT_INTS, _OUT_INTS, _OUT_INTS, _OUT_BYTES),
    ),
    "wait_begins": (_INT, _INT, _Ints, _Ints, _Ints, _Ints, _OUT_INTS),
    "parts_of_steps": (
        *(_INT, _Ints, _Ints, _Ints, _INT, _Bytes, _Ints, _Ints, _INT, _Ints, _Ints, _Ints, _Ints),
        *(_INT, _INT, _INT, _Ints, _OUT_DOUBLES),
    ),
    "under_way": (_INT, _Ints, _Ints, _INT, _Ints, _Ints, _OUT_DOUBLES),
    "covered_until": (_INT, _Ints, _Ints, _INT, _Ints, _OUT_INTS),
    "reference_times": (_INT, _Ints, _Ints, _Doubles, _FLOAT, _INT, _Ints, _OUT_INTS),
    "rows_of_steps": (_INT, _Ints, _Ints, _Ints, _INT, _INT, _Ints, _OUT_INTS, _OUT_INTS),
    "last_waits": (
        *(_INT, _Ints, _Ints, _Ints, _Ints, _INT, _Ints, _Ints, _Ints, _Ints, _Ints, _Ints, _Bytes, _Bytes),
        *(_Ints, _Ints, _Ints, _INT, _OUT_INTS, _OUT_BYTES),
    ),
}
_RESULTS = {"rows_of_steps": _INT, "delay_origins": _INT, "last_waits": None, "wait_begins": None, "met_groups": None}
_RESULTS |= {"reference_times": None}


@cache
def library() -> Any | None:
    """Return the compiled kernels; None if there are none of this source."""
    found = load_compiled(_SOURCE)
    for name, arguments in _ARGUMENTS.items() if found is not None else ():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name, ctypes.c_int)
    return found


def checked(status: int) -> None:
    """Raise what the status of a kernel says.

    Raises:
        MemoryError: it had not enough.
    """
    if status:
        raise MemoryError


def bytes_of(mask: Bools) -> Bytes:
    """Return a mask as a kernel takes it."""
    return mask.view(np.uint8)


def has_order(values: Floats) -> bool:
    """Return whether values have an order for a kernel: none of them is NaN."""
    return not np.isnan(values.min(initial=np.inf))


_MAX_NUMBERS_PER_VALUE = 2
_MAX_GAPS, _MAX_UNUSED = 4, 4096  # memory: numbers from 0 for each key, and besides


def stable_order(number: Ints) -> Ints:
    """Return what `np.argsort(number, kind="stable")` does, by counting where numbers from 0 are few, int64."""
    kernels = library()
    if kernels is not None and len(number):
        lowest, highest = int(number.min()), int(number.max())
        if lowest >= 0 and highest <= _MAX_NUMBERS_PER_VALUE * len(number):
            order = np.empty(len(number), np.int64)
            checked(kernels.count_order(len(number), number, highest, order))
            return order
    return np.argsort(number, kind="stable")


def numbered(keys: Ints) -> tuple[Ints, Ints]:
    """Return what `np.unique(keys, return_inverse=True)` does, of keys from 0, by counting where these are few."""
    if int(keys.max(initial=0)) > _MAX_GAPS * len(keys) + _MAX_UNUSED:
        names, number = np.unique(keys, return_inverse=True)
        return names, number.astype(np.int64)
    occurs = np.bincount(keys) > 0
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[keys]


def ordinals(is_first: Bools) -> Ints:
    """Return how many rows each row is behind the last first one, int64; `is_first` begins with one."""
    index = np.arange(len(is_first))
    return index - np.maximum.accumulate(np.where(is_first, index, 0))


def grouped_medians(number: Ints, value: Floats, num_groups: int) -> Floats:
    """Return the median of each group of values, float64, (num_groups,); 0 of one without values.

    Args:
        number: the group of each value, from 0, int64, (num_values,).
        value: the values, (num_values,).
        num_groups: how many groups there are.
    """
    bounds = np.append(0, np.cumsum(np.bincount(number, minlength=num_groups)))
    ordered, medians = value[stable_order(number)], np.zeros(num_groups)
    kernels = library()
    if kernels is not None and has_order(ordered):
        checked(kernels.medians_of_groups(num_groups, bounds, ordered, medians))
        return medians
    count = np.diff(bounds)
    for size in np.unique(count[count > 0]).tolist():
        groups = np.flatnonzero(count == size)
        own = ordered[bounds[groups][:, None] + np.arange(size)]
        low, high = (size - 1) // 2, size // 2
        own.partition((low, high), axis=1)
        medians[groups] = (own[:, low] + own[:, high]) / 2
    return medians


def others_median(values: Floats) -> Floats:
    """Return for each rank and step the median over the other ranks.

    With two ranks it is the other one's value: a median that includes the rank itself would halve its excess.

    Args:
        values: (num_ranks, num_steps), at least two ranks.
    """
    num_ranks = len(values)
    kernels = library()
    if kernels is not None and has_order(values):
        medians = np.empty(values.shape)
        checked(kernels.others_median(num_ranks, values.size // num_ranks, values, medians))
        return medians
    low, high = (num_ranks - 2) // 2, (num_ranks - 1) // 2
    # A few places of the sorted values suffice: a rank below one of them moves it up by one.
    ascending = np.partition(values, (low, low + 1, high, high + 1), axis=0)
    below = np.where(values <= ascending[low], ascending[low + 1], ascending[low])
    above = np.where(values <= ascending[high], ascending[high + 1], ascending[high])
    return np.asarray((below + above) / 2)
