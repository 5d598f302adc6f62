"""Pickles of a checkpoint, read without running anything that they ask for.

A pickle is a program: `pickle.load` calls any function that it names, with arguments that it brings, so that whoever
writes a checkpoint could run code as whoever resumes it. Here the few names that a checkpoint needs become records,
which keep arguments and do nothing. Any other name ends the reading, as does an instruction that no checkpoint needs.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar

import torch

from hpcpace.quoting import shown


class Record:
    """What a pickle asks to make by a class or a function; it is not made.

    Attributes:
        kind: the name of the class or function.
        arguments: what it would be called with.
        state: what its attributes would be set to; None if the pickle sets none.
    """

    kind: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Record:
        """Keep the arguments; NEWOBJ and REDUCE both come here."""
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _kind(name: str) -> type[Record]:
    return type(name, (Record,), {"kind": name})


_DCP = "torch.distributed.checkpoint"
_DTYPES = "bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 bool"
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# By module and name. Dtypes are singletons that cannot be called; a storage's class says its dtype and nothing else.
_ALLOWED: dict[tuple[str, str], type[Record] | torch.dtype] = {
    **{
        (f"{_DCP}.metadata", name): _kind(name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex"),
            *("StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): _kind("_StorageInfo"),
    ("torch", "Size"): _kind("Size"),
    ("torch.serialization", "_get_layout"): _kind("_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"): _kind("_rebuild_tensor_v2"),
    ("collections", "OrderedDict"): _kind("OrderedDict"),
    # Members of enumerations, in Python 3.11.0 to 3.11.3: by a look-up that is not made here.
    ("builtins", "getattr"): _kind("getattr"),
    # The writer's own path, which nobody reads; Python 3.13 calls its module so.
    ("pathlib", "PosixPath"): _kind("PosixPath"),
    ("pathlib._local", "PosixPath"): _kind("PosixPath"),
    **{("torch", name): getattr(torch, name) for name in _DTYPES.split()},
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}
_STORAGE = _kind("storage")
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD, pickle.BINPERSID),
)


class _Table(dict[Any, Any]):
    """A dictionary of a pickle; to hash a tuple that holds itself many times over would take for ever."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | Record):
            raise pickle.UnpicklingError(f"a key is a {type(key).__name__}")
        super().__setitem__(key, value)


class _InertUnpickler(pickle._Unpickler):
    """Makes records; the base class is the one in Python, as that in C sets aside as much memory as a pickle says."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            asked = shown(f"{module}.{name}")
            raise pickle.UnpicklingError(f"it asks for {asked}, which no checkpoint needs") from None

    def persistent_load(self, pid: Any) -> Record:
        if not isinstance(pid, tuple):
            raise pickle.UnpicklingError("it refers to something that is not a storage")
        return _STORAGE(*pid)

    def _empty_table(self) -> None:
        self.stack.append(_Table())

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise pickle.UnpicklingError(f"it sets attributes of a {type(self.stack[-1]).__name__}")
        self.stack[-1].__setstate__(state)

    def _call(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not (isinstance(kind, type) and issubclass(kind, Record) and isinstance(arguments, tuple)):
            raise pickle.UnpicklingError(f"it calls a {type(kind).__name__}")
        self.stack.append(kind(*arguments))

    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES},
        pickle.EMPTY_DICT[0]: _empty_table,
        pickle.BUILD[0]: _build,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
    }


def read_pickle(data: bytes) -> Any:
    """Return what a pickle holds, of plain values, dtypes and records.

    Raises:
        ValueError: it is not a pickle, or asks for what no checkpoint needs.
    """
    try:
        return _InertUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # whatever a stack without the right things on it leads to
        raise ValueError(f"it is not a pickle of a checkpoint ({type(error).__name__})") from error
