"""Loops over rows that numpy needs many passes or sorts for, kernels.cpp, where a C++ compiler was at hand.

Each has a counterpart in numpy beside its caller, with the same results to the last bit, which is used where there is
no library: `library` returns None then. Threads run beside a kernel.
"""

from __future__ import annotations

import ctypes
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "kernels.cpp"


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
    "last_partner": (_INT, _INT, _Bytes, _Ints, _Ints, _Ints, _Ints, _Bytes, _Bytes, _OUT_INTS),
    "met_groups": (_INT, _Bytes, _Bytes, _Ints, _Bytes, _Ints, _OUT_INT32S, _OUT_BYTES),
    "delay_origins": (
        *(_INT, _INT, _Ints, _Ints, _Ints, _Ints, _INT, _Int32s, _Int32s, _Ints, _Ints, _Bytes),
        *(_INT, _INT, _INT, _FLOAT, _FLOAT, _OUT_DOUBLES, _OUT_DOUBLES),
    ),
    "waits": (
        *(_INT, _Ints, _INT, _INT, _Bytes, _Ints, _Ints, _Ints, _Ints, _Ints, _Ints, _Bytes, _Bytes, _Bytes),
        *(_INT, _INT, _INT, _OUT_INTS, _OUT_INTS, _OUT_INTS, _OUT_BYTES),
    ),
    "wait_begins": (_INT, _INT, _Ints, _Ints, _Ints, _Ints, _OUT_INTS),
    "parts_of_steps": (
        *(_INT, _Ints, _Ints, _Ints, _INT, _Bytes, _Ints, _Ints, _INT, _Ints, _Ints, _Ints, _Ints),
        *(_INT, _INT, _INT, _Ints, _OUT_DOUBLES),
    ),
    "under_way": (_INT, _Ints, _Ints, _INT, _Ints, _Ints, _OUT_DOUBLES),
    "rows_of_steps": (_INT, _Ints, _Ints, _Ints, _INT, _INT, _Ints, _OUT_INTS, _OUT_INTS),
    "last_waits": (
        *(_INT, _Ints, _Ints, _Ints, _Ints, _INT, _Ints, _Ints, _Ints, _Ints, _Ints, _Ints, _Bytes, _Bytes),
        *(_Ints, _Ints, _Ints, _INT, _OUT_INTS, _OUT_BYTES),
    ),
}
_RESULTS = {"rows_of_steps": _INT, "last_waits": None, "wait_begins": None, "delay_origins": _INT, "met_groups": None}


@cache
def library() -> Any | None:
    """Return the compiled kernels; None if there are none of this source."""
    for path in sorted(_FOLDER.glob("_kernels*.so")):
        try:
            found = ctypes.CDLL(str(path))
            check = found.source_check
            check.restype = ctypes.c_uint32
            if check() != zlib.crc32(_SOURCE.read_bytes()):
                continue
        except (OSError, AttributeError):
            continue
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, _RESULTS.get(name, ctypes.c_int)
        return found
    return None


def checked(status: int) -> None:
    """Raise what the status of a kernel says.

    Raises:
        MemoryError: it had not enough.
    """
    if status:
        raise MemoryError


def bytes_of(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return a mask as a kernel takes it."""
    return mask.view(np.uint8)


def has_order(values: NDArray[np.float64]) -> bool:
    """Return whether values have an order for a kernel: none of them is NaN."""
    return not np.isnan(values.min(initial=np.inf))
