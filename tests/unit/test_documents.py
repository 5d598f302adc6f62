"""The documents name everything that the program has, and nothing that it does not have."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from calls import calls_in, mistake_in, spans_in, unknown_in
from cases import each_case

from hpcpace import __version__
from hpcpace.cli import cli
from hpcpace.core.config import DECLARED_BY, section_class
from hpcpace.diagnosis import summary
from hpcpace.diagnosis.finding import Evidence
from hpcpace.diagnosis.settings import DiagnosisConfig
from hpcpace.diagnosis.summary import Mode, Summary
from hpcpace.diagnosis.verdict import TOPICS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "analysis" / "README.md"]
CLI_DOC = (ROOT / "docs" / "cli.md").read_text()
SETTINGS_DOC = (ROOT / "docs" / "settings.md").read_text()
DIAGNOSIS_DOC = (ROOT / "docs" / "diagnosis.md").read_text()
SUMMARY_DOC = (ROOT / "docs" / "summary.md").read_text()
_NOT_DATACLASSES = {"schema", "hpcpace_version"}  # `Summary.to_json` adds them


def _commands(command: click.Command, path: str = "") -> list[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    found: list[tuple[str, click.Command]] = []
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        found += _commands(child, f"{path} {name}".strip())
    return found


COMMANDS = _commands(cli)


def _section(path: str) -> str:
    match = re.search(rf"^## `hpcpace {path}[^`]*`$(.*?)(?=^## |\Z)", CLI_DOC, re.MULTILINE | re.DOTALL)
    assert match, f"docs/cli.md has no section `## `hpcpace {path} ...``"
    return match[1]


@each_case(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_every_option_of_a_command_is_documented(path: str, command: click.Command) -> None:
    section = _section(path)
    options = [option for p in command.params if isinstance(p, click.Option) for option in (*p.opts, *p.secondary_opts)]
    assert [option for option in options if f"`{option}" not in section] == []


@each_case(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_no_option_is_documented_that_a_command_does_not_have(path: str, command: click.Command) -> None:
    options = {o for p in command.params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)}
    table = [line for line in _section(path).splitlines() if line.startswith("| `--")]
    named = {name for line in table for name in re.findall(r"`(--[a-z-]+)", line.split("|")[1])}
    assert named - options == set()


def _settings_section(name: str) -> str:
    match = re.search(rf"^## \[{name}\]: .*?$(.*?)(?=^## |\Z)", SETTINGS_DOC, re.MULTILINE | re.DOTALL)
    assert match, f"docs/settings.md has no section `## [{name}]: ...`"
    return match[1]


@each_case("section", DECLARED_BY)
def test_the_settings_of_a_section_are_documented_and_no_other(section: str) -> None:
    documented = re.findall(r"^\| `(\w+)` \|", _settings_section(section), re.MULTILINE)
    assert documented == [key.name for key in dataclasses.fields(section_class(section))]


def _tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = _tables()


def test_documents_have_tables_from_the_code() -> None:
    names = {path.name for path in TABLES.documents()}
    assert {"audit-rules.md", "cli.md", "settings.md", "pacing.md", "diagnosis.md", "summary.md"} <= names


@each_case("path", TABLES.documents(), ids=lambda path: path.name)
def test_the_tables_of_a_document_are_those_of_the_code(path: Path) -> None:
    text = path.read_text()
    assert text == TABLES.with_tables(text), "run: .venv/bin/python docs/tables.py"


@each_case(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_every_option_has_a_help_text_that_starts_with_a_capital_and_ends_with_a_full_stop(
    path: str, command: click.Command
) -> None:
    helps = [(p.name, (p.help or "").partition("  [")[0]) for p in command.params if isinstance(p, click.Option)]
    assert [(name, text) for name, text in helps if not re.fullmatch(r"[A-Z].*\.", text)] == []


@each_case("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


@each_case("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_to_sections_lead_to_a_heading(path: Path) -> None:
    targets = re.findall(r"\]\(([^):]*)#([^)]+)\)", path.read_text())
    wrong = [
        f"{name}#{anchor}" for name, anchor in targets if anchor not in _anchors(path.parent / name if name else path)
    ]
    assert wrong == []


_MISTAKES = ["report --steps x --attempt -1"]  # docs/cli.md shows what is said to them


def test_each_call_of_hpcpace_in_the_documents_parses() -> None:
    wrong = []
    for path in DOCUMENTS:
        text = path.read_text()
        wrong += [(path.name, call, mistake) for call in calls_in(text) if (mistake := mistake_in(call))]
        wrong += [(path.name, span, words) for span in spans_in(text) if (words := unknown_in(span))]
    assert [found for found in wrong if found[1] not in _MISTAKES] == []


_FILES = (
    r"(?<![\w/.-])((?:hpcpace|tests|docs|sbatch|experiments|analysis|\.ci)/[\w./*-]*\w\.(?:py|sh|toml|md|cpp|ya?ml))"
)


def test_each_file_and_target_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for path in DOCUMENTS:
        text = path.read_text()
        files = {name for name in re.findall(_FILES, text) if "NAME" not in name}
        wrong += [(path.name, name) for name in files if not any(ROOT.glob(name))]
        commands = set(re.findall(r"(?:^|`)make ([a-z][\w-]+)[` ]", text, re.MULTILINE))
        wrong += [(path.name, f"make {name}") for name in commands - targets]
        modules = {name.rstrip(".") for name in re.findall(r"python3? -m ((?:experiments|tests)[\w.]+)", text)}
        places = {name: ROOT.joinpath(*name.split(".")) for name in modules}
        wrong += [
            (path.name, name) for name, at in places.items() if not (at.is_dir() or at.with_suffix(".py").is_file())
        ]
    assert wrong == []


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _dataclasses_within(kind: Any) -> Iterator[type]:
    """Yield the dataclasses that a type is made of, the outer ones first."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from _dataclasses_within(hint)
    for part in typing.get_args(kind):
        yield from _dataclasses_within(part)


