from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from hpcpace.observe.collectives.observer import CollectiveObserver, CompiledObserver, find_layer
from hpcpace.trace.schema import TABLES

Observer = CollectiveObserver | CompiledObserver


class RecordedRows:
    """Stands in for the recorder: keeps rows as dictionaries by column name."""

    def __init__(self) -> None:
        self.step = 0
        self.max_rows = 1000
        self.num_dropped = 0
        self.collectives: list[dict[str, int]] = []
        self.phases: list[dict[str, int]] = []
        self.groups: list[dict[str, Any]] = []

    def add_collective(self, *values: int) -> None:
        self.collectives.append(_named("collectives", values))

    def add_packed_collectives(self, packed: bytes, num_dropped: int = 0) -> None:
        for row in np.frombuffer(packed, dtype=TABLES["collectives"].dtype).tolist():
            self.add_collective(*row)
        self.num_dropped += num_dropped

    def add_phase(self, *values: int) -> None:
        self.phases.append(_named("phases", values))

    def add_group(self, *values: Any) -> None:
        self.groups.append(_named("groups", values))


def _named(table: str, values: tuple[Any, ...]) -> dict[str, Any]:
    names = TABLES[table].dtype.names
    assert names is not None
    return dict(zip(names, values, strict=True))


LAYER = find_layer()


@pytest.fixture(params=["python"] if LAYER is None else ["python", "compiled"])
def new_observer(request: pytest.FixtureRequest, rows: RecordedRows) -> Callable[..., Observer]:
    """Make an observer that records into `rows`, once with each layer that there is."""

    def new(warn: Callable[[str], None], **settings: Any) -> Observer:
        if request.param == "python":
            return CollectiveObserver(rows, warn=warn, device_times=None, **settings)
        return CompiledObserver(LAYER, rows, warn=warn, **settings)

    return new


@pytest.fixture
def rows() -> RecordedRows:
    return RecordedRows()


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no session of these tests start the process that makes its card."""
    monkeypatch.setattr("hpcpace.observe.session.Card.start", lambda self: None)
