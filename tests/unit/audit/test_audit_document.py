"""docs/audit.md has every rule as `hpcpace audit explain` has it, every setting, and every field of JSON."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hpcpace.audit import facts, result
from hpcpace.audit.rules.table import RULES, Rule
from hpcpace.audit.settings import AuditConfig

DOCUMENT = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_rule_stands_with_reason_facts_fix_and_severities(rule: Rule) -> None:
    section = _plain(DOCUMENT.partition(f"### {rule.id} {rule.title}\n")[2].partition("\n### ")[0])
    assert _plain(rule.why).rstrip(".") in section
    assert f"Reads: {_plain(rule.reads)}." in section
    assert f"Fix: {_plain(rule.fix)}." in section
    assert f"Finds: {', '.join(rule.severities)}." in section


@pytest.mark.parametrize("setting", dataclasses.fields(AuditConfig), ids=lambda field: field.name)
def test_setting_stands_with_its_present_default(setting: dataclasses.Field[object]) -> None:
    row = re.search(rf"^\| `{setting.name}` \|.*\| ([^|]*) \|$", DOCUMENT, re.MULTILINE)
    shown = "none" if setting.default in (None, ()) else str(setting.default)
    assert row and row[1] == shown


@pytest.mark.parametrize("field", [*dataclasses.fields(facts.Snapshot), *dataclasses.fields(result.AuditResult)])
def test_field_of_json_is_documented(field: dataclasses.Field[object]) -> None:
    if field.name not in ("schema", "unreadable"):
        assert f"`{field.name}`" in DOCUMENT or f"`{field.name}." in DOCUMENT


def test_schemas_are_named() -> None:
    assert facts.SCHEMA in DOCUMENT and result.SCHEMA in DOCUMENT