_OWN = [kind for kind in vars(summary).values() if isinstance(kind, type) and kind.__module__ == summary.__name__]
OF_SUMMARY = list(dict.fromkeys([*_dataclasses_within(Summary), *filter(dataclasses.is_dataclass, _OWN)]))


def _fields_documented(name: str) -> set[str]:
    """Return the names in the first column of a section's first table."""
    match = re.search(rf"^## {name}$(.*?)(?=^## |\Z)", SUMMARY_DOC, re.MULTILINE | re.DOTALL)
    assert match, f"docs/summary.md has no section `## {name}`"
    rows = match[1].partition("| field |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@each_case("kind", OF_SUMMARY, ids=lambda kind: kind.__name__)
def test_the_document_of_the_summary_has_each_field_and_no_other(kind: Any) -> None:
    documented = _fields_documented(kind.__name__) - (_NOT_DATACLASSES if kind is Summary else set())
    assert documented == {field.name for field in dataclasses.fields(kind)}


def test_the_document_of_the_summary_names_its_schema() -> None:
    assert set(re.findall(r"hpcpace-summary/\d+", SUMMARY_DOC)) == {summary.SCHEMA}


def test_the_example_of_a_summary_has_what_a_summary_has() -> None:
    example = json.loads(SUMMARY_DOC.partition("```json")[2].partition("```")[0])
    assert example["schema"] == summary.SCHEMA
    assert set(example) <= {field.name for field in dataclasses.fields(Summary)} | _NOT_DATACLASSES
    assert set(example["verdict"]) == {field.name for field in dataclasses.fields(summary.Verdict)}


@each_case("threshold", dataclasses.fields(DiagnosisConfig), ids=lambda field: field.name)
def test_a_threshold_is_documented_with_its_present_default(threshold: dataclasses.Field[float]) -> None:
    row = re.search(rf"^\| `{threshold.name}` \|.*\| ([^|]*) \|$", DIAGNOSIS_DOC, re.MULTILINE)
    assert row, f"docs/diagnosis.md has no row for {threshold.name}"
    assert row[1] == f"{threshold.default:g}"


def test_no_threshold_is_documented_that_is_not_there() -> None:
    table = DIAGNOSIS_DOC.partition("| setting |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {
        field.name for field in dataclasses.fields(DiagnosisConfig)
    }


def test_each_mode_has_its_section() -> None:
    own = [kind for topic in TOPICS for kind in vars(sys.modules[topic.find.__module__]).values()]
    kinds = [kind for kind in own if isinstance(kind, type) and issubclass(kind, Evidence)]
    modes = {str(mode) for mode in (*Mode, *(vars(kind).get("mode") for kind in kinds)) if isinstance(mode, str)}
    assert [mode for mode in sorted(modes) if f"\n## {mode}\n" not in DIAGNOSIS_DOC] == [], (
        "docs/diagnosis.md needs a section `## MODE` of each"
    )


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_each_linter_of_a_commit_is_pinned() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pins = (ROOT / "constraints.txt").read_text()
    programs = set(re.findall(r"entry: \.venv/bin/(\w+)", hooks))
    assert programs == {"ruff", "mypy", "shellcheck"}
    assert [name for name in programs if not re.search(rf"^{name}(-py)?==", pins, re.MULTILINE)] == []


def test_the_readme_is_short_and_its_commands_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 100
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([\w-]+) +#", text)) <= set(targets)


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    names = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert {name for name in names if f"]({name})" not in index} == set()


def test_every_document_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    shown = re.findall(r"^ +- (?:.*: )?([\w./-]+\.md)$", nav, re.MULTILINE)
    elsewhere = re.findall(r'^    "([\w-]+\.md)": ', (ROOT / "docs" / "hooks.py").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    pages.remove("README.md")  # its page has another name: the site begins with the README of the repository
    assert sorted(shown) == sorted([*pages, *elsewhere, "api.md"])


def test_the_headings_of_measuring_name_modules_that_exist() -> None:
    modules = {path.stem for path in (ROOT / "hpcpace" / "metrics").rglob("*.py")}
    headings = re.findall(r"^## .*\((`.*`)\)$", (ROOT / "docs" / "measuring.md").read_text(), re.M)
    assert {name for heading in headings for name in re.findall(r"`(\w+)`", heading)} <= modules
    assert len(headings) > 5
