"""Limits on the shape of the code, as `python -m experiments.structure` measures it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.structure import (
    Function,
    Module,
    module_cycles,
    num_code_lines,
    package_cycles,
    percentile,
    read_modules,
    used_once,
)

ROOT = Path(__file__).parents[2]
P95_LINES, MAX_LINES, MAX_ARGUMENTS = 32, 70, 10
OPEN_TO_USERS = {"observe/session.py __init__"}
"""What a training script passes by keyword, each with a default: the options of a session."""


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """All modules of hpcpace: reading them takes seconds, too long for the collection of every tier."""
    return read_modules(ROOT)


@pytest.fixture(scope="module")
def functions(modules: list[Module]) -> list[Function]:
    """All functions of hpcpace."""
    return [function for module in modules for function in module.functions]


def test_nearly_every_function_fits_a_screen(functions: list[Function]) -> None:
    assert percentile([function.num_lines for function in functions], 0.95) <= P95_LINES


def test_no_function_is_longer_than_the_limit(functions: list[Function]) -> None:
    assert [f for f in functions if f.num_lines > MAX_LINES] == []


def test_only_commands_have_more_arguments_than_the_limit(functions: list[Function]) -> None:
    wide = {f for f in functions if f.num_arguments > MAX_ARGUMENTS and not f.is_command}
    assert {f"{f.path.removeprefix('hpcpace/')} {f.name}" for f in wide} <= OPEN_TO_USERS


def test_packages_do_not_import_each_other_in_a_circle(modules: list[Module]) -> None:
    assert package_cycles(modules) == []


def test_modules_do_not_import_each_other_in_a_circle_not_even_inside_functions(
    modules: list[Module],
) -> None:
    assert module_cycles(modules) == []


def _module(name: str, *imports: str) -> Module:
    return Module(name=f"hpcpace.{name}", num_lines=1, functions=(), imports=frozenset(f"hpcpace.{i}" for i in imports))


def test_a_circle_of_packages_is_found_and_one_inside_a_package_is_not() -> None:
    modules = [_module("a.x", "a.y", "b.x"), _module("a.y", "a.x"), _module("b.x", "c"), _module("c", "a.y")]
    assert package_cycles(modules) == [["a", "b", "c"]]
    assert package_cycles([*modules[:3], _module("c")]) == []


def test_a_circle_of_modules_is_found_inside_a_package_too() -> None:
    modules = [_module("a.x", "a.y"), _module("a.y", "a.z"), _module("a.z", "a.x"), _module("a.w", "a.x")]
    assert module_cycles(modules) == [["hpcpace.a.x", "hpcpace.a.y", "hpcpace.a.z"]]
    assert module_cycles([*modules[:2], _module("a.z")]) == []


def test_counts_the_modules_with_one_importer() -> None:
    modules = [_module("a.x", "b.x", "c"), _module("b.x", "c"), _module("c")]
    assert used_once(modules) == ["hpcpace.b.x"]


def test_code_lines_leave_out_docstrings_comments_and_blank_lines() -> None:
    documented = '"""Two\nlines."""\n\n# a comment\nx = (\n    1,  # another\n)\n\n\n'
    text = documented + 'def f():\n    """One."""\n    return """a\nb"""\n'
    assert num_code_lines(text) == 6


def test_reads_functions_arguments_and_imports(tmp_path: Path) -> None:
    package = tmp_path / "hpcpace" / "a"
    package.mkdir(parents=True)
    (package / "other.py").write_text("")
    (package / "one.py").write_text(
        "class A:\n    def f(self, b, *c, d=1, **e):\n        from hpcpace.a import other\n        return other\n"
        "@click.command()\ndef g(a):\n    pass\n"
    )
    one, _ = read_modules(tmp_path)
    assert one.imports == {"hpcpace.a.other"}
    found = {f.name: (f.num_lines, f.num_arguments, f.is_command) for f in one.functions}
    assert found == {"f": (3, 4, False), "g": (2, 1, True)}


@pytest.mark.parametrize(
    ("folder", "forbidden"), [("hpcpace", ("analysis", "experiments", "library", "tests")), ("experiments", ("tests",))]
)
def test_programs_do_not_import_experiments_and_experiments_do_not_import_tests(
    folder: str, forbidden: tuple[str, ...]
) -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] in forbidden
    ]
    assert wrong == []


def test_the_study_command_loads_neither_torch_nor_mpi() -> None:
    code = "import sys, hpcpace.cli.study; print(*{'torch', 'mpi4py', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
