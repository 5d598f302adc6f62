"""Thresholds have a unit and a reason, are set in [thresholds.TOPIC] within bounds, and are all known by name."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.config import Config
from hpcpace.core.errors import ConfigError
from hpcpace.core.settings import resolve
from hpcpace.core.thresholds import UNITS, ThresholdValues, declared, threshold_fields
from hpcpace.diagnosis.judged import CoreWaitThresholds

PACKAGE = Path(__file__).parents[2] / "hpcpace"
TRIVIAL = {0, 1, 2, -1, 100, 0.5}
KINDS = ("display", "format", "memory", "speed", "statistics", "timing")
"""Purposes of constants that decide nothing, with which the comments on them begin.

They limit what a reader sees, describe bytes and units, bound memory, say when dividing work pays, are properties of
distributions, or repeat intervals of other parts of hpcpace.
"""
FIELDS = [(topic, name, field) for topic, fields in threshold_fields().items() for name, field in fields.items()]


def _config_of(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "hpcpace.toml"
    file.write_text(text)
    return resolve(file=file, site_file=tmp_path / "none").config


def _classes_in_code() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(keyword.arg == "topic" for keyword in node.keywords):
                yield node.name


def test_a_report_loads_every_module_that_declares_thresholds() -> None:
    assert sorted(_classes_in_code()) == sorted(kind.__name__ for kinds in declared().values() for kind in kinds)


def test_a_name_occurs_once_in_a_topic() -> None:
    num_fields = sum(len(vars(kind())) for kinds in declared().values() for kind in kinds)
    assert num_fields == len(FIELDS)


def test_each_threshold_has_a_unit_and_a_sentence_of_reasons() -> None:
    spec = importlib.util.spec_from_file_location("tables", PACKAGE.parent / "docs" / "tables.py")
    assert spec and spec.loader
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    reasons = {
        (topic, name): text
        for topic, kinds in declared().items()
        for kind in kinds
        for name, text in tables.texts_below_fields(kind).items()
    }
    wrong = [
        f"{topic}.{name}"
        for topic, name, field in FIELDS
        if field.metadata["unit"] not in UNITS or not re.fullmatch(r"[A-Z].*\.", reasons.get((topic, name), ""))
    ]
    assert wrong == []


def test_defaults_are_within_the_bounds_of_their_units() -> None:
    table = ThresholdValues().table()
    assert {(topic, name): field.default for topic, name, field in FIELDS} == {
        (topic, name): value for topic, values in table.items() for name, value in values.items()
    }


def test_a_file_sets_a_threshold(tmp_path: Path) -> None:
    thresholds = _config_of(tmp_path, "[thresholds.links]\nshared_wait_part = 1").of(ThresholdValues)
    assert thresholds.of(CoreWaitThresholds).shared_wait_part == 1.0
    assert thresholds.table()["links"]["shared_wait_part"] == 1.0


def test_a_later_source_wins_by_name(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text("[thresholds.links]\nshared_wait_part = 0.5")
    file = tmp_path / "own.toml"
    file.write_text("[thresholds.links]\nshared_wait_part = 0.25")
    found = resolve(file=file, site_file=site)
    assert found.config.of(ThresholdValues).of(CoreWaitThresholds).shared_wait_part == 0.25
    assert found.origin("thresholds", "links.shared_wait_part") == str(file)


@pytest.mark.parametrize("text", ["", "[thresholds]\n"])
def test_without_any_they_are_the_defaults(tmp_path: Path, text: str) -> None:
    assert _config_of(tmp_path, text).of(ThresholdValues).table() == ThresholdValues().table()


@each_case(
    "text, message",
    [
        ("thresholds = 3", "thresholds must be tables like [thresholds.links]"),
        ("[thresholds]\nlinks = 3", "thresholds.links must be a table like [thresholds.links]"),
        ("[thresholds.linx]\na = 3", "unknown topic 'linx' in [thresholds]: the topics are "),
        ("[thresholds.links]\nshare = 3", "unknown key 'share' in [thresholds.links]: the keys are "),
        ("[thresholds.links]\nshared_wait_part = 'a'", "thresholds.links.shared_wait_part is 'a': expected a number"),
        ("[thresholds.links]\nshared_wait_part = true", "thresholds.links.shared_wait_part is True: expected a number"),
        ("[thresholds.links]\nshared_wait_part = 1.5", "it must be a number from 0 to 1 (set by "),
        ("[thresholds.links]\nshared_wait_part = -1", "thresholds.links.shared_wait_part is -1.0: it must be"),
        ("[thresholds.links]\nshared_wait_part = nan", "thresholds.links.shared_wait_part is nan: it must be"),
    ],
)
def test_a_wrong_table_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        _config_of(tmp_path, text)


def _bare_numbers(path: Path) -> Iterator[str]:
    """Yield the numbers of a module that are neither thresholds nor trivial, nor a constant that says what it is for.

    A confidence is no threshold: the score calibrates it. Nor are those of an enumeration. A setting is documented.
    """
    text = path.read_text()
    tree, tokens = ast.parse(text), tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string.strip("# ") for token in found}
    alone = {token.start[0] for token in found if not token.line[: token.start[1]].strip()}
    allowed: set[int] = set()
    for node in ast.walk(tree):
        is_declaration = isinstance(node, ast.ClassDef) and (
            any(keyword.arg in ("topic", "section") for keyword in node.keywords)
            or any(ast.unparse(base) in ("IntEnum", "IntFlag") for base in node.bases)
        )
        if is_declaration or (isinstance(node, ast.keyword) and node.arg == "confidence"):
            allowed.update(map(id, ast.walk(node)))
    for node, below in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            above = [node.lineno - 1] if node.lineno - 1 in alone else []
            lines = [*above, *range(node.lineno, (node.end_lineno or 0) + 1)]
            reasons = [comments.get(line, "") for line in lines]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                reasons.append(str(below.value.value))
            if any(re.match(rf"({'|'.join(KINDS)}): ", reason, re.IGNORECASE) for reason in reasons):
                allowed.update(map(id, ast.walk(node)))
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value not in TRIVIAL
        if is_number and id(node) not in allowed:
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_every_number_that_decides_is_a_threshold() -> None:
    paths = [path for area in ("diagnosis", "metrics") for path in sorted((PACKAGE / area).rglob("*.py"))]
    assert [found for path in paths for found in _bare_numbers(path)] == []
