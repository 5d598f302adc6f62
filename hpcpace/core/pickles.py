"""Pickles of others, read without running anything that they ask for.

A pickle is a program: `pickle.load` calls any function that it names, with arguments that it brings. Here any name ends
the reading, as does an instruction that plain values do not need. The reader is the one in Python, because the one in C
allocates as much memory as a pickle asks for.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from hpcpace.core.compat import PythonUnpickler
from hpcpace.core.text import shown

MAX_VALUES = 1 << 21
"""Lists, tables, tuples, marks and entries of the memo: each takes up to 200 times its one byte in memory."""
_MAX_UNFOLDED_PER_BYTE = 2
"""A value may be in many places. Stacks of a dump share their frames, which makes it as large as its bytes at most."""
_FREE_UNFOLDED = 1 << 16
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL),
)
_MAKERS = (
    *(pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINPERSID),
)


class _Table(dict[Any, Any]):
    """A dictionary of a pickle; to hash a tuple that holds itself many times over would take for ever."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str):
            raise pickle.UnpicklingError(f"a key is a {type(key).__name__}, not a text")
        super().__setitem__(key, value)


def _counted(carry_out: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what carries out an instruction that sets aside memory, up to a number of times."""

    def count(unpickler: Any) -> None:
        unpickler.num_values += 1
        if unpickler.num_values > MAX_VALUES:
            raise pickle.UnpicklingError(f"it has more than {MAX_VALUES} lists and tables")
        carry_out(unpickler)

    return count


class _InertUnpickler(PythonUnpickler):
    """Makes plain values, and refuses every name and every instruction beyond these."""

    stack: list[Any]
    num_values = 0

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {shown(f'{module}.{name}')}, which no dump needs")

    def persistent_load(self, pid: Any) -> Any:
        self.find_class("pickle", "persistent id")

    def _empty_table(self) -> None:
        self.stack.append(_Table())

    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: PythonUnpickler.dispatch[code[0]] for code in _OPCODES},
        **{code[0]: _counted(PythonUnpickler.dispatch[code[0]]) for code in _MAKERS},
        pickle.EMPTY_DICT[0]: _counted(_empty_table),
    }


def read_pickle(data: bytes) -> Any:
    """Return the dictionaries, lists, tuples, numbers and texts of a pickle.

    A walk through all of it, in whatever order, takes time that is linear in its bytes.

    Raises:
        ValueError: it is no pickle, is cut off, asks for anything else, or has values that are in too many places.
    """
    try:
        value = _InertUnpickler(io.BytesIO(data)).load()
        _check_unfolded(value, _MAX_UNFOLDED_PER_BYTE * len(data) + _FREE_UNFOLDED)
        return value
    except pickle.UnpicklingError as error:
        text = str(error)
        raise ValueError("it is cut off" if "truncated" in text or "exhausted" in text else text) from error
    except (EOFError, struct.error) as error:
        raise ValueError("it is cut off") from error
    except KeyError as error:  # an instruction that is not among those above
        raise ValueError(f"it has the instruction {shown(error.args[0])}, which no dump needs") from error
    except IndexError as error:
        # Bytes that are not there, or a value that is not on the stack.
        is_cut = "index out of range" in str(error)
        raise ValueError("it is cut off" if is_cut else "it is damaged, or no pickle of a dump") from error
    except Exception as error:  # whatever a stack without the right things on it leads to
        raise ValueError(f"it is damaged, or no pickle of a dump ({type(error).__name__})") from error


def _check_unfolded(value: Any, max_values: int) -> None:
    """Refuse values that hold others so many times over, or themselves, that no walk through them ends in time."""
    num_values, left = 1, [value]
    while left:
        parts = _parts(left.pop())
        num_values += len(parts)
        if num_values > max_values:
            raise pickle.UnpicklingError(f"its values hold each other more than {max_values} times")
        left.extend(part for part in parts if isinstance(part, (dict, list, tuple)))


def _parts(value: Any) -> Collection[Any]:
    """Return what a value holds directly."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()
