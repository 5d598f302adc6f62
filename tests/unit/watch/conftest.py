from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import LiveRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    """A run of four ranks on two hosts that has begun and done 30 steps of 100 ms."""
    made = LiveRun(tmp_path)
    made.begin()
    made.steps(30)
    made.flush()
    yield made
    made.close()
