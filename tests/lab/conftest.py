"""One lab of four hosts for all lab tests. What they need must be there in CI; elsewhere they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.labs import JobQueue
from hpcpace.core.errors import UsageError
from hpcpace.lab.fabric import check_requirements
from hpcpace.lab.lab import Lab
from hpcpace.lab.settings import LabConfig

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


@pytest.fixture(scope="session", autouse=True)
def short_start_of_mpi() -> Iterator[None]:
    """Let a start of MPI that hangs be repeated within a test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCPACE_WORLD_START_TIMEOUT_S", "30")
        yield


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Hosts n1 and n2 on leaf1, n3 and n4 on leaf2; they see the temporary folders of the tests."""
    config = LabConfig(name="tests", share=(str(tmp_path_factory.getbasetemp()),))
    with Lab.up(config) as lab:
        yield lab


@pytest.fixture
def queue(lab: Lab) -> Iterator[JobQueue]:
    """The lab's Slurm; no job outlives the test."""
    queue = JobQueue(lab)
    yield queue
    queue.cancel_all()
