"""Limits on the shape of the code, as `python -m experiments.structure` measures it."""

from __future__ import annotations

from pathlib import Path

from experiments.structure import Module, package_cycles, percentile, read_modules, used_once

MODULES = read_modules(Path(__file__).parents[2])
FUNCTIONS = [function for module in MODULES for function in module.functions]
P95_LINES, MOST_LINES, MOST_ARGUMENTS = 32, 70, 10
TOO_LONG = {"analyze", "_nodes", "critical_path", "_figures"}
"""Functions still above the limit; take a name out when its function is cut."""
TOO_MANY_ARGUMENTS = {"observe/session.py __init__", "pace/pacer.py __init__", "train/pipeline.py build_pipeline"}
"""The same for arguments."""


def test_nearly_every_function_fits_a_screen() -> None:
    assert percentile([function.num_lines for function in FUNCTIONS], 0.95) <= P95_LINES


def test_no_function_is_longer_than_the_limit() -> None:
    assert {f.name for f in FUNCTIONS if f.num_lines > MOST_LINES} <= TOO_LONG


def test_only_commands_have_more_arguments_than_the_limit() -> None:
    wide = {f for f in FUNCTIONS if f.num_arguments > MOST_ARGUMENTS and not f.is_command}
    assert {f"{f.path.removeprefix('hpcpace/')} {f.name}" for f in wide} <= TOO_MANY_ARGUMENTS


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    assert package_cycles(MODULES) == []


def _module(name: str, *imports: str) -> Module:
    return Module(name=f"hpcpace.{name}", num_lines=1, functions=(), imports=frozenset(f"hpcpace.{i}" for i in imports))


def test_a_circle_of_packages_is_found_and_one_inside_a_package_is_not() -> None:
    modules = [_module("a.x", "a.y", "b.x"), _module("a.y", "a.x"), _module("b.x", "c"), _module("c", "a.y")]
    assert package_cycles(modules) == [["a", "b", "c"]]
    assert package_cycles([*modules[:3], _module("c")]) == []


def test_counts_the_modules_with_one_importer() -> None:
    modules = [_module("a.x", "b.x", "c"), _module("b.x", "c"), _module("c")]
    assert used_once(modules) == ["hpcpace.b.x"]


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
