"""What is loaded when: the command line and a login node need neither torch nor MPI."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import each_case

ROOT = Path(__file__).parents[2] / "hpcpace"
PURE_OF_PACE = tuple(f"pace/{path.name}" for path in (ROOT / "pace").glob("*.py") if path.name != "job.py")
"""All of pacing but its messages between ranks and its files."""
HEAVY = ("torch", "mpi4py", "pandas", "plotly", "matplotlib")


def _loaded(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@each_case("code", ["import hpcpace", "import hpcpace.cli", "import hpcpace.core.config, hpcpace.core.rundir"])
def test_the_package_and_the_command_line_load_nothing_heavy(code: str) -> None:
    assert _loaded(code) == set()


@pytest.mark.parametrize("module", ["report", "trace_files"])
def test_commands_of_the_login_node_load_neither_torch_nor_mpi(module: str) -> None:
    assert _loaded(f"import hpcpace.cli.{module}") & {"torch", "mpi4py"} == set()


def test_a_missing_run_is_refused_before_anything_that_reads_runs_is_loaded(tmp_path: Path) -> None:
    code = f"""
import sys
sys.argv = ["hpcpace", "report", {str(tmp_path / "none")!r}]
from hpcpace.cli import main
try:
    main()
except SystemExit as error:
    print(error.code, *({{"numpy", "h5py", "scipy", "rich"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2"], result.stderr


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("hpcpace.cli.runs", ("numpy", "h5py")),
        ("hpcpace.diagnosis.analyze, hpcpace.report.run_report", ("scipy", "pandas", "plotly")),
        # Only a run with snapshots of its nodes needs the audit, and only one with a probe how it is saved.
        (
            "hpcpace.diagnosis.analyze, hpcpace.report.run_report",
            (
                *("hpcpace.audit.rulebook", "hpcpace.audit.collect_host", "hpcpace.audit.snapshot"),
                *("hpcpace.audit.facts", "hpcpace.audit.rules.affinity", "hpcpace.probe.record", "jinja2"),
            ),
        ),
    ],
)
def test_commands_load_no_more_than_they_use(modules: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print(*({set(unwanted)!r} & set(sys.modules)))"
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@each_case(
    ("packages", "forbidden"),
    [
        (
            ("metrics", "diagnosis", "report"),
            ("torch", "mpi4py", "hpcpace.observe", "hpcpace.train", "hpcpace.world", "hpcpace.core.environment"),
        ),
        (("world", "trace", "observe", "pace"), ("pandas", "hpcpace.report", "hpcpace.diagnosis", "hpcpace.metrics")),
        (("observe",), ("hpcpace.pace",)),
        (("pace",), ("hpcpace.observe", "hpcpace.train")),
        (PURE_OF_PACE, ("torch", "mpi4py", "hpcpace.world", "hpcpace.core.environment")),
        (("metrics",), ("rich", "plotly", "hpcpace.report", "hpcpace.diagnosis")),
        (("diagnosis",), ("rich", "plotly", "hpcpace.report")),
        (("report",), ("hpcpace.metrics", "hpcpace.trace")),
    ],
)
def test_data_flow_in_one_direction(packages: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in packages
        for path in ([ROOT / package] if package.endswith(".py") else (ROOT / package).rglob("*.py"))
        for name in _imports(path)
        if name.split(".")[0] in forbidden or name.startswith(forbidden)
    ]
    assert wrong == []


def _walk() -> list[Path]:
    """Return the modules that docs/architecture.md walks through from the collective to the verdict, in its order."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    section = text.partition("## One number")[2].partition("\n## ")[0]
    return [ROOT / name for name in re.findall(r"`([a-z_/]+\.py)`", section)]


def test_the_walk_of_one_number_never_goes_back_up() -> None:
    """What records hands its rows down; whatever reads them imports only what comes before it."""
    walk = [path.relative_to(ROOT).parts[0] for path in _walk()]
    assert list(dict.fromkeys(walk)) == ["observe", "trace", "metrics", "diagnosis", "report"]
    order = {package: place for place, package in enumerate(dict.fromkeys(walk))}
    names = ["hpcpace." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in _walk()]
    for step, path in enumerate(_walk()):
        if step > names.index("hpcpace.trace.attempt_reader"):
            assert _imports(path).isdisjoint(names[step + 1 :]), f"{path} imports a later step"
        package = path.relative_to(ROOT).parts[0]
        for name in _imports(path):
            other = name.split(".")[1] if name.startswith("hpcpace.") else ""
            if package == "observe":
                assert order.get(other, 0) <= order["trace"], f"{path} imports {name}"
            else:
                assert order.get(other, order["trace"]) <= order[package] and other != "observe", f"{path}: {name}"


def test_the_environment_is_read_in_one_module() -> None:
    readers = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if "os.environ" in path.read_text()}
    assert readers == {"core/environment.py"}


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """Without packages pytest knows a file by its name only, and collects neither where all tiers run together."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
