"""On trees of real machines that hwloc publishes, the audit reads the same as hwloc's lstopo."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.published_machines import KINDS, compare, unpacked

TREES = Path(__file__).parents[2] / "data" / "hwloc-trees"
NAMES = sorted(path.name.removesuffix(".tar.bz2") for path in TREES.glob("*.tar.bz2"))
NO_NUMA_IN_KERNEL = "20s390-2g6s4c"
"""lstopo makes one NUMA node of the whole machine where the kernel has none."""

pytestmark = [
    pytest.mark.tool,
    pytest.mark.skipif(
        shutil.which("lstopo-no-graphics") is None, reason="needs hwloc's lstopo: apt-get install hwloc-nox"
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_machine_is_the_one_that_lstopo_sees(name: str, tree_path: Path) -> None:
    found = compare(name, unpacked(TREES / f"{name}.tar.bz2", tree_path))
    differing = {kind for kind in KINDS if "/" in found.cell(kind)}
    assert differing == ({"NUMA nodes"} if name == NO_NUMA_IN_KERNEL else set())
