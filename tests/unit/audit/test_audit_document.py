"""docs/audit-rules.md has every rule and every setting as the code has them, and names every field of JSON.

`python tests/audit_document.py` writes the rules and the settings anew.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from audit_document import updated
from cases import each_case

from hpcpace.audit import facts, rulebook
from hpcpace.audit.findings import Severity
from hpcpace.audit.rulebook import BY_ID, Rule
from hpcpace.audit.settings import AuditConfig

DOCUMENT = (Path(__file__).parents[3] / "docs" / "audit-rules.md").read_text()


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@each_case("rule", BY_ID.values(), ids=lambda rule: rule.id)
def test_rule_has_reason_facts_fix_and_severities(rule: Rule) -> None:
    section = _plain(DOCUMENT.partition(f"### {rule.id} {rule.title}\n")[2].partition("\n###")[0])
    severities = ", ".join(f"{letter} ({Severity(letter).word})" for letter in rule.severities)
    assert section.startswith(_plain(rule.why))
    assert f"- Severities: {severities} - Reads: {_plain(rule.reads)} - Fix: {_plain(rule.fix)}" in section


def test_rules_and_settings_are_exactly_those_of_the_code() -> None:
    assert updated(DOCUMENT) == DOCUMENT


@each_case("setting", dataclasses.fields(AuditConfig), ids=lambda field: field.name)
def test_setting_has_its_present_default(setting: dataclasses.Field[object]) -> None:
    row = re.search(rf"^\| `{setting.name}` \|.*\| ([^|]*) \|$", DOCUMENT, re.MULTILINE)
    shown = "none" if setting.default in (None, ()) else str(setting.default)
    assert row and row[1] == shown


@each_case("field", [*dataclasses.fields(facts.Snapshot), *dataclasses.fields(rulebook.AuditResult)])
def test_field_of_json_is_documented(field: dataclasses.Field[object]) -> None:
    if field.name not in ("schema", "unreadable"):
        assert f"`{field.name}`" in DOCUMENT or f"`{field.name}." in DOCUMENT


def test_schemas_are_named() -> None:
    assert facts.SCHEMA in DOCUMENT and rulebook.SCHEMA in DOCUMENT
