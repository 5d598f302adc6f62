"""A probe as one page: rates next to what networks allow, times with their laws, pairs of hosts, noise and copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcpace.core.rundir import json_text
from hpcpace.core.text import NS_PER_US, format_duration, plural
from hpcpace.probe.changes import Change
from hpcpace.probe.record import LatencyLaw, ProbeRecord, SweepRow
from hpcpace.report.document import Plot
from hpcpace.report.drawing import axis, line, plot_text
from hpcpace.report.html.frame import framed, tools
from hpcpace.report.html.probe_hosts import copies_content, noise_content
from hpcpace.report.html.probe_pairs import pairs_content, pairs_drawn
from hpcpace.report.html.text import contents, escape, facts, figure, notes, section, side_by_side, table, warning
from hpcpace.report.words.probe import (
    allowed_words,
    change_words,
    changes_shown,
    counts_words,
    grouped,
    network_words,
    rate_words,
    share_words,
    size_words,
    switch_words,
    title_words,
)

_COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6", "@c7", "@c8")
_HEIGHT_PX = 300
_MOST_SKEWS = 64
_MOST_CHANGES = 256


def probe_page(
    record: ProbeRecord, changes: Sequence[Change] = (), remarks: Sequence[str] = (), outcome: str = ""
) -> str:
    """Return the whole page.

    Args:
        record: what was probed.
        changes: since another probe.
        remarks: what could not be compared with that, a sentence each.
        outcome: of the comparison with that, one sentence; empty without one.
    """
    groups = grouped(record.sweep)
    rates, times = _rate_plots(groups), _time_plots(groups, record.laws)
    matrix = pairs_drawn(record.pairs)
    made = [
        (title, section(title, lead, *content))
        for title, lead, content in (
            ("Since the other probe", outcome, _changes(changes, remarks)),
            ("Rates", "", (_summary_table(groups, record), *(figure(plot) for plot in rates))),
            ("Times and laws", _LAW_LEAD if times else "", (*_pairs([figure(plot) for plot in times]), _laws(record))),
            ("Every size", "", tuple(_rows_table(rows) for rows in groups)),
            ("Own skew", _SKEW_LEAD if record.skews else "", (_skew_table(record),)),
            ("Pairs of hosts", _PAIRS_LEAD, pairs_content(record.pairs, matrix)),
            ("Noise of cores", _NOISE_LEAD, noise_content(record.noise)),
            ("Copies", "", copies_content(record.copies)),
            ("This probe", "", (_facts(record),)),
        )
    ]
    titles = [title for title, content in made if content]
    head = f'<header class="run">hpcpace probe of <b>{escape(title_words(record))}</b></header>'
    lost = f"{', '.join(record.lost_hosts)} stopped answering" if record.lost_hosts else ""
    parts = (
        f'<div class="head">{head}{tools("probe.json")}</div>',
        warning(lost),
        contents(titles),
        notes(record.problems),
        "<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>",
        *(content for _, content in made),
    )
    body = "\n".join(part for part in parts if part)
    return framed(
        f"Probe of {plural(len(record.hosts), 'host')} · hpcpace", body, [*rates, *times, *matrix], _json(record)
    )


_LAW_LEAD = (
    "Dots are medians, lines the law: latency and rate in pieces. Where it jumps or bends, the library switches "
    "algorithm or protocol."
)
_SKEW_LEAD = (
    "What a rank adds by itself between two operations, over the median of all ranks: time in which it did not run, or "
    "ran slowly."
)
_PAIRS_LEAD = "Two hosts at a time, one way and then the other; of all rounds, the best of each pair."
_NOISE_LEAD = (
    "What keeps a core from equal pieces of work. A detour is a piece that takes 10 % longer than the shortest."
)


def _json(record: ProbeRecord) -> str:
    return json_text(record.to_json())


def _pairs(figures: Sequence[str]) -> list[str]:
    return [
        side_by_side(figures[place], figures[place + 1] if place + 1 < len(figures) else "", is_even=True)
        for place in range(0, len(figures), 2)
    ]


def _rate_plots(groups: Sequence[Sequence[SweepRow]]) -> list[Plot]:
    """Return busbw over sizes of all operations over all hosts."""
    most = max((rows[0].num_nodes for rows in groups), default=0)
    shown = [rows for rows in groups if rows[0].num_nodes == most]
    if not shown:
        return []
    traces, legend = [], []
    for rows, color in zip(shown, _COLOURS, strict=False):
        name = plot_text(rows[0].op)
        share = [f", {share_words(row)} of limit" if row.limit is not None else "" for row in rows]
        curve = line(
            [row.size_bytes for row in rows],
            np.array([row.busbw / 1e9 for row in rows]),
            color,
            hover=f"{name}: %{{y:.4~g}} GB/s at %{{text}}",
        )
        text = [f"{size_words(row.size_bytes)}{words}" for row, words in zip(rows, share, strict=True)]
        traces.append({**curve, "mode": "lines+markers", "text": text})
        legend.append((rows[0].op, color, ""))
    limit = max((row.limit for rows in shown for row in rows if row.limit is not None), default=None)
    caption = f"busbw over {plural(most, 'host')} as nccl-tests define it."
    if limit is not None:
        sizes = [row.size_bytes for rows in shown for row in rows]
        traces.append(
            line(
                [min(sizes), max(sizes)],
                np.array([limit, limit]) / 1e9,
                "@muted",
                dash="dash",
                hover="limit: %{y:.4~g} GB/s",
            )
        )
        caption += f" Dashed: what the hosts' networks allow at most, {rate_words(limit)}."
    return [
        Plot(
            name="probe-rates",
            label="busbw of each operation over sizes",
            caption=caption,
            height_px=_HEIGHT_PX + 40,
            traces=traces,
            layout={
                "xaxis": _size_axis([row for rows in shown for row in rows]),
                "yaxis": axis("GB/s", type="log", exponentformat="none"),
            },
            legend=legend,
        )
    ]


def _time_plots(groups: Sequence[Sequence[SweepRow]], laws: Sequence[LatencyLaw]) -> list[Plot]:
    """Return time over sizes of each operation, with a curve for each number of hosts."""
    known = {(law.op, law.num_nodes): law for law in laws}
    plots: list[Plot] = []
    for op in dict.fromkeys(rows[0].op for rows in groups):
        shown = [rows for rows in groups if rows[0].op == op]
        traces, legend = [], []
        for rows, color in zip(shown, _COLOURS, strict=False):
            hosts = plural(rows[0].num_nodes, "host")
            sizes = [row.size_bytes for row in rows]
            times_us = np.array([row.p50_ns / NS_PER_US for row in rows])
            dots = line(sizes, times_us, color, hover=f"{hosts}: %{{y:.4~g}} us at %{{text}}")
            traces.append({**dots, "mode": "markers", "text": [size_words(size) for size in sizes]})
            law = known.get((op, rows[0].num_nodes))
            if law is not None:
                dense = np.geomspace(law.least_bytes, law.most_bytes, 80)
                fitted_us = np.array([max(law.time_ns(size), 1.0) / NS_PER_US for size in dense])
                traces.append(line([float(f"{size:.6g}") for size in dense], fitted_us, color, hover=f"law, {hosts}"))
            legend.append((hosts, color, ""))
        plots.append(
            Plot(
                name=f"probe-time-{len(plots)}",
                label=f"Time of {plot_text(op)} over sizes",
                caption=f"Time of {op}.",
                height_px=_HEIGHT_PX,
                traces=traces,
                layout={
                    "xaxis": _size_axis([row for rows in shown for row in rows]),
                    "yaxis": axis("us", type="log", exponentformat="none"),
                },
                legend=legend,
            )
        )
    return plots


def _size_axis(rows: Sequence[SweepRow]) -> dict[str, object]:
    least, most = min(row.size_bytes for row in rows), max(row.size_bytes for row in rows)
    powers = [1 << power for power in range(0, 64, 4) if least <= 1 << power <= most]
    return axis("size", type="log", tickvals=powers, ticktext=[size_words(size) for size in powers])


def _summary_table(groups: Sequence[Sequence[SweepRow]], record: ProbeRecord) -> str:
    laws = {(law.op, law.num_nodes): law for law in record.laws}
    rows = [
        (
            of[0].op,
            str(of[0].num_nodes),
            str(of[0].num_ranks),
            format_duration(of[0].p50_ns),
            size_words(of[-1].size_bytes),
            rate_words(of[-1].busbw),
            share_words(of[-1]),
            switch_words(laws.get((of[0].op, of[0].num_nodes))),
        )
        for of in groups
    ]
    head = ("operation", "hosts", "ranks", "latency", "largest size", "busbw", "of limit", "switches at")
    allowed = [allowed_words(of, record) for of in groups if of[0].num_nodes == len(record.hosts)]
    return table("Latency of the smallest size, busbw of the largest", head, rows, text=(0, 7)) + notes(
        [words for words in allowed if words]
    )


def _laws(record: ProbeRecord) -> str:
    rows = []
    for law in record.laws:
        for number, piece in enumerate(law.pieces):
            begins = f"{size_words(piece.from_low_bytes)} to {size_words(piece.from_high_bytes)}" if number else ""
            rate = 1e9 / piece.ns_per_byte if piece.ns_per_byte > 0 else None
            rows.append(
                (
                    law.op if not number else "",
                    str(law.num_nodes) if not number else "",
                    size_words(piece.from_bytes),
                    begins,
                    format_duration(piece.latency_ns),
                    f"{format_duration(piece.latency_low_ns)} to {format_duration(piece.latency_high_ns)}",
                    rate_words(rate) if rate else "",
                    f"{100 * law.least_error:+.0f} to {100 * law.most_error:+.0f} %" if not number else "",
                    f"{100 * law.single_least_error:+.0f} to {100 * law.single_most_error:+.0f} %"
                    if not number
                    else "",
                )
            )
    head = ("operation", "hosts", "from", "95 %", "latency", "95 %", "rate", "errors", "errors of one piece")
    return table("Laws: time = latency + size / rate, in pieces", head, rows)


def _rows_table(rows: Sequence[SweepRow]) -> str:
    head = ("size", "time", "algbw", "busbw", "of limit", "p95", "p99", "times")
    cells = [
        (
            size_words(row.size_bytes),
            format_duration(row.p50_ns),
            rate_words(row.algbw),
            rate_words(row.busbw),
            share_words(row),
            format_duration(row.p95_ns),
            format_duration(row.p99_ns),
            str(row.num_repetitions),
        )
        for row in rows
    ]
    where = f"{plural(rows[0].num_nodes, 'host')}, {plural(rows[0].num_ranks, 'rank')}"
    title = escape(f"{rows[0].op}, {where}")
    return f"<details><summary>{title}</summary>{table(rows[0].op, head, cells, text=())}</details>"


def _skew_table(record: ProbeRecord) -> str:
    latest = sorted(record.skews, key=lambda skew: -skew.mean_ns)[:_MOST_SKEWS]
    cells = [(str(one.rank), one.host, format_duration(one.mean_ns), format_duration(one.p99_ns)) for one in latest]
    return table("Ranks, the latest first", ("rank", "host", "mean", "p99"), cells, text=(1,))


def _changes(changes: Sequence[Change], remarks: Sequence[str]) -> tuple[str, ...]:
    rows = [change_words(change) for change in changes_shown(changes, _MOST_CHANGES)]
    caption = "Time of each operation, and of pairs, cores and copies that changed, with intervals"
    return (
        notes([*counts_words(changes), *remarks], has_terms=False),
        table(caption, ("what", "hosts", "", "change"), rows, text=(0, 2, 3)),
    )


def _facts(record: ProbeRecord) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in sorted(record.versions.items()))
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record.part_s.items())
    networks = tuple((f"network of {hosts}", words) for hosts, words in network_words(record))
    return facts(
        (*networks, ("cluster", record.cluster), ("job", record.job_id), ("versions", versions), ("time", parts))
    )
