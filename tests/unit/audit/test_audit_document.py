"""docs/audit-rules.md names every field of JSON; docs/tables.py writes its rules and settings."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from cases import each_case

from hpcpace.audit import facts, rulebook
from hpcpace.audit.rulebook import BY_ID

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENT = (DOCS / "audit-rules.md").read_text()


def test_each_rule_has_its_section_in_the_order_in_which_they_run() -> None:
    assert re.findall(r"^### ([A-Z]\d\d) ", DOCUMENT, re.MULTILINE) == list(BY_ID)


def test_outputs_show_the_number_of_rules() -> None:
    shown = re.findall(r"of (\d+) rules applied", (DOCS / "audit.md").read_text())
    assert shown and set(shown) == {str(len(BY_ID))}, f"docs/audit.md: there are {len(BY_ID)} rules now"


@each_case("field", [*dataclasses.fields(facts.Snapshot), *dataclasses.fields(rulebook.AuditResult)])
def test_field_of_json_is_documented(field: dataclasses.Field[object]) -> None:
    if field.name not in ("schema", "unreadable"):
        assert f"`{field.name}`" in DOCUMENT or f"`{field.name}." in DOCUMENT


def test_schemas_are_named() -> None:
    assert facts.SCHEMA in DOCUMENT and rulebook.SCHEMA in DOCUMENT
