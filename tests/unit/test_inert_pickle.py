"""Pickles of plain values: every name is refused, and nothing is made that could take the memory of the machine."""

from __future__ import annotations

import collections
import datetime
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.core import codec
from hpcpace.core.codec import read_pickle

PLAIN = {"version": "2.10", "a": [1, -1, 2.5, None, True, "é", ("x", 2**40), {}], "empty": []}


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@each_case("protocol", [2, 3, 4, 5])
def test_plain_values_are_read(protocol: int) -> None:
    assert read_pickle(pickle.dumps(PLAIN, protocol)) == PLAIN


@each_case(
    ("content", "name"),
    [
        (Evil(os.system, "true"), "posix.system"),
        (Evil(threading.Thread), "threading.Thread"),
        (Evil(eval, "1"), "builtins.eval"),
        (collections.OrderedDict(), "collections.OrderedDict"),
        (datetime.date(2026, 1, 1), "datetime.date"),
        (Path("x"), "pathlib"),
        ({"entries": [Evil(print)]}, "builtins.print"),
    ],
)
@each_case("protocol", [2, 4])
def test_every_name_is_refused_and_said(content: Any, name: str, protocol: int) -> None:
    name = name.replace("builtins", "__builtin__") if protocol == 2 else name
    with pytest.raises(ValueError, match=f"it asks for '{name}"):
        read_pickle(pickle.dumps(content, protocol))


@each_case(
    ("data", "reason"),
    [
        (b"", "cut off"),
        (b"\x80", "cut off"),
        (pickle.dumps(PLAIN, 2)[:-1], "cut off"),
        (pickle.dumps(PLAIN, 2)[:30], "cut off"),
        (pickle.dumps(PLAIN, 4)[:30], "cut off"),
        (pickle.dumps({1: 2}), "a key is a int"),
        (pickle.dumps({("a",): 2}), "a key is a tuple"),
        (pickle.dumps(b"bytes", 4), "instruction"),
        (pickle.dumps({1, 2}, 4), "instruction"),
        (b"cos\nsystem\n(S'true'\ntR.", "asks for 'os.system'"),
        (b"(S'true'\nios\nsystem\n.", "instruction"),
        (b"\x80\x02]q\x00(", "cut off"),
        (b"\x80\x02h\x07.", "Memo value not found"),
        (b"\x80\x02NQ.", "asks for 'pickle.persistent id'"),
        (b"\x80\x09.", "damaged"),
        (b"\x80\x04\x8c\xffabc.", "cut off"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "cut off"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff", "damaged"),
        (b"\x80\x02X\x02\x00\x00\x00\xff\xfe.", "damaged"),
        (b"\x80\x02K\x01a.", "cut off"),
    ],
)
def test_what_is_no_plain_pickle_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_pickle(data)


def _shared(levels: int) -> bytes:
    """Return a pickle of a list of two times the same list, and so on: 2**levels in all."""
    return b"\x80\x02]" + b"q\x00]h\x00ah\x00a" * levels + b"."


@each_case(
    "data",
    [
        _shared(60),
        b"\x80\x02]q\x00h\x00a.",  # a list in itself
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",  # a table in itself
        b"\x80\x02(" + b"N" * 50_000 + b"tq\x00(" + b"h\x00" * 50_000 + b"t.",
    ],
    ids=["shared by levels", "list in itself", "table in itself", "long one many times"],
)
def test_values_that_hold_each_other_without_end_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="its values hold each other more than"):
        read_pickle(data)


def test_a_name_that_is_no_text_is_not_written_out() -> None:
    with pytest.raises(ValueError, match="STACK_GLOBAL requires str"):
        read_pickle(_shared(60)[:-1] + b"h\x00\x93.")


@each_case("opcode", [b"\x94", b"(", b"r\x00\x00\x00\x00"], ids=["MEMOIZE", "MARK", "LONG_BINPUT"])
def test_what_a_pickle_remembers_is_counted(monkeypatch: pytest.MonkeyPatch, opcode: bytes) -> None:
    monkeypatch.setattr(codec, "MAX_VALUES", 1000)
    with pytest.raises(ValueError, match="more than 1000 lists"):
        read_pickle(b"\x80\x04N" + opcode * 1001 + b".")


def test_a_pickle_of_nothing_but_lists_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_VALUES", 1000)
    with pytest.raises(ValueError, match="more than 1000 lists"):
        read_pickle(b"\x80\x02" + b"]" * 1001 + b".")


def test_deep_nesting_takes_no_stack() -> None:
    depth = 100_000
    value = read_pickle(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    assert isinstance(value, list)
