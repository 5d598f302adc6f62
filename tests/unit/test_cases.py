"""Loops over cases: all run, and the message names those that failed."""

from __future__ import annotations

import inspect

import pytest
from cases import each_case


def test_all_cases_run_and_the_message_names_those_that_failed() -> None:
    seen = []

    @each_case(("number", "wanted"), [(1, 1), (2, 3), pytest.param(4, 5, id="the last")])
    def check(number: int, wanted: int) -> None:
        seen.append(number)
        assert number == wanted

    with pytest.raises(AssertionError, match=r"(?s)2 of 3 cases failed:\n\[2-3\] Assert.*\[the last\] Assert"):
        check()
    assert seen == [1, 2, 4]


def test_loops_can_be_nested_and_keep_fixtures() -> None:
    seen = []

    @each_case("a", [1, 2])
    @each_case("b", [3, 4])
    def check(fixture: int, a: int, b: int) -> None:
        seen.append((fixture, a, b))

    assert list(inspect.signature(check).parameters) == ["fixture"]
    check(fixture=0)
    assert seen == [(0, 1, 3), (0, 1, 4), (0, 2, 3), (0, 2, 4)]


def test_errors_other_than_assertions_are_failures_and_no_cases_are_one_too() -> None:
    @each_case("a", [0, 1])
    def divide(a: int) -> None:
        assert 1 / a

    with pytest.raises(AssertionError, match=r"1 of 2 cases failed:\n\[0\] ZeroDivisionError"):
        divide()

    @each_case("a", [])
    def nothing(a: int) -> None: ...

    with pytest.raises(AssertionError, match="no cases"):
        nothing()
