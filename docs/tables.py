"""Write the tables in the documents from the code.

    python docs/tables.py

A table is between `<!-- options COMMAND -->` (or `COMMAND like OTHER`), `<!-- settings SECTION -->`,
`<!-- thresholds all -->`, `<!-- glossary report -->`, `<!-- frame NAME -->`, `<!-- modules all -->`,
`<!-- rules all -->` or `<!-- numbers all -->` and `<!-- end -->`. Options come from the commands and their help texts,
settings from the dataclass of each section and the text below each field, thresholds from the dataclasses of the
modules that decide, terms from the glossary of the report, columns of frames from `hpcpace.frames.columns`, modules
from the first line of their docstrings, audit rules from rules.toml, numbers of findings from the docstrings of their
evidence.
tests/unit/test_documents.py fails while a table is not what this script would write.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from hpcpace.audit.findings import Severity
from hpcpace.audit.rulebook import BY_ID, Rule
from hpcpace.cli import cli
from hpcpace.cli.options import Option
from hpcpace.core.config import section_class
from hpcpace.core.thresholds import declared
from hpcpace.diagnosis.finding import Evidence
from hpcpace.diagnosis.verdict import TOPICS
from hpcpace.frames.columns import FRAMES
from hpcpace.report.document import GLOSSARY

FOLDER = Path(__file__).parent
_KINDS = "options|settings|thresholds|glossary|frame|modules|rules|numbers"
_WIDTH = 120
_NUMERIC = ("int", "float", "int | None", "float | None")
_TABLE = re.compile(rf"(<!-- ({_KINDS}) (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    """Return the documents that have such tables."""
    return [path for path in sorted(FOLDER.glob("*.md")) if _TABLE.search(path.read_text(encoding="utf-8"))]


def with_tables(text: str) -> str:
    """Return a document with all its tables as the code has them now."""
    makers = {
        "options": options_table,
        "settings": settings_table,
        "thresholds": thresholds_table,
        "glossary": glossary_table,
        "frame": frame_table,
        "modules": modules_table,
        "rules": rules_text,
        "numbers": numbers_table,
    }
    return _TABLE.sub(lambda found: f"{found[1]}{makers[found[2]](found[3])}\n{found[4]}", text)


def options_table(wanted: str) -> str:
    """Return the options of a command, such as `lab up`, as a table; of `A like B`, those of B are named below it."""
    path, _, like = wanted.partition(" like ")
    rows, known = _option_rows(path), _option_rows(like) if like else []
    own = [row for row in rows if row not in known]
    table = _table("option", own) if own else ""
    if not like:
        return table
    alike = ", ".join(row[0].replace("\\|", "|") for row in rows if row in known)
    return f"{table}\n\nAs of `hpcpace {like}`: {alike}.".lstrip()


def _option_rows(path: str) -> list[tuple[str, str, str]]:
    command: click.Command = cli
    for name in path.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"there is no command {path}"
        command = found
    return [_option_row(option) for option in command.params if isinstance(option, click.Option)]


def settings_table(section: str) -> str:
    """Return the settings of a section of the configuration as a table."""
    kind = section_class(section)
    meanings = texts_below_fields(kind)
    rows = [(f"`{f.name}`", _cell(meanings[f.name]), _shown(f.default)) for f in dataclasses.fields(kind)]
    return _table("setting", rows)


def thresholds_table(_: str) -> str:
    """Return a table of the thresholds of each topic."""
    lines: list[str] = []
    for topic, kinds in declared().items():
        lines += ["", f"## [thresholds.{topic}]", "| threshold | default | unit | decides |", "|---|---|---|---|"]
        for kind in kinds:
            reasons = texts_below_fields(kind)
            for field in dataclasses.fields(kind):
                cells = (f"`{field.name}`", _shown(field.default), field.metadata["unit"], _cell(reasons[field.name]))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def glossary_table(_: str) -> str:
    """Return the terms of the report with what they mean."""
    rows = [f"| {term.name} | {_cell(term.meaning)} |" for term in GLOSSARY]
    return "\n".join(["| term | meaning |", "|---|---|", *rows])


def frame_table(name: str) -> str:
    """Return the columns of a frame with their types and what they mean."""
    rows = [f"| `{column.name}` | {column.kind} | {_cell(column.meaning)} |" for column in FRAMES[name]]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows])


def modules_table(_: str) -> str:
    """Return every module of each package with the first line of its docstring."""
    package = FOLDER.parent / "hpcpace"
    lines: list[str] = []
    for folder in sorted({path.parent for path in package.rglob("*.py") if path.name != "__init__.py"}):
        lines += ["", f"## {folder.relative_to(package.parent)}/", "| module | contents |", "|---|---|"]
        lines += [
            f"| `{path.stem}` | {_cell(_first_line(path))} |"
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py"
        ]
    return "\n".join(lines)


def rules_text(_: str) -> str:
    """Return a section for each audit rule, in the order in which they run."""
    return "\n\n".join(map(_rule_text, BY_ID.values()))


def _rule_text(rule: Rule) -> str:
    severities = ", ".join(f"{letter} ({Severity(letter).word})" for letter in rule.severities)
    lines = [f"### {rule.id} {rule.title}", textwrap.fill(rule.why, _WIDTH, break_on_hyphens=False), ""]
    for label, text in (("Severities", severities), ("Reads", rule.reads), ("Fix", rule.fix)):
        lines += textwrap.wrap(f"- {label}: {text}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def numbers_table(_: str) -> str:
    """Return the numeric fields of each evidence by mode, as its docstring describes them."""
    own = [kind for topic in TOPICS for kind in vars(sys.modules[topic.find.__module__]).values()]
    kinds = {kind for kind in own if inspect.isclass(kind) and issubclass(kind, Evidence)}
    rows = sorted(_evidence_row(kind) for kind in kinds if not inspect.isabstract(kind))
    return "\n".join(["| mode | finding | numbers |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def _evidence_row(kind: type[Evidence]) -> tuple[str, str, str]:
    mode: Any = inspect.getattr_static(kind, "mode")
    wanted = {str(field.name) for field in dataclasses.fields(kind) if field.type in _NUMERIC}
    texts = {names: text for each in reversed(kind.mro()) for names, text in _described(each, "Attributes").items()}
    if "numbers" in vars(kind):
        texts = _described(kind.numbers, "Returns")
        wanted = {name for names in texts for name in names}
    cells = []
    for names, text in texts.items():
        if own := [name for name in names if name in wanted]:
            cells.append(f"{', '.join(f'`{name}`' for name in own)}: {text}")
            wanted.difference_update(own)
    if wanted:
        raise SystemExit(f"{kind.__name__}: its docstring must say below Attributes what {sorted(wanted)} are")
    finding = (inspect.getdoc(kind) or "").partition("\n")[0]
    return (
        _cell(mode if isinstance(mode, str) else (inspect.getdoc(mode) or "").lower()),
        _cell(finding),
        _cell("; ".join(cells)),
    )


def _described(of: Any, heading: str) -> dict[tuple[str, ...], str]:
    """Return the texts below a heading of a docstring, by the names that each describes together."""
    part = (inspect.cleandoc(of.__doc__ or "")).partition(f"{heading}:\n")[2]
    entries = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", part, re.MULTILINE)
    return {tuple(names.split(", ")): _cell(" ".join(text.split())) for names, text in entries}


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _table(first: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [(first, "meaning", "default"), ("---", "---", "---"), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- | --- | --- |", "|---|---|---|")


def _option_row(option: click.Option) -> tuple[str, str, str]:
    value = "" if option.is_flag else " " + (option.metavar or _metavar(option.type))
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts)).replace("|", r"\|")
    default = option.default_words() if isinstance(option, Option) else ""
    return names, _cell(option.help or ""), default or ("off" if option.is_flag else "")


def _cell(text: str) -> str:
    """Return a sentence as a cell: without its full stop, but with an ellipsis."""
    return re.sub(r"(?<!\.)\.$", "", text).replace("|", r"\|")


def _metavar(kind: click.ParamType[Any]) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(kind.choices)
    return "PATH" if isinstance(kind, click.Path) else "NAME"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None or value == () else str(value)


def texts_below_fields(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, by name of the field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


def main() -> None:
    """Write all tables, and print the documents that have changed."""
    for path in documents():
        before = path.read_text(encoding="utf-8")
        if (after := with_tables(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
