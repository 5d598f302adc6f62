"""Values of files in messages: short, printable, and in bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cases import each_case

from hpcpace.core.text import shortened, shown


class _Named(dict[str, Any]):
    """A class of its own: reprlib knows kinds by the names of their classes, and writes others whole."""


def _shared(make: Any, levels: int) -> Any:
    value: Any = make(["x"])
    for _ in range(levels):
        value = make([value, value])
    return value


@each_case(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (0.5, "0.5"),
        ("a\nb\x1b[31m", r"'a\nb\x1b[31m'"),
        ("x" * 1000, "'" + "x" * 56 + "..."),
        (b"\x00\xff", r"b'\x00\xff'"),
        ([1, [2, [3, [4]]]], "[1, [2, [3, [...]]]]"),
        ({"a": {"b": {"c": {"d": 1}}}}, "{'a': {'b': {'c': {...}}}}"),
        ((1,), "(1,)"),
        (10**5000, "<an integer of 16610 bits>"),
        (object(), "<object>"),
        ("\ud800", r"'\ud800'"),
    ],
    ids=lambda _: "",
)
def test_a_value_is_short_and_printable(value: Any, text: str) -> None:
    assert shown(value) == text


@each_case(
    "make",
    [
        lambda: _shared(list, 200),
        lambda: _shared(tuple, 200),
        lambda: _shared(lambda pair: {"a": pair[0], "b": pair[-1]}, 200),
        lambda: _shared(lambda pair: _Named(a=pair[0], b=pair[-1]), 200),
        lambda: "x" * (16 << 20),
        lambda: b"x" * (16 << 20),
        lambda: [["x" * 1_000_000] * 1000] * 1000,
        lambda: 1 << (1 << 24),
    ],
)
def test_what_a_value_contains_costs_no_time(make: Callable[[], Any]) -> None:
    value = make()
    begin_s = time.process_time()
    assert len(shown(value)) <= 60
    assert time.process_time() - begin_s < 1


@each_case(
    ("text", "short"),
    [
        ("rank_3", "rank_3"),
        ("a" * 200 + "rank_3", "a" * 39 + "..." + "a" * 32 + "rank_3"),
        ("a\n", r"a\n"),
    ],
    ids=["short", "long", "not printable"],
)
def test_a_long_name_keeps_its_ends(text: str, short: str) -> None:
    assert shortened(text) == short


def test_a_name_of_escapes_is_short() -> None:
    assert len(shortened("\U000e0001" * 1_000_000)) <= 80
