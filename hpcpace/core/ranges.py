"""Whole numbers as ranges, `0-3,8`: as the kernel, Slurm and people write ranks, CPUs and hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of ascending numbers that has no gap."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def range_names(runs: Iterable[tuple[int, int]]) -> list[str]:
    """Return runs as `4-7`, those of a single number as `8`."""
    return [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]


def format_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as `0-3,8`; an empty text for none."""
    return ",".join(range_names(runs_of(numbers)))


def parse_range(text: str) -> range:
    """Return the numbers of `8` or `4-7`; how many there may be is for the caller to bound before it lists them.

    Raises:
        ValueError: the text has another form, or the range goes backwards.
    """
    found = _RANGE.fullmatch(text)
    numbers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not numbers:
        raise ValueError(f"{text[:80]!r} is not a number or a range like 4-7")
    return numbers
