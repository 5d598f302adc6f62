"""Cores: how ranks spend their own work, and the hosts on which ranks wait for a core."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from hpcpace.core.text import format_duration, percent
from hpcpace.diagnosis.plot_data import CoreTimes, Values
from hpcpace.diagnosis.summary import HostCores, RankCores, Summary
from hpcpace.report.document import NONE, Block, Cell, Notes, Plot, Row, Section, SideBySide, Table
from hpcpace.report.drawing import LABEL_WIDTH, NAMED, axis, bars, marked, marker, names_axis, plot_text, unique

_MAX_HOSTS = (8, 64)
"""The most rows on a terminal and on a page."""
_MAX_RANKS = (16, 256)
_MAX_BARS = 24
_MIN_WAIT_NS = 1e5  # display: waiting for a core in a phase of a step
_MIN_DRAWN = 0.01  # display: share of a rank's own work that waits for a core, for waiting to be drawn by rank
_HEAD_PX, _ROW_PX = 76, 30

# (name, colour, pattern), in the order of `_uses`
_USES = (
    ("running on a core", "@busy", ""),
    ("ready, without a core", "@wait", ""),
    ("neither: I/O, locks, sleep", "@other", ""),
    ("not known", "@other", "/"),
)


def cores_section(summary: Summary, times: CoreTimes | None, named: Collection[int]) -> Section:
    """Return the hosts on which ranks wait for cores, and what each rank had of its cores; empty without any.

    Args:
        summary: the figures.
        times: what plots show of them; None where that is not known.
        named: the ranks that the verdict names, which are marked.
    """
    drawn = [] if times is None else [times_by_phase(times), *waiting_by_rank(times, named)]
    rows = [Row(core_cells(row), hosts=row.host) for row in summary.cores]
    head = ("host", "ranks", "CPUs", "threads running", "or ready", "waiting", "CPU pressure", "throttled")
    waiting = "waiting: share of the time for which a rank was ready to run and had no core, of the worst rank"
    return Section(
        "Cores",
        (
            SideBySide(drawn, is_even=True),
            Table(head, rows, limits=_MAX_HOSTS, which="worst"),
            Notes([waiting] * bool(rows)),
            *_rank_cores(summary.rank_cores),
        ),
        lead="hosts on which ranks were ready to run and had no core for a part of the time" if rows else "",
    )


def _rank_cores(found: Sequence[RankCores]) -> tuple[Block, ...]:
    """Return the table of ranks, with the phases in which one of them waits for a core."""
    phases = list(dict.fromkeys(name for row in found for name, queued_ns in row.phases if queued_ns >= _MIN_WAIT_NS))
    rows = [
        Row(
            (
                str(row.rank),
                row.host,
                str(row.nice),
                str(row.num_cpus) if row.num_cpus else "not known",
                NONE if row.waiting is None else percent(row.waiting),
                *(NONE if ns is None else format_duration(ns) for ns in (row.work_ns, row.running_ns)),
                *(format_duration(dict(row.phases)[name]) if name in dict(row.phases) else NONE for name in phases),
            ),
            hosts=row.host,
            ranks=str(row.rank),
        )
        for row in found
    ]
    head: tuple[str | Cell, ...] = (
        "rank",
        "host",
        "nice",
        "CPUs",
        Cell("waiting", "wait-\ning"),
        Cell("own work", "own\nwork"),
        "runs",
        *(Cell(f"waits in {name}", f"waits in\n{name}") for name in phases),
    )
    work = "own work, runs and waits in are times of a step; the rest of own work is neither: I/O, locks, sleep"
    is_known = any(row.work_ns is not None for row in found)
    return (
        Table(head, rows, "Ranks and their cores", text=(1,), limits=_MAX_RANKS, which="worst"),
        Notes([work] * is_known),
    )


def core_cells(row: HostCores) -> tuple[str, ...]:
    """Return the cells of a host."""
    counts = (str(row.num_ranks), str(row.num_cpus) if row.num_cpus else "not known")
    shares = (percent(share) for share in (row.waiting, row.pressure, row.throttled))
    return (row.host, *counts, f"{row.running:.1f}", f"{row.ready:.1f}", *shares)


def _uses(times: CoreTimes) -> tuple[Values, ...]:
    return times.running_ms, times.queued_ms, times.idle_ms, times.unknown_ms


def times_by_phase(times: CoreTimes) -> Plot:
    """Return how own work was spent in each phase, mean over ranks; phases without own work are left out."""
    means = np.array([use.mean(axis=0) for use in _uses(times)])
    rows = np.flatnonzero(means.sum(axis=0) > 0).tolist()
    return _stacked(
        [times.phases[row] for row in rows],
        means[:, rows],
        name="core-phases",
        title="On and off a core",
        label="Own work on and off a core, by phase",
        caption="Own work of a step, mean over ranks.",
    )


def waiting_by_rank(times: CoreTimes, named: Collection[int] = ()) -> Iterator[Plot]:
    """Yield how each rank spent its own work, of many those that wait longest for a core; nothing where none waits."""
    sums = np.array([use.sum(axis=1) for use in _uses(times)])
    waiting = sums[1] / np.maximum(sums.sum(axis=0), 1e-9)
    if len(times.ranks) < 2 or waiting.max() < _MIN_DRAWN:
        return
    rows = np.arange(len(times.ranks))
    if len(rows) > _MAX_BARS:
        rows = np.argsort(-sums[1], kind="stable")[:_MAX_BARS]
    about = [(times.ranks[row], times.hosts[row]) for row in rows.tolist()]
    names = unique(marked(plot_text(f"{rank} {host}", LABEL_WIDTH), rank in named) for rank, host in about)
    some = f" The {len(rows)} of {len(times.ranks)} ranks that wait longest." * (len(rows) < len(times.ranks))
    is_named = any(rank in named for rank, _ in about)
    yield _stacked(
        names,
        sums[:, rows],
        name="core-ranks",
        title="Waiting for cores",
        label="Own work of ranks on and off a core",
        caption=f"Own work of a step, by rank.{some}{NAMED * is_named}",
        rows=[(name, str(rank), host) for name, (rank, host) in zip(names, about, strict=True)],
    )


def _stacked(
    names: Sequence[str],
    values_ms: Values,
    *,
    name: str,
    title: str,
    label: str,
    caption: str,
    rows: Sequence[tuple[str, str, str]] = (),
) -> Plot:
    """Return stacked bars of what `_USES` has, values of (num_uses, num_names)."""
    shown = [(look, of) for look, of in zip(_USES, values_ms, strict=True) if of.any()]
    return Plot(
        name=name,
        title=title,
        label=label,
        caption=caption,
        height_px=_HEAD_PX + _ROW_PX * len(names),
        traces=[
            bars(names, of, marker(color, pattern), f"%{{y}}: {what} %{{x:.3~g}} ms") | {"name": what}
            for (what, color, pattern), of in shown
        ],
        layout={
            "barmode": "stack",
            "bargap": 0.25,
            "xaxis": axis("ms of a step", rangemode="tozero"),
            "yaxis": names_axis(len(names)),
        },
        legend=[look for look, _ in shown],
        rows=rows,
    )
