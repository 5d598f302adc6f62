"""Pickles of others, read without running anything that they ask for.

A pickle is a program: `pickle.load` calls any function that it names, with arguments that it brings. Here the few names
that a caller allows become records, which keep arguments and do nothing. Any other name ends the reading, as does an
instruction that neither a checkpoint nor a dump needs. The reader is the one in Python, because that in C sets aside as
much memory as a pickle says.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hpcpace.quoting import shown

MAX_VALUES = 1 << 21
"""Lists, tables, tuples, records, marks and entries of the memo: each takes up to 200 times its one byte in memory."""
_MAX_UNFOLDED_PER_BYTE = 2
"""A value may be in many places. Stacks of a dump share their frames, which makes it as large as its bytes at most."""
_FREE_UNFOLDED = 1 << 16
PERSISTENT = ("pickle", "persistent id")
"""Stands in a table of names for what a pickle refers to outside of itself."""

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


class Record:
    """What a pickle asks to make by a class or a function; it is not made.

    Attributes:
        kind: the name of the class or function.
        arguments: what it would be called with.
        state: what its attributes would be set to; None if the pickle sets none.
    """

    __slots__ = ("arguments", "state")
    kind: ClassVar[str] = ""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        # As one tuple: a pickle can make a thousand calls with the same million arguments.
        self.arguments = arguments
        self.state: Any = None


def record_kind(name: str) -> type[Record]:
    """Return what a table of names has for a class or function of a name."""
    return type(name, (Record,), {"kind": name, "__slots__": ()})


class _Table(dict[Any, Any]):
    """A dictionary of a pickle; to hash a tuple that holds itself many times over would take for ever."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | Record):
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


class _InertUnpickler(pickle._Unpickler):
    """Makes plain values and records, and refuses every instruction beyond these."""

    stack: list[Any]
    num_values = 0

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any], source: str) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._source = names, source

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            asked = shown(f"{module}.{name}")
            raise pickle.UnpicklingError(f"it asks for {asked}, which no {self._source} needs") from None

    def persistent_load(self, pid: Any) -> Any:
        kind = self.find_class(*PERSISTENT)
        if not isinstance(pid, tuple):
            raise pickle.UnpicklingError("it refers to something that is not a storage")
        return kind(pid)

    def _empty_table(self) -> None:
        self.stack.append(_Table())

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise pickle.UnpicklingError(f"it sets attributes of a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def _call(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not (isinstance(kind, type) and issubclass(kind, Record) and isinstance(arguments, tuple)):
            raise pickle.UnpicklingError(f"it calls a {type(kind).__name__}")
        self.stack.append(kind(arguments))

    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES},
        **{code[0]: _counted(pickle._Unpickler.dispatch[code[0]]) for code in _MAKERS},
        pickle.EMPTY_DICT[0]: _counted(_empty_table),
        pickle.BUILD[0]: _build,
        pickle.REDUCE[0]: _counted(_call),
        pickle.NEWOBJ[0]: _counted(_call),
    }


def read_pickle(data: bytes, *, names: Mapping[tuple[str, str], Any] | None = None, source: str = "dump") -> Any:
    """Return what a pickle holds, of dictionaries, lists, tuples, numbers, texts and what its names stand for.

    Whoever walks through all of it, in whatever order, takes time that is linear in its bytes.

    Args:
        data: the pickle.
        names: what it may ask for, by module and name: kinds of records, and values that it gets as they are.
        source: what it is a pickle of, for messages.

    Raises:
        ValueError: it is no pickle, is cut off, asks for anything else, or has values that are in too many places.
    """
    try:
        value = _InertUnpickler(data, names or {}, source).load()
        _check_unfolded(value, _MAX_UNFOLDED_PER_BYTE * len(data) + _FREE_UNFOLDED)
        return value
    except pickle.UnpicklingError as error:
        text = str(error)
        raise ValueError("it is cut off" if "truncated" in text or "exhausted" in text else text) from error
    except (EOFError, struct.error) as error:
        raise ValueError("it is cut off") from error
    except KeyError as error:  # an instruction that is not among those above
        raise ValueError(f"it has the instruction {shown(error.args[0])}, which no {source} needs") from error
    except IndexError as error:
        # Bytes that are not there, or a value that is not on the stack.
        is_cut = "index out of range" in str(error)
        raise ValueError("it is cut off" if is_cut else f"it is damaged, or no pickle of a {source}") from error
    except Exception as error:  # whatever a stack without the right things on it leads to
        raise ValueError(f"it is damaged, or no pickle of a {source} ({type(error).__name__})") from error


def _check_unfolded(value: Any, max_values: int) -> None:
    """Refuse values that hold others so many times over, or themselves, that no walk through them ends in time."""
    num_values, left = 1, [value]
    while left:
        for parts in _parts(left.pop()):
            num_values += len(parts)
            if num_values > max_values:
                raise pickle.UnpicklingError(f"its values hold each other more than {max_values} times")
            left.extend(part for part in parts if isinstance(part, (dict, list, tuple, Record)))


def _parts(value: Any) -> tuple[Any, ...]:
    """Return what a value holds directly, in one or two collections."""
    if isinstance(value, Record):
        return (value.arguments, (value.state,))
    if isinstance(value, dict):
        return (value.values(), [key for key in value if isinstance(key, Record)])
    return (value,) if isinstance(value, (list, tuple)) else ()
