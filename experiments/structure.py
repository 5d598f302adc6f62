"""Prints the shape of the code, one row per package of hpcpace: `python -m experiments.structure [FOLDER] [--worst N]`.

FOLDER is the root of any checkout of this repository, so that two states of the code can be compared. Only the
standard library is needed, and nothing of the measured code is imported: everything is read from its syntax.
"""

from __future__ import annotations

import argparse
import ast
import io
import math
import statistics
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "hpcpace"
TOP = "(top level)"
"""The modules that are in no subpackage, such as `errors`."""


@dataclass(frozen=True)
class Function:
    """A function or method.

    Attributes:
        path, line, name: where it is; the path is relative to the checkout.
        num_lines: from `def` to its last line, decorators left out.
        num_arguments: of all kinds, without self and cls.
        is_command: whether click calls it, with an argument per option.
    """

    path: str
    line: int
    name: str
    num_lines: int
    num_arguments: int
    is_command: bool


@dataclass(frozen=True)
class Module:
    """A file.

    Attributes:
        name: dotted, like hpcpace.metrics.steps or hpcpace.metrics.__init__.
        num_lines: all lines.
        functions: all of them, nested ones too.
        imports: modules of hpcpace that it imports anywhere, also inside functions.
        for_types: those that it imports below `if TYPE_CHECKING` alone.
    """

    name: str
    num_lines: int
    functions: tuple[Function, ...]
    imports: frozenset[str]
    for_types: frozenset[str] = frozenset()

    @property
    def package(self) -> str:
        """Its subpackage of hpcpace, down to one level; `TOP` for modules that are in none."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 else TOP


def read_modules(root: Path) -> list[Module]:
    """Return all modules of hpcpace in a checkout.

    Args:
        root: folder that has the folder hpcpace.
    """
    paths = sorted((root / PACKAGE).rglob("*.py"))
    names = {_name(path.relative_to(root)) for path in paths}
    return [_read(root, path, names) for path in paths]


def _name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def _read(root: Path, path: Path, names: set[str]) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=str(path))
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for child in block.body
        for node in ast.walk(child)
    }
    imports = frozenset(_imported(ast.walk(tree), names))
    run = frozenset(_imported((node for node in ast.walk(tree) if id(node) not in guarded), names))
    return Module(
        name=_name(path.relative_to(root)),
        num_lines=len(text.splitlines()),
        functions=tuple(_functions(tree, path.relative_to(root))),
        imports=imports,
        for_types=imports - run,
    )


def _functions(tree: ast.Module, path: Path) -> Iterator[Function]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        of = node.args
        named = [argument.arg for argument in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
        named = named[1:] if named[:1] in (["self"], ["cls"]) else named
        yield Function(
            path=str(path),
            line=node.lineno,
            name=node.name,
            num_lines=(node.end_lineno or node.lineno) - node.lineno + 1,
            num_arguments=len(named) + (of.vararg is not None) + (of.kwarg is not None),
            is_command=any("command" in ast.unparse(d) or "click." in ast.unparse(d) for d in node.decorator_list),
        )


def _imported(nodes: Iterator[ast.AST], names: set[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            candidates = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            candidates = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        else:
            continue
        for candidate in candidates:
            found = next((n for name in candidate for n in (name, f"{name}.__init__") if n in names), None)
            if found is not None:
                yield found


def package_cycles(modules: Sequence[Module]) -> list[list[str]]:
    """Return the groups of packages that import each other in a circle, wherever in a module the import is.

    A module of the top level counts as a package by itself. `hpcpace/__init__.py` is left out: every import of hpcpace
    runs it, so that all would be in a circle with what it loads on demand.
    """
    own = [module for module in modules if module.name != f"{PACKAGE}.__init__"]
    node = {module.name: module.name.split(".")[1] for module in own}
    graph: dict[str, set[str]] = {name: set() for name in node.values()}
    for module in own:
        graph[node[module.name]] |= {node[name] for name in module.imports & node.keys()} - {node[module.name]}
    return _circles(graph)


def module_cycles(modules: Sequence[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle, imports inside functions included.

    Imports for type checkers alone never run, and do not count. The files `__init__.py` are left out: those of hpcpace
    load on demand what imports them.
    """
    names = {module.name for module in modules if not module.name.endswith(".__init__")}
    edges = {module.name: (module.imports & names) - module.for_types - {module.name} for module in modules}
    return _circles({name: set(edges[name]) for name in names})


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    reached = {name: _reach(graph, name) for name in graph}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
    return sorted(sorted(group) for group in groups)


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def used_once(modules: Sequence[Module]) -> list[str]:
    """Return the modules with exactly one importer in hpcpace."""
    count = {module.name: 0 for module in modules if not module.name.endswith("__init__")}
    for module in modules:
        for name in module.imports & count.keys():
            count[name] += 1
    return [name for name, number in count.items() if number == 1]


