"""Bandwidth: what operations achieve by kind, number of ranks and size, as nccl-tests has it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcpace.core.text import format_bytes, plural
from hpcpace.diagnosis.plot_data import Bandwidth
from hpcpace.report.document import NONE, PAGE, Plot, Table
from hpcpace.report.drawing import axis, intervals, names_axis, plot_text, unique

_MAX_DRAWN = 16
_MAX_TICKS = 6
_ZEROS = re.compile(r"\.0+(?= )")
_PER_GIGA, _LOG_GIGA = 1e9, 9  # format: GB/s
_HEAD_PX, _ROW_PX = 84, 30
_LOOKS = (("algorithm", "@busy", "circle"), ("bus", "@wait", "diamond-open"))


def bandwidth_plot(found: Sequence[Bandwidth]) -> Plot:
    """Return the bandwidths, at least one, as points with the range of most steps; of many, of the largest sizes."""
    rows = sorted(sorted(found, key=lambda one: -one.size_bytes)[:_MAX_DRAWN], key=lambda one: (one.op, one.group_size))
    names = unique(_name(one) for one in rows)
    some = f" The {len(rows)} of {len(found)} kinds with the largest operations." * (len(rows) < len(found))
    return Plot(
        name="bandwidths",
        title="Bandwidth",
        label=f"Algorithm and bus bandwidth of {plural(len(rows), 'kind')} of operations",
        caption=(
            "Algorithm: size of an operation over its transfer. Bus: what passes the slowest link in that time, as "
            f"nccl-tests has it. Median over steps, with the range of 90 % of them; the axis is logarithmic.{some}"
        ),
        height_px=_HEAD_PX + _ROW_PX * len(rows),
        traces=[_points(rows, names, *look) for look in _LOOKS],
        layout={"xaxis": _decades(rows), "yaxis": names_axis(len(rows))},
        legend=[(f"{name} bandwidth", color, "") for name, color, _ in _LOOKS],
    )


def _name(one: Bandwidth) -> str:
    return plot_text(f"{one.op} of {one.group_size}, {format_bytes(one.size_bytes)}", 40)


def _points(rows: Sequence[Bandwidth], names: Sequence[str], what: str, color: str, symbol: str) -> dict[str, Any]:
    factors = np.array([one.bus_factor if one.bus_factor is not None else np.nan for one in rows])
    factors = factors if what == "bus" else np.ones(len(rows))
    low, median, high = (
        factors * np.array([getattr(one, end) for one in rows]) / _PER_GIGA for end in ("low", "median", "high")
    )
    made = intervals(names, median, low, high, color, f"%{{y}}: {what} bandwidth %{{x:.3~g}} GB/s")
    if what == "bus":  # whose range is that of the algorithm, as many times larger
        del made["error_x"]
    return {**made, "name": what, "marker": {**made["marker"], "symbol": symbol}}


def _decades(rows: Sequence[Bandwidth]) -> dict[str, Any]:
    """Return a logarithmic axis of whole decades around all values, with at most _MAX_TICKS ticks."""
    ends = [rate for one in rows for rate in (one.low, one.high, one.median * (one.bus_factor or 1.0))]
    first, last = math.floor(math.log10(min(ends))), math.floor(math.log10(max(ends))) + 1
    ticks = range(first, last + 1, -(-(last + 1 - first) // _MAX_TICKS))
    return axis(
        "",
        type="log",
        range=[first - _LOG_GIGA, last - _LOG_GIGA],
        tickvals=[10.0 ** (tick - _LOG_GIGA) for tick in ticks],
        ticktext=[f"{_ZEROS.sub('', format_bytes(10.0**tick))}/s" for tick in ticks],
    )


def bandwidth_table(found: Sequence[Bandwidth]) -> Table:
    """Return the bandwidths in figures; empty without any."""
    rows = [
        (
            one.op,
            str(one.group_size),
            format_bytes(one.size_bytes),
            *(f"{_gigas(rate)} GB/s" for rate in (one.low, one.median, one.high)),
            NONE if one.bus_factor is None else f"{_gigas(one.bus_factor * one.median)} GB/s",
        )
        for one in found
    ]
    return Table(
        ("operation", "ranks", "size", "algorithm, 5 %", "median", "95 %", "bus, median"),
        rows,
        "Bandwidth by kind, number of ranks and size",
        details=f"{plural(len(rows), 'bandwidth')} in figures",
        on=PAGE,
    )


def _gigas(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _PER_GIGA:.3g}"
