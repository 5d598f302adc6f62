"""Repeats of MLPerf Training 4.0 are called different at the nominal rate at most."""

from __future__ import annotations

import re

import pytest
from cases import each_case

from experiments.published_speeds import judged_repeats, repeats

pytestmark = pytest.mark.nightly  # tests/unit/metrics/test_run_difference.py has the same of random runs


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return list(judged_repeats(repeats()))


def test_the_published_repeats_are_those_of_many_systems(lines: list[str]) -> None:
    assert lines[0].startswith("130 systems and benchmarks with 1001 runs")


@each_case("what", ["single runs", "  of systems with a CV up to 1 %", "3 repeats", "5 repeats"])
def test_runs_of_the_same_thing_are_called_different_at_the_nominal_rate(lines: list[str], what: str) -> None:
    (line,) = (line for line in lines if line.startswith(what))
    called, total = map(int, re.findall(r"(\d+) of (\d+),", line)[0])
    assert total >= 1000 and called <= 0.05 * total
