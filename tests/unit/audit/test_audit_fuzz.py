"""Damaged trees and snapshots end with findings or a clear error: 1,000 of each with --all-seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import only_nightly

from hpcpace.audit.snapshot import take_tree
from hpcpace.audit.snapshot_files import snapshot_text
from tests.machines.cases import small_node
from tests.machines.fuzz import examined, examined_snapshot


@pytest.mark.parametrize("seed", only_nightly(range(48), range(48, 1000)))
def test_a_damaged_tree_is_no_traceback(seed: int, tree_path: Path) -> None:
    examined(seed, tree_path)


def test_damaged_snapshots_are_no_tracebacks(tree_path: Path) -> None:
    text = snapshot_text(take_tree(small_node("n1").write(tree_path)))
    outcomes = [examined_snapshot(seed, text) for seed in only_nightly(range(300), range(300, 1000))]
    assert None in outcomes and any(outcomes)
