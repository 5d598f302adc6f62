from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rows import header

from hpcpace.trace.recorder import Recorder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace" / "rank-00000.h5"


@pytest.fixture
def warnings() -> list[str]:
    """What the recorders of a test warned of."""
    return []


@pytest.fixture
def start(path: Path, warnings: list[str]) -> Iterator[Callable[..., Recorder]]:
    """Start a recorder that flushes only when it is told to."""
    started: list[Recorder] = []

    def call(place: Path = path, **changes: Any) -> Recorder:
        recorder = Recorder(place, header(), warn=warnings.append, **{"flush_interval_s": 3600.0, **changes})
        recorder.start()
        started.append(recorder)
        return recorder

    yield call
    for recorder in started:
        recorder.close()
