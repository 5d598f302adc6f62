"""One Slurm for all lab tests. What they need must be there in CI; elsewhere they are skipped, with the reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpace.errors import UsageError
from hpcpace.lab.slurm import OneHostSlurm, check_requirements

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lab_items = [item for item in items if HERE in item.path.parents]
    for item in lab_items:
        item.add_marker(pytest.mark.root)
        item.add_marker(pytest.mark.slurm)
    if os.environ.get("CI") == "true" or os.environ.get("HPCPACE_REQUIRE_LAB") == "1":
        return
    try:
        check_requirements()
    except UsageError as error:
        for item in lab_items:
            item.add_marker(pytest.mark.skip(reason=f"lab: {error}"))


@pytest.fixture(scope="session")
def slurm() -> Iterator[OneHostSlurm]:
    with OneHostSlurm() as cluster:
        # Jobs find the Python, and the hpcpace, of these tests.
        cluster.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), cluster.environ["PATH"]])
        yield cluster


@pytest.fixture(autouse=True)
def _no_job_left_over(slurm: OneHostSlurm) -> Iterator[None]:
    yield
    slurm.run("scancel", "--user=root")
