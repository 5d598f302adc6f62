"""An audit as the terminal shows it."""

from __future__ import annotations

import io

from rich.console import Console

from hpcpace.audit.rulebook import AuditResult
from hpcpace.report.audit_report import audit_document
from hpcpace.report.terminal import print_document

WIDTH = 100


def verdict_lines(result: AuditResult, width: int = WIDTH) -> list[str]:
    """Return the lines that an audit prints."""
    page = io.StringIO()
    print_document(Console(file=page, width=width, markup=False), audit_document(result, width=width))
    return page.getvalue().splitlines()
