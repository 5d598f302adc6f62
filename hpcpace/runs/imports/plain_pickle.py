"""Pickles of plain values, read without a single name that they could ask for.

A pickle is a program that may name any function of Python and call it. A dump of PyTorch's Flight Recorder consists of
dictionaries, lists, numbers and texts, so nothing is ever looked up or called here: a name ends the reading. The reader
is the one in Python, because that in C sets aside as much memory as a pickle says.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, ClassVar

from hpcpace.quoting import printable

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
_MOST_NAME = 80
MOST_VALUES = 1 << 22
"""Lists, tables, tuples and marks of one pickle: each takes tens of times its one byte in memory."""


def _counted(opcode: bytes) -> Callable[[Any], None]:
    """Return what carries out an instruction that sets aside memory, up to a number of times."""
    carry_out = pickle._Unpickler.dispatch[opcode[0]]

    def count(unpickler: Any) -> None:
        unpickler.num_values += 1
        if unpickler.num_values > MOST_VALUES:
            raise pickle.UnpicklingError(f"it has more than {MOST_VALUES} lists and tables")
        carry_out(unpickler)

    return count


_MAKERS = (
    *(pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
)
_count_list = _counted(pickle.EMPTY_LIST)


class _Table(dict[Any, Any]):
    """A dictionary of a pickle; to hash a tuple that holds itself many times over would take for ever."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str):
            raise pickle.UnpicklingError(f"a key is a {type(key).__name__}, not a text")
        super().__setitem__(key, value)


class _PlainUnpickler(pickle._Unpickler):
    """Makes plain values, and refuses every name and every instruction beyond these."""

    stack: list[Any]
    num_values = 0

    def find_class(self, module: str, name: str) -> Any:
        asked = printable(f"{module}.{name}"[:_MOST_NAME])
        raise pickle.UnpicklingError(f"it asks for {asked}, and a dump needs no code")

    def _empty_table(self) -> None:
        _count_list(self)
        self.stack[-1] = _Table()

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.find_class(str(module), str(name))

    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES},
        **{code[0]: _counted(code) for code in _MAKERS},
        pickle.EMPTY_DICT[0]: _empty_table,
        # They lead to `find_class`, which names what is asked for.
        pickle.GLOBAL[0]: pickle._Unpickler.dispatch[pickle.GLOBAL[0]],
        pickle.STACK_GLOBAL[0]: _stack_global,
        pickle.INST[0]: pickle._Unpickler.dispatch[pickle.INST[0]],
    }


def read_plain_pickle(data: bytes) -> Any:
    """Return what a pickle holds, of dictionaries, lists, tuples, numbers and texts.

    Raises:
        ValueError: it is no pickle, is cut off, or asks for anything else.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(_reason(error)) from error
    except (EOFError, struct.error) as error:
        raise ValueError("it is cut off") from error
    except KeyError as error:  # an instruction that is not among those above
        raise ValueError(f"it has the instruction {error.args[0]!r}, which no dump needs") from error
    except IndexError as error:
        # Bytes that are not there, or a value that is not on the stack.
        reason = "it is cut off" if "index out of range" in str(error) else "it is damaged, or no pickle of a dump"
        raise ValueError(reason) from error
    except Exception as error:  # whatever a stack without the right things on it leads to
        raise ValueError(f"it is damaged, or no pickle of a dump ({type(error).__name__})") from error


def _reason(error: pickle.UnpicklingError) -> str:
    text = str(error)
    return "it is cut off" if "truncated" in text or "exhausted" in text else text
