"""Tables as CSV, with names that a spreadsheet would compute with."""

from __future__ import annotations

import csv
import io

import numpy as np
from cases import each_case

from hpcpace.core.exposition import csv_bytes


def _cells(*values: object) -> list[str]:
    (row,) = csv.reader(io.StringIO(csv_bytes(values, []).decode(), newline=""))
    return row


@each_case(
    "text",
    [
        "=1+1",
        '=HYPERLINK("http://x","y")',
        "+cmd|' /C calc'!A0",
        "-2+3",
        "-n1",
        "@SUM(A1)",
        "-",
        "+",
        "-1.5x",
        "-1_000",
        "-inf",
        "+-1",
        "-٣",
    ],
)
def test_what_would_be_a_formula_is_text(text: str) -> None:
    assert _cells(text) == [f"'{text}"]


@each_case(
    ("text", "shown"),
    [
        ("\t=1", "'\\t=1"),
        ("\r=1", "'\\r=1"),
        ("n1\r=1", "n1\\r=1"),
        ("n1\n=1", "n1\\n=1"),
        ("n1\x1b[2J", "n1\\x1b[2J"),
        ("n\udcff", "n\\udcff"),
    ],
)
def test_what_is_not_printable_is_escaped_and_begins_no_row(text: str, shown: str) -> None:
    assert _cells(text) == [shown]


@each_case(
    ("value", "text"),
    [
        (-1.5, "-1.5"),
        (np.float64(-1e-9), "-1e-09"),
        (-3, "-3"),
        ("-1.5", "-1.5"),
        ("+2", "+2"),
        ("-.5e+3", "-.5e+3"),
        (1234567.0, "1.23457e+06"),
        (None, ""),
        ("n1=2", "n1=2"),
        ("n1,n2", "n1,n2"),
        ("né", "né"),
        ("'=1", "'=1"),
    ],
)
def test_numbers_and_plain_names_stay(value: object, text: str) -> None:
    assert _cells(value) == [text]


def test_names_of_columns_are_cells_too() -> None:
    assert csv_bytes(["run", "=a"], [["=b", 1]]) == b"run,'=a\n'=b,1\n"
