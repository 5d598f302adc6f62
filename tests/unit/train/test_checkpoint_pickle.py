"""Pickles that would run code, and pickles that would fill memory or never end."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import functools
import os
import pickle
import subprocess
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hpcpace.inert_pickle import Record
from hpcpace.train.checkpoint_pickle import read_checkpoint_pickle


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


class State:
    """Pickled as an object of a class that gets a state."""

    def __init__(self, made: Any, state: Any) -> None:
        self._parts = (*made, state)

    def __reduce__(self) -> Any:
        return self._parts


def _touch(marker: Path) -> str:
    return f"touch {marker}"


def _array_of_objects(marker: Path) -> bytes:
    array = np.empty(1, dtype=object)
    array[0] = Call(os.system, _touch(marker))
    return pickle.dumps(array)


def _stack_global(module: str, name: str, argument: str) -> bytes:
    """Return a pickle that calls a function, by the names that are given."""

    def text(value: str) -> bytes:
        return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


def _opened_by_torch(marker: Path) -> bytes:
    inner = Path(f"{marker}.pt")
    torch.save(Call(os.system, _touch(marker)), inner)
    return pickle.dumps(Call(functools.partial(torch.load, weights_only=False), str(inner)))


def _loaded_from_bytes(marker: Path) -> bytes:
    inner = Path(f"{marker}.pt")
    torch.save(Call(os.system, _touch(marker)), inner)
    return pickle.dumps(Call(torch.storage._load_from_bytes, inner.read_bytes()))


GADGETS: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda marker: pickle.dumps(Call(os.system, _touch(marker))),
    "os.system of protocol 0": lambda marker: pickle.dumps(Call(os.system, _touch(marker)), protocol=0),
    "os.system of protocol 2": lambda marker: pickle.dumps(Call(os.system, _touch(marker)), protocol=2),
    "subprocess": lambda marker: pickle.dumps(Call(subprocess.check_call, ["touch", str(marker)])),
    "exec": lambda marker: pickle.dumps(Call(builtins.exec, f"import os; os.system({_touch(marker)!r})")),
    "eval": lambda marker: pickle.dumps(Call(builtins.eval, f"__import__('os').system({_touch(marker)!r})")),
    "method": lambda marker: pickle.dumps(Call(Path.touch, marker)),
    "getattr": lambda marker: (
        b"cbuiltins\ngetattr\n(cos\npath\nS'os'\ntRp0\n0cos\nsystem\n" + f"(S'{_touch(marker)}'\ntR.".encode()
    ),
    "partial": lambda marker: pickle.dumps(Call(functools.partial(os.system, _touch(marker)))),
    "map": lambda marker: pickle.dumps(Call(list, Call(map, os.system, [_touch(marker)]))),
    "array of objects": _array_of_objects,
    "name with dots": lambda marker: _stack_global("torch.serialization", "os.system", _touch(marker)),
    "INST": lambda marker: f"(S'{_touch(marker)}'\nios\nsystem\n.".encode(),
    "OBJ": lambda marker: f"(cos\nsystem\nS'{_touch(marker)}'\no.".encode(),
    "state": lambda marker: pickle.dumps(State((OrderedDict, ()), {"a": Call(os.system, _touch(marker))})),
    "rebuilt type": lambda marker: pickle.dumps(
        Call(torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, (_touch(marker),), {})
    ),
    "argument of a rebuilt tensor": lambda marker: pickle.dumps(
        Call(torch._utils._rebuild_tensor_v2, Call(os.system, _touch(marker)), 0, (1,), (1,), False, OrderedDict())
    ),
    "argument of a size": lambda marker: pickle.dumps(Call(torch.Size, Call(os.system, _touch(marker)))),
    "torch.load": _opened_by_torch,
    "torch's bytes": _loaded_from_bytes,
}


@pytest.mark.parametrize("gadget", GADGETS.values(), ids=GADGETS)
def test_a_pickle_that_would_run_code_runs_none(tmp_path: Path, gadget: Callable[[Path], bytes]) -> None:
    marker = tmp_path / "marker"
    data = gadget(marker)
    with contextlib.suppress(Exception):  # most do not return what their caller wants
        pickle.loads(data)
    assert marker.exists(), "the test is wrong: this pickle runs nothing"
    marker.unlink()
    with pytest.raises(ValueError):
        read_checkpoint_pickle(data)
    assert not marker.exists()


def test_a_registered_extension_is_not_called(tmp_path: Path) -> None:
    copyreg.add_extension("posix", "system", 250)
    try:
        data = b"\x80\x02\x82\xfaX" + (7).to_bytes(4, "little") + b"touch x\x85R."
        with pytest.raises(ValueError, match="it has the instruction 130"):
            read_checkpoint_pickle(data)
    finally:
        copyreg.remove_extension("posix", "system", 250)


@pytest.mark.parametrize(
    "made",
    [
        (torch.Size, ((1 << 40,),)),
        (torch._utils._rebuild_tensor_v2, (None, 0, (1 << 40,), (1,), False, OrderedDict())),
        (torch.serialization._get_layout, ("os.system",)),
        (OrderedDict, ([["a", 1]],)),
        (getattr, ("text", "format")),
    ],
)
def test_what_a_checkpoint_needs_is_kept_and_not_called(made: Any) -> None:
    record = read_checkpoint_pickle(pickle.dumps(Call(made[0], *made[1])))
    assert isinstance(record, Record)
    assert record.kind == made[0].__name__
    assert len(record.arguments) == len(made[1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"R.",
        b"\x80\x04",
        b"not a pickle",
        b"\x80\x04)]a.",  # APPEND to a tuple
        b"\x80\x04}(K\x01K\x02u.",  # a number as key
        b"\x80\x04})K\x02s.",  # a tuple as key
        b"\x80\x04]}b.",  # a state for a list
        b"\x80\x04ctorch\nfloat32\n)R.",  # a dtype, called
        b"\x80\x04ctorch\nfloat32\n}b.",  # a dtype, changed
        b"\x80\x04ctorch\nSize\n}b.",  # a class, changed
        b"\x80\x04ctorch\nSize\nK\x01R.",  # arguments that are none
        b"\x80\x04cbuiltins\ngetattr\nctorch\nSize\nX\x03\x00\x00\x00new\x86R)R.",  # what getattr would give, called
        b"\x80\x04h\x05.",  # a memo that is not there
        b"\x80\x04]Q.",  # a storage that is none
    ],
)
def test_a_damaged_pickle_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_checkpoint_pickle(data)


def _nested(depth: int) -> bytes:
    """Return a pickle of a tuple of two, of which each is the same tuple of two, and so on: 2**depth in all."""
    return b"\x80\x04)" + b"".join(b"q\x00h\x00\x86" for _ in range(depth))


BOMBS = {
    "index of the memo": b"\x80\x04]r\xff\xff\xff\x7f.",
    "length of a text": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"a.",
    "length of a bytearray": b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b"a.",
    "length of a frame": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"].",
    "key that holds itself": b"\x80\x04}" + _nested(60)[2:] + b"K\x01s.",
    "calls that share their arguments": (
        b"\x80\x04ctorch\nSize\nq\x00(" + b"N" * 20_000 + b"tq\x01" + b"h\x00h\x01R" * 4000 + b"."
    ),
    "deep list": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_a_pickle_takes_no_more_memory_or_time_than_its_length_allows(data: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            read_checkpoint_pickle(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < (1 << 20) + 200 * len(data)