_NO_CODE = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)}


def num_code_lines(text: str) -> int:
    """Return the lines of a module without blank ones, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def totals(root: Path, modules: Sequence[Module]) -> str:
    """Return the size of hpcpace and experiments as a line each."""
    lines = []
    for name in (PACKAGE, "experiments"):
        texts = [path.read_text(encoding="utf-8") for path in (root / name).rglob("*.py")]
        median = statistics.median([len(text.splitlines()) for text in texts]) if texts else 0
        lines.append(
            f"{name}: {sum(map(num_code_lines, texts))} code lines, {len(texts)} modules, median {median:.0f} lines"
        )
    return "\n".join([*lines, f"modules with one importer: {len(used_once(modules))}"])


def percentile(values: Sequence[int], share: float) -> int:
    """Return the least value that at least this share of all values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


def row(name: str, modules: Sequence[Module], once: set[str]) -> list[str]:
    """Return the columns of `HEAD` for some modules."""
    functions = [function for module in modules for function in module.functions]
    lengths = [function.num_lines for function in functions]
    arguments = [function.num_arguments for function in functions if not function.is_command]
    return [
        name,
        *(str(len(modules)), str(sum(module.num_lines for module in modules)), str(len(functions))),
        *(str(percentile(lengths, share)) for share in (0.5, 0.95, 1.0)),
        str(max(arguments, default=0)),
        str(sum(module.name in once for module in modules)),
    ]


HEAD = ["package", "files", "lines", "functions", "p50", "p95", "max", "arguments", "used once"]
"""Function lengths are in lines; `arguments` is the most of any function that is no click command."""


def table(modules: Sequence[Module]) -> str:
    """Return the rows of all packages and their total, as a Markdown table."""
    once = set(used_once(modules))
    packages = sorted({module.package for module in modules} - {TOP})
    rows = [row(name, [module for module in modules if module.package == name], once) for name in (TOP, *packages)]
    rows.append(row("all", modules, once))
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    lines = [HEAD, ["-" * width if not i else "-" * (width - 1) + ":" for i, width in enumerate(widths)], *rows]
    return "\n".join(f"| {' | '.join(_aligned(line, widths))} |" for line in lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(cells, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.structure", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1], help="root of a checkout")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also list the N longest functions")
    args = parser.parse_args()
    modules = read_modules(args.folder)
    print(table(modules))
    cycles = [" <-> ".join(group) for group in package_cycles(modules)]
    print(f"\n{totals(args.folder, modules)}")
    print(f"package cycles: {'; '.join(cycles) or 'none'}")
    cycles = [" <-> ".join(group) for group in module_cycles(modules)]
    print(f"module cycles, imports inside functions included: {'; '.join(cycles) or 'none'}")
    functions = [function for module in modules for function in module.functions]
    for function in sorted(functions, key=lambda one: -one.num_lines)[: args.worst]:
        place = f"{function.path}:{function.line} {function.name}"
        print(f"{function.num_lines:4d} lines, {function.num_arguments:2d} arguments  {place}")


if __name__ == "__main__":
    main()
