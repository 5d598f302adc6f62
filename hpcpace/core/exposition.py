"""Metrics as text for Prometheus: its text format 0.0.4, as files of node_exporter have it, and OpenMetrics 1.0.

Written here, because node_exporter takes no OpenMetrics, prometheus_client keeps a registry of its own, and a base
install should need neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hpcpace.core.text import printable

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_MAX_LABEL = 200


class Kind(StrEnum):
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
    kind: Kind
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
    suffix = {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(family.kind, "")
    name = family.name if is_openmetrics else family.name + suffix
    kind = Kind.GAUGE if family.kind == Kind.INFO and not is_openmetrics else family.kind
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
