"""What is loaded when: the command line and a login node need neither torch nor MPI."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hpcpace"
HEAVY = ("torch", "mpi4py", "pandas", "plotly", "matplotlib")


def _loaded(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("code", ["import hpcpace", "import hpcpace.cli", "import hpcpace.config, hpcpace.rundir"])
def test_the_package_and_the_command_line_load_nothing_heavy(code: str) -> None:
    assert _loaded(code) == set()


@pytest.mark.parametrize("module", ["report", "dump"])
def test_commands_of_the_login_node_load_neither_torch_nor_mpi(module: str) -> None:
    assert _loaded(f"import hpcpace.cli.{module}") & {"torch", "mpi4py"} == set()


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize(
    ("packages", "forbidden"),
    [
        (("metrics", "diagnosis", "report"), ("torch", "mpi4py", "hpcpace.observe", "hpcpace.train", "hpcpace.world")),
        (("world", "trace", "observe", "pace"), ("pandas", "hpcpace.report", "hpcpace.diagnosis", "hpcpace.metrics")),
        (("pace",), ("torch", "mpi4py", "scipy", "hpcpace.observe", "hpcpace.train", "hpcpace.world")),
        (("metrics",), ("rich", "plotly", "hpcpace.report", "hpcpace.diagnosis")),
        (("diagnosis",), ("rich", "plotly", "hpcpace.report")),
        (("report",), ("hpcpace.metrics", "hpcpace.trace")),
    ],
)
def test_data_flow_in_one_direction(packages: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for name in _imports(path)
        if name.split(".")[0] in forbidden or name.startswith(forbidden)
    ]
    assert wrong == []


def test_the_environment_is_read_in_one_module() -> None:
    readers = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if "os.environ" in path.read_text()}
    assert readers == {"world/environment.py"}


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """Without packages pytest knows a file by its name only, and collects neither where all tiers run together."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
