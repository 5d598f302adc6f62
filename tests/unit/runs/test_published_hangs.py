"""Published hangs of known truth: every injected rank is named, and nobody else, whatever is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases import each_case

from experiments.published_hangs import ANSWERS, DOCUMENT, Scenario, published, table

NAMES = ["gpu_error_1st", "gpu_error_2nd", "lock_gil_1st", "lock_gil_2nd"]
SAFE = set(ANSWERS[:3])


@pytest.fixture(scope="module")
def scenarios() -> Iterator[dict[str, Scenario]]:
    with published() as found:
        yield {scenario.name: scenario for scenario in found}


@each_case("name", NAMES)
def test_the_injected_ranks_are_named_and_nobody_else(scenarios: dict[str, Scenario], name: str) -> None:
    hang = scenarios[name].verdict()
    assert hang is not None
    assert set(hang.culprits) == scenarios[name].injected


@each_case("name", NAMES)
def test_no_innocent_rank_is_named_with_half_of_the_dumps(scenarios: dict[str, Scenario], name: str) -> None:
    found = scenarios[name].half_verdicts(50)
    assert set(found) <= SAFE
    assert found.total() == 50


@pytest.mark.nightly
def test_the_document_has_what_is_measured(scenarios: dict[str, Scenario]) -> None:
    assert table(list(scenarios.values())) in DOCUMENT.read_text()
