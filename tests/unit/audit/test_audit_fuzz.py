"""Damaged trees come to findings or a clear error; audit_fuzz.py runs as many seeds as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.snapshot_files import snapshot_text
from tests.machines.cases import small_node
from tests.machines.fuzz import examined, examined_snapshot


@pytest.mark.parametrize("seed", range(48))
def test_a_damaged_tree_is_no_traceback(seed: int, tree_path: Path) -> None:
    examined(seed, tree_path)


def test_damaged_snapshots_are_no_tracebacks(tree_path: Path) -> None:
    text = snapshot_text(take_tree(small_node("n1").write(tree_path)))
    outcomes = [examined_snapshot(seed, text) for seed in range(300)]
    assert None in outcomes and any(outcomes)
