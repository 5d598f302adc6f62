from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from hpcpace.trace.schema import TABLES


class RecordedRows:
    """Stands in for the recorder: keeps rows as dictionaries by column name."""

    def __init__(self) -> None:
        self.step = 0
        self.collectives: list[dict[str, int]] = []
        self.phases: list[dict[str, int]] = []
        self.groups: list[dict[str, Any]] = []

    def add_collective(self, *values: int) -> None:
        self.collectives.append(_named("collectives", values))

    def add_phase(self, *values: int) -> None:
        self.phases.append(_named("phases", values))

    def add_group(self, *values: Any) -> None:
        self.groups.append(_named("groups", values))


def _named(table: str, values: tuple[Any, ...]) -> dict[str, Any]:
    names = TABLES[table].dtype.names
    assert names is not None
    return dict(zip(names, values, strict=True))


@pytest.fixture
def rows() -> RecordedRows:
    return RecordedRows()


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
