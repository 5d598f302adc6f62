"""Who writes files: hpcpace/core/files.py alone, but for traces, checkpoints and the lab."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from cases import each_case

ROOT = Path(__file__).parents[2]
WRITERS = re.compile(r"hpcpace/(core/files\.py|trace/.*|train/checkpoint\w*\.py|lab/.*|observe/node_local\.py)")
KERNEL_FILES = {
    ("hpcpace/studies/jobs.py", "_CLEAR_REFS.write_text"),
    ("hpcpace/cli/run_card.py", "_OOM_SCORE.write_text"),
}
"""Files of /proc take what is written in place only."""

MODULES = {
    "os": {"replace", "rename", "renames", "chmod", "fchmod", "lchmod", "link", "symlink", "truncate", "mkfifo"},
    "shutil": {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "copymode", "copystat", "move"},
    "tempfile": {"mkstemp", "mkdtemp", "mktemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory"},
    "json": {"dump"},
    "pickle": {"dump"},
    "torch": {"save"},
    "np": {"save", "savez", "savez_compressed", "savetxt"},
}
METHODS = {
    *("write_text", "write_bytes", "touch", "chmod", "lchmod", "symlink_to", "hardlink_to", "tofile", "write_image"),
    *("to_csv", "to_parquet", "to_pickle", "to_hdf", "to_feather"),
}
OPENERS = {"open", "fdopen", "File"}
MODE = re.compile(r"(?=.*[wxa+])[rwxabt+]+")
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}


def writes(source: str) -> list[str]:
    """Return the calls of a module that write a file, as `LINE CALL`."""
    tree = ast.parse(source)
    buffers = set(_buffers(tree))
    found = [f"{node.lineno} {name}" for node in ast.walk(tree) for name in _imported(node)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return found + [f"{call.lineno} {ast.unparse(call.func)}" for call in calls if _is_write(call, buffers)]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module in MODULES:
        yield from (alias.name for alias in node.names if alias.name in MODULES[node.module])


def _buffers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "io.BytesIO()" in ast.unparse(node.value):
            yield from (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))


def _is_write(call: ast.Call, buffers: set[str]) -> bool:
    path = ast.unparse(call.func)
    module, _, name = path.rpartition(".")
    if name in OPENERS:
        return _opens_to_write(call, path)
    if name == "savefig":
        return not (call.args and ast.unparse(call.args[0]) in buffers)
    if name in ("replace", "rename") and module != "os":  # Path's have one argument; those of texts and dataclasses not
        return bool(module) and module != "dataclasses" and len(call.args) == 1 and not call.keywords
    return name in MODULES.get(module, ()) or (bool(module) and name in METHODS)


def _opens_to_write(call: ast.Call, path: str) -> bool:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if path == "os.open":
        if call.args and ast.unparse(call.args[0]) == "os.devnull":
            return False
        flags = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
        return bool(WRITING_FLAGS & set(re.findall(r"\w+", flags))) or not re.fullmatch(r"(os\.O_\w+( \| )?)+", flags)
    modes = [node.value for node in arguments if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    is_unknown = (
        path in ("open", "io.open", "os.fdopen") and len(call.args) > 1 and not isinstance(call.args[1], ast.Constant)
    )
    return is_unknown or any(MODE.fullmatch(mode) for mode in modes)


@each_case(
    "line",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "open(path, mode)",
        "path.open('w', newline='')",
        "os.fdopen(descriptor, 'r+')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "os.open(path, flags)",
        "h5py.File(path, 'w')",
        "path.write_text(text)",
        "(folder / 'a').write_bytes(b'')",
        "Path(name).touch()",
        "path.chmod(0o644)",
        "os.chmod(path, 0o644)",
        "os.fchmod(descriptor, 0o644)",
        "os.replace(one, other)",
        "os.rename(one, other)",
        "Path(name).replace(path)",
        "one.rename(other)",
        "shutil.copy(one, other)",
        "from shutil import copyfile",
        "from os import replace",
        "tempfile.mkstemp()",
        "tempfile.NamedTemporaryFile(delete=False)",
        "figure.savefig(path)",
        "figure.savefig(f'{name}.png')",
        "json.dump(content, file)",
        "np.save(path, array)",
        "frame.to_csv(path)",
        "link.symlink_to(path)",
    ],
)
def test_what_writes_is_found(line: str) -> None:
    assert len(writes(line)) == 1


@each_case(
    "line",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "Folder.open(path, make=True)",
        "attempt.open()",
        "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)",
        "h5py.File(path, 'r')",
        "text.replace('a', 'b')",
        "dataclasses.replace(one)",
        "replace(one, host=name)",
        "frame.rename(columns=names)",
        "png = io.BytesIO()\nfigure.savefig(png, format='png')",
        "write_text(text)",
    ],
)
def test_what_writes_no_file_is_not_found(line: str) -> None:
    assert writes(line) == []


def _modules() -> Iterator[tuple[str, str]]:
    for folder in ("hpcpace", "analysis"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_all_files_are_written_by_the_one_writer() -> None:
    found = {
        f"{name}:{write}"
        for name, source in _modules()
        if not WRITERS.fullmatch(name)
        for write in writes(source)
        if (name, write.partition(" ")[2]) not in KERNEL_FILES
    }
    assert found == set()


def test_all_tables_are_written_as_csv_in_one_module() -> None:
    assert [name for name, source in _modules() if re.search(r"\bcsv\.(writer|DictWriter)\b", source)] == [
        "hpcpace/core/exposition.py"
    ]
