"""Formats of JSON files: bounds hold, and an error names the place, the value and what is expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import pytest
from cases import each_case
from msgspec import Meta

from hpcpace.core.codec import (
    MAX_LETTERS,
    Count,
    Number,
    Text,
    WrongValue,
    convert,
    decoder,
    parse_json,
    plain,
    read_json,
)
from hpcpace.core.rundir import RunDirectory


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: Text
    size: Count = 0


@dataclass(frozen=True, kw_only=True)
class Format:
    rank: Count
    share: Number | None = None
    time_ns: Annotated[float, Meta(gt=0, le=1e19)] = 1.0
    is_on: bool = False
    colour: Colour = Colour.RED
    entries: Annotated[tuple[Entry, ...], Meta(max_length=2)] = ()
    tables: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def test_values_become_what_the_format_has() -> None:
    content = {"rank": 3, "share": 1, "entries": [{"name": "é" * 600, "more": 7}], "tables": {"a": {"b": 2}}, "new": 1}
    made = convert(content, Format)
    assert made == Format(rank=3, share=1.0, entries=(Entry(name="é" * MAX_LETTERS),), tables={"a": {"b": 2}})
    assert decoder(Format)(plain(made)) == made


@each_case(
    ("changes", "message"),
    [
        ({"rank": None}, "rank is None: expected an integer"),
        ({"rank": True}, "rank is True: expected an integer"),
        ({"rank": 1 << 70}, "rank is 1180591620717411303424: expected an integer <= 4611686018427387903"),
        ({"rank": -1}, "rank is -1: expected an integer >= 0"),
        ({"share": "1"}, "share is '1': expected a number or null"),
        ({"share": float("nan")}, "share is nan: expected a number >= -1e+19"),
        ({"share": float("inf")}, "share is inf: expected a number <= 1e+19"),
        ({"time_ns": 0}, "time_ns is 0: expected a number > 0.0"),
        ({"is_on": 1}, "is_on is 1: expected true or false"),
        ({"colour": "blue"}, "colour is 'blue': Invalid enum value 'blue'"),
        ({"entries": {}}, "entries is {}: expected a list"),
        ({"entries": [{"name": "a"}, {"name": 2}]}, "entries[1].name is 2: expected a text"),
        ({"entries": [{"name": "a"}, {}]}, "entries[1] has no 'name'"),
        (
            {"entries": [{"name": "a"}] * 3},
            "entries is [{'name': 'a'}, {'name': 'a'}, {'name': 'a'}]: expected a list of",
        ),
        ({"tables": {"a": {"b": 1}, "c": {"d": 1, "e\n": "x"}}}, r"tables.c.e\n is 'x': expected an integer"),
        ({"tables": {"a": {"b": 1}, "c": 5}}, "tables.c is 5: expected an object"),
    ],
)
def test_an_error_names_the_place_the_value_and_what_is_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongValue) as raised:
        convert({"rank": 0, **changes}, Format)
    assert message in str(raised.value)


def test_what_is_no_object_or_lacks_a_field_is_named() -> None:
    with pytest.raises(WrongValue, match="it is 7: expected an object"):
        convert(7, Format)
    with pytest.raises(WrongValue, match="it has no 'rank'"):
        convert({}, Format)
    with pytest.raises(WrongValue, match=r"it has '\\ud800', which is not Unicode"):
        convert({"\ud800": 1}, Format)


@each_case("content", ["", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, b"\xff", "9" * 5000 + "]"])
def test_text_that_is_not_strict_json_is_refused(content: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(content)


def test_numbers_that_nothing_reaches_are_named_where_they_are_converted() -> None:
    for number in ("1" + "0" * 30, "1e30", "-1e400", "9" * 4000):
        with pytest.raises(WrongValue, match=r"rank is (1e\+30|-?inf): expected an integer"):
            convert(parse_json(f'{{"rank": {number}}}'), Format)
    assert parse_json("[9223372036854775807, -1.5e3]") == [(1 << 63) - 1, -1500.0]


def test_a_file_of_a_run_that_cannot_be_used_is_named_with_the_reason(tmp_path: Any) -> None:
    run, problems = RunDirectory(tmp_path), []
    (tmp_path / "one.json").write_text('{"rank": "x"}')
    assert read_json(run, "one.json", decoder(Format), problems) is None
    assert read_json(run, "missing.json", decoder(Format), problems) is None
    assert problems == [f"{tmp_path}/one.json is left out (rank is 'x': expected an integer)"]
