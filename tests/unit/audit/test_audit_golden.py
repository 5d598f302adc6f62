"""Every machine's full list of findings, compared whole with what is kept in tests/data/audit-trees.

After a change that is meant, `python -m tests.audit_golden` writes the lists anew: read their diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_golden import GOLDEN, listed

from tests.machines.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_machine_has_exactly_its_findings(name: str, tree_path: Path) -> None:
    assert listed(CASES[name], tree_path) == (GOLDEN / f"{name}.txt").read_text()


def test_no_list_is_kept_of_a_machine_that_is_gone() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)
