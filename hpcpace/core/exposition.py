"""Tables as CSV for spreadsheets, and metrics as text for Prometheus: its text format 0.0.4 and OpenMetrics 1.0.

Names that others chose, of hosts and runs, are text in a CSV and no formulas. The metrics are written here, because
node_exporter takes no OpenMetrics, prometheus_client keeps a registry of its own, and neither should be needed.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

from hpcpace.core.records import dataclass
from hpcpace.core.text import printable

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_MAX_LABEL = 200


class MetricType(StrEnum):
    """The kinds of metrics; the value of an info is 1, and its labels are what it says."""

    GAUGE = "gauge"
    COUNTER = "counter"
    INFO = "info"


@dataclass(kw_only=True)
class Family:
    """A metric: its name without the suffix of its kind, and its samples.

    Attributes:
        name: with its unit at the end, without `_total` or `_info`.
        help: one sentence.
        unit: base unit, which `name` ends with; empty without one.
        samples: labels and value of each.
    """

    name: str
    kind: MetricType
    help: str
    unit: str = ""
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, labels: Mapping[str, str]) -> None:
        """Add a sample; what is not known has none."""
        if value is not None and math.isfinite(value):
            self.samples.append((labels, value))


def exposition(families: Sequence[Family], *, is_openmetrics: bool = False) -> str:
    """Return metrics as text; those without samples are left out."""
    lines = [line for family in families if family.samples for line in _lines(family, is_openmetrics)]
    return "".join(f"{line}\n" for line in [*lines, *(["# EOF"] if is_openmetrics else [])])


def _lines(family: Family, is_openmetrics: bool) -> Iterable[str]:
    suffix = {MetricType.COUNTER: "_total", MetricType.INFO: "_info"}.get(family.kind, "")
    name = family.name if is_openmetrics else family.name + suffix
    kind = MetricType.GAUGE if family.kind == MetricType.INFO and not is_openmetrics else family.kind
    yield f"# HELP {name} {_escaped(family.help) if is_openmetrics else family.help}"
    yield f"# TYPE {name} {kind}"
    if family.unit and is_openmetrics:
        yield f"# UNIT {name} {family.unit}"
    for labels, value in family.samples:
        pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield (
            f"{family.name}{suffix}{{{pairs}}} {_number(value)}" if pairs else f"{family.name}{suffix} {_number(value)}"
        )


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else repr(float(value))


def _escaped(text: str) -> str:
    return printable(text)[:_MAX_LABEL].replace("\\", "\\\\").replace('"', '\\"')


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
