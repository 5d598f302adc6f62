"""Communication by kind of operation and by rank: waits, transfers, bandwidth, effect of skew, and a probe."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpace.core.text import NS_PER_MS, NS_PER_S, format_bytes, format_duration, percent, plural
from hpcpace.diagnosis.network_summary import ProbedFigures
from hpcpace.diagnosis.plot_data import Bandwidth, PlotData, Values
from hpcpace.diagnosis.summary import OperationKind, RankRow, SensitivityRow, Summary
from hpcpace.report.document import NONE, PAGE, TERMINAL, UNKNOWN, Notes, Plot, Section, Table
from hpcpace.report.drawing import axis, bars, intervals, mark, names_axis, plot_text, series, unique

_BARRIER = "barrier"  # as summaries name it
_MAX_KINDS, _MAX_PROBED = 20, 8
_MIN_SLOPE = 0.05  # below it, even a skew as long as the transfer changes that by less than noise does


def communication_section(summary: Summary, plots: PlotData, shown: Sequence[RankRow]) -> Section:
    """Return communication by kind, and on a terminal by the ranks shown; empty without any."""
    kinds, num_steps = summary.kinds, max(summary.steps.num_used, 1)
    rows = [
        (
            kind.op,
            str(kind.group_size or UNKNOWN),
            f"{kind.num_rows / num_steps:.4g}",
            message_size(kind.size_bytes / num_steps, kind.op),
            format_duration(kind.median_ns),
            format_duration(kind.p95_ns),
            duration(kind.mean_wait_ns),
            duration(kind.mean_transfer_ns),
            str(kind.num_unmatched or NONE),
        )
        for kind in kinds
    ]
    has_partners = any(kind.num_unmatched < kind.num_rows for kind in kinds)
    steps, shares = plots.step, plots.communication_share
    head = ("operation", "group size", "calls per step", "bytes per step", "median", "p95")
    return Section(
        "Communication by kind",
        (
            wait_and_transfer(kinds) if has_partners else None,
            Table((*head, "mean wait", "mean transfer", "unmatched"), rows, "all ranks together"),
            bandwidth_plot(plots.bandwidths) if plots.bandwidths else None,
            bandwidth_table(plots.bandwidths),
            _sensitivity_table(summary.sensitivity),
            regime(steps, shares) if steps is not None and shares is not None and len(steps) else None,
            _rank_table(shown, kinds) if kinds else None,
        ),
    )


def message_size(size_bytes: float, *ops: str) -> str:
    """Return the size of what some kinds of operations sent; `?` where none is recorded, but of barriers."""
    return format_bytes(size_bytes) if size_bytes or set(ops) <= {_BARRIER} else UNKNOWN


def duration(length_ns: float | None) -> str:
    """Return a duration; `?` where it is not known."""
    return UNKNOWN if length_ns is None else format_duration(length_ns)


def _sensitivity_table(sensitivity: Sequence[SensitivityRow]) -> Table:
    """Return whether collectives take longer when their ranks arrive together or at different times."""
    rows = []
    for row in sensitivity:
        slope, low, high = (format_duration(value * NS_PER_MS) for value in (row.slope, *row.interval))
        size = message_size(row.size_bytes, row.op)
        rows.append((row.op, str(row.group_size), size, slope, f"{low} to {high}", skew_reading(row)))
    return Table(
        ("operation", "group size", "bytes", "per ms of skew", "95 % interval", "reading"),
        rows,
        "transfer against skew: transfer added per ms between the first and the last arrival",
        text=(0, 5),
    )


def skew_reading(row: SensitivityRow) -> str:
    """Return what the slope of transfer over skew means."""
    low, high = row.interval
    if high < -_MIN_SLOPE:
        return "longer when together: contention"
    if low > _MIN_SLOPE:
        return "longer when apart"
    return "small" if high < 0 or low > 0 else "no dependence seen"


def _rank_table(shown: Sequence[RankRow], kinds: Sequence[OperationKind]) -> Table:
    """Return the communication of each rank; `kinds` are those of all ranks together."""
    unsized = [kind.op for kind in kinds if not kind.size_bytes]
    are_waits_known = all(row.wait_ns is not None for row in shown)
    either = [] if are_waits_known else ["exposed either"]
    rows = [
        (
            str(row.rank),
            f"{row.num_operations:.4g}",
            message_size(row.size_bytes, *unsized),
            duration(row.wait_ns),
            duration(row.exposed_wait_ns),
            duration(row.transfer_ns),
            duration(row.exposed_transfer_ns),
            *([] if are_waits_known else [duration(row.exposed_ns)]),
        )
        for row in shown
    ]
    return Table(
        ["rank", "calls", "bytes", "wait", "exposed wait", "transfer", "exposed transfer", *either],
        rows,
        "by rank, per step; exposed is the part that blocked the rank",
        on=TERMINAL,
    )


def wait_and_transfer(kinds: Sequence[OperationKind]) -> Plot:
    """Return mean wait against mean transfer of each kind of operation that has counterparts."""
    rows = [kind for kind in kinds if kind.mean_wait_ns is not None][:_MAX_KINDS]
    names = unique([f"{plot_text(kind.op)} of {kind.group_size or UNKNOWN}" for kind in rows])
    columns = (
        ("wait for the last partner", "@wait", [(kind.mean_wait_ns or 0.0) / NS_PER_MS for kind in rows]),
        ("transfer", "@transfer", [(kind.mean_transfer_ns or 0.0) / NS_PER_MS for kind in rows]),
    )
    return Plot(
        name="wait-transfer",
        label="Mean wait against mean transfer of an operation, by kind",
        caption="Mean of one operation. Much wait and little transfer: the network is not the cause.",
        height_px=80 + 46 * max(len(rows), 1),
        traces=[
            bars(names, np.array(values), {"color": color}, f"%{{y}}: {name} %{{x:.3~g}} ms")
            for name, color, values in columns
        ],
        layout={
            "barmode": "group",
            "bargap": 0.25,
            "xaxis": axis("ms", rangemode="tozero"),
            "yaxis": names_axis(len(rows)),
        },
        legend=[(name, color, "") for name, color, _ in columns],
    )


def regime(step: NDArray[np.int64], share: Values) -> Plot:
    """Return transfer over work and transfer in each step: above one half a step is bound by communication."""
    traces, remark = series(step, 100 * share, "@transfer", "%")
    return Plot(
        name="regime",
        title="Transfer over steps",
        label="Transfer over own work and transfer, by step",
        caption=(
            "Exposed transfer as a share of own work and transfer; waiting for others is neither. Above the dotted "
            f"line a step is bound by communication, below it by computation.{remark}"
        ),
        height_px=240,
        traces=traces,
        layout={
            "xaxis": axis("step"),
            "yaxis": axis("% of work and transfer", range=[0, 100]),
            "shapes": [mark("y", 50, "half")["shape"]],
        },
    )


def probed_section(summary: Summary) -> Section:
    """Return transfers next to the probe; empty without one."""
    probed = summary.probe
    if probed is None:
        return Section("Next to the probe", ())
    rows = [
        (
            row.op,
            str(row.num_nodes),
            str(row.num_ranks),
            size_words(row.size_bytes),
            format_duration(row.transfer_ns),
            format_duration(row.probed_ns),
            percent(row.achieved),
        )
        for row in probed.rows
    ]
    head = ("operation", "hosts", "ranks", "size", "transfer", "probed", "of probed rate")
    return Section(
        "Next to the probe",
        (
            Notes([_probed_lead(probed)]),
            Table(head, rows, limits=(_MAX_PROBED, 0), which="most costly"),
            Notes(list(_probed_remarks(probed))),
        ),
    )


def _probed_lead(probed: ProbedFigures) -> str:
    """Return what the probe says in one sentence; why it is not used otherwise."""
    if probed.refused:
        return f"{probed.source} is left out: {probed.refused}"
    if probed.achieved is None:
        return f"{probed.source} has no operation between the hosts of this run"
    return f"transfers achieve {percent(probed.achieved)} of the probed rate"


def _probed_remarks(probed: ProbedFigures) -> Iterator[str]:
    """Yield where the probe is from, and what it does not say."""
    if probed.refused:
        return
    taken = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(probed.probed_unix_ns / NS_PER_S))
    yield f"{probed.source}, taken {taken}; probed without computation beside it"
    if any(row.is_beyond for row in probed.rows):
        yield "sizes beyond the largest probed one follow the last piece of the law"
    if probed.num_unprobed:
        yield f"{plural(probed.num_unprobed, 'kind')} of operations between hosts were not probed"


def size_words(size_bytes: float) -> str:
    """Return a size of a message in powers of 1024, as they are chosen: `64 B`, `16 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1023.5:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


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
