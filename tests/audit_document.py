"""The parts of docs/audit-rules.md that follow from the code: the rules and the settings.

Run as a program, it writes them anew: read the diff.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hpcpace.audit.findings import Severity
from hpcpace.audit.rulebook import BY_ID, Rule
from hpcpace.audit.settings import AuditConfig

DOCUMENT = Path(__file__).parents[1] / "docs" / "audit-rules.md"
_WIDTH = 120


def rules_text() -> str:
    """Return the sections of all rules, in the order in which they run."""
    return "\n\n".join(map(_rule_text, BY_ID.values()))


def settings_text() -> str:
    """Return the table of the settings."""
    rows = (f"| `{name}` | {meaning} | {default} |" for name, meaning, default in _settings())
    return "\n".join(["| setting | meaning | default |", "|---|---|---|", *rows])


def updated(document: str) -> str:
    """Return the document with both parts as they follow from the code."""
    for name, text in (("rules", rules_text()), ("settings", settings_text())):
        found = re.findall(rf"(?s)<!-- {name}: [^>]*-->\n(.*?)\n<!-- end of {name} -->", document)
        if len(found) != 1:
            raise ValueError(f"{DOCUMENT} has {len(found)} parts between the marks of {name}")
        document = document.replace(found[0], text)
    return document


def _rule_text(rule: Rule) -> str:
    severities = ", ".join(f"{letter} ({Severity(letter).word})" for letter in rule.severities)
    lines = [f"### {rule.id} {rule.title}", textwrap.fill(rule.why, _WIDTH, break_on_hyphens=False), ""]
    for label, text in (("Severities", severities), ("Reads", rule.reads), ("Fix", rule.fix)):
        lines += textwrap.wrap(f"- {label}: {text}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _settings() -> Iterator[tuple[str, str, str]]:
    """Yield name, meaning (the text below the field) and default of each setting."""
    meanings = {}
    (body,) = (node.body for node in ast.parse(inspect.getsource(AuditConfig)).body if isinstance(node, ast.ClassDef))
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            meanings[field.target.id] = str(text.value.value).rstrip(".")
    for setting in dataclasses.fields(AuditConfig):
        default = "none" if setting.default in (None, ()) else str(setting.default)
        yield setting.name, meanings[setting.name], default


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))
