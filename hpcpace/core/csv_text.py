"""Tables as CSV: names that others chose, of hosts and runs, are text there and no formulas of a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hpcpace.core.text import printable

# What spreadsheets take for the beginning of a formula (OWASP, CSV Injection).
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def csv_bytes(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a table as CSV in UTF-8, with numbers to six digits.

    A cell that a spreadsheet could take for a formula has a `'` in front. What is not printable is escaped: Python's
    csv leaves a carriage return as it is, behind which a reader begins a new row.

    Args:
        columns: names of the columns.
        rows: of the table; None becomes an empty cell.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_cell(value) for value in row] for row in (columns, *rows))
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return text_cell(f"{value:.6g}" if isinstance(value, float) else str(value))


def text_cell(text: str) -> str:
    """Return a text as it stands in a cell: no formula, and printable."""
    return printable(f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text)
