"""Findings of the audit on the culprits in words, on a terminal and on the page alike."""

from __future__ import annotations

from collections.abc import Iterator

from hpcpace.core.text import plural
from hpcpace.diagnosis.summary import AuditFigures, AuditMatch

AUDIT_HEAD = ("who", "rule", "seen", "fix")
NO_MATCH = "no finding on the culprits"
_WORDS = {"F": "fail", "W": "warning", "U": "unknown", "I": "note"}


def audit_subtitle(audit: AuditFigures) -> str:
    """Return how much the audit has found, and where to see it."""
    parts = [plural(audit.counts[letter], word) for letter, word in _WORDS.items() if audit.counts.get(letter)]
    size = f"{plural(audit.num_hosts, 'node')}, {plural(audit.num_ranks, 'rank')}"
    return f"{', '.join(parts) or 'nothing found'} ({size}; `hpcpace audit --from RUN` shows all)"


def audit_lines(audit: AuditFigures) -> Iterator[tuple[str, str]]:
    """Yield each finding on a culprit, with the line that fixes it."""
    for match in audit.matches:
        yield match.told, match.fix
    if not audit.matches:
        yield NO_MATCH, ""


def audit_cells(match: AuditMatch) -> tuple[str, ...]:
    """Return what `AUDIT_HEAD` names."""
    return (match.who, f"{match.severity} {match.rule}", match.told, match.fix)
