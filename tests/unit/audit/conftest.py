"""A folder in memory for trees of thousands of small files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.machine import memory_folder


@pytest.fixture
def tree_path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hpcpace-audit-", dir=memory_folder()))
    yield folder
    shutil.rmtree(folder)
