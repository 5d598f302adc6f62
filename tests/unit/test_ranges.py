"""Ranges of whole numbers, and lists cut to their first entries."""

from __future__ import annotations

from hpcpace.core.text import few, first_few, format_ranges, parse_range


def test_numbers_become_ranges_and_come_back() -> None:
    cases = {"": [], "7": [7], "0-3,8": [0, 1, 2, 3, 8], "-1,1-2": [-1, 1, 2]}
    assert {text: format_ranges(numbers) for text, numbers in cases.items()} == {text: text for text in cases}
    assert [list(parse_range(text)) for text in ("8", "4-7", "007-008")] == [[8], [4, 5, 6, 7], [7, 8]]


def test_what_is_no_range_is_refused() -> None:
    taken = []
    for text in ("", "a", "3-1", "-1", "1-", "1-2-3", "1,2", "0x1", "1234567890", "\u00b2", "1 - 2"):
        try:
            taken.append((text, parse_range(text)))
        except ValueError as error:
            assert "is not a number or a range" in str(error)
    assert taken == []


def test_lists_say_how_many_more_there_are() -> None:
    assert (few([1, 2], 2), few([1, 2, 3], 1), few([], 2)) == ("1, 2", "1 and 2 more", "")
    assert first_few(["a", "b", "c"], 2, noun="file", before="and ") == ["a", "b", "and 1 more file"]
    assert first_few(["a", "b"], 1, words=str.upper) == ["A", "1 more"]
