"""Frameworks of which only the interface is there: callbacks are tested without any of them installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcpace.core.rundir import RunDirectory
from hpcpace.trace.attempt_reader import read_attempt
from hpcpace.trace.schema import Phase
from hpcpace.trace.tables import RankTrace


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that puts a module with these attributes where `import` finds it."""

    def stand_in(name: str, **attributes: Any) -> None:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:length]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(attributes)

    ours = [name for name in sys.modules if name.startswith("hpcpace.callbacks.")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    yield stand_in
    for name in [name for name in sys.modules if name.startswith("hpcpace.callbacks.")]:
        del sys.modules[name]


class Recorded:
    """What a session has written."""

    def __init__(self, run_dir: Path) -> None:
        self.trace: RankTrace = read_attempt(RunDirectory(run_dir).attempt(0)).traces[0]

    @property
    def samples(self) -> list[int]:
        """The samples of each step."""
        return [int(samples) for samples in self.trace.tables["steps"]["samples"]]

    @property
    def flags(self) -> list[int]:
        """The marks of each step, without that of the warm-up."""
        return [int(flags) & ~1 for flags in self.trace.tables["steps"]["flags"]]

    def num_phases(self, phase: Phase) -> int:
        """How often a phase was recorded."""
        return int((self.trace.tables["phases"]["phase"] == phase).sum())


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[], Recorded]:
    """Return a function that reads the run in `tmp_path`."""
    return lambda: Recorded(tmp_path)
