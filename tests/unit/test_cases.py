"""Loops over cases: all run, and the message names those that failed."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from cases import ALL_SEEDS, chosen, each_case, only_nightly


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


def test_each_case_has_a_folder_patches_and_output_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    @each_case("a", ["one", "two"])
    def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], a: str) -> None:
        print(a)
        seen.append((list(tmp_path.iterdir()), os.environ.get("OF_A_CASE"), capsys.readouterr().out))
        (tmp_path / a).touch()
        monkeypatch.setenv("OF_A_CASE", a)

    check(tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert seen == [([], None, "one\n"), ([], None, "two\n")]


def test_a_landing_runs_a_choice_and_the_night_all() -> None:
    flag = ALL_SEEDS.set(False)
    assert (chosen(range(10), 3), only_nightly([1], [2, 3])) == ([0, 3, 6], [1])
    ALL_SEEDS.set(True)
    assert (chosen(range(10), 3), only_nightly([1], [2, 3])) == (list(range(10)), [1, 2, 3])
    ALL_SEEDS.reset(flag)
