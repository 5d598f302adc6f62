"""A scaling series as a table: one row a size, those that are predicted included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcpace.core.text import NS_PER_MS
from hpcpace.runs.scaling.result import PredictedSize, Scaling, SizeFigures
from hpcpace.runs.scaling.samples import PARTS

COLUMNS = (
    *("units", "unit", "ranks", "runs", "is_predicted", "samples_per_s", "speedup", "speedup_low", "speedup_high"),
    *("scaling_factor", "scaling_factor_low", "scaling_factor_high", "further_gain", "band"),
    *("step_ms", "step_ms_low", "step_ms_high", "cv", "busy", "wait", "transfer"),
    *(f"{name}_ms" for name in PARTS),
)


def rows_of(scaling: Scaling) -> Iterator[list[Any]]:
    """Yield the rows below `COLUMNS`."""
    for size in scaling.sizes:
        yield _measured(size, scaling.unit)
    for predicted in scaling.predictions:
        yield _predicted(predicted, scaling)


def _measured(size: SizeFigures, unit: str) -> list[Any]:
    return [
        *(size.num_units, unit, size.num_ranks or None, len(size.runs), 0, size.samples_per_s),
        *(size.speedup, *size.speedup_interval, size.scaling_factor, *size.scaling_interval),
        *(size.further_gain, str(size.band), _ms(size.step_ns), None, None),
        *(size.cv, size.busy, size.wait, size.transfer),
        *(_ms(size.parts_ns.get(name)) for name in PARTS),
    ]


def _predicted(size: PredictedSize, scaling: Scaling) -> list[Any]:
    ratio = size.num_units / scaling.sizes[0].num_units
    low, high = size.speedup_interval
    rate = scaling.sizes[0].samples_per_s
    return [
        *(size.num_units, scaling.unit, None, 0, 1, None if rate is None else rate * size.speedup),
        *(size.speedup, low, high, size.scaling_factor, low / ratio, high / ratio),
        *(None, "", _ms(size.step_ns), *map(_ms, size.step_interval_ns)),
        *(None, None, None, None),
        *(_ms(size.parts_ns.get(name)) for name in PARTS),
    ]


def _ms(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / NS_PER_MS
